// GEMM inner loop in float32 on CUDA cores (FFMA). Each thread computes a register tile of THREAD_M
// × THREAD_N accumulators; gemm.cuh has the main loop.

#pragma once

#ifndef TILE_M
#define TILE_M 64
#define TILE_N 64
#define THREAD_M 4
#define THREAD_N 4
#endif

constexpr int TILE_K = 16;
constexpr int THREADS = (TILE_M / THREAD_M) * (TILE_N / THREAD_N);

static_assert(THREAD_M % 4 == 0 && THREAD_N % 4 == 0, "register tiles are multiples of 4 x 4");

// The four rows of a pooling window that one thread holds are adjacent rows of the tile.
constexpr int MEMBER_STEP = 1;
__device__ inline int window_of(int row) { return row / 4; }
__device__ inline int member_of(int row) { return row % 4; }

__device__ inline float round_operand(float value) { return value; }
__device__ inline Pack<float> round_operands(const Pack<float>& pack) { return pack; }

// A tile of A or B in shared memory, stored with the sum index first. Threads then read their
// operands as vectors of four, which the padding keeps aligned.
template <int WIDTH, bool K_MAJOR> struct Slice {
    float at[TILE_K][WIDTH + 4];

    __device__ void store_shared(int i, int k, const Pack<float>& pack) {
        if (K_MAJOR) {
#pragma unroll
            for (int v = 0; v < PACK; ++v) at[k + v][i] = pack.at[v];
        } else {
            *reinterpret_cast<Pack<float>*>(&at[k][i]) = pack;
        }
    }
};

// Register tile of a thread: THREAD_M × THREAD_N accumulators in 4 × 4 blocks that are spread over
// the block's tile, so that the threads of a warp read adjacent addresses in shared memory.
struct Accumulators {
    float c[THREAD_M][THREAD_N] = {};

    static __device__ int row(int i) {
        const int thread = threadIdx.x / (TILE_N / THREAD_N);
        return i / 4 * (TILE_M / (THREAD_M / 4)) + thread * 4 + i % 4;
    }
    static __device__ int column(int j) {
        const int thread = threadIdx.x % (TILE_N / THREAD_N);
        return j / 4 * (TILE_N / (THREAD_N / 4)) + thread * 4 + j % 4;
    }

    template <class SliceA, class SliceB> __device__ void add(const SliceA& as, const SliceB& bs) {
#pragma unroll
        for (int k = 0; k < TILE_K; ++k) {
            float a[THREAD_M], b[THREAD_N];
#pragma unroll
            for (int i = 0; i < THREAD_M; ++i) a[i] = as.at[k][row(i)];
#pragma unroll
            for (int j = 0; j < THREAD_N; ++j) b[j] = bs.at[k][column(j)];
#pragma unroll
            for (int i = 0; i < THREAD_M; ++i)
#pragma unroll
                for (int j = 0; j < THREAD_N; ++j) c[i][j] += a[i] * b[j];
        }
    }

    // Begin the sums with what is stored.
    template <class Store> __device__ void load_tile(int top, int left, const Store& store) {
#pragma unroll
        for (int i = 0; i < THREAD_M; ++i)
#pragma unroll
            for (int j = 0; j < THREAD_N; j += 4) {
                const auto values = store.template stored<4>(top + row(i), left + column(j));
#pragma unroll
                for (int e = 0; e < 4; ++e) c[i][j + e] = to_float(values.at[e]);
            }
    }

    template <class Store> __device__ void store_tile(int top, int left, const Store& store) const {
#pragma unroll
        for (int i = 0; i < THREAD_M; i += 4)
#pragma unroll
            for (int j = 0; j < THREAD_N; j += 4) {
                float values[4][4];
#pragma unroll
                for (int e = 0; e < 16; ++e) values[e / 4][e % 4] = c[i + e / 4][j + e % 4];
                store(top + row(i), left + column(j), values);
            }
    }
};
