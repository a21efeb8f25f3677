// Sums of parts that blocks have left behind, in an order that is always the same.
#pragma once

#include "vector.cuh"

// Vectors of a block, threads along x; and threads along y that share a vector's parts.
constexpr int BLOCK_VECTORS = 32, K_THREADS = 8;

// Sum of vector i of `parts` parts of `size` elements each; true in the thread that is to use it.
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
