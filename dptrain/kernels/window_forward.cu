#include "order.cuh"
#include "window.cuh"

// Pixels in the order of rows of y; of windows' members as fused.cuh wants them, but that half of
// the windows have their left and right members exchanged, so that eight rows side by side, two
// pixels apart, lie in eight different groups of banks.
struct OutputOrder {
    const View& view;
    int rows;

    __device__ Pixel operator()(int i) const {
        const int at = min(BEHIND == 2 ? window_of(i) : i, rows - 1), unit = BEHIND == 2 ? 2 : 1;
        const int width = view.out_width / unit, height = view.out_height / unit, row = at / width;
        Pixel pixel = {row / height, row % height * unit, at % width * unit};
        if (BEHIND == 2) {
            const int member = member_of(i) ^ (i % 8 / 4);
            pixel.row += member / 2, pixel.column += member % 2;
        }
        return pixel;
    }
};

// Undoes the exchange of members.
struct Exchange {
    __device__ void operator()(Sums& sums) const {
        const bool exchanged = BEHIND == 2 && threadIdx.x % 32 >= 16;
#pragma unroll
        for (int i = 0; i < Sums::DOWN; ++i)
#pragma unroll
            for (int j = 0; j < Sums::ACROSS; ++j)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const float left = sums.c[i][j][e], right = sums.c[i][j][e + 2];
                    sums.c[i][j][e] = exchanged ? right : left;
                    sums.c[i][j][e + 2] = exchanged ? left : right;
                }
    }
};

// y = convolution + bias and what follows, for `samples` samples.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    window_forward(const Number* x, const Number* weights, const float* b, Number* y, Mark* marks,
                   int samples, GEOMETRY DROPPING) {
    in_order();
    const Geometry g = GEOMETRY_VALUES;
    const View view = forward_view(g);
    const int rows = output_rows(g, samples);
    slide(view, Maps{x}, samples, BEHIND == 2 ? (rows + 7) / 8 * 32 : rows, weights,
          OutputOrder{view, rows}, Exchange(),
          StoreOutput{y, marks, b, rows, g.filters, output_rows(g, 1), DROPPING_VALUES});
}
