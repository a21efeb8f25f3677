// The product of weights_many_blocks.cu with tiles of TILE × TILE in shared memory, as in
// shared_tiles.cu. Both operands are loaded along the sum. Threads then read columns of the tile of
// U, whose rows are padded by one element to avoid bank conflicts.
#ifndef TILE
#define TILE 16
#endif

extern "C" __global__ void gemm_nt(const float* dy, const float* unrolled, float* dw, int filters,
                                   int terms, int pixels, int adds) {
    __shared__ float as[TILE][TILE], bs[TILE][TILE + 1];
    const int x = threadIdx.x, y = threadIdx.y;
    const int column = blockIdx.x * TILE + x, row = blockIdx.y * TILE + y;
    const int term = blockIdx.x * TILE + y;
    const bool mine = row < filters && column < terms;
    float sum = adds && mine ? dw[row * terms + column] : 0;
    for (int first = 0; first < pixels; first += TILE) {
        const bool inside = first + x < pixels;
        as[y][x] = inside && row < filters ? dy[row * pixels + first + x] : 0;
        bs[y][x] = inside && term < terms ? unrolled[term * pixels + first + x] : 0;
        __syncthreads();
        for (int k = 0; k < TILE; ++k) sum += as[y][k] * bs[x][k];
        __syncthreads();
    }
    if (mine) dw[row * terms + column] = sum;
}
