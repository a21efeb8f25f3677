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

// The samples of a micro-shard, by the last arguments of the kernel.
__device__ inline SampleRange samples_of_shard(int shard, int samples, int larger) {
    return {shard * samples + min(shard, larger), samples + (shard < larger)};
}

__device__ inline SampleRange own_shard(int samples, int larger) {
    return samples_of_shard(blockIdx.z, samples, larger);
}

// What the blocks with this blockIdx.z sum of a weight gradient: part `index` of the split-K parts of
// some samples. With MICRO_SHARDS these are the samples of a micro-shard, each of which has
// `shard_parts` parts, the last argument of the kernel. Parts without terms are 0.
struct SplitPart {
    int index, shard;
    SampleRange range;
};

#if MICRO_SHARDS
#define PARTS_PARAMETERS SHARDS_PARAMETERS, int shard_parts
#define PARTS_ARGUMENTS SHARDS_ARGUMENTS, shard_parts
__device__ inline SplitPart split_part(int, int shard_samples, int larger_shards, int parts) {
    const int shard = blockIdx.z / parts;
    return {int(blockIdx.z) % parts, shard, samples_of_shard(shard, shard_samples, larger_shards)};
}
#else
#define PARTS_PARAMETERS
#define PARTS_ARGUMENTS
__device__ inline SplitPart split_part(int samples) { return {int(blockIdx.z), 0, {0, samples}}; }
#endif

// Move an array with `size` elements for each sample to the first sample of a part.
template <class T> __device__ inline void move_to(const SplitPart& part, const T*& array, int size) {
    array += (long long)part.range.first * size;
}
