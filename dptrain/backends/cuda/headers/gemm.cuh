// Tiled GEMM, C = A B: the main loop of the fully connected layers and of convolutions with
// gathered operands.
//
// A block computes a tile of TILE_M × TILE_N elements of C and iterates over the sum in steps of
// TILE_K terms. In each step, all threads load a slice of A and of B into shared memory, and each
// thread or warp multiplies into accumulators in registers. The slices are double-buffered, so that
// one barrier per step is enough. The operands of the next PREFETCH_STEPS steps are prefetched from
// global memory into registers. ffma.cuh (float32 on CUDA cores) and mma.cuh (tensor cores) define
// the layout of slices in shared memory and the multiplication.
//
// Intra-block split-K: if there are few blocks, K_GROUPS groups of threads (threadIdx.y) share a
// tile, so that each multiprocessor has enough warps. Each group computes every K_GROUPS-th step
// with slices of its own; finally the first group adds the accumulators of the others.
//
// In a convolution, A (or B) is an implicit matrix: an operand computes the addresses of its
// elements. Operands are loaded in packs of 16 bytes, which are PACK elements adjacent along the
// sum (K_MAJOR), or else along the rows of A or the columns of B. An operand defines
//
//     Outer, outer(i)         state of row i of A, or column i of B; computed once
//     Inner, inner(k)         state of position k of the sum
//     advance(inner)          moves it STRIDE_K positions further; needed unless K_MAJOR
//     Raw, at(outer, inner)   the pack at that position as stored in memory, 0 outside
//     value(raw)              its PACK elements in the format of the slices
//
// so that no instruction waits for memory before value() is called PREFETCH_STEPS steps later. The
// order of additions depends only on the kernel and the tile, so results are reproducible.

#pragma once

#include "precision.cuh"
#include "dependent_launch.cuh"

#ifndef PREFETCH_STEPS
#define PREFETCH_STEPS 1
#define K_GROUPS 1
#endif

// True if the previous kernel does not write B (weights), so that B may be read before
// `wait_for_previous_kernel`.
#ifndef PREFETCH_WEIGHTS
#define PREFETCH_WEIGHTS 0
#endif

// True if a gradient with respect to an input is added to what another kernel has stored.
#ifndef ADD_GRADIENT
#define ADD_GRADIENT 0
#endif

// True if tensor cores compute products of float32 from TF32 parts (mma.cuh).
#ifndef TF32X3
#define TF32X3 0
#endif
// True if they are multiplied by wgmma (wgmma.cuh), from operands that are split in shared memory.
#ifndef TF32X3_WGMMA
#define TF32X3_WGMMA 0
#endif

constexpr int PACK = 16 / sizeof(Number);

// N elements that are loaded or stored by one instruction; by default 16 bytes.
template <class T, int N = PACK> struct alignas(N * sizeof(T) < 16 ? N * sizeof(T) : 16) Pack {
    T at[N];
};

// Reinterpret the bits as another type of the same size.
template <class To, class From> __device__ inline To as(const From& from) {
    static_assert(sizeof(To) == sizeof(From), "sizes must be equal");
    To to;
    memcpy(&to, &from, sizeof(To));
    return to;
}

#if PRECISION == 0 && !TF32X3
#include "ffma.cuh"
#else
#include "mma.cuh"
#endif

constexpr int STRIDE_K = K_GROUPS * TILE_K;  // Distance along the sum between two steps of a group.

// Blocks that should be resident on a multiprocessor: 512 threads together, which limits kernels to
// 128 registers. dptrain/backends/cuda/dense/gemm_tiles.py assumes this.
constexpr int GEMM_MIN_BLOCKS = THREADS * K_GROUPS < 512 ? 512 / (THREADS * K_GROUPS) : 1;

// Width of vector access: the largest power of two that divides PACK and the row length of x and dx
// (IN_VECTOR: channels, inputs), or of y, dy and the weights (OUT_VECTOR: filters, outputs).
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

