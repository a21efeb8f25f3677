// dW (filters, terms) = dY (filters, pixels) U^T of one image after another, U being (terms, pixels):
// the sum runs along the rows of both. An element a thread; `adds` what it has from images before.
extern "C" __global__ void product(const float* dy, const float* unrolled, float* dw, int filters,
                                   int terms, int pixels, int adds) {
    const int column = blockIdx.x * blockDim.x + threadIdx.x;
    const int row = blockIdx.y * blockDim.y + threadIdx.y;
    if (row >= filters || column >= terms) return;
    float sum = adds ? dw[row * terms + column] : 0;
    for (int k = 0; k < pixels; ++k) sum += dy[row * pixels + k] * unrolled[column * pixels + k];
    dw[row * terms + column] = sum;
}
