// Gradient of a convolution with respect to its input, on halo tiles in shared memory:
//
//     dx[n, h, w, c] = Σ over (r, s, k) of dz[n, p, q, k] w[r, s, c, k]
//     with h = p · stride_h + r − pad_top and w = q · stride_w + s − pad_left
//
// This is a convolution of dz with the filters rotated by 180 degrees and with input and output
// channels exchanged. With strides, the gradient of the folded input is computed (`StoredMap` of
// halo_tile.cuh). dz is computed from dy while halo tiles are loaded (`GradientSource` of
// halo_tile.cuh).
//
// If ADD_GRADIENT, the result is added to dx: accumulators begin with the values of dx.
//
// Algorithm and launch: as in conv2d_forward_halo.cu, with channels in place of filters.
//
// Source: Chetlur et al., 2014, section 3 (implicit GEMM); PTX ISA (wgmma, TMA).

#include "dependent_launch.cuh"
#include "implicit_gemm.cuh"

static_assert(!TENSOR_MAPS || EPILOGUE != 1, "TMA cannot load the operands of a ReLU epilogue");

// dy (samples, Ho, Wo, K), or pooled (samples, Ho / 2, Wo / 2, K), or tensor maps; saved in the
// shape of dy: y for a ReLU epilogue, the argmax (uint8) for a pooling epilogue; factor: scale of
// the kept outputs of dropout; weights as packed by pack_weights.cu; dx (samples, H, W, C).
extern "C" __global__ void __launch_bounds__(ALL_THREADS, MIN_BLOCKS)
    conv2d_backward_input_halo(TENSOR_MAPS_PARAMETER const Number* dy, const Saved* saved,
                               float factor, const Number* weights, Number* dx, int samples,
                               GEOMETRY_PARAMETERS) {
    prefetch_tensor_maps(TENSOR_MAPS_ARGUMENT);
    wait_for_previous_kernel();
    const Geometry g = GEOMETRY_ARGUMENTS;
    const GradientSource<PERSISTENT> source{{dy, saved, factor}, TENSOR_MAPS_ARGUMENT};
#if FOLDED
    const StoreFolded store{dx, stored_input(g), weights};
#else
    const StorePlain<Number, IN_VECTOR> store{dx, samples * g.height * g.width, g.channels,
                                              weights};
#endif
    implicit_gemm(backward_view(g), source, samples, weights, store);
}
