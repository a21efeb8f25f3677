// Gradient of the weights, one image after the other: dW (filters, terms) = dY (filters, pixels)
// Uᵀ, with U (terms, pixels). Launched with one thread per element of dW. If `adds` is not 0, the
// result is added to dW.
extern "C" __global__ void gemm_nt(const float* dy, const float* unrolled, float* dw, int filters,
                                   int terms, int pixels, int adds) {
    const int column = blockIdx.x * blockDim.x + threadIdx.x;
    const int row = blockIdx.y * blockDim.y + threadIdx.y;
    if (row >= filters || column >= terms) return;
    float sum = adds ? dw[row * terms + column] : 0;
    for (int k = 0; k < pixels; ++k) sum += dy[row * pixels + k] * unrolled[column * pixels + k];
    dw[row * terms + column] = sum;
}
