#include "order.cuh"
#include "window.cuh"

// dz, made of what follows the convolution as it comes to shared memory.
struct GradientMaps {
    Gradient dz;

    __device__ void fill(const Window& window) const {
#if BEHIND == 0
        Maps{dz.dy}.fill(window);
#elif BEHIND == 1
        const auto fetch = [&](int i) {
            Gradient::Raw raw = {};
            const int at = window.source(i);
            if (at >= 0) dz.piece(raw, 0, at, 0);
            return raw;
        };
        in_batches<Gradient::Raw, 2>(window.runs(), fetch, [&](int i, const Gradient::Raw& raw) {
            *window.run(i) = dz.value(raw);
        });
#else
        // Each run of dy is read once and goes to four pixels. A map may have a last row or column
        // that is in no window.
        for (int i = threadIdx.x; i < window.runs(); i += THREADS) *window.run(i) = {};
        __syncthreads();
        const View& view = window.view;
        const int height = view.height / 2, width = view.width / 2, each = view.channels / RUN;
        const int begin = line(view, window.first, 0);
        const int end = min(line(view, window.stop - 1, 1), window.samples * height);
        const auto fetch = [&](int i) {
            return PooledRun::read(dz, (begin * width * each + i) * RUN);
        };
        const auto put = [&](int i, PooledRun run) {
            const int at = begin + i / (width * each), column = i / each % width * 2 + view.left;
            const int top = at / height * view.down() + at % height * 2 + view.top - window.first;
            Number* const to = window.numbers + (top * view.across + column) * window.pixel;
            run.scale(dz.factor);
#pragma unroll
            for (int m = 0; m < 4; ++m) {
                const int pixels = m / 2 * view.across + m % 2;
                if (unsigned(top + m / 2) < unsigned(window.stop - window.first))
                    *reinterpret_cast<Run<Number>*>(to + pixels * window.pixel + i % each * RUN) =
                        run.member(m);
            }
        };
        in_batches<PooledRun, 4>((end - begin) * width * each, fetch, put);
#endif
    }

    __device__ void settle(const Window& window) const {
        if (BEHIND == 0) Maps{dz.dy}.settle(window);
    }

    // Lines of windows, of all samples, that begin above row `y`; or, `with` it, at it.
    static __device__ int line(const View& view, int y, int with) {
        const int height = view.height / 2, row = y % view.down() - view.top;
        const int lines = row < 0 ? 0 : row / 2 + with;
        return y / view.down() * height + min(lines, height);
    }
};

struct InputOrder {
    const View& view;
    int pixels;

    __device__ Pixel operator()(int i) const {
        const int at = min(i, pixels - 1), row = at / view.out_width;
        return {row / view.out_height, row % view.out_height, at % view.out_width};
    }
};

// dx from dy, for `samples` samples.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    window_backward_input(const Number* dy, const Mark* marks, float factor, const Number* weights,
                          Number* dx, int samples, GEOMETRY) {
    in_order();
    const Geometry g = GEOMETRY_VALUES;
    const View view = backward_view(g);
    const int pixels = samples * g.height * g.width;
    slide(view, GradientMaps{{dy, marks, factor}}, samples, pixels, weights,
          InputOrder{view, pixels}, [](Sums&) {}, StorePlain<Number, IN_STEP>{dx, pixels, g.channels});
}
