// C = A B by tiles in shared memory: the main loop of every layer with weights.
//
// A block of threads computes TILE_M x TILE_N elements of C. It walks along the sum TILE_K terms at
// a time: all threads bring a slice of A and of B into shared memory, and each adds its share of
// the products to sums that it holds in registers. There are two slices of each, so that one is
// filled while the other is used and one barrier a step is enough; what the next PREFETCH_STEPS steps need
// is on its way from global memory to registers meanwhile. How slices lie, and who multiplies what,
// is the matter of ffma.cuh (float32) and of mma.cuh (tensor cores).
//
// Few blocks keep a GPU busy only if each has many warps. So a block may have K_GROUPS of threads
// (threadIdx.y) that share its tile: each takes every K_GROUPS-th step along the sum, in slices of
// its own, and in the end the first adds what the others have.
//
// A convolution is such a product whose A (or B) exists nowhere: an operand says where the elements
// of a row and of positions along the sum come from. They travel in runs of 16 bytes of a slice,
// PACK elements that are neighbours along the sum (SUM_FIRST), or along the rows of A, or columns of
// B. An operand has
//
//     Outer, outer(i)         what it knows of row i of A, or column i of B; worked out once
//     Inner, inner(k)         what it knows of position k along the sum
//     advance(inner)          makes it that of STRIDE_K positions later; unless SUM_FIRST
//     Raw, at(outer, inner)   the run that begins there as it lies in memory, 0 where nothing is
//     value(raw)              its PACK elements, as slices hold them
//
// so that nothing waits for memory before value() is asked for, PREFETCH_STEPS steps later. The order in
// which an element's products are added depends on the kernel and the tile alone: results are the
// same in every run.

#pragma once

#include "precision.cuh"
#include "dependent_launch.cuh"

#ifndef PREFETCH_STEPS
#define PREFETCH_STEPS 1
#define K_GROUPS 1
#endif

// Whether B is what the kernel before does not write, so that it may be read before `wait_for_previous_kernel`.
#ifndef PREFETCH_WEIGHTS
#define PREFETCH_WEIGHTS 0
#endif

constexpr int PACK = 16 / sizeof(Number);

// N elements that are read or written at once.
template <class T, int N = PACK> struct alignas(N * sizeof(T) < 16 ? N * sizeof(T) : 16) Pack {
    T at[N];
};

// The same bits as another type.
template <class To, class From> __device__ inline To as(const From& from) {
    static_assert(sizeof(To) == sizeof(From), "of the same size");
    To to;
    memcpy(&to, &from, sizeof(To));
    return to;
}

#if PRECISION == 0
#include "ffma.cuh"
#else
#include "mma.cuh"
#endif

constexpr int STRIDE_K = K_GROUPS * TILE_K;  // From one step of a group to its next.

// Blocks of a multiprocessor that are to run at a time, 512 threads together, for which kernels are
// held to 128 registers: dptrain/backends/cuda/tiles.py counts on them.
constexpr int GEMM_MIN_BLOCKS = THREADS * K_GROUPS < 512 ? 512 / (THREADS * K_GROUPS) : 1;

// Largest power of two that divides both a run and the length of rows of x and dx (channels,
// inputs), and of y, dy and weights (filters, outputs): so many elements are read at once.
#ifndef IN_VECTOR
#define IN_VECTOR 1
#define OUT_VECTOR 1
#endif

template <int STEP, class T, int N>
__device__ inline void read(Pack<T, N>& pack, int first, const T* from) {
    const Pack<T, STEP> piece = *reinterpret_cast<const Pack<T, STEP>*>(from);
#pragma unroll
    for (int v = 0; v < STEP; ++v) pack.at[first + v] = piece.at[v];
}

