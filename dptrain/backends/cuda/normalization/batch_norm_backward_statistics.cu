// Gradients of weight and bias of a batch normalisation, and the sums that the gradient of its
// input needs:
//
//     dbias = Σ dz,   dweight = Σ dz · (x − mean) · invstd,   over the pixels of this rank,
//
// where dz is dy, or the gradient before a fused function (ACTIVATION_FROM of activation.cuh).
//
//     dy, y, x       (pixels, C)     activation type; y is read with ACTIVATION_FROM 2 only
//     dz             (pixels, C)     written if STORE_DZ: the gradient of the other addend, from
//                                    which batch_norm_backward_input.cu continues. It may be dy.
//     partial        (blocks, 2, C)  float32
//     totals         (2, C)          float64: dbias and dweight, to be added over ranks
//     count          (1,)            float64: pixels of all ranks
//     backward_sums  (2, C)          float32: mean of dz, and invstd · mean of dz · x̂
//
// With MICRO_SHARDS, `totals` are the rows of batch_norm.cuh: dbias and dweight.
//
// Launch: channel_sums.cuh. Time: that of reading dy, x and y.
//
// Source: Ioffe and Szegedy, "Batch normalization", 2015, section 3.

#include "batch_norm.cuh"
#include "rank_sums.cuh"

#ifndef STORE_DZ
#define STORE_DZ 0
#endif

__device__ inline void store_backward_sums(float* backward_sums, const float* moments, int channels,
                                           int c, double count, double dbias, double dweight) {
    const double factor = count > 0.0 ? 1.0 / count : 0.0;
    backward_sums[c] = float(dbias * factor);
    backward_sums[channels + c] = float(dweight * factor * double(moments[channels + c]));
}

// Store the results for a channel from Σ dz and Σ dz · (x − mean): the gradients of this rank, and
// backward_sums of all ranks unless another kernel computes them.
__device__ inline void store_gradients(double* totals, const double* count, float* backward_sums,
                                       float* dweight, float* dbias, const float* moments,
                                       int channels, int c, Doubles<2> sums, RankSums& rank_sums) {
    sums.at[1] *= double(moments[channels + c]);
    dbias[c] = float(sums.at[0]);
    dweight[c] = float(sums.at[1]);
    rank_sums.add(c, channels, sums);
    totals[c] = sums.at[0];
    totals[channels + c] = sums.at[1];
    if (rank_sums.ranks)
        store_backward_sums(backward_sums, moments, channels, c, count[0], sums.at[0], sums.at[1]);
    if (threadIdx.x == 0) rank_sums.close(blockIdx.y);
}

#if MICRO_SHARDS
#define PITCH_PARAMETER , int slot_pitch

struct ChannelGradients {
    float dbias, dweight;

    __device__ ChannelGradients operator+(const ChannelGradients& other) const {
        return {dbias + other.dbias, dweight + other.dweight};
    }
};

// Store the gradients of this rank, whose slot s starts at element s · slot_pitch, and
// backward_sums for a channel.
__device__ inline void store_gradients_of_shards(double* rows, int first_shard,
                                                 const double* count, const float* moments,
                                                 float* backward_sums, float* dweight, float* dbias,
                                                 int slot_pitch, int channels, int c) {
    const ShardRows<2> shards{rows, channels};
    {
        const auto at = [&](int shard) {
            const Doubles<2> sums = shards.sums(first_shard + shard, c);
            return ChannelGradients{float(sums.at[0]), float(sums.at[1])};
        };
        const auto take = [&](int slot, const ChannelGradients& sum) {
            dbias[(long long)slot * slot_pitch + c] = sum.dbias;
            dweight[(long long)slot * slot_pitch + c] = sum.dweight;
        };
        OWN_SHARDS
    }
    const auto at = [&](int shard) { return shards.sums(shard, c); };
    const Doubles<2> total = ALL_SHARDS;
    store_backward_sums(backward_sums, moments, channels, c, *count, total.at[0], total.at[1]);
}
#else
#define PITCH_PARAMETER
#endif

