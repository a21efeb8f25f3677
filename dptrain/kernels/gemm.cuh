// C = A B by tiles in shared memory: the main loop of every layer with weights.
//
// A block of threads computes TILE_M x TILE_N elements of C. It walks along the sum TILE_K terms at
// a time: all threads bring a slice of A and of B into shared memory, and each adds its share of
// the products to sums that it holds in registers. There are two slices of each, so that one is
// filled while the other is used and one barrier a step is enough; what the next AHEAD steps need is
// on its way from global memory to registers meanwhile. How slices lie, and who multiplies what, is
// the matter of ffma.cuh (float32) and of mma.cuh (tensor cores).
//
// A convolution is such a product whose A (or B) exists nowhere: an operand says where the elements
// of a row and of positions along the sum come from. They travel in runs of 16 bytes of a slice,
// RUN elements that are neighbours along the sum (SUM_FIRST), or along the rows of A, or columns of
// B. An operand has
//
//     Outer, outer(i)         what it knows of row i of A, or column i of B; worked out once
//     Inner, inner(k)         what it knows of position k along the sum
//     Raw, at(outer, inner)   the run that begins there as it lies in memory, 0 where nothing is
//     value(raw)              its RUN elements, as slices hold them
//
// so that nothing waits for memory before value() is asked for, AHEAD steps later. The order in which an
// element's products are added depends on the kernel and the tile alone: results are the same in
// every run.

#pragma once

#include "number.cuh"

#ifndef AHEAD
#define AHEAD 1
#endif

constexpr int RUN = 16 / sizeof(Number);

// N elements that are read or written at once.
template <class T, int N = RUN>
struct alignas(N * sizeof(T) < 16 ? N * sizeof(T) : 16) Run {
    T at[N];
};

#if PRECISION == 0
#include "ffma.cuh"
#else
#include "mma.cuh"
#endif

// Largest power of two that divides both a run and the length of rows of x and dx (channels,
// inputs), and of y, dy and weights (filters, outputs): so many elements are read at once.
#ifndef IN_STEP
#define IN_STEP 1
#define OUT_STEP 1
#endif

template <int STEP, class T, int N>
__device__ inline void read(Run<T, N>& run, int first, const T* from) {
    const Run<T, STEP> piece = *reinterpret_cast<const Run<T, STEP>*>(from);
#pragma unroll
    for (int v = 0; v < STEP; ++v) run.at[first + v] = piece.at[v];
}

template <class T> __device__ inline Run<Number> as_factors(const Run<T>& run) {
    Run<Number> result;
#pragma unroll
    for (int v = 0; v < RUN; ++v) result.at[v] = as_factor(run.at[v]);
    return result;
}

// A thread's share of a slice of A or B on its way from global to shared memory.
template <class Operand, int WIDTH>
struct Loader {
    static constexpr bool SUM_FIRST = Operand::SUM_FIRST;
    // Runs of a slice, side by side in memory and in all.
    static constexpr int BESIDE = (SUM_FIRST ? TILE_K : WIDTH) / RUN, ALL = WIDTH * TILE_K / RUN;
    static constexpr int COUNT = (ALL + THREADS - 1) / THREADS;
    static constexpr int OUTERS = SUM_FIRST ? COUNT : 1;
    static_assert(THREADS % BESIDE == 0, "a thread's runs begin at one place of their rows");

    const Operand& operand;
    typename Operand::Outer outers[OUTERS];
    typename Operand::Raw raws[AHEAD][COUNT];

    __device__ Loader(const Operand& operand, int first) : operand(operand) {
#pragma unroll
        for (int q = 0; q < OUTERS; ++q) outers[q] = operand.outer(first + place(q));
    }

    // Row or column, inside the tile, of the thread's run q; and its position along the sum.
    static __device__ int place(int q) {
        const int beside = threadIdx.x % BESIDE * RUN;
        return SUM_FIRST ? (threadIdx.x + q * THREADS) / BESIDE : beside;
    }

    static __device__ int position(int q) {
        const int beside = threadIdx.x % BESIDE * RUN;
        return SUM_FIRST ? beside : (threadIdx.x + q * THREADS) / BESIDE;
    }

    static __device__ bool mine(int q) {
        return ALL % THREADS == 0 || threadIdx.x + q * THREADS < ALL;
    }

    // Read positions [k, k + TILE_K) of the sum, as far as they lie below `stop`, into registers of
    // the step that is number `step` of AHEAD.
    __device__ void fetch(int step, int k, int stop) {
        if (SUM_FIRST) {
            const int here = k + position(0);
            const typename Operand::Inner inner = operand.inner(here);
#pragma unroll
            for (int q = 0; q < COUNT; ++q) {
                raws[step][q] = {};
                if (here < stop && mine(q)) raws[step][q] = operand.at(outers[q % OUTERS], inner);
            }
        } else {
#pragma unroll
            for (int q = 0; q < COUNT; ++q) {
                const int here = k + position(q);
                raws[step][q] = {};
                if (here < stop && mine(q))
                    raws[step][q] = operand.at(outers[0], operand.inner(here));
            }
        }
    }

