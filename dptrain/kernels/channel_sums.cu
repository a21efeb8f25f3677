// Gradient of a bias: dy (pixels, channels) summed over pixels. Each block sums `part` pixels of
// LANES · VECTOR channels; where there are several, sum_parts.cu adds what they wrote, in order, so
// that the result is the same in every run.

#include "order.cuh"
#include "vector.cuh"

#ifndef LANES
#define LANES 4
#endif

constexpr int THREADS = 256, ROWS = THREADS / LANES;

// partial[part, channel]; with one block for all pixels that is the sum.
extern "C" __global__ void channel_sums(const Number* __restrict__ dy, float* __restrict__ partial,
                                        int pixels, int channels, int part) {
    in_order();
    __shared__ float rows[ROWS][LANES * VECTOR];
    const int lane = threadIdx.x % LANES, row = threadIdx.x / LANES;
    const int vectors = channels / VECTOR, slot = blockIdx.y * LANES + lane;
    const int start = blockIdx.x * part, stop = min(start + part, pixels);
    Floats sums = {};
    if (slot < vectors) {
#pragma unroll 4
        for (int pixel = start + row; pixel < stop; pixel += ROWS) {
            const Floats values = load(dy, pixel * vectors + slot);
            for (int k = 0; k < VECTOR; ++k) sums.at[k] += values.at[k];
        }
    }
    for (int k = 0; k < VECTOR; ++k) rows[row][lane * VECTOR + k] = sums.at[k];
    for (int half = ROWS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (row < half)
            for (int k = 0; k < VECTOR; ++k)
                rows[row][lane * VECTOR + k] += rows[row + half][lane * VECTOR + k];
    }
    if (row == 0 && slot < vectors)
        for (int k = 0; k < VECTOR; ++k)
            partial[blockIdx.x * channels + slot * VECTOR + k] = rows[0][lane * VECTOR + k];
}
