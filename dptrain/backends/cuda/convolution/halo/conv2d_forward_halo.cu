// Convolution forward with bias and epilogue, on halo tiles in shared memory:
//
//     y[n, p, q, k] = epilogue(b[k] + Σ over (r, s, c) of x[n, h, w, c] w[r, s, c, k])
//     with h = p · stride_h + r − pad_top and w = q · stride_w + s − pad_left
//
// Algorithm: implicit GEMM with halo tiles. On sm_90, halo tiles are copied by TMA and multiplied
// by wgmma; from sm_80 on, they are copied by cp.async and multiplied by mma.sync. See
// implicit_gemm.cuh, halo_tile.cuh and implicit_gemm_tile.cuh.
// Precisions tf32 and bf16; multiples of 32 channels and filters are computed without zeros.
//
// Launch: grid (blocks of work tiles, ceil(K / filters of a work tile)), block (THREADS,
// max(PERSISTENT_GROUPS, 1)); a persistent kernel has about one block per multiprocessor.
// implicit_gemm_tiles.py computes grid, block and dynamic shared memory.
//
// Source: Chetlur et al., 2014, section 3 (implicit GEMM); PTX ISA (wgmma, TMA).

#include "dependent_launch.cuh"
#include "implicit_gemm.cuh"
#include "output_sums.cuh"

#if SUMS
static_assert(!EPILOGUE && !CHECKS_SUMS, "every pixel is stored once, without a ReLU");

// Sums of the filters of a lane, over the pixels that it stores.
struct LaneSums {
    ShiftedSums filters[2];

    // Join the four lanes with the same filters, and store the sums of the warp group.
    __device__ void store(float* sums, int columns) {
        constexpr int GROUPS = PERSISTENT ? PERSISTENT_GROUPS : WARP_GROUPS * K_WARP_GROUPS;
        const int group = PERSISTENT ? threadIdx.y : threadIdx.x / WARP_GROUP_THREADS;
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            filters[n].join_lane(1);
            filters[n].join_lane(2);
            if (threadIdx.x % 4 == 0)
                filters[n].store(sums, blockIdx.x * GROUPS + group, columns, filter_of_lane() + n);
        }
    }
};

struct StoreSummed {
    const StoreOutput& output;
    LaneSums& sums;

    __device__ void pixel(int i, int column, const float (&values)[2]) const {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            const float bias = column + n < output.columns ? __ldg(output.bias + column + n) : 0.0f;
            sums.filters[n].add(stored_value(values[n] + bias));
        }
        output.pixel(i, column, values);
    }
};
#endif

static_assert(POOLED == (EPILOGUE == 2), "POOLED must match EPILOGUE");

// x (samples, H, W, C), or a tensor map of it; weights as packed by pack_weights.cu; b (K,)
// float32; y (samples, Ho, Wo, K), or (samples, Ho / 2, Wo / 2, K) if the epilogue pools; saved
// uint8 in the shape of y: the argmax if the epilogue pools, else unused.
extern "C" __global__ void __launch_bounds__(ALL_THREADS, MIN_BLOCKS)
    conv2d_forward_halo(TENSOR_MAPS_PARAMETER const Number* x, const Number* weights,
                        const float* b, Number* y, Saved* saved, int samples,
                        GEOMETRY_PARAMETERS EPILOGUE_PARAMETERS SUMS_PARAMETER) {
    prefetch_tensor_maps(TENSOR_MAPS_ARGUMENT);
    wait_for_previous_kernel();
    const Geometry g = GEOMETRY_ARGUMENTS;
    const StoreOutput output{y, saved, b, output_rows(g, samples), g.filters, output_rows(g, 1),
                             EPILOGUE_ARGUMENTS};
    const InputSource<IN_VECTOR> source{x, TENSOR_MAPS_ARGUMENT};
#if SUMS
    LaneSums lane_sums;
    implicit_gemm(forward_view(g), source, samples, weights, StoreSummed{output, lane_sums});
    lane_sums.store(sums, g.filters);
#else
    implicit_gemm(forward_view(g), source, samples, weights, output);
#endif
}
