// C = A B in float32, by tiles in shared memory: the main loop of every layer with weights.
//
// A block of threads computes TILE_M x TILE_N elements of C. It walks along the sum TILE_K
// positions at a time: all threads bring a slice of A and of B into shared memory, and each adds
// the products of its THREAD_M x THREAD_N elements, held in registers. There are two slices of
// each, so that one is filled while the other is used and one barrier a step is enough.
//
// A convolution is such a product whose A (or B) exists nowhere: an operand says where the element
// of a row and a position along the sum comes from. It has
//
//     Outer, outer(i)         what it knows of row i of A, or column i of B; worked out once
//     Inner, inner(k)         what it knows of position k along the sum
//     at(outer, inner)        the element, 0 where i is no row
//     SUM_FIRST               whether neighbours along the sum lie side by side in memory
//
// The order in which an element's products are added is that of k, whatever the tile.

#pragma once

#ifndef TILE_M
#define TILE_M 64
#define TILE_N 64
#define THREAD_M 4
#define THREAD_N 4
#endif

constexpr int TILE_K = 16;
constexpr int PAD = 4;  // Keeps vectors of four aligned, and spreads a column over the banks.
constexpr int THREADS = (TILE_M / THREAD_M) * (TILE_N / THREAD_N);

static_assert(THREAD_M % 4 == 0 && THREAD_N % 4 == 0, "registers are filled four at a time");
static_assert(THREADS % TILE_M == 0 && THREADS % TILE_N == 0 && THREADS % TILE_K == 0,
              "each thread brings in one row or one position of every slice");

template <int WIDTH>
using Slice = float[TILE_K][WIDTH + PAD];

// A thread's share of a slice of A or B on its way from global to shared memory.
template <class Operand, int WIDTH>
struct Loader {
    static constexpr int COUNT = WIDTH * TILE_K / THREADS;
    static constexpr int OUTERS = Operand::SUM_FIRST ? COUNT : 1;

    const Operand& operand;
    typename Operand::Outer outers[OUTERS];
    float values[COUNT];

    __device__ Loader(const Operand& operand, int first) : operand(operand) {
#pragma unroll
        for (int q = 0; q < OUTERS; ++q) outers[q] = operand.outer(first + place(q));
    }

    // Row or column, inside the tile, of the thread's element q; and its position along the sum.
    static __device__ int place(int q) {
        const int element = threadIdx.x + q * THREADS;
        return Operand::SUM_FIRST ? element / TILE_K : element % WIDTH;
    }

    static __device__ int position(int q) {
        const int element = threadIdx.x + q * THREADS;
        return Operand::SUM_FIRST ? element % TILE_K : element / WIDTH;
    }

    // Read positions [k, k + TILE_K) of the sum, as far as they lie below `stop`.
    __device__ void fetch(int k, int stop) {
        if (Operand::SUM_FIRST) {
            const int here = k + position(0);
            const typename Operand::Inner inner = operand.inner(here);
#pragma unroll
            for (int q = 0; q < COUNT; ++q)
                values[q] = here < stop ? operand.at(outers[q % OUTERS], inner) : 0.0f;
        } else {
#pragma unroll
            for (int q = 0; q < COUNT; ++q) {
                const int here = k + position(q);
                values[q] = here < stop ? operand.at(outers[0], operand.inner(here)) : 0.0f;
            }
        }
    }

    __device__ void put(Slice<WIDTH>& slice) const {
#pragma unroll
        for (int q = 0; q < COUNT; ++q) slice[position(q)][place(q)] = values[q];
    }
};

// Row of the tile that holds a thread's register row i: runs of four, spread over the tile, so
// that the threads of a warp read shared memory side by side.
template <int TILE, int COUNT>
__device__ int spread(int thread, int i) {
    return (i / 4) * (TILE / (COUNT / 4)) + thread * 4 + i % 4;
}

