#include "dependent_launch.cuh"
#include "implicit_gemm.cuh"

static_assert(POOLED == (EPILOGUE == 2), "what follows is pooled here");

// y = convolution + bias and what follows, for `samples` samples.
extern "C" __global__ void __launch_bounds__(ALL_THREADS, MIN_BLOCKS)
    conv2d_forward_halo(MAPS_PARAMETER const Number* x, const Number* weights, const float* b, Number* y,
                   Mark* marks, int samples, GEOMETRY DROPPING) {
    prepare(MAPS);
    wait_for_previous_kernel();
    const Geometry g = GEOMETRY_VALUES;
    convolve(forward_view(g), Maps{x, MAPS}, samples, weights,
             StoreOutput{y, marks, b, output_rows(g, samples), g.filters, output_rows(g, 1),
                         DROPPING_VALUES});
}
