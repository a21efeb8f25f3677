// C (rows, columns) = A (rows, terms) B (terms, columns) + bias (rows,), computed by a single block
// of TILE × TILE threads, tile of C after tile of C. As in shared_tiles.cu, operands are read from
// shared memory. All multiprocessors except one are idle.
#ifndef TILE
#define TILE 16
#endif

extern "C" __global__ void gemm_bias(const float* a, const float* b, const float* bias, float* c,
                                     int rows, int columns, int terms) {
    __shared__ float as[TILE][TILE], bs[TILE][TILE];
    const int x = threadIdx.x, y = threadIdx.y;
    for (int top = 0; top < rows; top += TILE) {
        for (int left = 0; left < columns; left += TILE) {
            const int row = top + y, column = left + x;
            float sum = 0;
            for (int first = 0; first < terms; first += TILE) {
                as[y][x] = row < rows && first + x < terms ? a[row * terms + first + x] : 0;
                bs[y][x] =
                    column < columns && first + y < terms ? b[(first + y) * columns + column] : 0;
                __syncthreads();
                for (int k = 0; k < TILE; ++k) sum += as[y][k] * bs[k][x];
                __syncthreads();
            }
            if (row < rows && column < columns) c[row * columns + column] = sum + bias[row];
        }
    }
}
