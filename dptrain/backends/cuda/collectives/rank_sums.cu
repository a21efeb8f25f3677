// Sums of batch statistics over the GPUs of a node by a separate kernel, for steps that time the sums.
// It exchanges the same packets as the kernels that compute statistics (rank_sums.cuh), so that some
// ranks may use this kernel and others those.
//
//     totals  (1 + 2 C,) or (2 C,)  float64: the number of pixels if HAS_COUNT, and two sums of each
//                                   channel; replaced by their sums over the ranks
//
// Launch: one block, because it reads and writes the number of pixels. A column has `column_channels`
// channels.

#define ACROSS_RANKS 1
#include "dependent_launch.cuh"
#include "rank_sums.cuh"

#ifndef HAS_COUNT
#define HAS_COUNT 0
#endif

extern "C" __global__ void sum_statistics(double* totals, int channels, int column_channels,
                                          RANKS_PARAMETERS) {
    wait_for_previous_kernel();
    RankSums rank_sums{RANKS_ARGUMENTS};
    const double count = HAS_COUNT ? totals[0] : 0.0;
    __syncthreads();
    double* const sums = totals + HAS_COUNT;
    for (int c = threadIdx.x; c < channels; c += blockDim.x) {
        Doubles<2 + HAS_COUNT> total;
        total.at[0] = sums[c];
        total.at[1] = sums[channels + c];
        total.at[1 + HAS_COUNT] = HAS_COUNT ? count : total.at[1];
        rank_sums.open(c / column_channels);
        rank_sums.add(c, channels, total);
        sums[c] = total.at[0];
        sums[channels + c] = total.at[1];
        if (HAS_COUNT && c == 0) totals[0] = total.at[1 + HAS_COUNT];
    }
    __syncthreads();
    for (int column = threadIdx.x; column * column_channels < channels; column += blockDim.x) {
        rank_sums.open(column);
        rank_sums.close(column);
    }
}
