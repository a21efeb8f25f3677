// Convolution as a matrix product that reads its patches where they lie (implicit GEMM).
//
// x (N, H, W, C), w (R, S, C, K), z (N, Ho, Wo, K); y is z, or what epilogue.cuh makes of it. With
// rows of the product in front:
//
//     forward           z[pixel, k]      = sum over (r, s, c) of patch[pixel, (r, s, c)] w[(r, s, c), k]
//     backward_weight   dw[(r, s, c), k] = sum over pixels of patch[pixel, (r, s, c)] dz[pixel, k]
//     backward_input    dx[pixel, c]     = sum over (r, s, k) of dz[pixel - (r, s), k] w[(r, s, c), k]
//
// Source of the idea: Chetlur et al., "cuDNN: efficient primitives for deep learning", 2014,
// section 3.

#pragma once

#include "epilogue.cuh"
#include "geometry.cuh"

// Further outside of any map than a kernel reaches back: what starts here is zero.
constexpr int OUTSIDE = -(1 << 30);

// Rows of y: of pixels, or of windows of four pixels where these are pooled.
__device__ inline int output_rows(const Geometry& g, int samples) {
    if (EPILOGUE == 2) return samples * (g.out_height / 2) * (g.out_width / 2);
    return samples * g.out_height * g.out_width;
}

// A pixel of a map.
struct Pixel {
    int sample, row, column;
};

// Where a patch begins: its first element, which may lie outside the map, row and column.
struct Patch {
    int start, row, column;
};

__device__ inline Patch patch(const Geometry& g, const Pixel& pixel) {
    const int row = pixel.row * g.stride_h - g.pad_top,
              column = pixel.column * g.stride_w - g.pad_left;
    return {((pixel.sample * g.height + row) * g.width + column) * g.channels, row, column};
}

// Elements of patches that are read at once: OFFSET elements behind the patch's first.
struct Tap {
    int offset, row, column;
};

// Of a run of a patch; where channels are few, pieces of it lie in different pixels.
struct Taps {
    Tap at[PACK / IN_VECTOR];
};

__device__ inline Taps split_taps(const Geometry& g, int i) {
    Taps taps;
#pragma unroll
    for (int v = 0; v < PACK; v += IN_VECTOR) {
        const unsigned at = i + v, pixel = at / unsigned(g.channels);
        const int row = pixel / unsigned(g.s), column = pixel % unsigned(g.s);
        const int offset = (row * g.width + column) * g.channels + at % unsigned(g.channels);
        taps.at[v / IN_VECTOR] = {offset, row < g.r ? row : OUTSIDE, column};
    }
    return taps;
}

__device__ inline Pack<Number> gather(const Number* x, const Geometry& g, const Patch& p,
                                      const Taps& taps) {
    Pack<Number> pack = {};
#pragma unroll
    for (int v = 0; v < PACK; v += IN_VECTOR) {
        const Tap& t = taps.at[v / IN_VECTOR];
        const bool inside = unsigned(p.row + t.row) < unsigned(g.height) &&
                            unsigned(p.column + t.column) < unsigned(g.width);
        if (inside) read<IN_VECTOR>(pack, v, x + p.start + t.offset);
    }
    return pack;
}
