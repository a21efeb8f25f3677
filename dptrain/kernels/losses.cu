// Losses of z (N, F) and their gradients dz, and what a step adds up: sums[0] = loss · scale, with
// scale = 1 / samples of the global minibatch, sums[1] = number of correct answers, sums[2] = the
// wish to stop, from `numbers` (hyperparameters.cuh). dz is written only where `backward` says so.
//
// SAMPLE_LANES threads, a part of a warp, take a sample. A block adds up its own, the block that comes
// last adds up the blocks, each in an order that is always the same: the same bits in every run.

#include "precision.cuh"
#include "dependent_launch.cuh"
#include "hyperparameters.cuh"

#ifndef SAMPLE_LANES
#define SAMPLE_LANES 16
#endif

constexpr int THREADS = 512;
constexpr unsigned ALL = 0xFFFFFFFFu;

// What several blocks leave for each other: how many are done, which ends at 0 as it began, and
// what each of them found, loss in the upper half.
using Word = unsigned long long;

struct Answer {
    float loss;
    int correct;
};

// The sum over the block, in thread 0.
__device__ inline Answer block_sum(Answer own) {
    __shared__ Answer warps[THREADS / 32];
    const int lane = threadIdx.x % 32;
    for (int half = 16; half > 0; half /= 2) {
        own.loss += __shfl_down_sync(ALL, own.loss, half);
        own.correct += __shfl_down_sync(ALL, own.correct, half);
    }
    if (lane == 0) warps[threadIdx.x / 32] = own;
    __syncthreads();
    own = {0.0f, 0};
    if (threadIdx.x == 0)
        for (const Answer& warp : warps) own = {own.loss + warp.loss, own.correct + warp.correct};
    __syncthreads();
    return own;
}

// Adds up what all threads found, times `factor`.
__device__ inline void finish(
    Answer own, float factor, float* sums, const float* numbers, Word* between) {
    const float stop = numbers[STEP_STOP];
    own = block_sum(own);
    if (gridDim.x > 1) {
        __shared__ bool last;
        if (threadIdx.x == 0) {
            const Word found = Word(__float_as_uint(own.loss)) << 32 | unsigned(own.correct);
            atomicExch(&between[1 + blockIdx.x], found);
            __threadfence();
            last = atomicAdd(&between[0], Word(1)) == gridDim.x - 1;
        }
        __syncthreads();
        if (!last) return;
        own = {0.0f, 0};
        for (int block = threadIdx.x; block < gridDim.x; block += THREADS) {
            const Word found = atomicAdd(&between[1 + block], Word(0));
            own.loss += __uint_as_float(unsigned(found >> 32));
            own.correct += int(unsigned(found));
        }
        own = block_sum(own);
        if (threadIdx.x == 0) atomicExch(&between[0], Word(0));
    }
    if (threadIdx.x == 0) {
        sums[0] = own.loss * factor;
        sums[1] = float(own.correct);
        sums[2] = stop;
    }
}

// What this thread has of a sample: outputs lane, lane + SAMPLE_LANES, … Whole warps stay together, from
// one `first` sample to the next: those behind the last count for nothing.
struct Part {
    int lane = threadIdx.x % SAMPLE_LANES, offset = threadIdx.x % 32 / SAMPLE_LANES;
    int first = int(blockIdx.x * THREADS + threadIdx.x) / SAMPLE_LANES - offset;
    int stride = gridDim.x * (THREADS / SAMPLE_LANES);
};

template <class T, class F> __device__ inline T over_lanes(T value, F combine) {
    for (int bit = SAMPLE_LANES / 2; bit > 0; bit /= 2)
        value = combine(value, __shfl_xor_sync(ALL, value, bit));
    return value;
}

