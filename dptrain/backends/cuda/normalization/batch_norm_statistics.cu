// Mean and variance of each channel over a minibatch, for batch normalisation in training.
//
//     x        (pixels, C)     activation type, pixels = N · H · W
//     partial  (blocks, 3, C)  float32: Σ (x − shift), Σ (x − shift)² and the shift of each block
//     totals   (1 + 2 C,)      float64: number of pixels, Σ x, Σ x² of each channel
//     moments, running_mean, running_var: as in batch_norm.cuh
//
// With MICRO_SHARDS, `totals` are the rows of batch_norm.cuh: Σ x, Σ x² and the number of pixels.
//
// Algorithm: float32 sums of squares lose all digits of the variance if the mean is much larger
// than the standard deviation. A block therefore subtracts the first value that it reads in each
// channel, and the last block computes Σ x and Σ x² of all blocks from these sums in float64, which
// ranks can add. One pass over x, which costs the time of reading it once. Launch: channel_sums.cuh.
//
// Source: Chan, Golub and LeVeque, "Algorithms for computing the sample variance: analysis and
// recommendations", 1983 (shifted data).

#include "batch_norm.cuh"
#include "rank_sums.cuh"

// Store the totals of a channel, and the moments unless another kernel adds the totals of all ranks.
__device__ inline void store_statistics(double* totals, float* moments, float* running_mean,
                                        float* running_var, int channels, int c,
                                        const Doubles<3>& total, float epsilon, float momentum,
                                        int ranks) {
    const double sum = total.at[0], squares = total.at[1], count = total.at[2];
    totals[1 + c] = sum;
    totals[1 + channels + c] = squares;
    if (c == 0) totals[0] = count;
    if (ranks)
        store_moments(moments, running_mean, running_var, channels, c, count, sum, squares, epsilon,
                      momentum);
}

#if MICRO_SHARDS
#define COUNT_PARAMETER , double* totals_count

// Store the moments of a channel from the rows of all micro-shards, and the number of pixels.
__device__ inline void store_moments_of_shards(double* rows, double* count, float* moments,
                                               float* running_mean, float* running_var,
                                               int channels, int c, float epsilon,
                                               float momentum) {
    const auto at = [&](int shard) { return ShardRows<3>{rows, channels}.sums(shard, c); };
    const Doubles<3> total = ALL_SHARDS;
    if (c == 0) *count = total.at[2];
    store_moments(moments, running_mean, running_var, channels, c, total.at[2], total.at[0],
                  total.at[1], epsilon, momentum);
}
#else
#define COUNT_PARAMETER
#endif

