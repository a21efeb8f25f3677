#include "dependent_launch.cuh"
#include "implicit_gemm.cuh"

static_assert(!TENSOR_MAPS || EPILOGUE != 1, "behind a rectifier threads read dy and y");

// dx from dy, for `samples` samples.
extern "C" __global__ void __launch_bounds__(ALL_THREADS, MIN_BLOCKS)
    conv2d_backward_input_halo(MAPS_PARAMETER const Number* dy, const Mark* marks, float factor,
                          const Number* weights, Number* dx, int samples, GEOMETRY) {
    prepare(MAPS);
    wait_for_previous_kernel();
    const Geometry g = GEOMETRY_VALUES;
    const int pixels = samples * g.height * g.width;
    convolve(backward_view(g), GradientMaps<PERSISTENT>{{dy, marks, factor}, MAPS}, samples, weights,
             StorePlain<Number, IN_VECTOR>{dx, pixels, g.channels});
}
