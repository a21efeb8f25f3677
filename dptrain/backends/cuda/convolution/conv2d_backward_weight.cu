// Gradient of a convolution with respect to its weights and bias, with gathered operands:
//
//     dw[r, s, c, k] = Σ over (n, p, q) of x[n, h, w, c] dz[n, p, q, k]
//     db[k]          = Σ over (n, p, q) of dz[n, p, q, k]
//     with h = p · stride_h + r · dilation_h − pad_top and w likewise
//
// dz is computed from dy on the fly (`Gradient` of epilogue.cuh).
//
// Algorithm: implicit GEMM with split-K. Rows of C are (r, s, c), and one more row of ones yields
// db; columns are filters. The sum runs over output pixels. It is split over blockIdx.z, and
// split_k_reduce.cu adds the splits in a fixed order.
//
// Launch: grid (ceil((R · S · C + 1) / TILE_M), ceil(K / TILE_N), splits), block (THREADS,
// K_GROUPS); dynamic shared memory as computed by dptrain/backends/cuda/dense/gemm_tiles.py.
//
// Source: Chetlur et al., "cuDNN: efficient primitives for deep learning", 2014, section 3.

#include "conv2d.cuh"

// A position of the sum over output pixels: the pixel, or the pooling window and which of its four
// pixels.
struct Position {
    int sample, row, column, member;
};

constexpr int POOL_MEMBERS = EPILOGUE == 2 ? 4 : 1, POOL = EPILOGUE == 2 ? 2 : 1;

// Operand A: row i is (r, s, c). One further row consists of ones and yields the gradient of the
// bias.
struct PatchesTransposed {
    static constexpr bool K_MAJOR = false;
    struct Outer {
        Taps taps;
        int ones;  // Index of the row of ones within the pack, if the pack contains it.
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
    // Updates the indices without a division, which would cost more than the rest of the load.
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

// Operand B: column i is a filter.
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

// Block z sums the terms [z · split_terms, (z + 1) · split_terms). x (samples, H, W, C); dy
// (samples, Ho, Wo, K), or pooled (samples, Ho / 2, Wo / 2, K); saved in the shape of dy: y for a
// ReLU epilogue, the argmax (uint8) for a pooling epilogue; factor: scale of the kept outputs of
// dropout; dw (splits, R, S, C, K) and db (splits, K) float32, interleaved as (splits, (R · S · C +
// 1) · K).
extern "C" __global__ void __launch_bounds__(THREADS * K_GROUPS, GEMM_MIN_BLOCKS)
    conv2d_backward_weight(const Number* x, const Number* dy, const Saved* saved, float factor,
                           float* dw, float* db, int samples, int split_terms,
                           GEOMETRY_PARAMETERS PARTS_PARAMETERS) {
    const Geometry g = GEOMETRY_ARGUMENTS;
    const SplitPart part = split_part(samples PARTS_ARGUMENTS);
    move_to(part, x, g.height * g.width * g.channels);
    move_to(part, dy, output_rows(g, 1) * g.filters);
    move_to(part, saved, output_rows(g, 1) * g.filters);
    const int taps = g.r * g.s * g.channels;
    const int terms = output_rows(g, part.range.count) * POOL_MEMBERS;
    const int first = part.index * split_terms, stop = min(first + split_terms, terms);
    multiply(PatchesTransposed{x, g}, Gradients{{dy, saved, factor}, g}, first, stop,
             StoreGradient{dw, db, taps, g.filters});
}
