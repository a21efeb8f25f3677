#include "conv2d.cuh"

// A: a row is an input pixel, the sum runs over (r, s, k).
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

// B: a column is an input channel, the sum runs over (r, s, k).
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

// dx from dy, for `samples` samples.
extern "C" __global__ void __launch_bounds__(THREADS)
    conv2d_backward_input(const float* dy, const float* w, float* dx, int samples, GEOMETRY) {
    const Geometry g = GEOMETRY_VALUES;
    const int pixels = samples * g.height * g.width, taps = g.r * g.s * g.filters;
    multiply(Gradients{dy, g, pixels}, WeightsTransposed{w, g}, pixels, g.channels, 0, taps,
             StorePlain{dx, g.channels});
}
