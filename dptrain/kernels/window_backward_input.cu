#include "order.cuh"
#include "columns.cuh"

static_assert(!MAPPED || BEHIND != 1, "behind a rectifier threads read dy and y");

// dx from dy, for `samples` samples.
extern "C" __global__ void __launch_bounds__(ALL_THREADS, BLOCKS)
    window_backward_input(MAPS_PARAMETER const Number* dy, const Mark* marks, float factor,
                          const Number* weights, Number* dx, int samples, GEOMETRY) {
    prepare(MAPS);
    in_order();
    const Geometry g = GEOMETRY_VALUES;
    const int pixels = samples * g.height * g.width;
    convolve(backward_view(g), GradientMaps<LATER>{{dy, marks, factor}, MAPS}, samples, weights,
             StorePlain<Number, IN_STEP>{dx, pixels, g.channels});
}
