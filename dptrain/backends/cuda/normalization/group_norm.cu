// Normalisation of groups of channels of x (samples, pixels, C):
//
//     y = weight · x̂ + bias,   x̂ = (x − mean) · invstd,   invstd = 1 / sqrt(variance + epsilon)
//
// Mean and variance are those of an instance: the C / groups channels of a group at all pixels of a
// sample. For group normalisation, a sample is a sample of the minibatch. For layer normalisation
// over channels, each pixel counts as a sample of one pixel, with one group.
//
//     moments (samples · groups, 2)  float32: mean and invstd of each instance
//
// Algorithm: GROUP_THREADS threads process an instance, a warp for small ones and a block for large
// ones. They read it three times: for the mean, for the variance as the mean of squared distances,
// and for y; the second and third time from the caches. Launched with one group of GROUP_THREADS
// threads for each instance, in blocks of 256; group_norm_backward_weight as in channel_sums.cuh.
//
// Source: Wu and He, "Group normalization", 2018.

#include "channel_sums.cuh"

// 32 or 256.
#ifndef GROUP_THREADS
#define GROUP_THREADS 32
#endif

constexpr int NORM_THREADS = 256;

// The vectors of an instance that this thread processes.
struct Instance {
    int index, lane, group_vectors, count, start, channel_vectors;
    bool exists;

    __device__ Instance(int samples, int pixels, int channels, int groups) {
        lane = threadIdx.x % GROUP_THREADS;
        index = blockIdx.x * (NORM_THREADS / GROUP_THREADS) + threadIdx.x / GROUP_THREADS;
        exists = index < samples * groups;
        channel_vectors = channels / VECTOR;
        group_vectors = channel_vectors / groups;
        count = exists ? pixels * group_vectors : 0;
        start = index / groups * pixels * channel_vectors + index % groups * group_vectors;
    }
    // Vector of x of number i of this instance, and vector of its channels in the weights.
    __device__ int at(int i) const {
        return start + i / group_vectors * channel_vectors + i % group_vectors;
    }
    __device__ int slot(int i) const { return (start + i % group_vectors) % channel_vectors; }
    __device__ float size() const { return float(count) * VECTOR; }
};

// Sum over the threads of an instance, in a fixed order; every thread of the block calls this.
__device__ inline float sum_instance(float own) {
#pragma unroll
    for (int bit = 1; bit < 32; bit *= 2) own += __shfl_xor_sync(WHOLE_WARP, own, bit);
    if (GROUP_THREADS == 32) return own;
    __shared__ float warps[NORM_THREADS / 32];
    __syncthreads();
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = own;
    __syncthreads();
    own = 0.0f;
    for (int warp = 0; warp < NORM_THREADS / 32; ++warp) own += warps[warp];
    return own;
}

extern "C" __global__ void __launch_bounds__(NORM_THREADS)
    group_norm_forward(const Number* __restrict__ x, Number* __restrict__ y,
                       const float* __restrict__ weight, const float* __restrict__ bias,
                       float* moments, int samples, int pixels, int channels, int groups,
                       float epsilon) {
    wait_for_previous_kernel();
    const Instance own(samples, pixels, channels, groups);
    float sum = 0.0f, squares = 0.0f;
    for (int i = own.lane; i < own.count; i += GROUP_THREADS)
        for (const float value : load(x, own.at(i)).at) sum += value;
    const float mean = sum_instance(sum) / own.size();
    for (int i = own.lane; i < own.count; i += GROUP_THREADS)
        for (const float value : load(x, own.at(i)).at) squares += (value - mean) * (value - mean);
    const float invstd = 1.0f / sqrtf(sum_instance(squares) / own.size() + epsilon);
    for (int i = own.lane; i < own.count; i += GROUP_THREADS) {
        Floats values = load(x, own.at(i));
        const Floats w = load(weight, own.slot(i)), b = load(bias, own.slot(i));
        for (int k = 0; k < VECTOR; ++k)
            values.at[k] = fmaf((values.at[k] - mean) * invstd, w.at[k], b.at[k]);
        store(y, own.at(i), values);
    }
    if (own.exists && own.lane == 0) {
        moments[2 * own.index] = mean;
        moments[2 * own.index + 1] = invstd;
    }
}

