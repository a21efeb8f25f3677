// Sums of the gradients of micro-shards along their tree:
//
//     slot s of dw and db = Σ over the micro-shards of slot s of their rows
//
//     rows (micro-shards, pitch) float32    a row has dw (weights,) and, from `start` on, db (biases,)
//     dw, db                     float32    slot s starts at element s · slot_pitch
//
// With split-K, partial (micro-shards, parts, pitch) has a row for each part, whose biases follow the
// weights. Launch: split_k.cuh. Time: that of reading the rows.

#include "dependent_launch.cuh"
#include "micro_shards.cuh"
#include "split_k.cuh"

__device__ inline Floats operator+(Floats a, const Floats& b) {
    for (int k = 0; k < VECTOR; ++k) a.at[k] += b.at[k];
    return a;
}

extern "C" __global__ void add_gradients(const float* rows, int pitch, int start, float* dw,
                                         int weights, float* db, int biases, int slot_pitch) {
    wait_for_previous_kernel();
    int i;
    if (!vector_index(weights + biases, i)) return;
    const bool is_weight = i < weights / VECTOR;
    if (!is_weight) i -= weights / VECTOR;
    const float* const first = is_weight ? rows : rows + start;
    const auto at = [&](int shard) { return load(first + (long long)shard * pitch, i); };
    const auto take = [&](int slot, const Floats& sum) {
        store((is_weight ? dw : db) + (long long)slot * slot_pitch, i, sum);
    };
    OWN_SHARDS
}

extern "C" __global__ void add_split_gradients(const float* partial, int parts, int pitch, float* dw,
                                               int weights, float* db, int biases, int slot_pitch) {
    wait_for_previous_kernel();
    const int i = blockIdx.x * BLOCK_VECTORS + threadIdx.x;
    const auto at = [&](int shard) {
        Floats total;
        split_k_sum(partial + (long long)shard * parts * pitch, parts, pitch, i, total);
        __syncthreads();  // The next sum uses the same shared memory.
        return total;
    };
    const auto take = [&](int slot, const Floats& sum) {
        if (threadIdx.y || i >= (weights + biases) / VECTOR) return;
        const long long start = (long long)slot * slot_pitch;
        if (i < weights / VECTOR)
            store(dw + start, i, sum);
        else
            store(db + start, i - weights / VECTOR, sum);
    };
    OWN_SHARDS
}
