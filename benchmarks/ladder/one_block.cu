// C = A B + bias by a single block, whose threads take turns at the elements of C: (rows, terms) by
// (terms, columns). All multiprocessors but one have nothing to do.
extern "C" __global__ void product(const float* a, const float* b, const float* bias, float* c,
                                   int rows, int columns, int terms) {
    for (int at = threadIdx.x; at < rows * columns; at += blockDim.x) {
        const int row = at / columns, column = at % columns;
        float sum = bias[row];
        for (int k = 0; k < terms; ++k) sum += a[row * terms + k] * b[k * columns + column];
        c[at] = sum;
    }
}