// A thread's share of a slice of A or B on its way from global to shared memory.
template <class Operand, int WIDTH> struct Loader {
    static constexpr bool K_MAJOR = Operand::K_MAJOR;
    // Runs of a slice, side by side in memory and in all.
    static constexpr int PACKS_ACROSS = (K_MAJOR ? TILE_K : WIDTH) / PACK,
                         ALL_PACKS = WIDTH * TILE_K / PACK;
    static constexpr int COUNT = (ALL_PACKS + THREADS - 1) / THREADS;
    static constexpr int OUTERS = K_MAJOR ? COUNT : 1, INNERS = K_MAJOR ? 1 : COUNT;
    static_assert(THREADS % PACKS_ACROSS == 0, "a thread's runs begin at one place of their rows");

    const Operand& operand;
    typename Operand::Outer outers[OUTERS];
    typename Operand::Inner inners[INNERS];  // Of the next fetch.
    typename Operand::Raw raws[PREFETCH_STEPS][COUNT];

    // For the tile's rows or columns from `first` on, and positions from k on.
    __device__ Loader(const Operand& operand, int first, int k) : operand(operand) {
#pragma unroll
        for (int q = 0; q < OUTERS; ++q) outers[q] = operand.outer(first + row(q));
        if (!K_MAJOR) {
#pragma unroll
            for (int q = 0; q < INNERS; ++q) inners[q] = operand.inner(k + k_index(q));
        }
    }

    // Row or column, inside the tile, of the thread's run q; and its position along the sum.
    static __device__ int row(int q) {
        const int beside = threadIdx.x % PACKS_ACROSS * PACK;
        return K_MAJOR ? (threadIdx.x + q * THREADS) / PACKS_ACROSS : beside;
    }

    static __device__ int k_index(int q) {
        const int beside = threadIdx.x % PACKS_ACROSS * PACK;
        return K_MAJOR ? beside : (threadIdx.x + q * THREADS) / PACKS_ACROSS;
    }

    static __device__ bool has_pack(int q) {
        return ALL_PACKS % THREADS == 0 || threadIdx.x + q * THREADS < ALL_PACKS;
    }

    // Read positions [k, k + TILE_K) of the sum, as far as they lie below `stop`, into registers of
    // the step that is number `step` of PREFETCH_STEPS. From one call to the next k grows by STRIDE_K.
    __device__ void load(int step, int k, int stop) {
        if constexpr (K_MAJOR) inners[0] = operand.inner(k + k_index(0));
#pragma unroll
        for (int q = 0; q < COUNT; ++q) {
            raws[step][q] = {};
            if (k + k_index(q) < stop && has_pack(q))
                raws[step][q] = operand.at(outers[q % OUTERS], inners[q % INNERS]);
            if constexpr (!K_MAJOR) operand.advance(inners[q]);
        }
    }

    // Those of all PREFETCH_STEPS steps, from `begin` on.
    __device__ void load_first(int begin, int stop) {
#pragma unroll
        for (int step = 0; step < PREFETCH_STEPS; ++step) load(step, begin + step * STRIDE_K, stop);
    }

    __device__ void store_shared(int step, Slice<WIDTH, K_MAJOR>& slice) const {
#pragma unroll
        for (int q = 0; q < COUNT; ++q)
            if (has_pack(q)) slice.store_shared(row(q), k_index(q), operand.value(raws[step][q]));
    }
};

// Adds what the other groups' threads have, in order, to the sums of the first.
__device__ inline void reduce_k_groups(Accumulators& acc, float* memory) {
    constexpr int COUNT = sizeof(acc.c) / sizeof(float);
    float* own = reinterpret_cast<float*>(acc.c);
    __syncthreads();
    if (threadIdx.y > 0) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
            memory[((threadIdx.y - 1) * COUNT + i) * THREADS + threadIdx.x] = own[i];
    }
    __syncthreads();
    if (threadIdx.y > 0) return;
    for (int group = 0; group < K_GROUPS - 1; ++group) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
            own[i] += memory[(group * COUNT + i) * THREADS + threadIdx.x];
    }
}

// Gives `store` the sums over k in [first, stop) of A[i, k] B[k, j] of the tile that blockIdx.x
// (rows) and blockIdx.y (columns) name: store(row, column, values), values[m][n] being that of row
// row + m MEMBER_STEP and column column + n. Rows and columns beyond the product's are among them.
template <class A, class B, class Store>
__device__ void multiply(const A& a, const B& b, int first, int stop, const Store& store) {
    extern __shared__ __align__(16) char memory[];
    struct Slices {
        Slice<TILE_M, A::K_MAJOR> a[2];
        Slice<TILE_N, B::K_MAJOR> b[2];
    };
    Slices& slices = reinterpret_cast<Slices*>(memory)[threadIdx.y];
    const int top = blockIdx.x * TILE_M, left = blockIdx.y * TILE_N;
    const int begin = first + threadIdx.y * TILE_K;
    Loader<A, TILE_M> next_a(a, top, begin);
    Loader<B, TILE_N> next_b(b, left, begin);
    Accumulators acc;
    // Where rows and columns lie was worked out while the kernel before still ran.
    if (PREFETCH_WEIGHTS) next_b.load_first(begin, stop);
    wait_for_previous_kernel();
    if (!PREFETCH_WEIGHTS) next_b.load_first(begin, stop);
    next_a.load_first(begin, stop);
    // All groups make as many steps as the first; what they fetch behind `stop` is 0.
    for (int k = first, slice = 0; k < stop;) {
        // Unrolled, so that each step has registers of its own.
#pragma unroll
        for (int step = 0; step < PREFETCH_STEPS; ++step) {
            if (k >= stop) break;
            next_a.store_shared(step, slices.a[slice]);
            next_b.store_shared(step, slices.b[slice]);
            __syncthreads();
            if (k + PREFETCH_STEPS * STRIDE_K < stop) {
                next_a.load(step, k - first + begin + PREFETCH_STEPS * STRIDE_K, stop);
                next_b.load(step, k - first + begin + PREFETCH_STEPS * STRIDE_K, stop);
            }
            acc.add(slices.a[slice], slices.b[slice]);
            k += STRIDE_K;
            slice ^= 1;
        }
    }
    if (K_GROUPS > 1) reduce_k_groups(acc, reinterpret_cast<float*>(memory));
    if (threadIdx.y == 0) acc.store_tile(top, left, store);
}

