// C (rows, columns) = A (rows, terms) B (terms, columns) + bias (rows,). Launched with one thread
// per element of C. Each thread reads all operands from global memory: two loads per multiply-add.
extern "C" __global__ void gemm_bias(const float* a, const float* b, const float* bias, float* c,
                                     int rows, int columns, int terms) {
    const int column = blockIdx.x * blockDim.x + threadIdx.x;
    const int row = blockIdx.y * blockDim.y + threadIdx.y;
    if (row >= rows || column >= columns) return;
    float sum = bias[row];
    for (int k = 0; k < terms; ++k) sum += a[row * terms + k] * b[k * columns + column];
    c[row * columns + column] = sum;
}
