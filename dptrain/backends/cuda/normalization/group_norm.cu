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
// Algorithm: GROUP_THREADS threads process an instance: a part of a warp, or a block for large ones.
// Small instances are read once and kept in registers (HELD vectors of each thread), others are read
// for the mean, for the variance as the mean of squared distances, and for y; the second and third
// time from the caches. Groups of threads iterate over instances, in blocks of 256 threads;
// group_norm_backward_weight is launched as in channel_sums.cuh.
//
// Source: Wu and He, "Group normalization", 2018.

#include "channel_sums.cuh"

// A power of two up to 32, or 256.
#ifndef GROUP_THREADS
#define GROUP_THREADS 32
#endif
// Vectors of an instance that a thread keeps in registers, which are then all; 0 if there are more.
#ifndef HELD
#define HELD 0
#endif
// 1 for layer normalisation: an instance consists of the channels of a pixel.
#ifndef IS_LAYER
#define IS_LAYER 0
#endif

constexpr int NORM_THREADS = 256, BLOCK_INSTANCES = NORM_THREADS / GROUP_THREADS;

// The vectors of an instance that this thread processes.
struct Instance {
    int index, lane, group_vectors, count, start, channel_vectors;
    bool exists;

    __device__ Instance(int first, int samples, int pixels, int channels, int groups) {
        lane = threadIdx.x % GROUP_THREADS;
        index = first + threadIdx.x / GROUP_THREADS;
        exists = index < samples * groups;
        channel_vectors = channels / VECTOR;
        group_vectors = channel_vectors / groups;
        count = exists ? pixels * group_vectors : 0;
        start = index / groups * pixels * channel_vectors + index % groups * group_vectors;
    }
    // Vector of x of number i of this instance, and vector of its channels in the weights.
    __device__ int at(int i) const {
        if (IS_LAYER) return start + i;
        return start + i / group_vectors * channel_vectors + i % group_vectors;
    }
    __device__ int slot(int i) const {
        return IS_LAYER ? i : (start + i % group_vectors) % channel_vectors;
    }
    __device__ float size() const { return float(count) * VECTOR; }

    // Call f(number of this thread's vector, number of the instance's vector) for each vector.
    template <class F> __device__ void each(F f) const {
#if HELD
#pragma unroll
        for (int h = 0; h < HELD; ++h)
            if (lane + h * GROUP_THREADS < count) f(h, lane + h * GROUP_THREADS);
#else
        for (int i = lane; i < count; i += GROUP_THREADS) f(0, i);
#endif
    }
};

// The vectors of an array that a thread reads again and again: in registers, or from the caches.
template <class T> struct Vectors {
    const T* from;
    Floats held[HELD ? HELD : 1];

    __device__ explicit Vectors(const T* from) : from(from) {}
    // Load number h of the thread from vector i of the array.
    __device__ void hold(int h, int i) {
        if (HELD) held[h] = load(from, i);
    }
    __device__ Floats get(int h, int i) const { return HELD ? held[h] : load(from, i); }
};

// Sum over the threads of an instance, in a fixed order; every thread of the block calls this.
__device__ inline float sum_instance(float own) {
    constexpr int LANES = GROUP_THREADS < 32 ? GROUP_THREADS : 32;
#pragma unroll
    for (int bit = 1; bit < LANES; bit *= 2) own += __shfl_xor_sync(WHOLE_WARP, own, bit);
    if (GROUP_THREADS <= 32) return own;
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
    Vectors<Number> values(x);
    for (int first = blockIdx.x * BLOCK_INSTANCES; first < samples * groups;
         first += gridDim.x * BLOCK_INSTANCES) {
        const Instance own(first, samples, pixels, channels, groups);
        float sum = 0.0f, squares = 0.0f;
        own.each([&](int h, int i) { values.hold(h, own.at(i)); });
        own.each([&](int h, int i) {
            for (const float value : values.get(h, own.at(i)).at) sum += value;
        });
        const float mean = sum_instance(sum) / own.size();
        own.each([&](int h, int i) {
            for (const float value : values.get(h, own.at(i)).at)
                squares += (value - mean) * (value - mean);
        });
        const float invstd = 1.0f / sqrtf(sum_instance(squares) / own.size() + epsilon);
        own.each([&](int h, int i) {
            Floats result = values.get(h, own.at(i));
            const Floats w = load(weight, own.slot(i)), b = load(bias, own.slot(i));
            for (int k = 0; k < VECTOR; ++k)
                result.at[k] = fmaf((result.at[k] - mean) * invstd, w.at[k], b.at[k]);
            store(y, own.at(i), result);
        });
        if (own.exists && own.lane == 0) {
            moments[2 * own.index] = mean;
            moments[2 * own.index + 1] = invstd;
        }
    }
}

// dx = invstd · (g − mean(g) − x̂ · mean(g · x̂)) with g = weight · dy and means over the instance.
extern "C" __global__ void __launch_bounds__(NORM_THREADS)
    group_norm_backward_input(const Number* __restrict__ dy, const Number* __restrict__ x,
                              Number* __restrict__ dx, const float* __restrict__ weight,
                              const float* moments, int samples, int pixels, int channels,
                              int groups) {
    wait_for_previous_kernel();
    Vectors<Number> values(x), gradients(dy);
    for (int first = blockIdx.x * BLOCK_INSTANCES; first < samples * groups;
         first += gridDim.x * BLOCK_INSTANCES) {
        const Instance own(first, samples, pixels, channels, groups);
        const float mean = own.exists ? moments[2 * own.index] : 0.0f;
        const float invstd = own.exists ? moments[2 * own.index + 1] : 0.0f;
        float sum = 0.0f, along = 0.0f;
        own.each([&](int h, int i) {
            values.hold(h, own.at(i));
            gradients.hold(h, own.at(i));
        });
        own.each([&](int h, int i) {
            const Floats z = values.get(h, own.at(i)), gradient = gradients.get(h, own.at(i));
            const Floats w = load(weight, own.slot(i));
            for (int k = 0; k < VECTOR; ++k) {
                const float g = gradient.at[k] * w.at[k];
                sum += g;
                along += g * (z.at[k] - mean);
            }
        });
        const float mean_g = sum_instance(sum) / own.size();
        const float slope = sum_instance(along) / own.size() * invstd * invstd;
        own.each([&](int h, int i) {
            const Floats z = values.get(h, own.at(i)), w = load(weight, own.slot(i));
            Floats gradient = gradients.get(h, own.at(i));
            for (int k = 0; k < VECTOR; ++k) {
                const float g = gradient.at[k] * w.at[k];
                gradient.at[k] = invstd * (g - mean_g - (z.at[k] - mean) * slope);
            }
            store_or_add(dx, own.at(i), gradient);
        });
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
                const int group = IS_LAYER ? 0 : (thread.slot * VECTOR + k) / group_channels;
                const float* found = moments + 2 * (instance + group);
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
