#include "dependent_launch.cuh"
#include "implicit_gemm.cuh"

static_assert(!TENSOR_MAPS || EPILOGUE != 1, "behind a rectifier threads read dy and y");

// dx from dy, for `samples` samples.
extern "C" __global__ void __launch_bounds__(ALL_THREADS, MIN_BLOCKS)
    conv2d_backward_input_halo(TENSOR_MAPS_PARAMETER const Number* dy, const Saved* saved,
                               float factor, const Number* weights, Number* dx, int samples,
                               GEOMETRY_PARAMETERS) {
    prefetch_tensor_maps(TENSOR_MAPS_ARGUMENT);
    wait_for_previous_kernel();
    const Geometry g = GEOMETRY_ARGUMENTS;
    const int pixels = samples * g.height * g.width;
    implicit_gemm(backward_view(g),
                  GradientSource<PERSISTENT>{{dy, saved, factor}, TENSOR_MAPS_ARGUMENT}, samples,
                  weights, StorePlain<Number, IN_VECTOR>{dx, pixels, g.channels});
}
