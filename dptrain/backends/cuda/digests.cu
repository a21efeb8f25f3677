// Digests of parts of a flat array, for dptrain/backends/digests.py: Σ x_i (2 (first + i) + 1) modulo
// 2^64 over the 32-bit words x_i of part blockIdx.y, which are bounds[part] … bounds[part + 1] − 1;
// bounds is int64 (parts + 1,). Blocks of 256 threads; block b of gridDim.x writes its part of the
// sum to partials[part][b]. Sums of integers do not depend on the order of additions.
//
// Traffic: each word is read once.

#include "dependent_launch.cuh"

constexpr int THREADS = 256;

extern "C" __global__ void digest_parts(const unsigned* words, const long long* bounds,
                                        unsigned long long* partials, unsigned first) {
    wait_for_previous_kernel();
    __shared__ unsigned long long sums[THREADS];
    const long long begin = bounds[blockIdx.y], end = bounds[blockIdx.y + 1];
    unsigned long long own = 0;
    for (long long i = begin + blockIdx.x * THREADS + threadIdx.x; i < end;
         i += gridDim.x * THREADS)
        own += (unsigned long long)words[i] * (2u * (first + unsigned(i)) + 1u);
    sums[threadIdx.x] = own;
    __syncthreads();
    for (int half = THREADS / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
        __syncthreads();
    }
    if (threadIdx.x == 0) partials[blockIdx.y * gridDim.x + blockIdx.x] = sums[0];
}
