// Loss functions, their gradients with respect to the predictions, and the loss sums of a step.
//
//     z          (n, F)   predictions (logits), activation type
//     labels     (n,)     int32, for classes        target (n, F) float32, for the others
//     dz         (n, F)   gradient, written if `backward` is not 0
//     weights    (n,)     float32, factors of the losses of the samples, if WEIGHTED is 1
//     loss_sums  (3,)     loss · scale, number of correct predictions, stop request
//     scratch    (1 + gridDim.x,) uint64, 0 before the first launch; with MICRO_SHARDS
//                (gridDim.z · (1 + gridDim.x) + 1 + gridDim.z,)
//
// With MICRO_SHARDS (micro_shards.cuh), the loss sums of slot s start at loss_sums[s · slot_pitch].
//
// A loss in loss_sums that is not finite stays: the minibatch of the next step may have been loaded
// before that loss was known, and no later step may update the parameters.
//
// scale = 1 / samples of the global minibatch. The stop request comes from the hyperparameters
// (hyperparameters.cuh), an array float32 (6,).
//
// Algorithm: SAMPLE_LANES lanes of a warp process a sample. Each block reduces its samples by warp
// shuffles, and the last block to finish adds the blocks. The order of additions is fixed, so
// results are reproducible. Launched with blocks of 512 threads (backend.py).

#include "precision.cuh"
#include "dependent_launch.cuh"
#include "hyperparameters.cuh"
#include "micro_shards.cuh"

#ifndef SAMPLE_LANES
#define SAMPLE_LANES 16
#endif

// 1 if the losses of classes have a further argument, the label smoothing. It applies to training
// only, that is, if `backward` is not 0.
#ifndef SMOOTHED
#define SMOOTHED 0
#endif
#if SMOOTHED
#define SMOOTHING_PARAMETER , float smoothing
#else
#define SMOOTHING_PARAMETER
#endif

// 1 if the last argument is a weight for each sample. Weights apply to training only.
#ifndef WEIGHTED
#define WEIGHTED 0
#endif
#if WEIGHTED
#define WEIGHTS_PARAMETER , const float* weights
#define WEIGHT(sample) (backward ? weights[sample] : 1.0f)
#else
#define WEIGHTS_PARAMETER
#define WEIGHT(sample) 1.0f
#endif

// The last arguments.
#if MICRO_SHARDS
#define LAST_PARAMETERS SHARDS_PARAMETERS, int slot_pitch
#define REDUCE_ARGUMENTS , slot_pitch
#else
#define LAST_PARAMETERS
#define REDUCE_ARGUMENTS
#endif

constexpr int THREADS = 512;
constexpr unsigned FULL_WARP = 0xFFFFFFFFu;

// Exchange between blocks: scratch[0] counts finished blocks and is reset to 0; scratch[1 + b]
// holds the sums of block b, with the loss in the upper 32 bits.
using PackedSum = unsigned long long;

struct LossSum {
    float loss;
    int correct;

    __device__ LossSum operator+(const LossSum& other) const {
        return {loss + other.loss, correct + other.correct};
    }
};

__device__ inline PackedSum pack(const LossSum& sum) {
    return PackedSum(__float_as_uint(sum.loss)) << 32 | unsigned(sum.correct);
}

__device__ inline LossSum unpack(PackedSum packed) {
    return {__uint_as_float(unsigned(packed >> 32)), int(unsigned(packed))};
}

// Store the sum of block `index` of `blocks` for the last one to finish, and return true in it.
// scratch (1 + blocks,).
__device__ inline bool is_last(PackedSum* scratch, int index, int blocks, const LossSum& own) {
    atomicExch(&scratch[1 + index], pack(own));
    __threadfence();
    if (atomicAdd(&scratch[0], PackedSum(1)) != blocks - 1) return false;
    atomicExch(&scratch[0], PackedSum(0));
    return true;
}

__device__ inline LossSum sum_of_block(PackedSum* scratch, int index) {
    return unpack(atomicAdd(&scratch[1 + index], PackedSum(0)));
}

// Sum over the block; the result is valid in thread 0.
__device__ inline LossSum block_sum(LossSum own) {
    __shared__ LossSum warps[THREADS / 32];
    const int lane = threadIdx.x % 32;
    for (int half = 16; half > 0; half /= 2) {
        own.loss += __shfl_down_sync(FULL_WARP, own.loss, half);
        own.correct += __shfl_down_sync(FULL_WARP, own.correct, half);
    }
    if (lane == 0) warps[threadIdx.x / 32] = own;
    __syncthreads();
    own = {0.0f, 0};
    if (threadIdx.x == 0)
        for (const LossSum& warp : warps) own = {own.loss + warp.loss, own.correct + warp.correct};
    __syncthreads();
    return own;
}

