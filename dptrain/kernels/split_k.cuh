// Sums of parts that blocks have left behind, in an order that is always the same.
#pragma once

#include "vector.cuh"

// Vectors of a block, threads along x; and threads along y that share a vector's parts.
constexpr int ELEMENTS = 32, SHARES = 8;

// Sum of vector i of `parts` parts of `size` elements each; true in the thread that is to use it.
__device__ inline bool sum_of_parts(const float* partial, int parts, int size, int i,
                                    Floats& total) {
    __shared__ Floats shares[SHARES][ELEMENTS];
    Floats share = {};
    if (i < size / VECTOR) {
#pragma unroll 8
        for (int part = threadIdx.y; part < parts; part += SHARES) {
            const Floats own = load(partial, part * (size / VECTOR) + i);
            for (int k = 0; k < VECTOR; ++k) share.at[k] += own.at[k];
        }
    }
    shares[threadIdx.y][threadIdx.x] = share;
    __syncthreads();
    total = {};
    for (int y = 0; y < SHARES; ++y)
        for (int k = 0; k < VECTOR; ++k) total.at[k] += shares[y][threadIdx.x].at[k];
    return threadIdx.y == 0 && i < size / VECTOR;
}
