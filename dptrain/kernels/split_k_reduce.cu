// Second pass of gradients of weights: the parts that blocks have summed over their own pixels.

#include "dependent_launch.cuh"
#include "split_k.cuh"

// dw, then db, from `parts` parts of weights + biases elements each.
extern "C" __global__ void split_k_reduce(const float* partial, int num_splits, float* dw,
                                          int weights, float* db, int biases) {
    wait_for_previous_kernel();
    const int i = blockIdx.x * BLOCK_VECTORS + threadIdx.x;
    Floats total;
    if (!split_k_sum(partial, num_splits, weights + biases, i, total)) return;
    if (i < weights / VECTOR)
        store(dw, i, total);
    else
        store(db, i - weights / VECTOR, total);
}
