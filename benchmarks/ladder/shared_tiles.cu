// C (rows, columns) = A (rows, terms) B (terms, columns) + bias (rows,), with tiles of TILE × TILE.
// The threads of a block load a tile of A and of B into shared memory, one element each, and every
// thread reads TILE elements of both from there. Global memory is read TILE times less often.
//
// Source: CUDA C++ Programming Guide, "Shared Memory".
#ifndef TILE
#define TILE 16
#endif

extern "C" __global__ void gemm_bias(const float* a, const float* b, const float* bias, float* c,
                                     int rows, int columns, int terms) {
    __shared__ float as[TILE][TILE], bs[TILE][TILE];
    const int x = threadIdx.x, y = threadIdx.y;
    const int column = blockIdx.x * TILE + x, row = blockIdx.y * TILE + y;
    float sum = 0;
    for (int first = 0; first < terms; first += TILE) {
        as[y][x] = row < rows && first + x < terms ? a[row * terms + first + x] : 0;
        bs[y][x] = column < columns && first + y < terms ? b[(first + y) * columns + column] : 0;
        __syncthreads();
        for (int k = 0; k < TILE; ++k) sum += as[y][k] * bs[k][x];
        __syncthreads();
    }
    if (row < rows && column < columns) c[row * columns + column] = sum + bias[row];
}
