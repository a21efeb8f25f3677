// Fully connected layers for small batches (skinny GEMM), by tensor cores: tf32, bf16, and fp32 by
// 3xTF32 (mma.cuh).
//
//     forward         y  = epilogue(x w + b)     x (N, inputs), w (inputs, outputs), b (outputs,)
//     backward_input  dx = dz wᵀ                 y, dy (N, outputs), dx (N, inputs)
//
// Each weight is used for a few samples only, so the time is determined by loading the weights. A
// block therefore starts asynchronous copies (cp.async) of all operands of its BLOCK_K terms at
// once and multiplies after they have arrived, without slicing the sum. With PREFETCH_WEIGHTS the
// copies of weights start while the previous kernel still runs (programmatic dependent launch).
//
// Split-K: blocks sum BLOCK_K inputs each, and dense_forward_reduce of dense.cu adds the splits.
// Intra-block split-K: K_GROUPS groups of threads (threadIdx.y) share a tile of TILE_M samples ×
// TILE_N columns; each group computes every K_GROUPS-th MMA step.
//
// Launch: grid (ceil(N / TILE_M), ceil(columns / TILE_N), splits), block (THREADS, K_GROUPS);
// skinny_gemm.py chooses the configuration and the dynamic shared memory.

#ifndef PRECISION
#define PRECISION 2  // Without tensor cores, fp32 has no such kernel.
#endif
#ifndef TILE_M
#define TILE_M 32
#define TILE_N 16
#define WARP_M 32
#define WARP_N 16
#define TILE_K_WORDS 16
#endif
// Terms of the sum that a block computes.
#ifndef BLOCK_K
#define BLOCK_K 64
#endif

#include "cp_async.cuh"
#include "epilogue.cuh"
#include "dependent_launch.cuh"

static_assert(WARP_M == TILE_M && BLOCK_K % 16 == 0,
              "a warp covers all samples and whole MMA steps");

constexpr int ALL_THREADS = THREADS * K_GROUPS;
__device__ inline int thread_of_block() { return threadIdx.y * THREADS + threadIdx.x; }

// Elements of a row of weights that one copy instruction loads.
constexpr int WEIGHT_STEP = OUT_VECTOR < 4 ? OUT_VECTOR : 4;

// Operand A in shared memory: a row is a sample, with adjacent terms.
struct Samples {
    static constexpr int STRIDE = BLOCK_K + PACK;  // The padding avoids bank conflicts.

    Number* data;

    __device__ Number* at(int i, int k) const { return data + i * STRIDE + k; }
    __device__ Number element(int i, int k) const {
        return round_operands(Pack<Number>{*at(i, k)}).at[0];
    }
};

#if TENSOR_CORES
__device__ inline void load_fragment(unsigned (&words)[4], const Samples& samples, int i, int k) {
    const int lane = threadIdx.x % 32;
    ldmatrix_x4(words, samples.at(i + lane % 16, k + lane / 16 * PACK));
#if PRECISION == 1
#pragma unroll
    for (unsigned& word : words) word = __float_as_uint(to_tf32(__uint_as_float(word)));
#endif
}
#endif

// Operand B in shared memory: float32 weights as in global memory, rounded when they are read. A
// row holds the terms of one column (K_MAJOR) or the columns of one term.
template <bool K_MAJOR> struct Weights {
    static constexpr int ROWS = K_MAJOR ? TILE_N : BLOCK_K, LENGTH = K_MAJOR ? BLOCK_K : TILE_N;
    static constexpr int STRIDE = LENGTH + (K_MAJOR ? 4 : 8);  // The padding avoids bank conflicts.

    float* data;

    __device__ float at(int column, int k) const {
        return data[K_MAJOR ? column * STRIDE + k : k * STRIDE + column];
    }
    __device__ float element(int column, int k) const {
        return to_float(round_operand(at(column, k)));
    }

    // Start copies of the rows from `top` on, out of `rows` rows with `length` elements, from
    // element `left` on.
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

#if TENSOR_CORES
// Load the fragment of 16 columns from j on, as in mma.cuh.
template <bool K_MAJOR>
__device__ inline void load_fragment(unsigned (&words)[4], const Weights<K_MAJOR>& weights, int j,
                                     int k) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int q = 0; q < 4; ++q) {
        const int column = j + g + q % 2 * 8;
#if PRECISION < 2
        words[q] = __float_as_uint(round_operand(weights.at(column, k + t + q / 2 * 4)));
#else
        const int first = k + t * 2 + q / 2 * 8;
        words[q] = pack_bfloat16x2(weights.at(column, first), weights.at(column, first + 1));
#endif
    }
}
#endif

// Multiply all terms of the block, add the groups and pass the tile to `store` as in gemm.cuh. The
// contents of shared memory are overwritten.
template <class B, class Store>
__device__ void multiply_block(const Samples& a, const B& b, void* memory, const Store& store) {
    cp_async_wait_all();
    __syncthreads();
    Accumulators acc;
#if TENSOR_CORES
#pragma unroll(TF32X3 ? 1 : 4)
    for (int k = threadIdx.y * STEP_K; k < BLOCK_K; k += K_GROUPS * STEP_K) acc.add_step(a, b, k);
    if (TF32X3 && __syncthreads_or(acc.any_needs_scalar_sum())) {
        acc = {};
        if (threadIdx.y == 0) acc.add_each(a, b, BLOCK_K);
    }
#else
    if (threadIdx.y == 0) acc.add_each(a, b, BLOCK_K);
#endif
    if (K_GROUPS > 1) reduce_k_groups(acc, reinterpret_cast<float*>(memory));
    if (threadIdx.y == 0) acc.store_tile(blockIdx.x * TILE_M, blockIdx.y * TILE_N, store);
}

// Layout of shared memory: weights, then samples.
template <bool K_MAJOR> struct SharedMemory {
    Weights<K_MAJOR> weights;
    Samples samples;

    __device__ explicit SharedMemory(char* memory)
        : weights{reinterpret_cast<float*>(memory)},
          samples{reinterpret_cast<Number*>(weights.data + weights.ROWS * weights.STRIDE)} {}
};

// Compute the sum over BLOCK_K inputs from `first` on.
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

// x (samples, inputs), w (inputs, outputs), b (outputs,), y (samples, outputs).
extern "C" __global__ void __launch_bounds__(ALL_THREADS)
    dense_forward(const Number* x, const float* w, const float* b, Number* y, int samples,
                  int inputs, int outputs EPILOGUE_PARAMETERS) {
    sum_inputs(x, w, 0, samples, inputs, outputs,
               StoreOutput{y, nullptr, b, samples, outputs, 1, EPILOGUE_ARGUMENTS});
}

// Split z = blockIdx.z sums the inputs [z · split_terms, (z + 1) · split_terms), with split_terms =
// BLOCK_K. x (samples, inputs), w (inputs, outputs), partial (splits, samples, outputs) float32.
extern "C" __global__ void __launch_bounds__(ALL_THREADS)
    dense_forward_split_k(const Number* x, const float* w, float* partial, int samples, int inputs,
                          int outputs, int split_terms) {
    sum_inputs(
        x, w, blockIdx.z * split_terms, samples, inputs, outputs,
        StorePlain<float, WEIGHT_STEP>{partial + blockIdx.z * samples * outputs, samples, outputs});
}

// dy and y (samples, outputs), w (inputs, outputs), dx (samples, inputs). BLOCK_K covers all
// outputs.
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
