// Gradient of a convolution with respect to its input, with gathered operands:
//
//     dx[n, h, w, c] = Σ over (r, s, k) of dz[n, p, q, k] w[r, s, c, k]
//     with h = p · stride_h + r · dilation_h − pad_top and w likewise
//
// dz is the gradient with respect to the output of the convolution. It is computed from dy on the
// fly (`Gradient` of epilogue.cuh).
//
// Algorithm: implicit GEMM. Rows of C are input pixels, columns are input channels, and the sum
// runs over (r, s, k). Terms whose output pixel does not exist are zero.
//
// With strides, only the taps r with (h + pad_top − r · dilation_h) % stride_h = 0 have an output
// pixel. All input rows h with the same remainder of h + pad_top have the same taps, and so have
// columns. blockIdx.z selects a class of pixels with equal remainders (`StrideClass`), whose sum runs
// over its own taps only: with 3 × 3 filters and stride 2, the four classes have 1, 2, 2 and 4 of the
// 9 taps.
//
// If ADD_GRADIENT, the result is added to dx: to the gradient that other layers with the same input
// have stored.
//
// Launch: grid (ceil(N · ceil(H / stride_h) · ceil(W / stride_w) / TILE_M), ceil(C / TILE_N),
// stride_h · stride_w), block (THREADS, K_GROUPS); dynamic shared memory as computed by
// dptrain/backends/cuda/dense/gemm_tiles.py.
//
// Source: Chetlur et al., "cuDNN: efficient primitives for deep learning", 2014, section 3.

#include "conv2d.cuh"

// 1 if a stride is not 1.
#ifndef STRIDED
#define STRIDED 0
#endif

// The taps first + m · step of a filter, with m < count, that reach an input row (or column). The
// first one multiplies the output row `start`, and each other one `distance` rows above the one
// before it.
struct TapClass {
    int first, step, count, distance, start;
};

// Return the taps of a filter with `size` rows that reach the input row that is `position` rows after
// the first row of the padding: those r with r · dilation ≡ position modulo the stride.
__device__ inline TapClass tap_class(int size, int position, int stride, int dilation) {
    const int rest = position % stride;
    if (dilation == 1)
        return {rest, stride, max((size - rest + stride - 1) / stride, 0), 1, position / stride};
    int step = 1, first = 0;
    while (step * dilation % stride) ++step;
    while (first < step && first * dilation % stride != rest) ++first;
    const int count = first < step ? max((size - first + step - 1) / step, 0) : 0;
    return {first, step, count, step * dilation / stride, (position - first * dilation) / stride};
}

// The input pixels (row + i · stride_h, column + j · stride_w) of all samples, with i < height and
// j < width, and their taps.
struct StrideClass {
    int row, column, height, width;
    TapClass down, across;

    __device__ StrideClass(const Geometry& g, int number) {
        // The classes with most taps come first if the padding is 1.
        number = g.stride_h * g.stride_w - 1 - number;
        row = number / g.stride_w, column = number % g.stride_w;
        height = (g.height - row + g.stride_h - 1) / g.stride_h;
        width = (g.width - column + g.stride_w - 1) / g.stride_w;
        down = tap_class(g.r, row + g.pad_top, g.stride_h, g.dilation_h);
        across = tap_class(g.s, column + g.pad_left, g.stride_w, g.dilation_w);
    }
    __device__ int taps() const { return down.count * across.count; }
    __device__ int pixels(int samples) const { return samples * height * width; }
};

// A pack of the sum over (m, n, k), split into vectors of OUT_VECTOR filters of one tap.
struct FilterTap {
    int row, column, filter;
};

struct FilterTaps {
    FilterTap at[PACK / OUT_VECTOR];
};

// Operand A: row i is an input pixel of the class.
struct Gradients {
    static constexpr bool K_MAJOR = true;
    struct Outer {
        // The output pixel of the first tap. Further taps are above and to the left of it.
        int sample, row, column;
    };
    using Inner = FilterTaps;
    using Raw = Gradient::Raw;

    Gradient dz;
    Geometry g;
    StrideClass own;
    int pixels;