    __device__ void put(int step, Slice<WIDTH, SUM_FIRST>& slice) const {
#pragma unroll
        for (int q = 0; q < COUNT; ++q)
            if (mine(q)) slice.put(place(q), position(q), operand.value(raws[step][q]));
    }
};

// Gives `store` the sums over k in [first, stop) of A[i, k] B[k, j] of the tile that blockIdx.x
// (rows) and blockIdx.y (columns) name: store(row, column, values), values[m][n] being that of row
// row + m MEMBER_STEP and column column + n. Rows and columns beyond the product's are among them.
template <class A, class B, class Store>
__device__ void multiply(const A& a, const B& b, int first, int stop, const Store& store) {
    __shared__ __align__(16) Slice<TILE_M, A::SUM_FIRST> as[2];
    __shared__ __align__(16) Slice<TILE_N, B::SUM_FIRST> bs[2];
    const int top = blockIdx.x * TILE_M, left = blockIdx.y * TILE_N;
    Loader<A, TILE_M> next_a(a, top);
    Loader<B, TILE_N> next_b(b, left);
    Sums sums;

#pragma unroll
    for (int step = 0; step < AHEAD; ++step) {
        next_a.fetch(step, first + step * TILE_K, stop);
        next_b.fetch(step, first + step * TILE_K, stop);
    }
    for (int k = first, slice = 0; k < stop;) {
        // Unrolled, so that each step has registers of its own.
#pragma unroll
        for (int step = 0; step < AHEAD; ++step) {
            if (k >= stop) break;
            next_a.put(step, as[slice]);
            next_b.put(step, bs[slice]);
            __syncthreads();
            if (k + AHEAD * TILE_K < stop) {
                next_a.fetch(step, k + AHEAD * TILE_K, stop);
                next_b.fetch(step, k + AHEAD * TILE_K, stop);
            }
            sums.add(as[slice], bs[slice]);
            k += TILE_K;
            slice ^= 1;
        }
    }
    sums.give(top, left, store);
}

// A matrix in memory as an operand: `count` rows of A (columns of B) and `terms` of the sum,
// neighbours along whichever index does not lie side by side `stride` elements apart; STEP divides
// the length of what does.
template <class T, bool SUM_FIRST_, int STEP>
struct Matrix {
    static constexpr bool SUM_FIRST = SUM_FIRST_;
    using Outer = int;
    using Inner = int;
    using Raw = Run<T>;

    const T* data;
    int count, terms, stride;

    __device__ Outer outer(int i) const { return i; }
    __device__ Inner inner(int k) const { return k; }
    __device__ Raw at(Outer i, Inner k) const {
        Raw run = {};
        if (SUM_FIRST && i >= count) return run;
#pragma unroll
        for (int v = 0; v < RUN; v += STEP) {
            if (SUM_FIRST && k + v < terms) read<STEP>(run, v, data + i * stride + k + v);
            if (!SUM_FIRST && i + v < count) read<STEP>(run, v, data + k * stride + i + v);
        }
        return run;
    }
    __device__ Run<Number> value(const Raw& raw) const { return as_factors(raw); }
};

template <class T> __device__ inline T converted(float value) { return from_float<T>(value); }
template <class T> __device__ inline T converted(int value) { return T(value); }

// Writes `values` from `column` on into a row of so many columns, a multiple of STEP.
template <int STEP, class T, class V, int N>
__device__ inline void write(T* row, int column, int columns, const V (&values)[N]) {
    constexpr int PIECE = STEP < N ? STEP : N;
#pragma unroll
    for (int v = 0; v < N; v += PIECE) {
        if (column + v >= columns) continue;
        Run<T, PIECE> piece;
#pragma unroll
        for (int u = 0; u < PIECE; ++u) piece.at[u] = converted<T>(values[v + u]);
        *reinterpret_cast<Run<T, PIECE>*>(row + column + v) = piece;
    }
}

// C itself, of rows x columns.
template <class T, int STEP>
struct StorePlain {
    T* y;
    int rows, columns;

    template <int N>
    __device__ void operator()(int row, int column, const float (&values)[4][N]) const {
#pragma unroll
        for (int m = 0; m < 4; ++m) {
            const int i = row + m * MEMBER_STEP;
            if (i < rows) write<STEP>(y + i * columns, column, columns, values[m]);
        }
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
            write<OUT_STEP>(to + part, column, columns, values[m]);
        }
    }
};
