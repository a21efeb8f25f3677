// Convolution as implicit GEMM with gathered operands: the matrix of patches (im2col) is never
// stored, and its elements are read from the input by address computation. This works for every
// stride and channel count. Layers of stride 1 with many channels use halo_tile.cuh instead.
//
//     x  (N, H, W, C)     input           w  (R, S, C, K)   weights
//     z  (N, Ho, Wo, K)   output          y  z after the epilogue (epilogue.cuh)
//
// The three products, rows of A first:
//
//     forward          z[pixel, k]  = Σ over (r, s, c) of patch[pixel, (r, s, c)] w[(r, s, c), k]
//     backward_weight  dw[(r,s,c), k] = Σ over pixels of patch[pixel, (r, s, c)] dz[pixel, k]
//     backward_input   dx[pixel, c] = Σ over (r, s, k) of dz[pixel − (r, s), k] w[(r, s, c), k]
//
// Source: Chetlur et al., "cuDNN: efficient primitives for deep learning", 2014, section 3.

#pragma once

#include "epilogue.cuh"
#include "geometry.cuh"
#include "micro_shards.cuh"

// A row or column index so far outside every map that all bounds checks fail and the element reads
// as zero.
constexpr int OUTSIDE = -(1 << 30);

// Number of rows of y: output pixels, or 2 × 2 pooling windows if the epilogue pools.
__device__ inline int output_rows(const Geometry& g, int samples) {
    if (EPILOGUE == 2) return samples * (g.out_height / 2) * (g.out_width / 2);
    return samples * g.out_height * g.out_width;
}

// A pixel of a map.
struct Pixel {
    int sample, row, column;
};

// First element of a patch: its offset in the input, its row and its column. It may lie in the
// padding.
struct Patch {
    int start, row, column;
};

__device__ inline Patch patch(const Geometry& g, const Pixel& pixel) {
    const int row = pixel.row * g.stride_h - g.pad_top,
              column = pixel.column * g.stride_w - g.pad_left;
    return {((pixel.sample * g.height + row) * g.width + column) * g.channels, row, column};
}

// Part of a patch that one instruction reads: its offset from the patch's first element, and its
// row and column within the patch.
struct Tap {
    int offset, row, column;
};

// The parts of one pack of a patch. If there are few channels, a pack covers several pixels.
struct Taps {
    Tap at[PACK / IN_VECTOR];
};

__device__ inline Taps split_taps(const Geometry& g, int i) {
    Taps taps;
#pragma unroll
    for (int v = 0; v < PACK; v += IN_VECTOR) {
        const unsigned at = i + v, pixel = at / unsigned(g.channels);
        const int r = pixel / unsigned(g.s);
        const int row = r * g.dilation_h, column = pixel % unsigned(g.s) * g.dilation_w;
        const int offset = (row * g.width + column) * g.channels + at % unsigned(g.channels);
        taps.at[v / IN_VECTOR] = {offset, r < g.r ? row : OUTSIDE, column};
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
