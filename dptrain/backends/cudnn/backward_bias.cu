// Gradient of a bias, db[k] = Σ over pixels of dy[pixel, k]; used by the cuDNN backend.
//
//     dy       (pixels, channels)        activation type, pixels = N · Ho · Wo
//     partial  (gridDim.x, channels)     float32
//
// Launched with grid (splits, ceil(channels / (CHANNEL_VECTORS · VECTOR))) and 256 threads. Each
// block reduces `block_pixels` pixels of its channels: threads accumulate strided pixels in
// registers, then a tree reduction in shared memory adds the threads. If there are several splits,
// split_k_reduce.cu adds them. The order of additions is fixed, so results are reproducible.

#include "dependent_launch.cuh"
#include "vector.cuh"

#ifndef CHANNEL_VECTORS
#define CHANNEL_VECTORS 4
#endif

constexpr int THREADS = 256, BLOCK_ROWS = THREADS / CHANNEL_VECTORS;

// partial (splits, channels) receives one row per block of pixels. With one split it is db itself.
extern "C" __global__ void backward_bias(const Number* __restrict__ dy, float* __restrict__ partial,
                                         int pixels, int channels, int block_pixels) {
    wait_for_previous_kernel();
    __shared__ float rows[BLOCK_ROWS][CHANNEL_VECTORS * VECTOR];
    const int lane = threadIdx.x % CHANNEL_VECTORS, row = threadIdx.x / CHANNEL_VECTORS;
    const int vectors = channels / VECTOR, slot = blockIdx.y * CHANNEL_VECTORS + lane;
    const int start = blockIdx.x * block_pixels, stop = min(start + block_pixels, pixels);
    Floats sums = {};
    if (slot < vectors) {
#pragma unroll 4
        for (int pixel = start + row; pixel < stop; pixel += BLOCK_ROWS) {
            const Floats values = load(dy, pixel * vectors + slot);
            for (int k = 0; k < VECTOR; ++k) sums.at[k] += values.at[k];
        }
    }
    for (int k = 0; k < VECTOR; ++k) rows[row][lane * VECTOR + k] = sums.at[k];
    for (int half = BLOCK_ROWS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (row < half)
            for (int k = 0; k < VECTOR; ++k)
                rows[row][lane * VECTOR + k] += rows[row + half][lane * VECTOR + k];
    }
    if (row == 0 && slot < vectors)
        for (int k = 0; k < VECTOR; ++k)
            partial[blockIdx.x * channels + slot * VECTOR + k] = rows[0][lane * VECTOR + k];
}
