#include "conv2d.cuh"

// A: a row is an output pixel, the sum runs over (r, s, c).
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

// y = convolution + bias, rectified if `relu`, for `samples` samples.
extern "C" __global__ void __launch_bounds__(THREADS)
    conv2d_forward(const float* x, const float* w, const float* b, float* y, int samples, int relu,
                   GEOMETRY) {
    const Geometry g = GEOMETRY_VALUES;
    const int pixels = samples * g.out_height * g.out_width, taps = g.r * g.s * g.channels;
    multiply(Patches{x, g, pixels}, Matrix<false>{w, g.filters, g.filters}, pixels, g.filters, 0,
             taps, StoreActivation{y, b, g.filters, relu != 0});
}

