#include "conv2d.cuh"

// A position of the sum over output pixels, which goes window by window where these are pooled:
// the window (or pixel) and which of its pixels.
struct Position {
    int sample, row, column, member;
};

constexpr int MEMBERS = EPILOGUE == 2 ? 4 : 1, UNIT = EPILOGUE == 2 ? 2 : 1;

// A: a row is (r, s, c), and one more is all ones, which gives the bias its gradient.
struct PatchesTransposed {
    static constexpr bool SUM_FIRST = false;
    struct Outer {
        Taps taps;
        int ones;  // Where in the run the row of ones is, if it is.
    };
    using Inner = Position;
    using Raw = Run<Number>;

    const Number* x;
    Geometry g;

    __device__ Outer outer(int i) const {
        return {split_taps(g, i), g.r * g.s * g.channels - i};
    }
    __device__ Inner inner(int k) const {
        const int i = k / MEMBERS, width = g.out_width / UNIT, height = g.out_height / UNIT;
        return {i / width / height, i / width % height, i % width, k % MEMBERS};
    }
    // Without a division: it would take longer than all the rest.
    __device__ void advance(Inner& p) const {
        constexpr int STEP = STRIDE_K / MEMBERS;
        const int width = g.out_width / UNIT, height = g.out_height / UNIT;
        p.column += STEP % width;
        p.row += STEP / width % height;
        p.sample += STEP / width / height;
        if (p.column >= width) p.column -= width, ++p.row;
        if (p.row >= height) p.row -= height, ++p.sample;
    }
    __device__ Raw at(const Outer& o, const Inner& p) const {
        const int row = p.row * UNIT + p.member / UNIT, column = p.column * UNIT + p.member % UNIT;
        Raw run = gather(x, g, patch(g, {p.sample, row, column}), o.taps);
#pragma unroll
        for (int v = 0; v < RUN; v += IN_VECTOR)
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
    __device__ void advance(Inner& k) const { k += STRIDE_K; }
    __device__ Raw at(Outer i, Inner k) const {
        const int row = unsigned(k) / MEMBERS;
        Raw raw = {};
#pragma unroll
        for (int v = 0; v < RUN; v += OUT_VECTOR)
            if (i + v < g.filters) dz.piece(raw, v, row * g.filters + i + v, k % 4);
        return raw;
    }
    __device__ Run<Number> value(const Raw& raw) const { return dz.value(raw); }
};

// dw and db of the positions [z part, (z + 1) part) of the sum, z = blockIdx.z, into part z.
extern "C" __global__ void __launch_bounds__(THREADS * K_GROUPS, GEMM_MIN_BLOCKS)
    conv2d_backward_weight(const Number* x, const Number* dy, const Mark* marks, float factor,
                           float* dw, float* db, int samples, int part, GEOMETRY) {
    const Geometry g = GEOMETRY_VALUES;
    const int taps = g.r * g.s * g.channels;
    const int terms = output_rows(g, samples) * MEMBERS;
    const int first = blockIdx.z * part, stop = min(first + part, terms);
    multiply(PatchesTransposed{x, g}, Gradients{{dy, marks, factor}, g}, first, stop,
             StoreGradient{dw, db, taps, g.filters});
}
