// Fully connected layers of few samples: products of dense.cu, in tf32 and bf16 alone.
//
// A weight is used for a few samples only, so the time goes to bringing weights, and to
// instructions of threads that have nothing else to do while they wait. So a block asks at once for
// all that its BLOCK_K of the sum take, by copies that pass no register, and multiplies when all is
// there: nothing is sliced. Where PREFETCH_WEIGHTS (gemm.cuh), weights are asked for while the kernel before
// still runs.
//
// K_GROUPS of threads (threadIdx.y) share a tile of TILE_M samples x TILE_N columns, as in gemm.cuh:
// each takes every K_GROUPS-th instruction along the sum.

#ifndef PRECISION
#define PRECISION 2  // There are none in float32.
#endif
#ifndef TILE_M
#define TILE_M 32
#define TILE_N 16
#define WARP_M 32
#define WARP_N 16
#define TILE_K_WORDS 16
#endif
// Of the sum, that a block takes.
#ifndef BLOCK_K
#define BLOCK_K 64
#endif

#include "cp_async.cuh"
#include "epilogue.cuh"
#include "dependent_launch.cuh"

static_assert(WARP_M == TILE_M && BLOCK_K % 16 == 0, "warps have all samples, and whole steps");

constexpr int ALL_THREADS = THREADS * K_GROUPS;
__device__ inline int thread_of_block() { return threadIdx.y * THREADS + threadIdx.x; }

// Of a row of weights, floats that are copied at once; of a row of x, numbers.
constexpr int WEIGHT_STEP = OUT_VECTOR < 4 ? OUT_VECTOR : 4;

// A: a row is a sample, its terms side by side, as they lie in memory.
struct Samples {
    static constexpr int STRIDE = BLOCK_K + PACK;  // What a warp reads lies in different banks.

    Number* data;

    __device__ Number* at(int i, int k) const { return data + i * STRIDE + k; }
    __device__ Number element(int i, int k) const {
        return round_operands(Pack<Number>{*at(i, k)}).at[0];
    }
#if __CUDA_ARCH__ >= 800
    __device__ void fragment(unsigned (&fragment)[4], int i, int k) const {
        const int lane = threadIdx.x % 32;
        ldmatrix_x4(fragment, at(i + lane % 16, k + lane / 16 * PACK));
#if PRECISION == 1
#pragma unroll
        for (unsigned& word : fragment) word = __float_as_uint(to_tf32(__uint_as_float(word)));
#endif
    }
#endif
};

// B: weights as they lie in memory, in float32, rounded as they are read. Rows are (SUM_FIRST) of a
// column, its terms side by side, or of a term.
template <bool K_MAJOR> struct Weights {
    static constexpr int ROWS = K_MAJOR ? TILE_N : BLOCK_K, LENGTH = K_MAJOR ? BLOCK_K : TILE_N;
    static constexpr int STRIDE = LENGTH + (K_MAJOR ? 4 : 8);  // As above.

    float* data;

    __device__ float at(int column, int k) const {
        return data[K_MAJOR ? column * STRIDE + k : k * STRIDE + column];
    }
    __device__ float element(int column, int k) const {
#if PRECISION == 1
        return to_tf32(at(column, k));
#else
        return to_float(to_bfloat16(at(column, k)));
#endif
    }
#if __CUDA_ARCH__ >= 800
    // Of eight columns from j on, for the terms of one instruction from k on.
    __device__ void fragment(unsigned (&fragment)[2], int j, int k) const {
        const int column = j + threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
        for (int q = 0; q < 2; ++q) {
#if PRECISION == 1
            fragment[q] = __float_as_uint(to_tf32(at(column, k + t + q * 4)));
#else
            const int first = k + t * 2 + q * 8;
            fragment[q] = pack_bfloat16x2(at(column, first), at(column, first + 1));
#endif
        }
    }
#endif

    // Asks for rows from `top` on, of `rows` that are `length` long, from `left` on.
    __device__ void load_async(const float* w, int top, int rows, int left, int length) const {
        constexpr int PIECES = LENGTH / WEIGHT_STEP;
#pragma unroll 8
        for (int i = thread_of_block(); i < ROWS * PIECES; i += ALL_THREADS) {
            const int row = i / PIECES, at = i % PIECES * WEIGHT_STEP;
            const bool there = top + row < rows && left + at < length;
            cp_async<WEIGHT_STEP * sizeof(float)>(
                data + row * STRIDE + at, w + (there ? (top + row) * length + left + at : 0),
                there);
        }
    }
};

