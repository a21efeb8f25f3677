// C = A B + bias by as many blocks as it takes, a thread an element of C: (rows, terms) by (terms,
// columns). Every thread reads all its factors from global memory, two loads for a multiply-add.
extern "C" __global__ void product(const float* a, const float* b, const float* bias, float* c,
                                   int rows, int columns, int terms) {
    const int column = blockIdx.x * blockDim.x + threadIdx.x;
    const int row = blockIdx.y * blockDim.y + threadIdx.y;
    if (row >= rows || column >= columns) return;
    float sum = bias[row];
    for (int k = 0; k < terms; ++k) sum += a[row * terms + k] * b[k * columns + column];
    c[row * columns + column] = sum;
}
