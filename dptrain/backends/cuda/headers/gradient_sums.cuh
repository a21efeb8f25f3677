// Sums of a gradient by channel, which a product computes with dy of a batch normalisation (SUMS) for
// batch_norm_backward_statistics.cu, and the gradient before a fused function (activation.cuh):
//
//     dz = dy, or the gradient before the function; it is stored in place of dy
//     sums (rows, 2, channels) float32: Σ dz and Σ dz · (x − mean)
//
// x is the input of the normalisation. The grid has blocks for a whole batch; sums of rows without
// pixels are 0.

#pragma once

#include "activation.cuh"
#include "output_sums.cuh"

#if SUMS
#define GRADIENT_SUMS_PARAMETERS                                                                   \
    , const Number *normalized, const Number *output, const float *moments, const float *weight,   \
        const float *bias, float *sums
#define GRADIENT_SUMS_ARGUMENT , sums
#define NORMALIZATION_ARGUMENTS {normalized, output, moments, weight, bias}
#else
#define GRADIENT_SUMS_PARAMETERS
#define GRADIENT_SUMS_ARGUMENT
#define NORMALIZATION_ARGUMENTS {}
#endif

// A batch normalisation with a fused function: its input x, its output y, which is read with
// ACTIVATION_FROM 2 only, and its moments and parameters.
struct Normalization {
    const Number *x, *y;
    const float *moments, *weight, *bias;
};

// What is loaded of N adjacent channels of a pixel, whose elements begin at `at`.
template <int N> struct GradientPixel {
    int at = -1;
    Pack<Number, N> x, y, stored;  // `stored` is dy of other paths, if it is added.

    __device__ bool exists() const { return at >= 0; }
    __device__ void load(const Normalization& from, int first) {
        at = first;
        x = *reinterpret_cast<const Pack<Number, N>*>(from.x + first);
        if (ACTIVATION_FROM == 2) y = *reinterpret_cast<const Pack<Number, N>*>(from.y + first);
    }
};

// The constants and the sums of N adjacent channels of a normalisation.
template <int N> struct GradientSums {
    float mean[N], scale[N], bias[N];
    float sum[N] = {}, along[N] = {};

    __device__ GradientSums(const Normalization& from, int column, int channels) {
#pragma unroll
        for (int n = 0; n < N; ++n) {
            mean[n] = __ldg(from.moments + column + n);
            if (ACTIVATION_FROM != 1) continue;
            scale[n] = __ldg(from.weight + column + n) * __ldg(from.moments + channels + column + n);
            bias[n] = __ldg(from.bias + column + n);
        }
    }
    // Replace dy of a pixel by dz, round it as it is stored, and add it.
    __device__ void add(float (&values)[N], const GradientPixel<N>& pixel) {
#pragma unroll
        for (int n = 0; n < N; ++n) {
            const float distance = to_float(pixel.x.at[n]) - mean[n];
            const float from = ACTIVATION_FROM == 1   ? fmaf(distance, scale[n], bias[n])
                               : ACTIVATION_FROM == 2 ? to_float(pixel.y.at[n])
                                                      : 0.0f;
            values[n] = stored_value(gradient_before_activation(values[n], from));
            sum[n] += values[n];
            along[n] += values[n] * distance;
        }
    }
    // Add the sums of the lane whose number differs in `bit`.
    __device__ void join_lane(int bit) {
#pragma unroll
        for (int n = 0; n < N; ++n) {
            sum[n] += __shfl_xor_sync(~0u, sum[n], bit);
            along[n] += __shfl_xor_sync(~0u, along[n], bit);
        }
    }
};