// Prefetches a slice of A or B from global memory into registers, then stores it in shared memory.
template <class Operand, int WIDTH> struct Loader {
    static constexpr bool K_MAJOR = Operand::K_MAJOR;
    // Packs of a slice: adjacent in memory, and in total.
    static constexpr int PACKS_ACROSS = (K_MAJOR ? TILE_K : WIDTH) / PACK,
                         ALL_PACKS = WIDTH * TILE_K / PACK;
    static constexpr int COUNT = (ALL_PACKS + THREADS - 1) / THREADS;
    static constexpr int OUTERS = K_MAJOR ? COUNT : 1, INNERS = K_MAJOR ? 1 : COUNT;
    static_assert(THREADS % PACKS_ACROSS == 0,
                  "all packs of a thread begin at the same offset of their rows");

    const Operand& operand;
    typename Operand::Outer outers[OUTERS];
    typename Operand::Inner inners[INNERS];  // Positions of the next load.
    typename Operand::Raw raws[PREFETCH_STEPS][COUNT];

    // Load the tile's rows or columns from `first` on, and positions of the sum from k on.
    __device__ Loader(const Operand& operand, int first, int k) : operand(operand) {
#pragma unroll
        for (int q = 0; q < OUTERS; ++q) outers[q] = operand.outer(first + row(q));
        if (!K_MAJOR) {
#pragma unroll
            for (int q = 0; q < INNERS; ++q) inners[q] = operand.inner(k + k_index(q));
        }
    }

    // Row or column within the tile of the thread's pack q, and its position along the sum.
    static __device__ int row(int q) {
        const int offset = threadIdx.x % PACKS_ACROSS * PACK;
        return K_MAJOR ? (threadIdx.x + q * THREADS) / PACKS_ACROSS : offset;
    }

    static __device__ int k_index(int q) {
        const int offset = threadIdx.x % PACKS_ACROSS * PACK;
        return K_MAJOR ? offset : (threadIdx.x + q * THREADS) / PACKS_ACROSS;
    }

    static __device__ bool has_pack(int q) {
        return ALL_PACKS % THREADS == 0 || threadIdx.x + q * THREADS < ALL_PACKS;
    }

    // Load positions [k, k + TILE_K) of the sum, limited by `stop`, into the registers of prefetch
    // step `step`. k grows by STRIDE_K from one call to the next.
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

    // Load the first PREFETCH_STEPS steps.
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

// Add the accumulators of the other groups to those of the first group, in a fixed order.
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

// Double-buffered slices of both operands in shared memory.
template <class A, class B> struct Slices {
    Slice<TILE_M, A::K_MAJOR> a[2];
    Slice<TILE_N, B::K_MAJOR> b[2];
};

// Add to `acc` this group's steps of Σ over k in [first, stop). The loaders were created for the
// group's first position `begin` and have loaded their first steps. All groups make the same number
// of steps as the first; operands beyond `stop` are 0. If RECOMPUTE, scalar instructions multiply.
template <bool RECOMPUTE, class A, class B>
__device__ inline void add_steps(Accumulators& acc, Loader<A, TILE_M>& next_a,
                                 Loader<B, TILE_N>& next_b, Slices<A, B>& slices, int first,
                                 int begin, int stop) {
    for (int k = first, slice = 0; k < stop;) {
        // Unrolled, so that each prefetch step uses registers of its own.
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
#if TF32X3
            if constexpr (RECOMPUTE)
                acc.add_each(slices.a[slice], slices.b[slice], TILE_K);
            else
#endif
                acc.add(slices.a[slice], slices.b[slice]);
            k += STRIDE_K;
            slice ^= 1;
        }
    }
}

