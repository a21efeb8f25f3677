// Gradient clipping by the global norm: g ← g min(1, clip_norm / (‖g‖ + 1e-6)), for the flat gradient
// g, float32 (count,), after the sum over ranks. Two kernels in blocks of 256 threads:
//
//     add_squares    partials[b] ← Σ g² over the elements of block b, in float64
//     clip_gradient  every block adds all partial sums in the same order, and scales its elements
//
// The order of additions is fixed, so results are reproducible. Traffic: g is read once; it is read
// and written again only if the norm exceeds clip_norm.
//
// Source: Pascanu et al., "On the difficulty of training recurrent neural networks", 2013,
// algorithm 1; the constant is that of PyTorch.

#include "dependent_launch.cuh"

constexpr int THREADS = 256;
constexpr double SMALLEST_NORM = 1e-6;

// Sum over the block; the result is valid in all threads.
__device__ inline double block_sum(double own) {
    __shared__ double sums[THREADS];
    sums[threadIdx.x] = own;
    __syncthreads();
    for (int half = THREADS / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
        __syncthreads();
    }
    return sums[0];
}

extern "C" __global__ void add_squares(const float* g, double* partials, int count) {
    wait_for_previous_kernel();
    double own = 0.0;
    for (int i = blockIdx.x * THREADS + threadIdx.x; i < count; i += gridDim.x * THREADS) {
        const double value = g[i];
        own += value * value;
    }
    const double sum = block_sum(own);
    if (threadIdx.x == 0) partials[blockIdx.x] = sum;
}

extern "C" __global__ void clip_gradient(float* g, const double* partials, int num_partials,
                                         float clip_norm, int count) {
    wait_for_previous_kernel();
    double own = 0.0;
    for (int i = threadIdx.x; i < num_partials; i += THREADS) own += partials[i];
    const double factor = clip_norm / (sqrt(block_sum(own)) + SMALLEST_NORM);
    if (factor >= 1.0) return;
    for (int i = blockIdx.x * THREADS + threadIdx.x; i < count; i += gridDim.x * THREADS)
        g[i] *= float(factor);
}
