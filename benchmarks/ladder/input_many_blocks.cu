// Gradient of the unrolled input of one image: dU (terms, pixels) = Wᵀ dY, with W (filters, terms)
// and dY (filters, pixels). Launched with one thread per element of dU.
extern "C" __global__ void gemm_tn(const float* w, const float* dy, float* unrolled, int terms,
                                   int pixels, int filters) {
    const int column = blockIdx.x * blockDim.x + threadIdx.x;
    const int row = blockIdx.y * blockDim.y + threadIdx.y;
    if (row >= terms || column >= pixels) return;
    float sum = 0;
    for (int k = 0; k < filters; ++k) sum += w[k * terms + row] * dy[k * pixels + column];
    unrolled[row * pixels + column] = sum;
}