// A matrix in memory as an operand: `count` rows of A (columns of B) and `terms` of the sum,
// neighbours along whichever index does not lie side by side `stride` elements apart; STEP divides
// the length of what does.
template <class T, bool K_MAJOR_, int STEP> struct Matrix {
    static constexpr bool K_MAJOR = K_MAJOR_;
    using Outer = int;
    using Inner = int;
    using Raw = Pack<T>;

    const T* data;
    int count, terms, stride;

    __device__ Outer outer(int i) const { return i; }
    __device__ Inner inner(int k) const { return k; }
    __device__ void advance(Inner& k) const { k += STRIDE_K; }
    __device__ Raw at(Outer i, Inner k) const {
        Raw pack = {};
        if (K_MAJOR && i >= count) return pack;
#pragma unroll
        for (int v = 0; v < PACK; v += STEP) {
            if (K_MAJOR && k + v < terms) read<STEP>(pack, v, data + i * stride + k + v);
            if (!K_MAJOR && i + v < count) read<STEP>(pack, v, data + k * stride + i + v);
        }
        return pack;
    }
    __device__ Pack<Number> value(const Raw& raw) const { return round_operands(raw); }
};

template <class T, int N> __device__ inline Pack<T, N> rounded(const float* values) {
    if constexpr (sizeof(T) == 2 && N == 2) {
        return as<Pack<T, N>>(pack_bfloat16x2(values[0], values[1]));
    } else {
        Pack<T, N> pack;
#pragma unroll
        for (int v = 0; v < N; ++v) pack.at[v] = from_float<T>(values[v]);
        return pack;
    }
}
template <class T, int N> __device__ inline Pack<T, N> rounded(const int* values) {
    Pack<T, N> pack;
#pragma unroll
    for (int v = 0; v < N; ++v) pack.at[v] = T(values[v]);
    return pack;
}

// Writes `values` from `column` on into a row of so many columns, a multiple of STEP.
template <int STEP, class T, class V, int N>
__device__ inline void write(T* row, int column, int columns, const V (&values)[N]) {
    constexpr int PIECE = STEP < N ? STEP : N;
#pragma unroll
    for (int v = 0; v < N; v += PIECE)
        if (column + v < columns)
            *reinterpret_cast<Pack<T, PIECE>*>(row + column + v) = rounded<T, PIECE>(values + v);
}

// C itself, of rows x columns.
template <class T, int STEP> struct StorePlain {
    T* y;
    int rows, columns;

    template <int M, int N>
    __device__ void operator()(int row, int column, const float (&values)[M][N]) const {
#pragma unroll
        for (int m = 0; m < M; ++m) {
            const int i = row + m * MEMBER_STEP;
            if (i < rows) pixel(i, column, values[m]);
        }
    }

    template <int N> __device__ void pixel(int i, int column, const float (&values)[N]) const {
        write<STEP>(y + i * columns, column, columns, values);
    }
};

// Gradients of weights, `rows` of them, and of the bias as one row more; part z of several lies
// `size` elements behind part z - 1.
struct StoreGradient {
    float *dweight, *dbias;
    int rows, columns;

    template <int N>
    __device__ void operator()(int row, int column, const float (&values)[4][N]) const {
        const int part = blockIdx.z * (rows + 1) * columns;
#pragma unroll
        for (int m = 0; m < 4; ++m) {
            const int i = row + m * MEMBER_STEP;
            if (i > rows) continue;
            float* to = i < rows ? dweight + i * columns : dbias;
            write<OUT_VECTOR>(to + part, column, columns, values[m]);
        }
    }
};