// The last blocks also add the sums of all ranks and compute the moments, unless `ranks` is 0; see
// rank_sums.cuh.
extern "C" __global__ void __launch_bounds__(CHANNEL_THREADS)
    batch_norm_statistics(const Number* __restrict__ x, float* partial, unsigned* tickets,
                          int pixels, int channels, double* totals, float* moments,
                          float* running_mean, float* running_var, float epsilon, float momentum,
                          RANKS_PARAMETERS COUNT_PARAMETER ROWS_PARAMETERS) {
    wait_for_previous_kernel();
#if MICRO_SHARDS
    const SampleRange own = own_pixels(shard_samples, larger_shards, sample_pixels);
    x += (long long)own.first * channels;
    pixels = own.count;
    partial += (long long)blockIdx.z * gridDim.x * 3 * channels;
#endif
    const ChannelThread thread(channels);
    Floats sums[2] = {}, shift = {};
    if (thread.has_channels() && pixels > 0) {
        shift = load(x, thread.at(min(int(blockIdx.x) * BLOCK_ROWS, pixels - 1)));
#pragma unroll 4
        for (int pixel = thread.first; pixel < pixels; pixel += thread.stride) {
            const Floats values = load(x, thread.at(pixel));
            for (int k = 0; k < VECTOR; ++k) {
                const float distance = values.at[k] - shift.at[k];
                sums[0].at[k] += distance;
                sums[1].at[k] += distance * distance;
            }
        }
        if (threadIdx.x < CHANNEL_VECTORS)
            for (int k = 0; k < VECTOR; ++k)
                __stcg(partial + (blockIdx.x * 3 + 2) * channels + thread.slot * VECTOR + k,
                       shift.at[k]);
    }
    store_block_sums(sums, partial, 3, 0, channels);
    if (!is_last_block(tickets)) return;

    int c;
    Doubles<2> sums_of_blocks;
    RankSums rank_sums{RANKS_ARGUMENTS};
    rank_sums.open(blockIdx.y);
    const auto term = [&](int block, int channel) {
        const float* row = partial + block * 3 * channels + channel;
        const double sum = __ldcg(row), squares = __ldcg(row + channels);
        const double count = pixels_of_block(block, pixels), by = __ldcg(row + 2 * channels);
        if (pixels == 0) return Doubles<2>{};
        return Doubles<2>{{sum + count * by, squares + 2.0 * by * sum + count * by * by}};
    };
    const bool has_result = sum_over_rows(gridDim.x, channels, c, sums_of_blocks, term);
    Doubles<3> total{{sums_of_blocks.at[0], sums_of_blocks.at[1], double(pixels)}};
#if MICRO_SHARDS
    if (has_result) ShardRows<3>{totals, channels}.store(c, total, first_shard, all_shards);
    if (is_last_row(tickets) && has_result)
        store_moments_of_shards(totals, totals_count, moments, running_mean, running_var, channels,
                                c, epsilon, momentum);
#else
    if (!has_result) return;
    rank_sums.add(c, channels, total);
    store_statistics(totals, moments, running_mean, running_var, channels, c, total, epsilon,
                     momentum, ranks);
    if (threadIdx.x == 0) rank_sums.close(blockIdx.y);
#endif
}

// The same from the sums of the kernel that has written x (output_sums.cuh). Launch: grid (1,
// columns), see channel_sums.cuh.
extern "C" __global__ void __launch_bounds__(CHANNEL_THREADS)
    batch_norm_statistics_of_sums(const float* sums, int rows, int channels, double* totals,
                                  float* moments, float* running_mean, float* running_var,
                                  float epsilon, float momentum, RANKS_PARAMETERS) {
    wait_for_previous_kernel();
    RankSums rank_sums{RANKS_ARGUMENTS};
    rank_sums.open(blockIdx.y);
    int c;
    Doubles<3> total;
    const bool has_result = sum_over_rows(rows, channels, c, total, [&](int row, int channel) {
        const float* const own = sums + row * 4 * channels + channel;
        const double near = own[0], by = own[2 * channels], pixels = own[3 * channels];
        return Doubles<3>{{near + pixels * by,
                           double(own[channels]) + 2.0 * by * near + pixels * by * by, pixels}};
    });
    if (!has_result) return;
    rank_sums.add(c, channels, total);
    store_statistics(totals, moments, running_mean, running_var, channels, c, total, epsilon,
                     momentum, ranks);
    if (threadIdx.x == 0) rank_sums.close(blockIdx.y);
}

// Compute the moments from the totals of all ranks; one thread for each channel.
extern "C" __global__ void batch_norm_moments(const double* totals, float* moments,
                                              float* running_mean, float* running_var, int channels,
                                              float epsilon, float momentum) {
    wait_for_previous_kernel();
    const int c = blockIdx.x * blockDim.x + threadIdx.x;
    if (c < channels)
        store_moments(moments, running_mean, running_var, channels, c, totals[0], totals[1 + c],
                      totals[1 + channels + c], epsilon, momentum);
}

#if MICRO_SHARDS
// Compute the moments from the rows of all micro-shards, and store the number of pixels; one thread
// for each channel.
extern "C" __global__ void batch_norm_moments_of_shards(double* rows, double* count,
                                                        float* moments, float* running_mean,
                                                        float* running_var, int channels,
                                                        float epsilon, float momentum) {
    wait_for_previous_kernel();
    const int c = blockIdx.x * blockDim.x + threadIdx.x;
    if (c < channels)
        store_moments_of_shards(rows, count, moments, running_mean, running_var, channels, c,
                                epsilon, momentum);
}
#endif