// Compute the tile (blockIdx.x, blockIdx.y) of Σ over k in [first, stop) of A[i, k] B[k, j] and
// pass it to `store` as store(row, column, values), where values[m][n] belongs to row `row` + m ·
// MEMBER_STEP and column `column` + n. Tiles at the border contain rows and columns beyond the
// matrix. If ADDS, the sums begin with what is stored, which is read while the first operands are
// loaded.
template <bool ADDS = false, class A, class B, class Store>
__device__ void multiply(const A& a, const B& b, int first, int stop, const Store& store) {
    extern __shared__ __align__(16) char memory[];
    Slices<A, B>& slices = reinterpret_cast<Slices<A, B>*>(memory)[threadIdx.y];
    const int top = blockIdx.x * TILE_M, left = blockIdx.y * TILE_N;
    const int begin = first + threadIdx.y * TILE_K;
    Loader<A, TILE_M> next_a(a, top, begin);
    Loader<B, TILE_N> next_b(b, left, begin);
    Accumulators acc;
    const auto load_accumulators = [&] {
        acc = {};
        if constexpr (ADDS)
            if (threadIdx.y == 0) acc.load_tile(top, left, store);
    };
    // The addresses of rows and columns were computed while the previous kernel still ran.
    if (PREFETCH_WEIGHTS) next_b.load_first(begin, stop);
    wait_for_previous_kernel();
    if (!PREFETCH_WEIGHTS) next_b.load_first(begin, stop);
    next_a.load_first(begin, stop);
    load_accumulators();
    add_steps<false>(acc, next_a, next_b, slices, first, begin, stop);
#if TF32X3
    if (__syncthreads_or(acc.any_needs_scalar_sum())) {
        Loader<A, TILE_M> next_a(a, top, begin);
        Loader<B, TILE_N> next_b(b, left, begin);
        next_a.load_first(begin, stop);
        next_b.load_first(begin, stop);
        load_accumulators();
        add_steps<true>(acc, next_a, next_b, slices, first, begin, stop);
    }
#endif
    if (K_GROUPS > 1) reduce_k_groups(acc, reinterpret_cast<float*>(memory));
    if (threadIdx.y == 0) acc.store_tile(top, left, store);
}

// A matrix in memory as an operand with `count` rows of A (columns of B) and `terms` terms.
// `stride` is the distance in elements between consecutive rows of memory. STEP divides the row
// length.
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

// Store `values` from `column` on in a row with `columns` columns, a multiple of STEP.
template <int STEP, class T, class V, int N>
__device__ inline void write(T* row, int column, int columns, const V (&values)[N]) {
    constexpr int PIECE = STEP < N ? STEP : N;
#pragma unroll
    for (int v = 0; v < N; v += PIECE)
        if (column + v < columns)
            *reinterpret_cast<Pack<T, PIECE>*>(row + column + v) = rounded<T, PIECE>(values + v);
}

// Read N elements, with which sums begin, in parts of at most STEP adjacent ones. Element v is at
// from + find(v). If that is negative or nothing `exists`, the result is never stored, and `other`
// is read, which no thread writes: without a condition, compilers need no instruction after the
// load, which would wait for it.
template <int N, int STEP, class T, class Find>
__device__ inline Pack<T, N> read_or_other(const T* from, const T* other, bool exists,
                                           const Find& find) {
    constexpr int PIECE = STEP < N ? STEP : N, BYTES = PIECE * sizeof(T);
    const auto at = [&](int v) { return exists & (find(v) >= 0) ? from + find(v) : other; };
    if constexpr (PIECE == N && BYTES % 4 == 0) {
        using Words = Pack<unsigned, BYTES / 4>;
        const Words words = *reinterpret_cast<const Words*>(at(0));
        return as<Pack<T, N>>(words);
    } else {
        Pack<T, N> pack;
#pragma unroll
        for (int v = 0; v < N; v += PIECE) read<PIECE>(pack, v, at(v));
        return pack;
    }
}

// Store C (rows, columns) unchanged.
template <class T, int STEP> struct StorePlain {
    T* y;
    int rows, columns;
    const T* other = nullptr;  // Of `read_or_other`, for products that begin with what is stored.

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

    // What is stored in a row from `column` on; any numbers unless the row `exists`.
    template <int N> __device__ Pack<T, N> stored(int i, int column, bool exists = true) const {
        return read_or_other<N, STEP>(y, other, exists & (i < rows), [&](int v) {
            return column + v < columns ? i * columns + column + v : -1;
        });
    }
};

// Store the gradient of weights (rows, columns) and the gradient of the bias, which is one further
// row of C. The splits of split-K are (rows + 1) · columns elements apart.
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
