#include "conv2d.cuh"

// A position of the sum over output pixels, which goes window by window where these are pooled:
// the window (or pixel) and which of its pixels.
struct Position {
    int sample, row, column, member;
};

constexpr int POOL_MEMBERS = EPILOGUE == 2 ? 4 : 1, POOL = EPILOGUE == 2 ? 2 : 1;

// A: a row is (r, s, c), and one more is all ones, which gives the bias its gradient.
struct PatchesTransposed {
    static constexpr bool K_MAJOR = false;
    struct Outer {
        Taps taps;
        int ones;  // Where in the run the row of ones is, if it is.
    };
    using Inner = Position;
    using Raw = Pack<Number>;

    const Number* x;
    Geometry g;

    __device__ Outer outer(int i) const { return {split_taps(g, i), g.r * g.s * g.channels - i}; }
    __device__ Inner inner(int k) const {
        const int i = k / POOL_MEMBERS, width = g.out_width / POOL, height = g.out_height / POOL;
        return {i / width / height, i / width % height, i % width, k % POOL_MEMBERS};
    }
    // Without a division: it would take longer than all the rest.
    __device__ void advance(Inner& p) const {
        constexpr int STEP = STRIDE_K / POOL_MEMBERS;
        const int width = g.out_width / POOL, height = g.out_height / POOL;
        p.column += STEP % width;
        p.row += STEP / width % height;
        p.sample += STEP / width / height;
        if (p.column >= width) p.column -= width, ++p.row;
        if (p.row >= height) p.row -= height, ++p.sample;
    }
    __device__ Raw at(const Outer& o, const Inner& p) const {
        const int row = p.row * POOL + p.member / POOL, column = p.column * POOL + p.member % POOL;
        Raw pack = gather(x, g, patch(g, {p.sample, row, column}), o.taps);
#pragma unroll
        for (int v = 0; v < PACK; v += IN_VECTOR)
            if (v == o.ones) pack.at[v] = from_float<Number>(1.0f);
        return pack;
    }
    __device__ Pack<Number> value(const Raw& raw) const { return round_operands(raw); }
};

// B: a column is a filter.
struct Gradients {
    static constexpr bool K_MAJOR = false;
    using Outer = int;
    using Inner = int;
    using Raw = Gradient::Raw;

    Gradient dz;
    Geometry g;

    __device__ Outer outer(int i) const { return i; }
    __device__ Inner inner(int k) const { return k; }
    __device__ void advance(Inner& k) const { k += STRIDE_K; }
    __device__ Raw at(Outer i, Inner k) const {
        const int row = unsigned(k) / POOL_MEMBERS;
        Raw raw = {};
#pragma unroll
        for (int v = 0; v < PACK; v += OUT_VECTOR)
            if (i + v < g.filters) dz.piece(raw, v, row * g.filters + i + v, k % 4);
        return raw;
    }
    __device__ Pack<Number> value(const Raw& raw) const { return dz.value(raw); }
};

// dw and db of the positions [z part, (z + 1) part) of the sum, z = blockIdx.z, into part z.
extern "C" __global__ void __launch_bounds__(THREADS * K_GROUPS, GEMM_MIN_BLOCKS)
    conv2d_backward_weight(const Number* x, const Number* dy, const Saved* saved, float factor,
                           float* dw, float* db, int samples, int split_terms,
                           GEOMETRY_PARAMETERS) {
    const Geometry g = GEOMETRY_ARGUMENTS;
    const int taps = g.r * g.s * g.channels;
    const int terms = output_rows(g, samples) * POOL_MEMBERS;
    const int first = blockIdx.z * split_terms, stop = min(first + split_terms, terms);
    multiply(PatchesTransposed{x, g}, Gradients{{dy, saved, factor}, g}, first, stop,
             StoreGradient{dw, db, taps, g.filters});
}