__device__ inline void store_sums(float* loss_sums, const LossSum& sum, float stop) {
    if (is_finite(loss_sums[0])) loss_sums[0] = sum.loss;
    loss_sums[1] = float(sum.correct);
    loss_sums[2] = stop;
}

// Add the sums of all threads of all blocks, multiply the loss by `factor` and store the loss sums.
__device__ inline void reduce_blocks(LossSum own, float factor, float* loss_sums,
                                     const float* hyperparameters, PackedSum* scratch,
                                     int slot_pitch = 0) {
    const float stop = hyperparameters[STOP_REQUESTED];
#if MICRO_SHARDS
    PackedSum* const shards = scratch + gridDim.z * (1 + gridDim.x);
#endif
    scratch += blockIdx.z * (1 + gridDim.x);
    own = block_sum(own);
    if (gridDim.x > 1) {
        __shared__ bool last;
        if (threadIdx.x == 0) last = is_last(scratch, blockIdx.x, gridDim.x, own);
        __syncthreads();
        if (!last) return;
        own = {0.0f, 0};
        for (int block = threadIdx.x; block < gridDim.x; block += THREADS)
            own = own + sum_of_block(scratch, block);
        own = block_sum(own);
    }
    if (threadIdx.x) return;
    own.loss *= factor;
#if MICRO_SHARDS
    if (!is_last(shards, blockIdx.z, gridDim.z, own)) return;
    const auto at = [&](int shard) { return sum_of_block(shards, shard); };
    const auto take = [&](int slot, const LossSum& sum) {
        store_sums(loss_sums + (long long)slot * slot_pitch, sum, slot ? 0.0f : stop);
    };
    OWN_SHARDS
#else
    store_sums(loss_sums, own, stop);
#endif
}

// This thread's part of a sample: outputs lane, lane + SAMPLE_LANES, … All lanes of a warp run the
// same number of iterations, because they exchange data; samples beyond the last are ignored.
struct LaneRange {
    int lane = threadIdx.x % SAMPLE_LANES, offset = threadIdx.x % 32 / SAMPLE_LANES;
    int first = int(blockIdx.x * THREADS + threadIdx.x) / SAMPLE_LANES - offset;
    int stride = gridDim.x * (THREADS / SAMPLE_LANES);
    int end;  // One past the last sample.

    __device__ explicit LaneRange(int samples) : end(samples) {}
    // With MICRO_SHARDS.
    __device__ LaneRange(int, int shard_samples, int larger_shards) {
        const SampleRange own = own_shard(shard_samples, larger_shards);
        first += own.first;
        end = own.first + own.count;
    }
};

template <class T, class F> __device__ inline T reduce_lanes(T value, F combine) {
    for (int bit = SAMPLE_LANES / 2; bit > 0; bit /= 2)
        value = combine(value, __shfl_xor_sync(FULL_WARP, value, bit));
    return value;
}

// Return the mean of a row of logits; all lanes of the sample receive it.
template <class T> __device__ inline float row_mean(const T* row, int outputs, int lane) {
    float sum = 0.0f;
    for (int k = lane; k < outputs; k += SAMPLE_LANES) sum += to_float(row[k]);
    return reduce_lanes(sum, [](float a, float b) { return a + b; }) / outputs;
}

struct RowMaximum {
    float value;
    int index;
};

// Find the first of the largest elements of a row; the lanes of a sample share the work. A row with
// NaN has the index −1, which is no class; NaN also shows in the sum of exponentials.
template <class T>
__device__ inline RowMaximum row_maximum(const T* row, int outputs, int lane) {
    float own = -__int_as_float(0x7F800000);
    int best = outputs;
    for (int k = lane; k < outputs; k += SAMPLE_LANES) {
        const float value = to_float(row[k]);
        if (value > own) own = value, best = k;
        if (value != value) own = __int_as_float(0x7F800000), best = -1;
    }
    const float maximum = reduce_lanes(own, [](float a, float b) { return fmaxf(a, b); });
    best = reduce_lanes(own == maximum ? best : outputs, [](int a, int b) { return min(a, b); });
    return {maximum, best};
}