__device__ inline void add_products(const Slice<TILE_M>& as, const Slice<TILE_N>& bs, int row,
                                    int column, float (&c)[THREAD_M][THREAD_N]) {
#pragma unroll
    for (int k = 0; k < TILE_K; ++k) {
        float a[THREAD_M], b[THREAD_N];
#pragma unroll
        for (int i = 0; i < THREAD_M; ++i) a[i] = as[k][spread<TILE_M, THREAD_M>(row, i)];
#pragma unroll
        for (int j = 0; j < THREAD_N; ++j) b[j] = bs[k][spread<TILE_N, THREAD_N>(column, j)];
#pragma unroll
        for (int i = 0; i < THREAD_M; ++i)
#pragma unroll
            for (int j = 0; j < THREAD_N; ++j) c[i][j] += a[i] * b[j];
    }
}

// store(i, j, sum over k in [first, stop) of A[i, k] B[k, j]) for i < rows and j < columns of the
// tile that blockIdx.x (rows) and blockIdx.y (columns) name.
template <class A, class B, class Store>
__device__ void multiply(const A& a, const B& b, int rows, int columns, int first, int stop,
                         const Store& store) {
    __shared__ __align__(16) Slice<TILE_M> as[2];
    __shared__ __align__(16) Slice<TILE_N> bs[2];
    const int top = blockIdx.x * TILE_M, left = blockIdx.y * TILE_N;
    const int row = threadIdx.x / (TILE_N / THREAD_N), column = threadIdx.x % (TILE_N / THREAD_N);
    Loader<A, TILE_M> next_a(a, top);
    Loader<B, TILE_N> next_b(b, left);
    float c[THREAD_M][THREAD_N] = {};

    next_a.fetch(first, stop);
    next_b.fetch(first, stop);
    for (int k = first, slice = 0; k < stop; k += TILE_K, slice ^= 1) {
        next_a.put(as[slice]);
        next_b.put(bs[slice]);
        __syncthreads();
        next_a.fetch(k + TILE_K, stop);
        next_b.fetch(k + TILE_K, stop);
        add_products(as[slice], bs[slice], row, column, c);
    }
#pragma unroll
    for (int i = 0; i < THREAD_M; ++i) {
        const int y = top + spread<TILE_M, THREAD_M>(row, i);
#pragma unroll
        for (int j = 0; j < THREAD_N; ++j) {
            const int x = left + spread<TILE_N, THREAD_N>(column, j);
            if (y < rows && x < columns) store(y, x, c[i][j]);
        }
    }
}

// A matrix in memory as an operand: `count` rows of A (columns of B), each element `stride` apart
// along whichever index does not lie side by side.
template <bool SUM_FIRST_>
struct Matrix {
    static constexpr bool SUM_FIRST = SUM_FIRST_;
    using Outer = int;
    using Inner = int;

    const float* data;
    int count, stride;

    __device__ Outer outer(int i) const { return i; }
    __device__ Inner inner(int k) const { return k; }
    __device__ float at(Outer i, Inner k) const {
        if (i >= count) return 0.0f;
        return SUM_FIRST ? data[i * stride + k] : data[k * stride + i];
    }
};

// y = value + bias, or max(0, that).
struct StoreActivation {
    float* y;
    const float* bias;
    int columns;
    bool relu;

    __device__ void operator()(int i, int j, float value) const {
        const float z = value + bias[j];
        // Written so that a NaN stays.
        y[i * columns + j] = relu && z <= 0.0f ? 0.0f : z;
    }
};

struct StorePlain {
    float* y;
    int columns;

    __device__ void operator()(int i, int j, float value) const { y[i * columns + j] = value; }
};

// Gradients of weights, and of the bias as one row more; part z of several lies `size` elements
// behind part z - 1.
struct StoreGradient {
    float *dweight, *dbias;
    int rows, columns;

    __device__ void operator()(int i, int j, float value) const {
        const int part = blockIdx.z * (rows + 1) * columns;
        if (i < rows)
            dweight[part + i * columns + j] = value;
        else
            dbias[part + j] = value;
    }
};
