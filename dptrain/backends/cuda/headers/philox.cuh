// Dropout masks from the counter-based random number generator Philox4x32-10, bit-identical to
// dptrain/philox.py.
#pragma once

#include "hyperparameters.cuh"
#include "vector.cuh"

// Philox4x32-10: replace the counter by four random words. Source: Salmon et al., "Parallel random
// numbers: as easy as 1, 2, 3", 2011, section 4.3.
__device__ inline void philox(unsigned counter[4], unsigned key0, unsigned key1) {
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const unsigned long long product0 = 0xD2511F53ull * counter[0];
        const unsigned long long product1 = 0xCD9E8D57ull * counter[2];
        counter[0] = unsigned(product1 >> 32) ^ counter[1] ^ key0;
        counter[1] = unsigned(product1);
        counter[2] = unsigned(product0 >> 32) ^ counter[3] ^ key1;
        counter[3] = unsigned(product0);
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
}

// Dropout of a layer: elements whose random word is below `threshold`, which may be 2³², are
// dropped; kept elements are multiplied by `factor`. `samples` int64 (n,) are sample indices, whose
// lowest 32 bits enter the counter; `hyperparameters` float32 (6,).
struct Dropout {
    const long long* samples;
    const float* hyperparameters;
    unsigned long long threshold;
    unsigned layer, key0, key1;
    float factor;
};

#define DROPOUT_PARAMETERS                                                                   \
    const long long *sample_ids, const float *hyperparameters, unsigned long long threshold, \
        unsigned layer, unsigned key0, unsigned key1, float factor
#define DROPOUT_ARGUMENTS {sample_ids, hyperparameters, threshold, layer, key0, key1, factor}

// Return bit k = 1 if element k of a block of four consecutive elements of a sample is kept. Only
// the lowest 32 bits of the sample index are used.
__device__ inline unsigned draw_block(const Dropout& d, unsigned sample_id, int block) {
    unsigned words[4] = {unsigned(block), sample_id, __float_as_uint(d.hyperparameters[STEP_INDEX]),
                         d.layer};
    philox(words, d.key0, d.key1);
    const unsigned threshold = unsigned(d.threshold);
    unsigned kept = 0;
#pragma unroll
    for (int k = 0; k < 4; ++k) kept |= unsigned(words[k] >= threshold) << k;
    return d.threshold >> 32 ? 0 : kept;
}

// The same for a sample of the minibatch, given by its position.
__device__ inline unsigned kept_in_block(const Dropout& d, int sample, int block) {
    return draw_block(d, unsigned(d.samples[sample]), block);
}

// Return bit k = 1 if element `first` + k of a sample is kept, for the elements of a vector.
__device__ inline unsigned kept_in_vector(const Dropout& d, int sample, int first) {
    unsigned kept = kept_in_block(d, sample, first / 4) >> first % 4;
    if (VECTOR == 8) kept |= kept_in_block(d, sample, first / 4 + 1) << 4;
    return kept;
}

// Multiply kept elements by the factor and the others by 0, so that NaN stays NaN.
__device__ inline void drop(Floats& values, unsigned kept, float factor) {
    for (int k = 0; k < VECTOR; ++k) values.at[k] *= kept >> k & 1 ? factor : 0.0f;
}