// Loss = −log softmax(z)[label]; dz = (softmax(z) − onehot(label)) · scale. A prediction is correct
// if the label has the largest logit. With label smoothing s, the one-hot row becomes
// (1 − s) onehot + s / F.
extern "C" __global__ void __launch_bounds__(THREADS)
    softmax_cross_entropy(const Number* z, const int* labels, Number* dz, float* loss_sums,
                          const float* hyperparameters, PackedSum* scratch, int n, int outputs,
                          float scale,
                          int backward SMOOTHING_PARAMETER WEIGHTS_PARAMETER LAST_PARAMETERS) {
    wait_for_previous_kernel();
    const LaneRange lanes(n SHARDS_ARGUMENTS);
    LossSum own_sum = {0.0f, 0};
    for (int first = lanes.first; first < lanes.end; first += lanes.stride) {
        const int sample = first + lanes.offset;
        const bool there = sample < lanes.end;
        const Number* row = z + (there ? sample : 0) * outputs;
        const int label = labels[there ? sample : 0];
        const float weight = WEIGHT(there ? sample : 0);
        const float chosen = to_float(row[label]);
        const auto [maximum, best] = row_maximum(row, outputs, lanes.lane);
        float sum_exp = 0.0f;
        for (int k = lanes.lane; k < outputs; k += SAMPLE_LANES)
            sum_exp += expf(to_float(row[k]) - maximum);
        sum_exp = reduce_lanes(sum_exp, [](float a, float b) { return a + b; });
#if SMOOTHED
        const float mean = row_mean(row, outputs, lanes.lane);
        if (there && backward && lanes.lane == 0)
            own_sum.loss += weight * smoothing * (chosen - mean);
#endif
        if (!there) continue;
        if (lanes.lane == 0) {
            own_sum.loss += weight * (logf(sum_exp) - (chosen - maximum));
            own_sum.correct += best == label;
        }
        if (!backward) continue;
        for (int k = lanes.lane; k < outputs; k += SAMPLE_LANES) {
            const float share = expf(to_float(row[k]) - maximum) / sum_exp;
#if SMOOTHED
            const float wanted = (k == label ? 1.0f - smoothing : 0.0f) + smoothing / outputs;
#else
            const float wanted = k == label ? 1.0f : 0.0f;
#endif
            dz[sample * outputs + k] = from_float<Number>((share - wanted) * (weight * scale));
        }
    }
    reduce_blocks(own_sum, scale, loss_sums, hyperparameters, scratch REDUCE_ARGUMENTS);
}

// The same loss from logs = log softmax(z), for a library that computes softmax: dlogs (n, F) is the
// gradient with respect to logs. NaN in a row of z makes the whole row of logs NaN.
extern "C" __global__ void __launch_bounds__(THREADS)
    negative_log_likelihood(const float* z, const float* logs, const int* labels, float* dlogs,
                            float* loss_sums, const float* hyperparameters, PackedSum* scratch,
                            int n, int outputs, float scale,
                            int backward SMOOTHING_PARAMETER WEIGHTS_PARAMETER LAST_PARAMETERS) {
    wait_for_previous_kernel();
    const LaneRange lanes(n SHARDS_ARGUMENTS);
    LossSum own_sum = {0.0f, 0};
    for (int first = lanes.first; first < lanes.end; first += lanes.stride) {
        const int sample = first + lanes.offset;
        const bool there = sample < lanes.end;
        const int start = (there ? sample : 0) * outputs, label = labels[there ? sample : 0];
        const float weight = WEIGHT(there ? sample : 0), factor = weight * scale;
        const RowMaximum best = row_maximum(z + start, outputs, lanes.lane);
#if SMOOTHED
        const float mean = row_mean(z + start, outputs, lanes.lane);
        if (there && backward && lanes.lane == 0)
            own_sum.loss += weight * smoothing * (z[start + label] - mean);
#endif
        if (!there) continue;
        if (lanes.lane == 0) {
            own_sum.loss -= weight * logs[start + label];
            own_sum.correct += best.index == label;
        }
        if (!backward) continue;
        for (int k = lanes.lane; k < outputs; k += SAMPLE_LANES)
#if SMOOTHED
            dlogs[start + k] =
                -factor * ((k == label ? 1.0f - smoothing : 0.0f) + smoothing / outputs);
#else
            dlogs[start + k] = k == label ? -factor : 0.0f;
#endif
    }
    reduce_blocks(own_sum, scale, loss_sums, hyperparameters, scratch REDUCE_ARGUMENTS);
}

