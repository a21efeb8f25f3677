// Batch normalisation of maps x (N, H, W, C): constants of a channel, and the gradient of a fused
// function f, such as ReLU (activation.cuh).
//
//     y = f(weight · (x − mean) · invstd + bias [+ x2])
//
// moments float32 (2, C): the mean, and invstd = 1 / sqrt(variance + epsilon).

#pragma once

#include "activation.cuh"
#include "channel_sums.cuh"
#include "micro_shards.cuh"

// Mean and variance of a channel from (count, Σ x, Σ x²) in float64. Subtracting the square of the
// mean has a relative error of about 1e-16 · mean² / variance.
struct Moments {
    double mean, variance;
};

__device__ inline Moments moments_of(double count, double sum, double squares) {
    const double mean = count > 0.0 ? sum / count : 0.0;
    return {mean, count > 0.0 ? max(squares / count - mean * mean, 0.0) : 0.0};
}

// Store the moments of channel c, and move the running mean and variance towards them by `momentum`
// of the distance. The running variance receives the unbiased variance.
__device__ inline void store_moments(float* moments, float* running_mean, float* running_var,
                                     int channels, int c, double count, double sum, double squares,
                                     float epsilon, float momentum) {
    const Moments found = moments_of(count, sum, squares);
    moments[c] = float(found.mean);
    moments[channels + c] = float(1.0 / sqrt(found.variance + double(epsilon)));
    if (!(count > 0.0)) return;
    const double unbiased = found.variance * count / max(count - 1.0, 1.0);
    running_mean[c] += momentum * (float(found.mean) - running_mean[c]);
    running_var[c] += momentum * (float(unbiased) - running_var[c]);
}

// Constants of a vector of channels: z = (x − mean) · scale + bias, with scale = weight · invstd.
struct ChannelConstants {
    Floats mean, scale, bias;

    __device__ ChannelConstants(const float* means, const float* invstds, const float* weights,
                                const float* biases, int slot) {
        mean = load(means, slot);
        scale = load(weights, slot);
        bias = load(biases, slot);
        const Floats invstd = load(invstds, slot);
        for (int k = 0; k < VECTOR; ++k) scale.at[k] *= invstd.at[k];
    }
    // By a variance instead of invstd.
    __device__ void use_variance(const float* variances, const float* weights, int slot,
                                 float epsilon) {
        scale = load(weights, slot);
        const Floats variance = load(variances, slot);
        for (int k = 0; k < VECTOR; ++k) scale.at[k] *= 1.0f / sqrtf(variance.at[k] + epsilon);
    }
    __device__ float normalized(float x, int k) const {
        return fmaf(x - mean.at[k], scale.at[k], bias.at[k]);
    }
};

// Replace dy by the gradient before the function. `saved` is a vector of y with ACTIVATION_FROM 2.
__device__ inline void undo_activation(Floats& gradient, const Floats& x, const Floats& saved,
                                       const ChannelConstants& c) {
    for (int k = 0; k < VECTOR; ++k) {
        const float from = ACTIVATION_FROM == 1 ? c.normalized(x.at[k], k) : saved.at[k];
        gradient.at[k] = gradient_before_activation(gradient.at[k], from);
    }
}

// Sums of each micro-shard of all ranks: rows (micro-shards, SUMS, C) of float64, each padded to an
// even length. A rank writes the rows of its micro-shards and sets the others to 0, so that the sum
// over the ranks only collects them.
#if MICRO_SHARDS
#define ROWS_PARAMETERS SHARDS_PARAMETERS, int sample_pixels, int first_shard, int all_shards

template <int SUMS> struct ShardRows {
    double* rows;
    int channels;

    __device__ double* at(int shard, int s, int c) const {
        return rows + (long long)shard * ((SUMS * channels + 1) / 2 * 2) + s * channels + c;
    }
    // Blocks of the same kernel may have stored the sums.
    __device__ Doubles<SUMS> sums(int shard, int c) const {
        Doubles<SUMS> found;
        for (int s = 0; s < SUMS; ++s) found.at[s] = __ldcg(at(shard, s, c));
        return found;
    }
    // Store the sums of channel c of micro-shard blockIdx.z, of which this rank has gridDim.z.
    __device__ void store(int c, const Doubles<SUMS>& own, int first_shard, int all_shards) const {
        for (int s = 0; s < SUMS; ++s) *at(first_shard + blockIdx.z, s, c) = own.at[s];
        if (blockIdx.z) return;
        for (int shard = 0; shard < all_shards; ++shard)
            if (shard < first_shard || shard >= first_shard + int(gridDim.z))
                for (int s = 0; s < SUMS; ++s) *at(shard, s, c) = 0.0;
    }
};

// Return true in the block that stores the last row of a column of channels, if it is to finish the
// sums: with FINISHES, if no other rank has rows. tickets (gridDim.z + 1, gridDim.y).
#ifndef FINISHES
#define FINISHES 0
#endif
__device__ inline bool is_last_row(unsigned* tickets) {
    return FINISHES && is_last_of(gridDim.z, tickets + gridDim.z * gridDim.y + blockIdx.y);
}

// The pixels of micro-shard blockIdx.z.
__device__ inline SampleRange own_pixels(int shard_samples, int larger_shards, int sample_pixels) {
    const SampleRange own = own_shard(shard_samples, larger_shards);
    return {own.first * sample_pixels, own.count * sample_pixels};
}
#else
#define ROWS_PARAMETERS
#endif
