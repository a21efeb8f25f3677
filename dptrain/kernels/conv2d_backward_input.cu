// Gradient of a convolution with respect to its input, with gathered operands:
//
//     dx[n, h, w, c] = Σ over (r, s, k) of dz[n, p, q, k] w[r, s, c, k]
//     with h = p · stride_h + r − pad_top and w = q · stride_w + s − pad_left
//
// dz is the gradient with respect to the output of the convolution. It is computed from dy on the
// fly (`Gradient` of epilogue.cuh).
//
// Algorithm: implicit GEMM. Rows of C are input pixels, columns are input channels, and the sum
// runs over (r, s, k). Terms whose output pixel does not exist, such as those that a stride skips,
// are zero.
//
// Launch: grid (ceil(N · H · W / TILE_M), ceil(C / TILE_N)), block (THREADS, K_GROUPS); dynamic
// shared memory as computed by dptrain/backends/cuda/gemm_tiles.py.
//
// Source: Chetlur et al., "cuDNN: efficient primitives for deep learning", 2014, section 3.

#include "conv2d.cuh"

// A pack of the sum over (r, s, k), split into vectors of OUT_VECTOR filters of one tap.
struct FilterTap {
    int row, column, filter;
};

struct FilterTaps {
    FilterTap at[PACK / OUT_VECTOR];
};

// Operand A: row i is an input pixel.
struct Gradients {
    static constexpr bool K_MAJOR = true;
    struct Outer {
        // With stride 1: the last output pixel whose patch contains this pixel.
        int sample, row, column;
    };
    using Inner = FilterTaps;
    using Raw = Gradient::Raw;

    Gradient dz;
    Geometry g;
    int pixels;

    __device__ Outer outer(int i) const {
        if (i >= pixels) return {0, OUTSIDE, OUTSIDE};
        const int row = i / g.width;
        return {row / g.height, row % g.height + g.pad_top, i % g.width + g.pad_left};
    }
    __device__ Inner inner(int k) const {
        Inner taps;
#pragma unroll
        for (int v = 0; v < PACK; v += OUT_VECTOR) {
            const unsigned at = k + v, filters = g.filters, pixel = at / filters;
            const int row = pixel / unsigned(g.s), column = pixel % unsigned(g.s);
            // Beyond the last tap: further down than any patch.
            taps.at[v / OUT_VECTOR] = {row < g.r ? row : -OUTSIDE, column, int(at % filters)};
        }
        return taps;
    }
    __device__ Raw at(const Outer& p, const Inner& taps) const {
        Raw raw = {};
#pragma unroll
        for (int v = 0; v < PACK; v += OUT_VECTOR) {
            const FilterTap& t = taps.at[v / OUT_VECTOR];
            // Tap r of the patch in output row (h + pad_top − r) / stride_h covers input row h, if
            // that row exists.
            const int below = p.row - t.row, beyond = p.column - t.column;
            if (below < 0 || beyond < 0 || below % g.stride_h || beyond % g.stride_w) continue;
            const int row = below / g.stride_h, column = beyond / g.stride_w;
            int height = g.out_height, width = g.out_width, y = row, x = column;
            if (EPILOGUE == 2) height /= 2, width /= 2, y /= 2, x /= 2;
            if (y >= height || x >= width) continue;
            const int pixel = (p.sample * height + y) * width + x;
            dz.piece(raw, v, pixel * g.filters + t.filter, row % 2 * 2 + column % 2);
        }
        return raw;
    }
    __device__ Pack<Number> value(const Raw& raw) const { return dz.value(raw); }
};

// Operand B: column c is an input channel.
struct WeightsTransposed {
    static constexpr bool K_MAJOR = true;
    using Outer = int;
    struct Inner {
        int at[PACK / OUT_VECTOR];
    };
    using Raw = Pack<float>;

    const float* w;
    Geometry g;

    __device__ Outer outer(int c) const { return c; }
    __device__ Inner inner(int k) const {
        Inner offsets;
#pragma unroll
        for (int v = 0; v < PACK; v += OUT_VECTOR) {
            const int tap = unsigned(k + v) / unsigned(g.filters);
            const int offset = tap * (g.channels - 1) * g.filters + k + v;
            offsets.at[v / OUT_VECTOR] = tap < g.r * g.s ? offset : OUTSIDE;
        }
        return offsets;
    }
    __device__ Raw at(Outer c, const Inner& offsets) const {
        Raw pack = {};
#pragma unroll
        for (int v = 0; v < PACK; v += OUT_VECTOR) {
            const int offset = offsets.at[v / OUT_VECTOR];
            if (c < g.channels && offset >= 0)
                read<OUT_VECTOR>(pack, v, w + offset + c * g.filters);
        }
        return pack;
    }
    __device__ Pack<Number> value(const Raw& raw) const { return round_operands(raw); }
};

// dy (samples, Ho, Wo, K), or pooled (samples, Ho / 2, Wo / 2, K); saved in the shape of dy: y for
// a ReLU epilogue, the argmax (uint8) for a pooling epilogue; factor: scale of the kept outputs of
// dropout; w (R, S, C, K) float32; dx (samples, H, W, C).
extern "C" __global__ void __launch_bounds__(THREADS * K_GROUPS, GEMM_MIN_BLOCKS)
    conv2d_backward_input(const Number* dy, const Saved* saved, float factor, const float* w,
                          Number* dx, int samples, GEOMETRY_PARAMETERS) {
    const Geometry g = GEOMETRY_ARGUMENTS;
    const int pixels = samples * g.height * g.width, taps = g.r * g.s * g.filters;
    multiply(Gradients{{dy, saved, factor}, g, pixels}, WeightsTransposed{w, g}, 0, taps,
             StorePlain<Number, IN_VECTOR>{dx, pixels, g.channels});
}
