// Second pass of split-K for gradients of weights and biases:
//
//     dw[i] = Σ over splits of partial[split, i]
//     db[j] = Σ over splits of partial[split, weights + j]
//
//     partial (num_splits, weights + biases) float32    dw (weights,)    db (biases,)
//
// Launched with one block of (32, 8) threads for 32 vectors (split_k.cuh). The order of additions
// is fixed.

#include "dependent_launch.cuh"
#include "split_k.cuh"

// With num_splits = 0 the gradients become 0.
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
