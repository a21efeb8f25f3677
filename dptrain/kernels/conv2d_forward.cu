#include "conv2d.cuh"

// A: a row is an output pixel, the sum runs over (r, s, c).
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

// y = convolution + bias and what follows, for `samples` samples.
extern "C" __global__ void __launch_bounds__(THREADS * K_GROUPS, GEMM_MIN_BLOCKS)
    conv2d_forward(const Number* x, const float* w, const float* b, Number* y, Saved* saved,
                   int samples, GEOMETRY_PARAMETERS EPILOGUE_PARAMETERS) {
    const Geometry g = GEOMETRY_ARGUMENTS;
    const int rows = output_rows(g, samples), taps = g.r * g.s * g.channels;
    multiply(Patches{x, g, rows}, Matrix<float, false, OUT_VECTOR>{w, g.filters, taps, g.filters},
             0, taps,
             StoreOutput{y, saved, b, rows, g.filters, output_rows(g, 1), EPILOGUE_ARGUMENTS});
}
