#include "conv2d.cuh"

// Position k of the sum over output pixels: window by window where these are pooled.
__device__ inline Output summed_pixel(const Geometry& g, int k) {
    return BEHIND == 2 ? member_pixel(g, k / 4, k % 4) : output_pixel(g, k);
}

// A: a row is (r, s, c), and one more is all ones, which gives the bias its gradient.
struct PatchesTransposed {
    static constexpr bool SUM_FIRST = false;
    struct Outer {
        Taps taps;
        int ones;  // Where in the run the row of ones is, if it is.
    };
    using Inner = Patch;
    using Raw = Run<Number>;

    const Number* x;
    Geometry g;

    __device__ Outer outer(int i) const {
        return {split_taps(g, i), g.r * g.s * g.channels - i};
    }
    __device__ Inner inner(int k) const { return patch(g, summed_pixel(g, k)); }
    __device__ Raw at(const Outer& o, const Inner& p) const {
        Raw run = gather(x, g, p, o.taps);
#pragma unroll
        for (int v = 0; v < RUN; v += IN_STEP)
            if (v == o.ones) run.at[v] = from_float<Number>(1.0f);
        return run;
    }
    __device__ Run<Number> value(const Raw& raw) const { return as_factors(raw); }
};

// B: a column is a filter.
struct Gradients {
    static constexpr bool SUM_FIRST = false;
    using Outer = int;
    using Inner = int;
    using Raw = Gradient::Raw;

    Gradient dz;
    Geometry g;

    __device__ Outer outer(int i) const { return i; }
    __device__ Inner inner(int k) const { return k; }
    __device__ Raw at(Outer i, Inner k) const {
        const int row = BEHIND == 2 ? k / 4 : k;
        Raw raw = {};
#pragma unroll
        for (int v = 0; v < RUN; v += OUT_STEP)
            if (i + v < g.filters) dz.piece(raw, v, row * g.filters + i + v, k % 4);
        return raw;
    }
    __device__ Run<Number> value(const Raw& raw) const { return dz.value(raw); }
};

// dw and db of the positions [z part, (z + 1) part) of the sum, z = blockIdx.z, into part z.
extern "C" __global__ void __launch_bounds__(THREADS)
    conv2d_backward_weight(const Number* x, const Number* dy, const Mark* marks, float factor,
                           float* dw, float* db, int samples, int part, GEOMETRY) {
    const Geometry g = GEOMETRY_VALUES;
    const int taps = g.r * g.s * g.channels;
    const int terms = output_rows(g, samples) * (BEHIND == 2 ? 4 : 1);
    const int first = blockIdx.z * part, stop = min(first + part, terms);
    multiply(PatchesTransposed{x, g}, Gradients{{dy, marks, factor}, g}, first, stop,
             StoreGradient{dw, db, taps, g.filters});
}
