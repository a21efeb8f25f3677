// Weights in the operand type of products by TMA and wgmma (wgmma_gemm.cuh).

#ifndef PRECISION
#define PRECISION 2  // These kernels exist for tf32 and bf16 only.
#endif
#define TILE_M 64
#define TILE_N 16
#define WARP_M 16
#define WARP_N 16
#define TILE_K_WORDS 16

#include "dependent_launch.cuh"
#include "gemm.cuh"

// rounded = w; `packs` packs of 16 bytes. One thread for each pack, in blocks of 256.
extern "C" __global__ void round_weights(const float* w, Number* rounded, int packs) {
    // The previous kernel may still read `rounded`; it does not write the weights.
    if (!PREFETCH_WEIGHTS) wait_for_previous_kernel();
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    Pack<Number> pack = {};
    if (i < packs) {
        Pack<float> values;
#pragma unroll
        for (int v = 0; v < PACK; v += 4) read<4>(values, v, w + i * PACK + v);
        pack = round_operands(values);
    }
    if (PREFETCH_WEIGHTS) wait_for_previous_kernel();
    if (i < packs) reinterpret_cast<Pack<Number>*>(rounded)[i] = pack;
}

// w (taps, channels, filters), transposed (taps, filters, channels). Launch: grid (filters / 32,
// channels / 32, taps), 256 threads.
extern "C" __global__ void transpose_weights(const float* w, Number* transposed, int channels,
                                             int filters) {
    __shared__ float tile[32][33];
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32;
    const int filter = blockIdx.x * 32, channel = blockIdx.y * 32,
              first = blockIdx.z * channels * filters;
    if (!PREFETCH_WEIGHTS) wait_for_previous_kernel();
#pragma unroll
    for (int i = row; i < 32; i += 8)
        tile[i][lane] = w[first + (channel + i) * filters + filter + lane];
    if (PREFETCH_WEIGHTS) wait_for_previous_kernel();
    __syncthreads();
#pragma unroll
    for (int i = row; i < 32; i += 8)
        transposed[first + (filter + i) * channels + channel + lane] =
            from_float<Number>(to_float(round_operand(tile[lane][i])));
}
