// Depthwise convolution: filter k reads channel k only.
//
//     y[n, p, q, k] = b[k] + Σ over (r, s) of x[n, h, w, k] w[r, s, k]
//     with h = p · stride_h + r · dilation_h − pad_top and w likewise
//
// x (N, H, W, K), w (R, S, 1, K) float32, y (N, Ho, Wo, K).
//
// There are R · S multiply-adds for each output, too few for tensor cores: the time is that of
// memory. A thread computes a vector of channels, whose neighbours in a window come from the caches.
// Forward and backward-input are launched with one thread for each vector of the result, in blocks
// of 256.

#include "channel_sums.cuh"
#include "geometry.cuh"

// Taps of the filter that a block of conv2d_depthwise_backward_weight sums; divides S.
#ifndef SUM_TAPS
#define SUM_TAPS 1
#endif

struct DepthwiseIndex {
    int sample, row, column, slot;

    __device__ DepthwiseIndex(int i, int height, int width, int vectors) {
        const int pixel = i / vectors, line = pixel / width;
        sample = line / height, row = line % height, column = pixel % width, slot = i % vectors;
    }
};

// bias (K,) is read if has_bias is not 0.
extern "C" __global__ void conv2d_depthwise_forward(const Number* __restrict__ x,
                                                    const float* __restrict__ w,
                                                    const float* __restrict__ bias,
                                                    Number* __restrict__ y, int has_bias,
                                                    int samples, GEOMETRY_PARAMETERS) {
    wait_for_previous_kernel();
    const Geometry g = GEOMETRY_ARGUMENTS;
    const int vectors = g.channels / VECTOR;
    int i;
    if (!vector_index(samples * g.out_height * g.out_width * g.channels, i)) return;
    const DepthwiseIndex to(i, g.out_height, g.out_width, vectors);
    const int top = to.row * g.stride_h - g.pad_top, left = to.column * g.stride_w - g.pad_left;
    Floats sum = {};
    if (has_bias) sum = load(bias, to.slot);
#pragma unroll
    for (int r = 0; r < g.r; ++r)
#pragma unroll
        for (int s = 0; s < g.s; ++s) {
            const int row = top + r * g.dilation_h, column = left + s * g.dilation_w;
            if (unsigned(row) >= unsigned(g.height) || unsigned(column) >= unsigned(g.width))
                continue;
            const int pixel = (to.sample * g.height + row) * g.width + column;
            const Floats values = load(x, pixel * vectors + to.slot);
            const Floats weights = load(w, (r * g.s + s) * vectors + to.slot);
            for (int k = 0; k < VECTOR; ++k)
                sum.at[k] = fmaf(values.at[k], weights.at[k], sum.at[k]);
        }
    store(y, i, sum);
}

// dx[n, h, w, k] = Σ over (r, s) of dy[n, p, q, k] w[r, s, k], for the output pixels that exist.
extern "C" __global__ void conv2d_depthwise_backward_input(const Number* __restrict__ dy,
                                                           const float* __restrict__ w,
                                                           Number* __restrict__ dx, int samples,
                                                           GEOMETRY_PARAMETERS) {
    wait_for_previous_kernel();
    const Geometry g = GEOMETRY_ARGUMENTS;
    const int vectors = g.channels / VECTOR;
    int i;
    if (!vector_index(samples * g.height * g.width * g.channels, i)) return;
    const DepthwiseIndex to(i, g.height, g.width, vectors);
    Floats sum = {};
#pragma unroll
    for (int r = 0; r < g.r; ++r)
#pragma unroll
        for (int s = 0; s < g.s; ++s) {
            const int below = to.row + g.pad_top - r * g.dilation_h;
            const int beyond = to.column + g.pad_left - s * g.dilation_w;
            if (below < 0 || beyond < 0 || below % g.stride_h || beyond % g.stride_w) continue;
            const int row = below / g.stride_h, column = beyond / g.stride_w;
            if (row >= g.out_height || column >= g.out_width) continue;
            const int pixel = (to.sample * g.out_height + row) * g.out_width + column;
            const Floats values = load(dy, pixel * vectors + to.slot);
            const Floats weights = load(w, (r * g.s + s) * vectors + to.slot);
            for (int k = 0; k < VECTOR; ++k)
                sum.at[k] = fmaf(values.at[k], weights.at[k], sum.at[k]);
        }
    store(dx, i, sum);
}

// dw[r, s, k] = Σ over pixels of x[n, h, w, k] dy[n, p, q, k]; db[k] = Σ dy.
//
// Launch: channel_sums.cuh; blockIdx.z selects SUM_TAPS adjacent taps of the filter, and the last
// one the bias if there is one. partial (blocks, R · S + 1, K) float32, tickets (gridDim.z,
// gridDim.y).
extern "C" __global__ void __launch_bounds__(CHANNEL_THREADS)
    conv2d_depthwise_backward_weight(const Number* __restrict__ x, const Number* __restrict__ dy,
                                     float* partial, unsigned* tickets, float* dw, float* db,
                                     int samples, GEOMETRY_PARAMETERS) {
    wait_for_previous_kernel();
    const Geometry g = GEOMETRY_ARGUMENTS;
    const ChannelThread thread(g.channels);
    const int taps = g.r * g.s, tap = blockIdx.z * SUM_TAPS;
    const int pixels = samples * g.out_height * g.out_width;
    const bool is_bias = tap >= taps;
    const int tap_row = tap / g.s * g.dilation_h, tap_column = tap % g.s * g.dilation_w;
    Floats sums[SUM_TAPS] = {};
    if (thread.has_channels())
        for (int pixel = thread.first; pixel < pixels; pixel += thread.stride) {
            const Floats gradient = load(dy, thread.at(pixel));
            const int line = pixel / g.out_width, sample = line / g.out_height;
            const int row = line % g.out_height * g.stride_h - g.pad_top + tap_row;
            const int first = pixel % g.out_width * g.stride_w - g.pad_left + tap_column;
#pragma unroll
            for (int t = 0; t < SUM_TAPS; ++t) {
                Floats values = {};
                const int column = first + t * g.dilation_w;
                const int from = (sample * g.height + row) * g.width + column;
                if (is_bias)
                    for (float& value : values.at) value = t == 0 ? 1.0f : 0.0f;
                else if (unsigned(row) < unsigned(g.height) &&
                         unsigned(column) < unsigned(g.width))
                    values = load(x, thread.at(from));
                for (int k = 0; k < VECTOR; ++k)
                    sums[t].at[k] = fmaf(values.at[k], gradient.at[k], sums[t].at[k]);
            }
        }
    store_block_sums(sums, partial, taps + 1, tap, g.channels);
    if (!is_last_block(tickets)) return;
    for (int t = 0; t < (is_bias ? 1 : SUM_TAPS); ++t) {
        int c;
        Doubles<1> total;
        __syncthreads();
        const auto term = [&](int block, int channel) {
            return Doubles<1>{{__ldcg(partial + (block * (taps + 1) + tap + t) * g.channels +
                                      channel)}};
        };
        const bool has_result = sum_over_rows(gridDim.x, g.channels, c, total, term);
        if (has_result) (is_bias ? db : dw + (tap + t) * g.channels)[c] = float(total.at[0]);
    }
}
