// Dropout with the masks of dptrain/plan/random.py, bit for bit.
//
// mask (N, blocks) holds a byte for each of the four elements of a block, the lowest first: 1 where
// the element is kept. A sample has `size` elements and blocks = ceil(size / 4).

#include "vector.cuh"

// Philox4x32-10. Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011,
// section 4.3.
__device__ inline void philox(unsigned counter[4], unsigned key0, unsigned key1) {
    for (int round = 0; round < 10; ++round) {
        const unsigned low0 = 0xD2511F53u * counter[0], low1 = 0xCD9E8D57u * counter[2];
        const unsigned high0 = __umulhi(0xD2511F53u, counter[0]);
        const unsigned high1 = __umulhi(0xCD9E8D57u, counter[2]);
        counter[0] = high1 ^ counter[1] ^ key0;
        counter[1] = low1;
        counter[2] = high0 ^ counter[3] ^ key1;
        counter[3] = low0;
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
}

// Draws the mask, a thread for each block. Words below `threshold`, which may be 2^32, are dropped;
// `samples` are identities, of which the counter takes the lowest 32 bits.
extern "C" __global__ void dropout_mask(
    unsigned* mask, const long long* samples, int n, int blocks, unsigned long long threshold,
    unsigned layer, unsigned key0, unsigned key1, unsigned step) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n * blocks) return;
    unsigned words[4] = {unsigned(i % blocks), unsigned(samples[i / blocks]), step, layer};
    philox(words, key0, key1);
    unsigned kept = 0;
    for (int k = 0; k < 4; ++k) kept |= unsigned(words[k] >= threshold) << 8 * k;
    mask[i] = kept;
}

// y = x · factor where kept, x · 0 elsewhere, so that NaN stays; y may be x.
extern "C" __global__ void dropout_apply(
    const Floats* x, const unsigned* mask, Floats* y, int n, int size, int blocks, float factor) {
    int i;
    if (!mine(n * size, i)) return;
    const int sample = i * VECTOR / size, element = i * VECTOR % size;
    const unsigned kept = mask[sample * blocks + element / 4] >> element % 4 * 8;
    Floats values = x[i];
    for (int k = 0; k < VECTOR; ++k) values.at[k] *= kept >> 8 * k & 1 ? factor : 0.0f;
    y[i] = values;
}
