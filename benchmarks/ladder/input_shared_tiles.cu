// The product of input_many_blocks.cu with tiles of TILE × TILE in shared memory, as in
// shared_tiles.cu. Tiles of W are stored as in memory, one filter per row.
#ifndef TILE
#define TILE 16
#endif

extern "C" __global__ void gemm_tn(const float* w, const float* dy, float* unrolled, int terms,
                                   int pixels, int filters) {
    __shared__ float as[TILE][TILE], bs[TILE][TILE];
    const int x = threadIdx.x, y = threadIdx.y;
    const int column = blockIdx.x * TILE + x, row = blockIdx.y * TILE + y;
    const int term = blockIdx.y * TILE + x;
    float sum = 0;
    for (int first = 0; first < filters; first += TILE) {
        const int filter = first + y;
        as[y][x] = filter < filters && term < terms ? w[filter * terms + term] : 0;
        bs[y][x] = filter < filters && column < pixels ? dy[filter * pixels + column] : 0;
        __syncthreads();
        for (int k = 0; k < TILE; ++k) sum += as[k][y] * bs[k][x];
        __syncthreads();
    }
    if (row < terms && column < pixels) unrolled[row * pixels + column] = sum;
}
