// Local response normalisation over the channels of x (N, H, W, C):
//
//     y = x s^−beta  with  s = bias + alpha Σ x² over the channels at most RADIUS away.
//
// A block takes THREADS elements that lie side by side, whatever pixels they belong to, and keeps
// them and their neighbours on both sides in shared memory.

#ifndef RADIUS
#define RADIUS 4
#endif

constexpr int THREADS = 256;

// s^−beta. For the published exponent ¾ by roots: a few roundings, and a tenth of the time.
__device__ inline float power(float s, float beta) {
    if (beta != 0.75f) return powf(s, -beta);
    const float root = rsqrtf(s);
    return root * sqrtf(root);
}

// Elements `first` … `first` + `count` − 1 of x; those that do not exist are 0.
__device__ inline void load(const float* x, float* tile, int first, int count, int total) {
    for (int j = threadIdx.x; j < count; j += THREADS) {
        const int i = first + j;
        tile[j] = i >= 0 && i < total ? x[i] : 0.0f;
    }
}

// Sum of values[−RADIUS] … values[RADIUS], as far as they are channels of the same pixel, of which
// `channel` is the one in the middle.
template <bool SQUARED>
__device__ inline float neighbours(const float* values, int channel, int channels) {
    float sum = 0.0f;
    for (int d = -RADIUS; d <= RADIUS; ++d)
        if (channel + d >= 0 && channel + d < channels)
            sum += SQUARED ? values[d] * values[d] : values[d];
    return sum;
}

extern "C" __global__ void __launch_bounds__(THREADS) lrn_forward(
    const float* x, float* y, int count, int channels, float bias, float alpha, float beta) {
    __shared__ float tile[THREADS + 2 * RADIUS];
    const int first = blockIdx.x * THREADS, i = first + threadIdx.x;
    load(x, tile, first - RADIUS, THREADS + 2 * RADIUS, count);
    __syncthreads();
    if (i >= count) return;
    const float* own = tile + RADIUS + threadIdx.x;
    const float s = bias + alpha * neighbours<true>(own, i % channels, channels);
    y[i] = *own * power(s, beta);
}

// dx = dy s^−β − 2αβ x Σ dy x s^(−β−1), the sum over neighbouring channels. s is computed again
// from x: that costs less than to have kept it.
extern "C" __global__ void __launch_bounds__(THREADS) lrn_backward(
    const float* x, const float* dy, float* dx, int count, int channels, float bias, float alpha,
    float beta) {
    __shared__ float tile[THREADS + 4 * RADIUS], terms[THREADS + 2 * RADIUS];
    const int first = blockIdx.x * THREADS, i = first + threadIdx.x;
    load(x, tile, first - 2 * RADIUS, THREADS + 4 * RADIUS, count);
    __syncthreads();
    for (int j = threadIdx.x; j < THREADS + 2 * RADIUS; j += THREADS) {
        const int at = first - RADIUS + j;
        float term = 0.0f;
        if (at >= 0 && at < count) {
            const float* value = tile + RADIUS + j;
            const float s = bias + alpha * neighbours<true>(value, at % channels, channels);
            term = dy[at] * *value * power(s, beta) / s;
        }
        terms[j] = term;
    }
    __syncthreads();
    if (i >= count) return;
    const int channel = i % channels;
    const float* own = tile + 2 * RADIUS + threadIdx.x;
    const float s = bias + alpha * neighbours<true>(own, channel, channels);
    const float total = neighbours<false>(terms + RADIUS + threadIdx.x, channel, channels);
    dx[i] = dy[i] * power(s, beta) - 2.0f * alpha * beta * *own * total;
}
