// Convolution with groups: filter k reads the channels of its group only.
//
//     y[n, p, q, k] = b[k] + Σ over (r, s, c) of x[n, h, w, group(k) · Cg + c] w[r, s, c, k]
//     with h = p · stride_h + r · dilation_h − pad_top, w likewise, and group(k) = k / Kg
//
// x (N, H, W, C), w (R, S, Cg, K) float32, y (N, Ho, Wo, K); Cg = C / groups, Kg = K / groups.
//
// Algorithm: direct sums, one thread for each element of the result, in blocks of 256. Adjacent
// threads read adjacent weights and share their inputs through the caches. Convolutions without
// groups and depthwise convolutions have faster kernels.

#include "dependent_launch.cuh"
#include "geometry.cuh"
#include "precision.cuh"

// True if the input gradient is added to what another kernel has stored.
#ifndef ADD_GRADIENT
#define ADD_GRADIENT 0
#endif

// bias (K,) is read if has_bias is not 0.
extern "C" __global__ void conv2d_grouped_forward(const Number* __restrict__ x,
                                                  const float* __restrict__ w,
                                                  const float* __restrict__ bias,
                                                  Number* __restrict__ y, int groups, int has_bias,
                                                  int samples, GEOMETRY_PARAMETERS) {
    wait_for_previous_kernel();
    const Geometry g = GEOMETRY_ARGUMENTS;
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= samples * g.out_height * g.out_width * g.filters) return;
    const int k = i % g.filters, pixel = i / g.filters, line = pixel / g.out_width;
    const int group_channels = g.channels / groups;
    const int first = k / (g.filters / groups) * group_channels;
    const int top = line % g.out_height * g.stride_h - g.pad_top;
    const int left = pixel % g.out_width * g.stride_w - g.pad_left, sample = line / g.out_height;
    float sum = has_bias ? bias[k] : 0.0f;
    for (int r = 0; r < g.r; ++r)
        for (int s = 0; s < g.s; ++s) {
            const int row = top + r * g.dilation_h, column = left + s * g.dilation_w;
            if (unsigned(row) >= unsigned(g.height) || unsigned(column) >= unsigned(g.width))
                continue;
            const Number* from =
                x + ((sample * g.height + row) * g.width + column) * g.channels + first;
            const float* weights = w + (r * g.s + s) * group_channels * g.filters + k;
            for (int c = 0; c < group_channels; ++c)
                sum = fmaf(to_float(from[c]), weights[c * g.filters], sum);
        }
    y[i] = from_float<Number>(sum);
}

// dx[n, h, w, c] = Σ over (r, s) and the filters k of the group of dy[n, p, q, k] w[r, s, c, k].
extern "C" __global__ void conv2d_grouped_backward_input(const Number* __restrict__ dy,
                                                         const float* __restrict__ w,
                                                         Number* __restrict__ dx, int groups,
                                                         int samples, GEOMETRY_PARAMETERS) {
    wait_for_previous_kernel();
    const Geometry g = GEOMETRY_ARGUMENTS;
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= samples * g.height * g.width * g.channels) return;
    const int channel = i % g.channels, pixel = i / g.channels, line = pixel / g.width;
    const int group_channels = g.channels / groups, group_filters = g.filters / groups;
    const int first = channel / group_channels * group_filters, c = channel % group_channels;
    const int bottom = line % g.height + g.pad_top, right = pixel % g.width + g.pad_left;
    const int sample = line / g.height;
    float sum = 0.0f;
    for (int r = 0; r < g.r; ++r)
        for (int s = 0; s < g.s; ++s) {
            const int below = bottom - r * g.dilation_h, beyond = right - s * g.dilation_w;
            if (below < 0 || beyond < 0 || below % g.stride_h || beyond % g.stride_w) continue;
            const int row = below / g.stride_h, column = beyond / g.stride_w;
            if (row >= g.out_height || column >= g.out_width) continue;
            const Number* from =
                dy + ((sample * g.out_height + row) * g.out_width + column) * g.filters + first;
            const float* weights = w + ((r * g.s + s) * group_channels + c) * g.filters + first;
            for (int k = 0; k < group_filters; ++k) sum = fmaf(to_float(from[k]), weights[k], sum);
        }
    dx[i] = from_float<Number>(ADD_GRADIENT ? to_float(dx[i]) + sum : sum);
}

// dw[r, s, c, k] = Σ over pixels of x[n, h, w, group(k) · Cg + c] dy[n, p, q, k]; db[k] = Σ dy.
//
// Split-K: blockIdx.y adds `block_pixels` pixels to its row of partial (gridDim.y, R · S · Cg · K +
// K) float32; split_k_reduce.cu adds the rows.
extern "C" __global__ void conv2d_grouped_backward_weight(const Number* __restrict__ x,
                                                          const Number* __restrict__ dy,
                                                          float* __restrict__ partial, int groups,
                                                          int block_pixels, int samples,
                                                          GEOMETRY_PARAMETERS) {
    wait_for_previous_kernel();
    const Geometry g = GEOMETRY_ARGUMENTS;
    const int i = blockIdx.x * blockDim.x + threadIdx.x, group_channels = g.channels / groups;
    const int weights = g.r * g.s * group_channels * g.filters, size = weights + g.filters;
    if (i >= size) return;
    const int k = i % g.filters, at = i / g.filters, tap = at / group_channels;
    const int channel = k / (g.filters / groups) * group_channels + at % group_channels;
    const int tap_row = tap / g.s * g.dilation_h, tap_column = tap % g.s * g.dilation_w;
    const int start = blockIdx.y * block_pixels;
    const int stop = min(start + block_pixels, samples * g.out_height * g.out_width);
    float sum = 0.0f;
    for (int pixel = start; pixel < stop; ++pixel) {
        const int line = pixel / g.out_width, sample = line / g.out_height;
        const int row = line % g.out_height * g.stride_h - g.pad_top + tap_row;
        const int column = pixel % g.out_width * g.stride_w - g.pad_left + tap_column;
        float value = 1.0f;
        if (i < weights) {
            if (unsigned(row) >= unsigned(g.height) || unsigned(column) >= unsigned(g.width))
                continue;
            const int from = (sample * g.height + row) * g.width + column;
            value = to_float(x[from * g.channels + channel]);
        }
        sum = fmaf(value, to_float(dy[pixel * g.filters + k]), sum);
    }
    partial[blockIdx.y * size + i] = sum;
}