// The last blocks also add the sums of all ranks and compute backward_sums, unless `ranks` is 0; see
// rank_sums.cuh. Without the number of blocks, the compiler spills registers so that more blocks fit.
extern "C" __global__ void __launch_bounds__(CHANNEL_THREADS, 2)
    batch_norm_backward_statistics(const Number* dy, const Number* __restrict__ y,
                                   const Number* __restrict__ x, Number* dz,
                                   const float* moments, const float* weight, const float* bias,
                                   float* partial, unsigned* tickets, double* totals,
                                   const double* count, float* backward_sums, float* dweight,
                                   float* dbias, int pixels, int channels,
                                   RANKS_PARAMETERS PITCH_PARAMETER ROWS_PARAMETERS) {
    wait_for_previous_kernel();
#if MICRO_SHARDS
    const SampleRange own = own_pixels(shard_samples, larger_shards, sample_pixels);
    const long long offset = (long long)own.first * channels;
    dy += offset, y += offset, x += offset, dz += offset;
    pixels = own.count;
    partial += (long long)blockIdx.z * gridDim.x * 2 * channels;
#endif
    const ChannelThread thread(channels);
    Floats sums[2] = {};
    if (thread.has_channels()) {
        const ChannelConstants constants(moments, moments + channels, weight, bias, thread.slot);
#pragma unroll 2
        for (int pixel = thread.first; pixel < pixels; pixel += thread.stride) {
            const int i = thread.at(pixel);
            const Floats values = load(x, i);
            Floats gradient = load(dy, i), saved = {};
            if (ACTIVATION_FROM == 2) saved = load(y, i);
            undo_activation(gradient, values, saved, constants);
            if (STORE_DZ) store(dz, i, gradient);
            for (int k = 0; k < VECTOR; ++k) {
                sums[0].at[k] += gradient.at[k];
                sums[1].at[k] += gradient.at[k] * (values.at[k] - constants.mean.at[k]);
            }
        }
    }
    store_block_sums(sums, partial, 2, 0, channels);
    if (!is_last_block(tickets)) return;

    int c;
    Doubles<2> total;
    RankSums rank_sums{RANKS_ARGUMENTS};
    rank_sums.open(blockIdx.y);
    const auto term = [&](int block, int channel) {
        const float* row = partial + block * 2 * channels + channel;
        return Doubles<2>{{__ldcg(row), __ldcg(row + channels)}};
    };
    const bool has_result = sum_over_rows(gridDim.x, channels, c, total, term);
#if MICRO_SHARDS
    if (has_result) {
        total.at[1] *= double(moments[channels + c]);
        ShardRows<2>{totals, channels}.store(c, total, first_shard, all_shards);
    }
    if (is_last_row(tickets) && has_result)
        store_gradients_of_shards(totals, first_shard, count, moments, backward_sums, dweight,
                                  dbias, slot_pitch, channels, c);
#else
    if (!has_result) return;
    store_gradients(totals, count, backward_sums, dweight, dbias, moments, channels, c, total,
                    rank_sums);
#endif
}

// The same from the sums (rows, 2, C) of the kernel that has written dz (gradient_sums.cuh). Launch:
// grid (1, columns), see channel_sums.cuh.
extern "C" __global__ void __launch_bounds__(CHANNEL_THREADS, 1)
    batch_norm_backward_statistics_of_sums(const float* sums, int rows, int channels,
                                           const float* moments, double* totals,
                                           const double* count, float* backward_sums,
                                           float* dweight, float* dbias, RANKS_PARAMETERS) {
    wait_for_previous_kernel();
    RankSums rank_sums{RANKS_ARGUMENTS};
    rank_sums.open(blockIdx.y);
    int c;
    Doubles<2> total;
    const bool has_result = sum_over_rows(rows, channels, c, total, [&](int row, int channel) {
        const float* const own = sums + row * 2 * channels + channel;
        return Doubles<2>{{own[0], own[channels]}};
    });
    if (has_result)
        store_gradients(totals, count, backward_sums, dweight, dbias, moments, channels, c, total,
                        rank_sums);
}

// Compute backward_sums from the totals of all ranks; one thread for each channel.
extern "C" __global__ void batch_norm_backward_sums(const double* totals, const double* count,
                                                    const float* moments, float* backward_sums,
                                                    int channels) {
    wait_for_previous_kernel();
    const int c = blockIdx.x * blockDim.x + threadIdx.x;
    if (c < channels)
        store_backward_sums(backward_sums, moments, channels, c, count[0], totals[c],
                            totals[channels + c]);
}

#if MICRO_SHARDS
// Compute the gradients of this rank and backward_sums from the rows of all micro-shards; one thread
// for each channel.
extern "C" __global__ void batch_norm_gradients_of_shards(double* rows, int first_shard,
                                                          const double* count,
                                                          const float* moments,
                                                          float* backward_sums, float* dweight,
                                                          float* dbias, int slot_pitch,
                                                          int channels) {
    wait_for_previous_kernel();
    const int c = blockIdx.x * blockDim.x + threadIdx.x;
    if (c < channels)
        store_gradients_of_shards(rows, first_shard, count, moments, backward_sums, dweight, dbias,
                                  slot_pitch, channels, c);
}
#endif
