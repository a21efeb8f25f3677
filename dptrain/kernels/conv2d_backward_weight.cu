#include "conv2d.cuh"

// A: a row is (r, s, c), and one more is all ones, which gives the bias its
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

