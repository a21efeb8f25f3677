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

#include "gemm.cuh"

// What kernels know of a layer; `down` and `across` are the strides, `top` and `left` the zeros
// above and before the map.
struct Geometry {
    int height, width, channels, out_height, out_width, filters, r, s, down, across, top, left;
};

#define GEOMETRY                                                                            \
    int height, int width, int channels, int out_height, int out_width, int filters, int r, \
        int s, int down, int across, int top, int left

// Compiled for one layer, kernels know it beforehand, and divide by constants.
#ifdef FIXED_HEIGHT
#define GEOMETRY_VALUES                                                                        \
    {FIXED_HEIGHT, FIXED_WIDTH, FIXED_CHANNELS, FIXED_OUT_HEIGHT, FIXED_OUT_WIDTH,             \
     FIXED_FILTERS, FIXED_R, FIXED_S, FIXED_DOWN, FIXED_ACROSS, FIXED_TOP, FIXED_LEFT}
#else
#define GEOMETRY_VALUES \
    {height, width, channels, out_height, out_width, filters, r, s, down, across, top, left}
#endif

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

// A of forward: a row is an output pixel, the sum runs over (r, s, c).
struct Patches {
    static constexpr bool SUM_FIRST = true;
    using Outer = Pixel;
    using Inner = Tap;

    const float* x;
    Geometry g;
    int pixels;

    __device__ Outer outer(int i) const { return patch(g, i, pixels); }
    __device__ Inner inner(int k) const { return split_tap(k, g.s, g.channels); }
    __device__ float at(const Outer& p, const Inner& t) const { return element(x, g, p, t); }
};

// A of backward_weight: a row is (r, s, c), and one more is all ones, which gives the bias its
// gradient; the sum runs over output pixels.
struct PatchesTransposed {
    static constexpr bool SUM_FIRST = false;
    using Outer = Tap;
    using Inner = Pixel;
    static constexpr int ONES = -1;

    const float* x;
    Geometry g;
    int pixels;

    __device__ Outer outer(int i) const {
        const int taps = g.r * g.s * g.channels;
        if (i == taps) return {0, 0, ONES};
        return i < taps ? split_tap(i, g.s, g.channels) : Tap{NOWHERE, NOWHERE, 0};
    }
    __device__ Inner inner(int k) const { return patch(g, k, pixels); }
    __device__ float at(const Outer& t, const Inner& p) const {
        return t.channel == ONES ? 1.0f : element(x, g, p, t);
    }
};

// A of backward_input: a row is an input pixel, the sum runs over (r, s, k).
struct Gradients {
    static constexpr bool SUM_FIRST = true;
    using Outer = Pixel;
    using Inner = Tap;

    const float* dy;
    Geometry g;
    int pixels;

    __device__ Outer outer(int i) const {
        if (i >= pixels) return {0, NOWHERE, NOWHERE};
        const int row = i / g.width, n = row / g.height;
        return {n * g.out_height * g.out_width * g.filters, row % g.height + g.top,
                i % g.width + g.left};
    }
    __device__ Inner inner(int k) const { return split_tap(k, g.s, g.filters); }
    __device__ float at(const Outer& p, const Inner& t) const {
        // Input row h met tap r of the patch in output row (h + top - r) / down, if that exists.
        const int below = p.row - t.row, beyond = p.column - t.column;
        if (below < 0 || beyond < 0 || below % g.down || beyond % g.across) return 0.0f;
        const int row = below / g.down, column = beyond / g.across;
        if (row >= g.out_height || column >= g.out_width) return 0.0f;
        return dy[p.sample + (row * g.out_width + column) * g.filters + t.channel];
    }
};

// B of backward_input: a column is an input channel, the sum runs over (r, s, k).
struct WeightsTransposed {
    static constexpr bool SUM_FIRST = true;
    using Outer = int;
    using Inner = int;

    const float* w;
    Geometry g;

    __device__ Outer outer(int c) const { return c; }
    __device__ Inner inner(int k) const {
        return k / g.filters * g.channels * g.filters + k % g.filters;
    }
    __device__ float at(Outer c, Inner offset) const {
        return c < g.channels ? w[offset + c * g.filters] : 0.0f;
    }
};

// y = convolution + bias, rectified if `relu`, for `samples` samples.
extern "C" __global__ void __launch_bounds__(THREADS)
    conv2d_forward(const float* x, const float* w, const float* b, float* y, int samples, int relu,
                   GEOMETRY) {
    const Geometry g = GEOMETRY_VALUES;
    const int pixels = samples * g.out_height * g.out_width, taps = g.r * g.s * g.channels;
    multiply(Patches{x, g, pixels}, Matrix<false>{w, g.filters, g.filters}, pixels, g.filters, 0,
             taps, StoreActivation{y, b, g.filters, relu != 0});
}

// dw and db of the output pixels [z part, (z + 1) part), z = blockIdx.z, into part z of the sums.
extern "C" __global__ void __launch_bounds__(THREADS)
    conv2d_backward_weight(const float* x, const float* dy, float* dw, float* db, int samples,
                           int part, GEOMETRY) {
    const Geometry g = GEOMETRY_VALUES;
    const int pixels = samples * g.out_height * g.out_width, taps = g.r * g.s * g.channels;
    const int first = blockIdx.z * part, stop = min(first + part, pixels);
    multiply(PatchesTransposed{x, g, pixels}, Matrix<false>{dy, g.filters, g.filters}, taps + 1,
             g.filters, first, stop, StoreGradient{dw, db, taps, g.filters});
}

// dx from dy, for `samples` samples.
extern "C" __global__ void __launch_bounds__(THREADS)
    conv2d_backward_input(const float* dy, const float* w, float* dx, int samples, GEOMETRY) {
    const Geometry g = GEOMETRY_VALUES;
    const int pixels = samples * g.height * g.width, taps = g.r * g.s * g.filters;
    multiply(Gradients{dy, g, pixels}, WeightsTransposed{w, g}, pixels, g.channels, 0, taps,
             StorePlain{dx, g.channels});
}
