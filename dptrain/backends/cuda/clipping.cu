// Norms of gradients and parameters. Gradient clipping by the global norm: g ← g min(1, clip_norm / (‖g‖ + 1e-6)), for the flat gradient
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

// Norms of layers, for LARS and LAMB: the sums of squares of the parameters w and the gradient g of
// each slot. Slot blockIdx.y has the elements starts[slot] … starts[slot + 1] − 1, starts is int32
// (slots + 1,), and partials float64 (slots, gridDim.x, 2).
extern "C" __global__ void add_layer_squares(const float* w, const float* g, const int* starts,
                                             double* partials) {
    wait_for_previous_kernel();
    const int slot = blockIdx.y;
    double own_w = 0.0, own_g = 0.0;
    for (int i = starts[slot] + blockIdx.x * THREADS + threadIdx.x; i < starts[slot + 1];
         i += gridDim.x * THREADS) {
        own_w += double(w[i]) * w[i];
        own_g += double(g[i]) * g[i];
    }
    const double sum_w = block_sum(own_w);
    __syncthreads();
    const double sum_g = block_sum(own_g);
    if (threadIdx.x > 0) return;
    double* const sums = partials + 2 * (slot * gridDim.x + blockIdx.x);
    sums[0] = sum_w;
    sums[1] = sum_g;
}

// g ← r (g + decay w), with r = trust ‖w‖ / (‖g‖ + norm_decay ‖w‖) of slot sources[slot], and r = 1
// if sources[slot] is −1 or if ‖w‖ or the denominator is 0. decays and norm_decays are float32
// (slots,).
extern "C" __global__ void scale_layers(const float* w, float* g, const int* starts,
                                        const int* sources, const float* decays,
                                        const float* norm_decays, const double* partials,
                                        float trust) {
    wait_for_previous_kernel();
    const int slot = blockIdx.y, source = sources[slot];
    double ratio = 1.0;
    if (source >= 0) {
        double sum_w = 0.0, sum_g = 0.0;
        for (int part = 0; part < gridDim.x; ++part) {
            sum_w += partials[2 * (source * gridDim.x + part)];
            sum_g += partials[2 * (source * gridDim.x + part) + 1];
        }
        const double norm = sqrt(sum_w), other = sqrt(sum_g) + norm_decays[source] * norm;
        if (norm != 0.0 && other != 0.0) ratio = trust * norm / other;
    }
    const float factor = float(ratio), decay = decays[slot];
    for (int i = starts[slot] + blockIdx.x * THREADS + threadIdx.x; i < starts[slot + 1];
         i += gridDim.x * THREADS)
        g[i] = factor * (g[i] + decay * w[i]);
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
