// Sums of parts that blocks have left behind, in an order that is always the same.
#pragma once

// Elements of a block, threads along x; and threads along y that share an element's parts.
constexpr int ELEMENTS = 32, SHARES = 8;

// Sum of element i of `parts` parts of `size` elements each; true in the thread that is to use it.
__device__ inline bool sum_of_parts(const float* partial, int parts, int size, int i,
                                    float& total) {
    __shared__ float shares[SHARES][ELEMENTS];
    float share = 0.0f;
    if (i < size) {
#pragma unroll 8
        for (int part = threadIdx.y; part < parts; part += SHARES)
            share += partial[part * size + i];
    }
    shares[threadIdx.y][threadIdx.x] = share;
    __syncthreads();
    total = 0.0f;
    for (int y = 0; y < SHARES; ++y) total += shares[y][threadIdx.x];
    return threadIdx.y == 0 && i < size;
}