// dx = invstd · (g − mean(g) − x̂ · mean(g · x̂)) with g = weight · dy and means over the instance.
extern "C" __global__ void __launch_bounds__(NORM_THREADS)
    group_norm_backward_input(const Number* __restrict__ dy, const Number* __restrict__ x,
                              Number* __restrict__ dx, const float* __restrict__ weight,
                              const float* moments, int samples, int pixels, int channels,
                              int groups) {
    wait_for_previous_kernel();
    const Instance own(samples, pixels, channels, groups);
    const float mean = own.exists ? moments[2 * own.index] : 0.0f;
    const float invstd = own.exists ? moments[2 * own.index + 1] : 0.0f;
    float sum = 0.0f, along = 0.0f;
    for (int i = own.lane; i < own.count; i += GROUP_THREADS) {
        const Floats values = load(x, own.at(i)), gradient = load(dy, own.at(i));
        const Floats w = load(weight, own.slot(i));
        for (int k = 0; k < VECTOR; ++k) {
            const float g = gradient.at[k] * w.at[k];
            sum += g;
            along += g * (values.at[k] - mean);
        }
    }
    const float mean_g = sum_instance(sum) / own.size();
    const float slope = sum_instance(along) / own.size() * invstd * invstd;
    for (int i = own.lane; i < own.count; i += GROUP_THREADS) {
        const Floats values = load(x, own.at(i)), w = load(weight, own.slot(i));
        Floats gradient = load(dy, own.at(i));
        for (int k = 0; k < VECTOR; ++k) {
            const float g = gradient.at[k] * w.at[k];
            gradient.at[k] = invstd * (g - mean_g - (values.at[k] - mean) * slope);
        }
        store(dx, own.at(i), gradient);
    }
}

// dweight = Σ dy · x̂ and dbias = Σ dy over all samples and pixels. partial (blocks, 2, C) float32.
extern "C" __global__ void __launch_bounds__(CHANNEL_THREADS)
    group_norm_backward_weight(const Number* __restrict__ dy, const Number* __restrict__ x,
                               const float* __restrict__ moments, float* partial,
                               unsigned* tickets, float* dweight, float* dbias, int samples,
                               int pixels, int channels, int groups) {
    wait_for_previous_kernel();
    const ChannelThread thread(channels);
    const int group_channels = channels / groups;
    Floats sums[2] = {};
    if (thread.has_channels())
#pragma unroll 2
        for (int pixel = thread.first; pixel < samples * pixels; pixel += thread.stride) {
            const Floats values = load(x, thread.at(pixel)), gradient = load(dy, thread.at(pixel));
            const int instance = pixel / pixels * groups;
            for (int k = 0; k < VECTOR; ++k) {
                const float* found =
                    moments + 2 * (instance + (thread.slot * VECTOR + k) / group_channels);
                sums[0].at[k] += gradient.at[k];
                sums[1].at[k] += gradient.at[k] * (values.at[k] - found[0]) * found[1];
            }
        }
    store_block_sums(sums, partial, 2, 0, channels);
    if (!is_last_block(tickets)) return;
    int c;
    Doubles<2> total;
    const auto term = [&](int block, int channel) {
        const float* row = partial + block * 2 * channels + channel;
        return Doubles<2>{{__ldcg(row), __ldcg(row + channels)}};
    };
    const bool has_result = sum_over_rows(gridDim.x, channels, c, total, term);
    if (!has_result) return;
    dbias[c] = float(total.at[0]);
    dweight[c] = float(total.at[1]);
}
