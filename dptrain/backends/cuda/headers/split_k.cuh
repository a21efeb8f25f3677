// Reduction of split-K: adds the partial sums of several blocks in a fixed order.
#pragma once

#include "vector.cuh"

// Vectors of a block (threadIdx.x), and threads that divide the splits of a vector (threadIdx.y).
constexpr int BLOCK_VECTORS = 32, K_THREADS = 8;

// Sum vector i of partial (num_splits, size). Return true in the thread that should store the
// result.
__device__ inline bool split_k_sum(const float* partial, int num_splits, int size, int i,
                                   Floats& total) {
    __shared__ Floats partials[K_THREADS][BLOCK_VECTORS];
    Floats own = {};
    if (i < size / VECTOR) {
#pragma unroll 8
        for (int split = threadIdx.y; split < num_splits; split += K_THREADS) {
            const Floats values = load(partial, split * (size / VECTOR) + i);
            for (int k = 0; k < VECTOR; ++k) own.at[k] += values.at[k];
        }
    }
    partials[threadIdx.y][threadIdx.x] = own;
    __syncthreads();
    total = {};
    for (int y = 0; y < K_THREADS; ++y)
        for (int k = 0; k < VECTOR; ++k) total.at[k] += partials[y][threadIdx.x].at[k];
    return threadIdx.y == 0 && i < size / VECTOR;
}
