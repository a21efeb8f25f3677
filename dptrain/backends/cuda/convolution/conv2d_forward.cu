// Convolution forward with gathered operands, with bias and epilogue:
//
//     y[n, p, q, k] = epilogue(b[k] + Σ over (r, s, c) of x[n, h, w, c] w[r, s, c, k])
//     with h = p · stride_h + r · dilation_h − pad_top and w likewise
//
// Algorithm: implicit GEMM. Rows of C are output pixels (or, if the epilogue pools, the four pixels
// of each 2 × 2 window next to each other), columns are filters, and the sum runs over (r, s, c).
// gemm.cuh has the main loop, ffma.cuh and mma.cuh the inner products.
//
// Launch: grid (ceil(rows / TILE_M), ceil(filters / TILE_N)), block (THREADS, K_GROUPS); dynamic
// shared memory as computed by dptrain/backends/cuda/dense/gemm_tiles.py.
//
// Source: Chetlur et al., "cuDNN: efficient primitives for deep learning", 2014, section 3.

#include "conv2d.cuh"

// Operand A: row i is the patch of an output pixel, and the sum runs over (r, s, c).
struct Patches {
    static constexpr bool K_MAJOR = true;
    using Outer = Patch;
    using Inner = Taps;
    using Raw = Pack<Number>;

    const Number* x;
    Geometry g;
    int rows;

    __device__ Outer outer(int i) const {
        const int at = EPILOGUE == 2 ? window_of(i) : i, unit = EPILOGUE == 2 ? 2 : 1;
        if (at >= rows) return {0, OUTSIDE, OUTSIDE};
        const int width = g.out_width / unit, height = g.out_height / unit, row = at / width;
        Pixel pixel = {row / height, row % height * unit, at % width * unit};
        if (EPILOGUE == 2) pixel.row += member_of(i) / 2, pixel.column += member_of(i) % 2;
        return patch(g, pixel);
    }
    __device__ Inner inner(int k) const { return split_taps(g, k); }
    __device__ Raw at(const Outer& p, const Inner& t) const { return gather(x, g, p, t); }
    __device__ Pack<Number> value(const Raw& raw) const { return round_operands(raw); }
};

// x (samples, H, W, C); w (R, S, C, K) float32; b (K,) float32; y (samples, Ho, Wo, K), or
// (samples, Ho / 2, Wo / 2, K) if the epilogue pools; saved uint8 in the shape of y: the argmax if
// the epilogue pools, else unused.
extern "C" __global__ void __launch_bounds__(THREADS * K_GROUPS, GEMM_MIN_BLOCKS)
    conv2d_forward(const Number* x, const float* w, const float* b, Number* y, Saved* saved,
                   int samples, GEOMETRY_PARAMETERS EPILOGUE_PARAMETERS) {
    const Geometry g = GEOMETRY_ARGUMENTS;
    const int rows = output_rows(g, samples), taps = g.r * g.s * g.channels;
    multiply(Patches{x, g, rows}, Matrix<float, false, OUT_VECTOR>{w, g.filters, taps, g.filters},
             0, taps,
             StoreOutput{y, saved, b, rows, g.filters, output_rows(g, 1), EPILOGUE_ARGUMENTS});
}
