// Convolution as a matrix product that reads its patches where they lie (implicit GEMM).
//
// x (N, H, W, C), w (R, S, C, K), y (N, Ho, Wo, K), all float32. With rows of the product in front:
//
//     forward           y[pixel, k]      = sum over (r, s, c) of patch[pixel, (r, s, c)] w[(r, s, c), k]
//     backward_weight   dw[(r, s, c), k] = sum over pixels of patch[pixel, (r, s, c)] dy[pixel, k]
//     backward_input    dx[pixel, c]     = sum over (r, s, k) of dy[pixel - (r, s), k] w[(r, s, c), k]
//
// Source of the idea: Chetlur et al., "cuDNN: efficient primitives for deep learning", 2014,
// section 3.

#pragma once

#include "gemm.cuh"
#include "geometry.cuh"

// Further outside of any map than a kernel reaches back: what starts here is zero.
constexpr int NOWHERE = -(1 << 30);

struct Pixel {
    int sample, row, column;  // First element of the sample; where the patch, or dx, begins.
};

struct Tap {
    int row, column, channel;
};

__device__ inline Tap split_tap(int i, int columns, int channels) {
    const int pixel = i / channels;
    return {pixel / columns, pixel % columns, i % channels};
}

// Of output pixel i: its patch.
__device__ inline Pixel patch(const Geometry& g, int i, int pixels) {
    if (i >= pixels) return {0, NOWHERE, NOWHERE};
    const int row = i / g.out_width, n = row / g.out_height;
    return {n * g.height * g.width * g.channels, row % g.out_height * g.down - g.top,
            i % g.out_width * g.across - g.left};
}

__device__ inline float element(const float* x, const Geometry& g, const Pixel& p, const Tap& t) {
    const int row = p.row + t.row, column = p.column + t.column;
    if (row < 0 || row >= g.height || column < 0 || column >= g.width) return 0.0f;
    return x[p.sample + (row * g.width + column) * g.channels + t.channel];
}