// Loss = −log softmax(z)[label]; dz = (softmax(z) − onehot) · scale.
extern "C" __global__ void __launch_bounds__(THREADS) softmax_cross_entropy(
    const Number* z, const int* labels, Number* dz, float* sums, const float* numbers,
    Word* between, int n, int outputs, float scale, int backward) {
    wait_for_previous_kernel();
    const Part part;
    Answer answer = {0.0f, 0};
    const float infinity = __int_as_float(0x7F800000);
    for (int first = part.first; first < n; first += part.stride) {
        const int sample = first + part.offset;
        const bool there = sample < n;
        const Number* row = z + (there ? sample : 0) * outputs;
        const int label = labels[there ? sample : 0];
        const float chosen = to_float(row[label]);
        float own = -infinity, total = 0.0f;
        int best = outputs;
        for (int k = part.lane; k < outputs; k += SAMPLE_LANES) {
            const float value = to_float(row[k]);
            if (value > own) own = value, best = k;
        }
        // The first among equals; a NaN loses to all, and shows in the total.
        const float largest = over_lanes(own, [](float a, float b) { return fmaxf(a, b); });
        best = over_lanes(own == largest ? best : outputs, [](int a, int b) { return min(a, b); });
        for (int k = part.lane; k < outputs; k += SAMPLE_LANES)
            total += expf(to_float(row[k]) - largest);
        total = over_lanes(total, [](float a, float b) { return a + b; });
        if (!there) continue;
        if (part.lane == 0) {
            answer.loss += logf(total) - (chosen - largest);
            answer.correct += best == label;
        }
        if (!backward) continue;
        for (int k = part.lane; k < outputs; k += SAMPLE_LANES) {
            const float share = expf(to_float(row[k]) - largest) / total;
            dz[sample * outputs + k] =
                from_float<Number>((share - (k == label ? 1.0f : 0.0f)) * scale);
        }
    }
    finish(answer, scale, sums, numbers, between);
}

// Loss = mean over outputs of log(1 + exp(z)) − z y; dz = (σ(z) − y) · scale / F. Correct: every
// output on the right side of ½.
extern "C" __global__ void __launch_bounds__(THREADS) sigmoid_cross_entropy(
    const Number* z, const float* target, Number* dz, float* sums, const float* numbers,
    Word* between, int n, int outputs, float scale, int backward) {
    wait_for_previous_kernel();
    const float factor = scale / outputs;
    const Part part;
    Answer answer = {0.0f, 0};
    for (int first = part.first; first < n; first += part.stride) {
        const int sample = first + part.offset;
        int wrong = 0;
        for (int k = part.lane; k < outputs && sample < n; k += SAMPLE_LANES) {
            const int i = sample * outputs + k;
            const float value = to_float(z[i]), y = target[i];
            // max(z, 0) is written so that a NaN stays.
            const float positive = value <= 0.0f ? 0.0f : value;
            answer.loss += positive - value * y + log1pf(expf(-fabsf(value)));
            wrong += (value > 0.0f) != (y > 0.5f);
            if (backward)
                dz[i] = from_float<Number>((0.5f + 0.5f * tanhf(0.5f * value) - y) * factor);
        }
        wrong = over_lanes(wrong, [](int a, int b) { return a + b; });
        answer.correct += sample < n && part.lane == 0 && wrong == 0;
    }
    finish(answer, factor, sums, numbers, between);
}

// Loss = mean over outputs of (z − y)²; dz = 2 (z − y) · scale / F. No answer is correct.
extern "C" __global__ void __launch_bounds__(THREADS) mean_squared_error(
    const Number* z, const float* target, Number* dz, float* sums, const float* numbers,
    Word* between, int n, int outputs, float scale, int backward) {
    wait_for_previous_kernel();
    const float factor = scale / outputs;
    Answer answer = {0.0f, 0};
    for (int i = blockIdx.x * THREADS + threadIdx.x; i < n * outputs; i += gridDim.x * THREADS) {
        const float d = to_float(z[i]) - target[i];
        answer.loss += d * d;
        if (backward) dz[i] = from_float<Number>(2.0f * d * factor);
    }
    finish(answer, factor, sums, numbers, between);
}
