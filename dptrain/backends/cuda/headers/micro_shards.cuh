// Micro-shards: the parts of a minibatch whose sums over samples are added along a fixed tree, so
// that the bits do not depend on which rank has them (dptrain/plan/shards.py). With MICRO_SHARDS, a
// kernel sums each micro-shard of this rank by blocks of its own, those with another blockIdx.z, and
// its last parameters are the size of the smaller micro-shards, and the number of those with one
// sample more, which come first.
//
// dptrain/backends/cuda/shards.py writes the macros of sums, expressions of at(i), the value of
// micro-shard i: ALL_SHARDS is the sum over all micro-shards of all ranks, and OWN_SHARDS consists of
// a statement take(s, sum); for each gradient slot s of this rank.

#pragma once

#ifndef MICRO_SHARDS
#define MICRO_SHARDS 0
#endif
#if MICRO_SHARDS
#define SHARDS_PARAMETERS , int shard_samples, int larger_shards
#define SHARDS_ARGUMENTS , shard_samples, larger_shards
#else
#define SHARDS_PARAMETERS
#define SHARDS_ARGUMENTS
#endif

#ifndef ALL_SHARDS
#define ALL_SHARDS at(0)
#endif
#ifndef OWN_SHARDS
#define OWN_SHARDS take(0, at(0));
#endif

// Consecutive samples of a minibatch.
struct SampleRange {
    int first, count;
};

// The samples of micro-shard blockIdx.z, by the last arguments of the kernel.
__device__ inline SampleRange own_shard(int samples, int larger) {
    const int shard = blockIdx.z;
    return {shard * samples + min(shard, larger), samples + (shard < larger)};
}