// Loss = mean over classes of d², where p = softmax(z) and d = p − onehot(label);
// dz = 2 p (d − Σ p d) · scale / F. A prediction is correct if the label has the largest logit.
extern "C" __global__ void __launch_bounds__(THREADS)
    softmax_squared_error(const Number* z, const int* labels, Number* dz, float* loss_sums,
                          const float* hyperparameters, PackedSum* scratch, int n, int outputs,
                          float scale, int backward WEIGHTS_PARAMETER LAST_PARAMETERS) {
    wait_for_previous_kernel();
    const float factor = scale / outputs;
    const auto add = [](float a, float b) { return a + b; };
    const LaneRange lanes(n SHARDS_ARGUMENTS);
    LossSum own_sum = {0.0f, 0};
    for (int first = lanes.first; first < lanes.end; first += lanes.stride) {
        const int sample = first + lanes.offset;
        const bool there = sample < lanes.end;
        const Number* row = z + (there ? sample : 0) * outputs;
        const int label = labels[there ? sample : 0];
        const float weight = WEIGHT(there ? sample : 0);
        const auto [maximum, best] = row_maximum(row, outputs, lanes.lane);
        float others = 0.0f, squares = 0.0f;
        for (int k = lanes.lane; k < outputs; k += SAMPLE_LANES) {
            const float power = k == label ? 0.0f : expf(to_float(row[k]) - maximum);
            others += power;
            squares += power * power;
        }
        others = reduce_lanes(others, add);
        squares = reduce_lanes(squares, add);
        if (!there) continue;
        const float own = expf(to_float(row[label]) - maximum), total = others + own;
        // d of the label is −others / total, which does not cancel for p close to 1.
        const float rest = others / total;
        squares /= total * total;
        if (lanes.lane == 0) {
            own_sum.loss += weight * (squares + rest * rest);
            own_sum.correct += best == label;
        }
        if (!backward) continue;
        const float mean = squares - own / total * rest;
        for (int k = lanes.lane; k < outputs; k += SAMPLE_LANES) {
            const float p = expf(to_float(row[k]) - maximum) / total;
            const float slope = 2.0f * p * ((k == label ? -rest : p) - mean);
            dz[sample * outputs + k] = from_float<Number>(slope * (weight * factor));
        }
    }
    reduce_blocks(own_sum, factor, loss_sums, hyperparameters, scratch REDUCE_ARGUMENTS);
}

// The function of an output z and its target y, and its derivative by z. backend.py writes them from
// the expressions of the loss, as macros: statements that return them, and the name of the kernel.
#ifndef LOSS_NAME
#define LOSS_NAME elementwise_loss
#define LOSS_VALUE return z - y;
#define LOSS_SLOPE return 1.0f;
#endif

// 1 if a prediction is correct when every output lies on the side of ½ of its target; otherwise no
// prediction counts as correct.
#ifndef BINARY_TARGETS
#define BINARY_TARGETS 0
#endif

__device__ inline float loss_value(float z, float y) { LOSS_VALUE }

__device__ inline float loss_slope(float z, float y) { LOSS_SLOPE }

// Loss = mean over outputs of loss_value(z, y); dz = loss_slope(z, y) · scale / F.
extern "C" __global__ void __launch_bounds__(THREADS)
    LOSS_NAME(const Number* z, const float* target, Number* dz, float* loss_sums,
              const float* hyperparameters, PackedSum* scratch, int n, int outputs, float scale,
              int backward WEIGHTS_PARAMETER LAST_PARAMETERS) {
    wait_for_previous_kernel();
    const float factor = scale / outputs;
    const LaneRange lanes(n SHARDS_ARGUMENTS);
    LossSum own_sum = {0.0f, 0};
    for (int first = lanes.first; first < lanes.end; first += lanes.stride) {
        const int sample = first + lanes.offset;
        const float weight = WEIGHT(sample < lanes.end ? sample : 0);
        int wrong = !BINARY_TARGETS;
        for (int k = lanes.lane; k < outputs && sample < lanes.end; k += SAMPLE_LANES) {
            const int i = sample * outputs + k;
            const float value = to_float(z[i]), y = target[i];
            own_sum.loss += weight * loss_value(value, y);
            wrong += (value > 0.0f) != (y > 0.5f) || value != value;
            if (backward) dz[i] = from_float<Number>(loss_slope(value, y) * (weight * factor));
        }
        wrong = reduce_lanes(wrong, [](int a, int b) { return a + b; });
        own_sum.correct += sample < lanes.end && lanes.lane == 0 && wrong == 0;
    }
    reduce_blocks(own_sum, factor, loss_sums, hyperparameters, scratch REDUCE_ARGUMENTS);
}
