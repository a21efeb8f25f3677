// Work on maps (N, H, W, C) by channel: each thread keeps one vector of channels and iterates over
// pixels, and sums over all pixels are added in a fixed order.
//
// Launch: grid (blocks, columns). A block has CHANNEL_THREADS threads: CHANNEL_VECTORS adjacent
// threads for adjacent vectors of channels, times BLOCK_ROWS pixels. blockIdx.y selects the column
// of BLOCK_CHANNELS channels; the blocks of a column share the pixels
// (dptrain/backends/cuda/channels.py).
//
// Why this layout: eight vectors of 16 bytes fill a cache line of 128 bytes, so that each load of a
// warp reads whole lines, and few channels for each block keep the last step of a sum short: it
// adds one number of each block of a column.
//
// Sums: a thread adds its pixels in float32, a block its threads by warp shuffles and shared
// memory, and the last block of a column to finish adds the blocks in float64. The order of
// additions depends on the launch alone, so results are reproducible.

#pragma once

#include "dependent_launch.cuh"
#include "vector.cuh"

// A power of two, at most 8.
#ifndef CHANNEL_VECTORS
#define CHANNEL_VECTORS 4
#endif

#ifndef CHANNEL_THREADS
#define CHANNEL_THREADS 512
#endif

constexpr int BLOCK_ROWS = CHANNEL_THREADS / CHANNEL_VECTORS;
constexpr int BLOCK_CHANNELS = CHANNEL_VECTORS * VECTOR;
constexpr unsigned WHOLE_WARP = 0xFFFFFFFFu;

// The vector of channels and the pixels of this thread.
struct ChannelThread {
    int vectors, slot, first, stride;

    __device__ explicit ChannelThread(int channels) {
        vectors = channels / VECTOR;
        slot = blockIdx.y * CHANNEL_VECTORS + threadIdx.x % CHANNEL_VECTORS;
        first = blockIdx.x * BLOCK_ROWS + threadIdx.x / CHANNEL_VECTORS;
        stride = gridDim.x * BLOCK_ROWS;
    }
    // False for the threads after the last vector of channels.
    __device__ bool has_channels() const { return slot < vectors; }
    // Index of this thread's vector at a pixel.
    __device__ int at(int pixel) const { return pixel * vectors + slot; }
};

// Number of pixels of block `block` of a column.
__device__ inline int pixels_of_block(int block, int pixels) {
    const int sweep = gridDim.x * BLOCK_ROWS;
    const int rest = pixels % sweep - block * BLOCK_ROWS;
    return pixels / sweep * BLOCK_ROWS + min(max(rest, 0), BLOCK_ROWS);
}

// Add the sums of all threads of the block that have the same channels, and call take(s, c, sum) for
// each sum s and channel c.
template <int SUMS, class Take>
__device__ inline void sum_block(Floats (&own)[SUMS], int channels, Take take) {
    constexpr int WARPS = CHANNEL_THREADS / 32;
    __shared__ float warps[WARPS][SUMS][BLOCK_CHANNELS];
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int bit = CHANNEL_VECTORS; bit < 32; bit *= 2)
#pragma unroll
        for (int s = 0; s < SUMS; ++s)
#pragma unroll
            for (int k = 0; k < VECTOR; ++k)
                own[s].at[k] += __shfl_xor_sync(WHOLE_WARP, own[s].at[k], bit);
    if (lane < CHANNEL_VECTORS)
#pragma unroll
        for (int s = 0; s < SUMS; ++s)
#pragma unroll
            for (int k = 0; k < VECTOR; ++k)
                warps[threadIdx.x / 32][s][lane * VECTOR + k] = own[s].at[k];
    __syncthreads();
    for (int i = threadIdx.x; i < SUMS * BLOCK_CHANNELS; i += CHANNEL_THREADS) {
        const int s = i / BLOCK_CHANNELS, channel = i % BLOCK_CHANNELS;
        const int c = blockIdx.y * BLOCK_CHANNELS + channel;
        float sum = 0.0f;
        for (int warp = 0; warp < WARPS; ++warp) sum += warps[warp][s][channel];
        if (c < channels) take(s, c, sum);
    }
}

// Store the sums of the block in rows `first` … of partial[blockIdx.x], for partial (gridDim.x, rows,
// channels).
template <int SUMS>
__device__ inline void store_block_sums(Floats (&own)[SUMS], float* partial, int rows, int first,
                                        int channels) {
    sum_block(own, channels, [&](int s, int c, float sum) {
        if (first + s < rows) __stcg(partial + (blockIdx.x * rows + first + s) * channels + c, sum);
    });
}

// Return true in all threads of the last of some blocks that call this. The stores of all of them
// before this call are then visible to __ldcg. The ticket is 0 before and after the kernel.
__device__ inline bool is_last_of(unsigned blocks, unsigned* ticket) {
    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        last = atomicAdd(ticket, 1u) == blocks - 1;
        if (last) atomicExch(ticket, 0u);
        __threadfence();
    }
    __syncthreads();
    return last;
}

// The same for the blocks of a column. tickets (gridDim.z, gridDim.y).
__device__ inline bool is_last_block(unsigned* tickets) {
    unsigned* ticket = tickets + blockIdx.z * gridDim.y + blockIdx.y;
    return is_last_of(gridDim.x, ticket);
}

template <int SUMS> struct Doubles {
    double at[SUMS];

    __device__ Doubles operator+(const Doubles& other) const {
        Doubles sum = *this;
        for (int s = 0; s < SUMS; ++s) sum.at[s] += other.at[s];
        return sum;
    }
};

// Sum of term(row, channel) over a number of rows, such as one for each block, for each channel of
// the block's column. Every thread calls this. It returns true in the threads with a result, and sets
// their channel.
template <int SUMS, class Term>
__device__ inline bool sum_over_rows(int rows, int channels, int& channel, Doubles<SUMS>& sums,
                                     Term term) {
    constexpr int SEGMENTS = CHANNEL_THREADS / BLOCK_CHANNELS;
    __shared__ double parts[SUMS][CHANNEL_THREADS];
    const int segment = threadIdx.x / BLOCK_CHANNELS;
    channel = blockIdx.y * BLOCK_CHANNELS + threadIdx.x % BLOCK_CHANNELS;
    sums = {};
    if (channel < channels)
#pragma unroll 4
        for (int row = segment; row < rows; row += SEGMENTS) {
            const Doubles<SUMS> found = term(row, channel);
            for (int s = 0; s < SUMS; ++s) sums.at[s] += found.at[s];
        }
    for (int s = 0; s < SUMS; ++s) parts[s][threadIdx.x] = sums.at[s];
    for (int half = SEGMENTS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (segment < half)
            for (int s = 0; s < SUMS; ++s)
                parts[s][threadIdx.x] += parts[s][threadIdx.x + half * BLOCK_CHANNELS];
    }
    for (int s = 0; s < SUMS; ++s) sums.at[s] = parts[s][threadIdx.x];
    return segment == 0 && channel < channels;
}