    __device__ Outer outer(int i) const {
        if (i >= pixels) return {0, OUTSIDE, OUTSIDE};
        const int line = i / own.width;
        return {line / own.height, line % own.height + own.down.start,
                i % own.width + own.across.start};
    }
    __device__ Inner inner(int k) const {
        Inner taps;
#pragma unroll
        for (int v = 0; v < PACK; v += OUT_VECTOR) {
            const unsigned at = k + v, filters = g.filters, tap = at / filters;
            // A class without taps has no terms.
            const unsigned columns = max(own.across.count, 1);
            const int row = tap / columns, column = tap % columns * own.across.distance;
            // Beyond the last tap: further down than any patch.
            taps.at[v / OUT_VECTOR] = {
                row < own.down.count ? row * own.down.distance : -OUTSIDE, column,
                int(at % filters)};
        }
        return taps;
    }
    __device__ Raw at(const Outer& p, const Inner& taps) const {
        Raw raw = {};
#pragma unroll
        for (int v = 0; v < PACK; v += OUT_VECTOR) {
            const FilterTap& t = taps.at[v / OUT_VECTOR];
            const int row = p.row - t.row, column = p.column - t.column;
            if (row < 0 || column < 0) continue;
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
    StrideClass own;

    __device__ Outer outer(int c) const { return c; }
    __device__ Inner inner(int k) const {
        Inner offsets;
#pragma unroll
        for (int v = 0; v < PACK; v += OUT_VECTOR) {
            const unsigned at = k + v, number = at / unsigned(g.filters);
            const unsigned columns = max(own.across.count, 1);
            const int r = own.down.first + int(number / columns) * own.down.step;
            const int s = own.across.first + int(number % columns) * own.across.step;
            const int offset =
                (r * g.s + s) * g.channels * g.filters + int(at % unsigned(g.filters));
            offsets.at[v / OUT_VECTOR] = int(number) < own.taps() ? offset : OUTSIDE;
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

// Stores row i of C, a pixel of a class, in dx.
struct StoreClass {
    StorePlain<Number, IN_VECTOR> plain;
    Geometry g;
    StrideClass own;
    int pixels;

    template <int M, int N>
    __device__ void operator()(int row, int column, const float (&values)[M][N]) const {
#pragma unroll
        for (int m = 0; m < M; ++m) {
            const int i = row + m * MEMBER_STEP;
            if (i < pixels) plain.pixel(pixel(i), column, values[m]);
        }
    }

    template <int N> __device__ Pack<Number, N> stored(int i, int column) const {
        return plain.template stored<N>(pixel(i), column, i < pixels);
    }

   private:
    // Pixel of dx in row i of C.
    __device__ int pixel(int i) const {
        const int line = i / own.width, sample = line / own.height;
        const int h = line % own.height * g.stride_h + own.row;
        const int w = i % own.width * g.stride_w + own.column;
        return (sample * g.height + h) * g.width + w;
    }
};

// dy (samples, Ho, Wo, K), or pooled (samples, Ho / 2, Wo / 2, K); saved in the shape of dy: y for
// a ReLU epilogue, the argmax (uint8) for a pooling epilogue; factor: scale of the kept outputs of
// dropout; w (R, S, C, K) float32; dx (samples, H, W, C).
extern "C" __global__ void __launch_bounds__(THREADS * K_GROUPS, GEMM_MIN_BLOCKS)
    conv2d_backward_input(const Number* dy, const Saved* saved, float factor, const float* w,
                          Number* dx, int samples, GEOMETRY_PARAMETERS) {
    const Geometry g = GEOMETRY_ARGUMENTS;
    const StrideClass own(g, blockIdx.z);
    const int pixels = own.pixels(samples), terms = own.taps() * g.filters;
    const Gradients gradients{{dy, saved, factor}, g, own, pixels};
    const StorePlain<Number, IN_VECTOR> plain{dx, samples * g.height * g.width, g.channels,
                                              reinterpret_cast<const Number*>(w)};
#if STRIDED
    if (ADD_GRADIENT && terms == 0) {
        wait_for_previous_kernel();
        return;
    }
    multiply<ADD_GRADIENT>(gradients, WeightsTransposed{w, g, own}, 0, terms,
                           StoreClass{plain, g, own, pixels});
#else
    multiply<ADD_GRADIENT>(gradients, WeightsTransposed{w, g, own}, 0, terms, plain);
#endif
}
