#include "dependent_launch.cuh"
#include "implicit_gemm.cuh"

static_assert(POOLED == (EPILOGUE == 2), "what follows is pooled here");

// y = convolution + bias and what follows, for `samples` samples.
extern "C" __global__ void __launch_bounds__(ALL_THREADS, MIN_BLOCKS)
    conv2d_forward_halo(TENSOR_MAPS_PARAMETER const Number* x, const Number* weights,
                        const float* b, Number* y, Saved* saved, int samples,
                        GEOMETRY_PARAMETERS EPILOGUE_PARAMETERS) {
    prefetch_tensor_maps(TENSOR_MAPS_ARGUMENT);
    wait_for_previous_kernel();
    const Geometry g = GEOMETRY_ARGUMENTS;
    implicit_gemm(forward_view(g), InputSource{x, TENSOR_MAPS_ARGUMENT}, samples, weights,
                  StoreOutput{y, saved, b, output_rows(g, samples), g.filters, output_rows(g, 1),
                              EPILOGUE_ARGUMENTS});
}