// The sums of all groups for the block's tile, which `store` is given as in gemm.cuh. Behind it
// nothing in shared memory is of use.
template <class B, class Store>
__device__ void multiply_block(const Samples& a, const B& b, void* memory, const Store& store) {
    cp_async_wait_all();
    __syncthreads();
    Accumulators acc;
#if __CUDA_ARCH__ >= 800
#pragma unroll 4
    for (int k = threadIdx.y * STEP_K; k < BLOCK_K; k += K_GROUPS * STEP_K) {
        unsigned rows[Accumulators::M_MMAS][4], columns[Accumulators::N_MMAS][2];
#pragma unroll
        for (int i = 0; i < Accumulators::M_MMAS; ++i) a.fragment(rows[i], i * 16, k);
#pragma unroll
        for (int j = 0; j < Accumulators::N_MMAS; ++j)
            b.fragment(columns[j], Accumulators::left() + j * 8, k);
#pragma unroll
        for (int i = 0; i < Accumulators::M_MMAS; ++i)
#pragma unroll
            for (int j = 0; j < Accumulators::N_MMAS; ++j)
                mma(acc.c[i][j], rows[i], columns[j][0], columns[j][1]);
    }
#else
    if (threadIdx.y == 0) acc.add_each(a, b, BLOCK_K);
#endif
    if (K_GROUPS > 1) reduce_k_groups(acc, reinterpret_cast<float*>(memory));
    if (threadIdx.y == 0) acc.store_tile(blockIdx.x * TILE_M, blockIdx.y * TILE_N, store);
}

// Shared memory: weights, then samples.
template <bool K_MAJOR> struct SharedMemory {
    Weights<K_MAJOR> weights;
    Samples samples;

    __device__ explicit SharedMemory(char* memory)
        : weights{reinterpret_cast<float*>(memory)},
          samples{reinterpret_cast<Number*>(weights.data + weights.ROWS * weights.STRIDE)} {}
};

// The sum over BLOCK_K inputs from `first` on.
template <class Store>
__device__ void sum_inputs(const Number* x, const float* w, int first, int samples, int inputs,
                           int outputs, const Store& store) {
    extern __shared__ __align__(16) char memory[];
    const SharedMemory<false> shared(memory);
    const int top = blockIdx.x * TILE_M, left = blockIdx.y * TILE_N;
    if (!PREFETCH_WEIGHTS) wait_for_previous_kernel();
    shared.weights.load_async(w, first, inputs, left, outputs);
    if (PREFETCH_WEIGHTS) wait_for_previous_kernel();
    constexpr int PIECES = BLOCK_K / IN_VECTOR;
#pragma unroll 4
    for (int i = thread_of_block(); i < TILE_M * PIECES; i += ALL_THREADS) {
        const int row = i / PIECES, k = i % PIECES * IN_VECTOR;
        const bool there = top + row < samples && first + k < inputs;
        cp_async<IN_VECTOR * sizeof(Number)>(
            shared.samples.at(row, k), x + (there ? (top + row) * inputs + first + k : 0), there);
    }
    multiply_block(shared.samples, shared.weights, memory, store);
}

// y = x w + b, and what follows.
extern "C" __global__ void __launch_bounds__(ALL_THREADS)
    dense_forward(const Number* x, const float* w, const float* b, Number* y, int samples,
                  int inputs, int outputs EPILOGUE_PARAMETERS) {
    sum_inputs(x, w, 0, samples, inputs, outputs,
               StoreOutput{y, nullptr, b, samples, outputs, 1, EPILOGUE_ARGUMENTS});
}

// Part z = blockIdx.z of x w: the sum over inputs [z part, (z + 1) part), part being BLOCK_K.
extern "C" __global__ void __launch_bounds__(ALL_THREADS)
    dense_forward_split_k(const Number* x, const float* w, float* partial, int samples, int inputs,
                          int outputs, int split_terms) {
    sum_inputs(
        x, w, blockIdx.z * split_terms, samples, inputs, outputs,
        StorePlain<float, WEIGHT_STEP>{partial + blockIdx.z * samples * outputs, samples, outputs});
}

// dx = dz w^T; BLOCK_K are all outputs.
extern "C" __global__ void __launch_bounds__(ALL_THREADS)
    dense_backward_input(const Number* dy, const Number* y, float factor, const float* w,
                         Number* dx, int samples, int inputs, int outputs) {
    extern __shared__ __align__(16) char memory[];
    const SharedMemory<true> shared(memory);
    const int top = blockIdx.x * TILE_M;
    if (!PREFETCH_WEIGHTS) wait_for_previous_kernel();
    shared.weights.load_async(w, blockIdx.y * TILE_N, inputs, 0, outputs);
    if (PREFETCH_WEIGHTS) wait_for_previous_kernel();
    const Gradient dz{dy, y, factor};
    constexpr int PIECES = BLOCK_K / PACK;
#pragma unroll 2
    for (int i = thread_of_block(); i < TILE_M * PIECES; i += ALL_THREADS) {
        const int row = i / PIECES, k = i % PIECES * PACK;
        Gradient::Raw raw = {};
#pragma unroll
        for (int v = 0; v < PACK; v += OUT_VECTOR)
            if (top + row < samples && k + v < outputs)
                dz.piece(raw, v, (top + row) * outputs + k + v, 0);
        *reinterpret_cast<Pack<Number>*>(shared.samples.at(row, k)) = dz.value(raw);
    }
    multiply_block(shared.samples, shared.weights, memory,
                   StorePlain<Number, IN_VECTOR>{dx, samples, inputs});
}
