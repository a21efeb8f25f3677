// Sums of an output by channel, which a product computes with its output (SUMS) for the statistics of
// a batch normalisation that reads it (batch_norm_statistics.cu).
//
//     sums (rows, 4, channels) float32: for each channel the sum of the distances from a shift, that
//     of their squares, the shift, and the number of pixels
//
// The shift is the first value, so that float32 keeps the digits of the variance if the mean is
// much larger than the standard deviation. Values are those that are stored, after rounding. The
// grid has blocks for a whole batch; rows without pixels have the number 0.
//
// Source: Chan, Golub and LeVeque, "Algorithms for computing the sample variance: analysis and
// recommendations", 1983 (shifted data, and sums of parts).

#pragma once

#include "epilogue.cuh"

#ifndef SUMS
#define SUMS 0
#endif
#if SUMS
#define SUMS_PARAMETER , float* sums
#define SUMS_ARGUMENT , sums
#else
#define SUMS_PARAMETER
#define SUMS_ARGUMENT
#endif

struct ShiftedSums {
    float sum = 0.0f, squares = 0.0f, shift = 0.0f, count = 0.0f;

    __device__ void add(float value) {
        if (count == 0.0f) shift = value;
        const float distance = value - shift;
        sum += distance;
        squares += distance * distance;
        count += 1.0f;
    }
    // Add the sums of other pixels.
    __device__ void join(const ShiftedSums& other) {
        if (count == 0.0f) shift = other.shift;
        const float by = other.count > 0.0f ? other.shift - shift : 0.0f;
        squares += other.squares + by * (2.0f * other.sum + other.count * by);
        sum += other.sum + other.count * by;
        count += other.count;
    }
    // Join the sums of the lane whose number differs in `bit`.
    __device__ void join_lane(int bit) {
        join({__shfl_xor_sync(~0u, sum, bit), __shfl_xor_sync(~0u, squares, bit),
              __shfl_xor_sync(~0u, shift, bit), __shfl_xor_sync(~0u, count, bit)});
    }
    // Store them in a row of `sums` (rows, 4, channels).
    __device__ void store(float* sums, int row, int channels, int channel) const {
        if (channel >= channels) return;
        float* const to = sums + row * 4 * channels + channel;
        to[0] = sum, to[channels] = squares, to[2 * channels] = shift, to[3 * channels] = count;
    }
};

// A value as it is stored in the output.
__device__ inline float stored_value(float value) { return to_float(from_float<Number>(value)); }
