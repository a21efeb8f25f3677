// The masks of dropout: those of dptrain/plan/random.py, bit for bit.
#pragma once

#include "hyperparameters.cuh"
#include "vector.cuh"

// Philox4x32-10. Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011,
// section 4.3.
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

// What a layer drops by: words below `threshold`, which may be 2^32, are dropped, and what is kept
// is multiplied with `factor`. `samples` are identities, of which the counter takes the lowest 32
// bits.
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

// Bit k: word k of a block, the k-th of four consecutive elements of a sample, is kept. That of an
// identity, of which the lowest 32 bits are enough.
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

// That of a sample of the batch.
__device__ inline unsigned kept_in_block(const Dropout& d, int sample, int block) {
    return draw_block(d, unsigned(d.samples[sample]), block);
}

// Bit k: element `first` + k of a sample is kept, for the elements of a vector.
__device__ inline unsigned kept_in_vector(const Dropout& d, int sample, int first) {
    unsigned kept = kept_in_block(d, sample, first / 4) >> first % 4;
    if (VECTOR == 8) kept |= kept_in_block(d, sample, first / 4 + 1) << 4;
    return kept;
}

// Times the factor where kept, times 0 elsewhere, so that NaN stays.
__device__ inline void drop(Floats& values, unsigned kept, float factor) {
    for (int k = 0; k < VECTOR; ++k) values.at[k] *= kept >> k & 1 ? factor : 0.0f;
}
