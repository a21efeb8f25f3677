// GEMM by TMA and wgmma (Hopper), C = A B: large dense layers, and convolutions with many channels.
//
// A block computes a tile of TILE_M × TILE_N elements of C. Its last warp is the producer: one
// thread copies slices of both operands by TMA into a ring buffer of STAGES stages. The other warps
// are consumers, a warp group for each 64 rows of the tile. Barriers `full` and `empty` of each
// stage connect them. A slice has TILE_K terms, which are 128 bytes of a row, and is stored with
// the swizzle of 128 bytes, from which wgmma reads it:
//
//     K-major      extent rows of TILE_K terms
//     otherwise    blocks of TILE_K terms (rows) × TILE_K rows of A or columns of B
//
// tf32 operands in shared memory must be K-major. If A is not, its fragments are read into
// registers; then the rows of a warp are permuted such that lanes read different banks.
//
// Accumulators are exchanged through shared memory, so that a thread stores 16 bytes of adjacent
// elements of C, or of its transpose if C_TRANSPOSED.
//
// Without tensor maps (the emulator), scalar instructions multiply elements from global memory.
//
// Source: the warp-specialised kernels of CUTLASS
// (cutlass/gemm/kernel/sm90_gemm_tma_warpspecialized.hpp).

#pragma once

#ifndef PRECISION
#define PRECISION 2  // These kernels exist for tf32 and bf16 only.
#endif
#ifndef STAGES
#define TILE_M 128
#define TILE_N 64
#define WARP_M 16
#define WARP_N 64
#define TILE_K_WORDS 32
#define STAGES 4
#define MIN_BLOCKS 2
#define BARRIERS_OFFSET 98304
#endif

#include "gradient_sums.cuh"
#include "tma.cuh"

// Tensor map i of the kernel; null without tensor maps.
#if TENSOR_MAPS
#define MAP(i) (TENSOR_MAPS_ARGUMENT + (i))
#else
#define MAP(i) nullptr
#endif

constexpr int PRODUCER_THREADS = 32, ALL_THREADS = THREADS + PRODUCER_THREADS, ROW_BYTES = 128;
constexpr int STAGE_BYTES = (TILE_M + TILE_N) * ROW_BYTES, N8_TILES = TILE_N / 8;
static_assert(WARP_M == 16 && WARP_N == TILE_N && TILE_K * sizeof(Number) == ROW_BYTES,
              "a warp has 16 rows of the tile, a slice 128 bytes of each");

#if TENSOR_MAPS
// How wgmma reads a slice of an operand.
template <bool K_MAJOR> struct SliceLayout {
    // Descriptor of rows of a slice, and its distance to the next instruction's terms.
    static __device__ unsigned long long descriptor(const char* slice) {
        return K_MAJOR ? wgmma::swizzled_descriptor<8>(slice, 8 * ROW_BYTES)
                       : wgmma::descriptor(slice, TILE_K * ROW_BYTES, 8 * ROW_BYTES) | 1ull << 62;
    }
    static constexpr int NEXT_TERMS = (K_MAJOR ? 32 : STEP_K * ROW_BYTES) / 16;
};
#endif

// An operand has K_MAJOR, `element(i, k)`, and `slices<EXTENT>(first, k)`: the slices of EXTENT rows
// of A or columns of B from `first` on, beginning with the terms from k on. Their method
// copy(to, barrier) starts the copies of one slice, and next() goes on to the following TILE_K terms.
// One thread copies all slices of a block, so next() should not divide: with about eight divisions
// for each slice, products took 2 to 5% longer.

// A matrix (count, terms) with adjacent terms (K_MAJOR), or (terms, count), in rows of `pitch`
// elements. `map` is its tensor map.
template <bool K_MAJOR_> struct TiledMatrix {
    static constexpr bool K_MAJOR = K_MAJOR_;

    const TensorMap* map;
    const Number* data;
    int count, pitch;

    __device__ float element(int i, int k) const {
        Pack<Number> pack = {};
        if (i < count) pack.at[0] = data[K_MAJOR ? i * pitch + k : k * pitch + i];
        return to_float(round_operands(pack).at[0]);
    }
#if TENSOR_MAPS
    template <int EXTENT> struct Slices {
        const TensorMap* map;
        int first, k;

        __device__ void copy(char* to, MBarrier* barrier) const {
            if (K_MAJOR) {
                tma_copy_box(to, map, k, first, barrier);
            } else {
#pragma unroll
                for (int i = 0; i < EXTENT; i += TILE_K)
                    tma_copy_box(to + i * ROW_BYTES, map, first + i, k, barrier);
            }
        }
        __device__ void next() { k += TILE_K; }
    };
    template <int EXTENT> __device__ Slices<EXTENT> slices(int first, int k) const {
        return {map, first, k};
    }
#endif
};

// What store.pixel() needs of a row of C: by default its number. Each lane computes it for one row.
template <class Store> __device__ inline int row_place(const Store&, int row) { return row; }

template <bool C_TRANSPOSED, class A, class B> struct WgmmaGemm {
    // Whether A is read into registers, and the fragments that are read at once. With wide tiles and
    // more than 256 resident threads, two would exceed the registers, and wgmma would be serialized.
    static constexpr bool REGISTER_A = PRECISION == 1 && !A::K_MAJOR;
    static constexpr int FRAGMENTS = MIN_BLOCKS * THREADS > 256 && TILE_N > 64 ? 1 : 2;

    const A& a;
    const B& b;
    char* memory;
    int top = blockIdx.x * TILE_M, left = blockIdx.y * TILE_N;
    float c[N8_TILES][4] = {};

    // Row of the tile of fragment row r, 0 to 15, of this warp.
    static __device__ int tile_row(int r) {
        const int warp = threadIdx.x / 32;
        if (!REGISTER_A) return warp * 16 + r;
        return warp / 2 * 32 + 4 * (warp % 2 * 2 + r / 8 + r % 8 / 4 * 4) + r % 4;
    }

#if TENSOR_MAPS
    struct Barriers {
        MBarrier full[STAGES], empty[STAGES];
    };
    __device__ Barriers& barriers() const {
        return *reinterpret_cast<Barriers*>(memory + BARRIERS_OFFSET);
    }

    // One thread initialises the barriers; the block must synchronise afterwards.
    __device__ void init() const {
        for (int i = 0; i < STAGES; ++i) {
            barriers().full[i].init();
            barriers().empty[i].init(THREADS / 32);
        }
    }

    // Copy all slices of the sum. Only one thread calls this.
    __device__ void produce(int first, int steps) const {
        auto slices_a = a.template slices<TILE_M>(top, first);
        auto slices_b = b.template slices<TILE_N>(left, first);
        for (int step = 0; step < steps; ++step) {
            const int slot = step % STAGES;
            MBarrier& full = barriers().full[slot];
            if (step >= STAGES) barriers().empty[slot].wait(step / STAGES - 1);
            full.arrive_expect_tx(STAGE_BYTES);
            char* const stage = memory + slot * STAGE_BYTES;
            slices_a.copy(stage, &full);
            slices_b.copy(stage + TILE_M * ROW_BYTES, &full);
            slices_a.next();
            slices_b.next();
        }
    }

    // Multiply all slices.
    __device__ void consume(int steps) {
        using LayoutA = SliceLayout<A::K_MAJOR>;
        using LayoutB = SliceLayout<B::K_MAJOR>;
        const int rows = threadIdx.x / 128 * 64 * ROW_BYTES;
        const unsigned long long first_a = LayoutA::descriptor(memory + rows),
                                 first_b = LayoutB::descriptor(memory + TILE_M * ROW_BYTES);
#pragma unroll 1
        for (int step = 0; step < steps; ++step) {
            const int slot = step % STAGES;
            barriers().full[slot].wait(step / STAGES);
            const int at = slot * (STAGE_BYTES / 16);
            if constexpr (REGISTER_A) {
#pragma unroll
                for (int i = 0; i < TILE_K / STEP_K; i += FRAGMENTS) {
                    unsigned words[FRAGMENTS][4];
                    load_fragments(words, memory + slot * STAGE_BYTES, i);
                    wgmma::fence();
#pragma unroll
                    for (int n = 0; n < FRAGMENTS; ++n)
                        wgmma::mma<false>(c, words[n], first_b + at + (i + n) * LayoutB::NEXT_TERMS);
                    wgmma::commit_group();
                    wgmma::wait_group<0>();
                }
                release(step);
            } else {
                wgmma::fence();
#pragma unroll
                for (int i = 0; i < TILE_K / STEP_K; ++i)
                    wgmma::mma<!A::K_MAJOR, !B::K_MAJOR>(c, first_a + at + i * LayoutA::NEXT_TERMS,
                                                         first_b + at + i * LayoutB::NEXT_TERMS);
                wgmma::commit_group();
                wgmma::wait_group<1>();
                if (step > 0) release(step - 1);
            }
        }
        wgmma::wait_group<0>();
#pragma unroll
        for (int j = 0; j < N8_TILES; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) asm volatile("" : "+f"(c[j][e])::"memory");
    }

    // This warp no longer reads the slices of a step.
    __device__ void release(int step) const {
        if (threadIdx.x % 32 == 0) barriers().empty[step % STAGES].arrive();
    }

    // Read the fragments of A of FRAGMENTS instructions. The slice has TILE_K terms × 32 rows in
    // each block.
    static __device__ void load_fragments(unsigned (&words)[FRAGMENTS][4], const char* slice,
                                          int first) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < FRAGMENTS; ++i)
#pragma unroll
            for (int q = 0; q < 4; ++q) {
                const int row = tile_row(q % 2 * 8 + lane / 4), k = q / 2 * 4 + lane % 4;
                const int at = row / 32 * (TILE_K * ROW_BYTES) + k * ROW_BYTES +
                               (row % 32 / 4 ^ k) * 16 + row % 4 * 4;
                words[i][q] = *reinterpret_cast<const unsigned*>(slice + at +
                                                                 (first + i) * 8 * ROW_BYTES);
            }
    }
#else
    __device__ void multiply_scalar(int first, int stop) {
        const int lane = threadIdx.x % 32;
        for (int j = 0; j < N8_TILES; ++j)
            for (int e = 0; e < 4; ++e) {
                const int row = top + tile_row(e / 2 * 8 + lane / 4);
                const int column = left + j * 8 + lane % 4 * 2 + e % 2;
                for (int k = first; k < stop; ++k)
                    c[j][e] += a.element(row, k) * b.element(column, k);
            }
    }
#endif

    static constexpr int PITCH = C_TRANSPOSED ? 20 : TILE_N + 8,
                         WARP_FLOATS = C_TRANSPOSED ? TILE_N * PITCH : 16 * PITCH;

    // Exchange the accumulators of the lanes of a warp, each warp through memory of its own.
    __device__ void exchange() const {
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        float* const own = warp_memory(threadIdx.x / 32);
#pragma unroll
        for (int j = 0; j < N8_TILES; ++j)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int row = g + h * 8, column = j * 8 + t * 2;
                if (C_TRANSPOSED) {
                    own[column * PITCH + row] = c[j][h * 2];
                    own[(column + 1) * PITCH + row] = c[j][h * 2 + 1];
                } else {
                    *reinterpret_cast<Pack<float, 2>*>(own + row * PITCH + column) = {
                        c[j][h * 2], c[j][h * 2 + 1]};
                }
            }
        __syncwarp();
    }
    __device__ float* warp_memory(int warp) const {
        return reinterpret_cast<float*>(memory) + warp * WARP_FLOATS;
    }

    // The place of the row of line lane % 16 of this warp.
    template <class Store> __device__ int place_of_lane(const Store& store) const {
        return row_place(store, min(top + tile_row(threadIdx.x % 16), store.rows - 1));
    }

    // Read WIDTH adjacent elements of a line of the exchanged tile.
    template <int WIDTH>
    __device__ void read_line(float (&values)[WIDTH], int line, int first) const {
        const float* const from = warp_memory(threadIdx.x / 32) + line * PITCH + first;
#pragma unroll
        for (int v = 0; v < WIDTH; v += 4) {
            const Pack<float, 4> part = *reinterpret_cast<const Pack<float, 4>*>(from + v);
#pragma unroll
            for (int n = 0; n < 4; ++n) values[v + n] = part.at[n];
        }
    }

    // Pass the tile, which was exchanged, to store.pixel(row, column, values) in vectors of 16 bytes
    // of adjacent columns.
    template <class Store> __device__ void store_tile(const Store& store) const {
        constexpr int WIDTH = 16 / sizeof(*store.y),
                      ROW_VECTORS = (C_TRANSPOSED ? 16 : TILE_N) / WIDTH;
        const int lane = threadIdx.x % 32, places = place_of_lane(store);
#pragma unroll 4
        for (int i = lane; i < 16 * TILE_N / WIDTH; i += 32) {
            const int line = i / ROW_VECTORS, first = i % ROW_VECTORS * WIDTH;
            float values[WIDTH];
            read_line(values, line, first);
            const int row = C_TRANSPOSED ? left + line : top + tile_row(line);
            const int column = C_TRANSPOSED ? top + tile_row(first) : left + first;
            const int place = C_TRANSPOSED ? row : __shfl_sync(~0u, places, line);
            if (row < store.rows && column < store.columns) store.pixel(place, column, values);
        }
    }

    // The same with the sums of a gradient, see gradient_sums.cuh: a lane has the same columns in all
    // lines, and leaves their sums in the memory of its warp in place of the tile.
    template <class Store> __device__ void store_and_sum(const Store& store) const {
        constexpr int WIDTH = 16 / sizeof(*store.y), ROW_VECTORS = TILE_N / WIDTH,
                      LANES = ROW_VECTORS < 32 ? ROW_VECTORS : 32, PARTS = ROW_VECTORS / LANES,
                      NEXT = 32 / LANES;
        // Lines that a lane loads at once, so that memory is busy.
        constexpr int LINES = ACTIVATION_FROM == 2 || ADD_GRADIENT ? 4 : 8,
                      BATCH = LINES < 16 / NEXT ? LINES : 16 / NEXT;
        static_assert(!C_TRANSPOSED, "sums are those of columns");
        const int lane = threadIdx.x % 32;
        const int places = Store::DIVIDES ? place_of_lane(store) : 0;
        float results[PARTS][2][WIDTH];
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            const int first = (part * LANES + lane % LANES) * WIDTH, column = left + first;
            const bool exists = column < store.columns;
            GradientSums<WIDTH> own(store.normalization, exists ? column : 0, store.columns);
#pragma unroll 1
            for (int line = lane / LANES; line < 16; line += BATCH * NEXT) {
                GradientPixel<WIDTH> pixels[BATCH];
                int found[BATCH];
#pragma unroll
                for (int i = 0; i < BATCH; ++i)
                    found[i] = Store::DIVIDES ? __shfl_sync(~0u, places, line + i * NEXT)
                                              : row_place(store, top + tile_row(line + i * NEXT));
#pragma unroll
                for (int i = 0; i < BATCH; ++i)
                    if (exists && top + tile_row(line + i * NEXT) < store.rows)
                        store.load(pixels[i], found[i], column);
#pragma unroll
                for (int i = 0; i < BATCH; ++i) {
                    float values[WIDTH];
                    read_line(values, line + i * NEXT, first);
                    if (pixels[i].exists()) store.pixel(pixels[i], values, own);
                }
            }
#pragma unroll
            for (int bit = LANES; bit < 32; bit *= 2) own.join_lane(bit);
#pragma unroll
            for (int n = 0; n < WIDTH; ++n)
                results[part][0][n] = own.sum[n], results[part][1][n] = own.along[n];
        }
        __syncwarp();
        float* const to = warp_memory(threadIdx.x / 32);
        if (lane < LANES)
#pragma unroll
            for (int part = 0; part < PARTS; ++part)
#pragma unroll
                for (int s = 0; s < 2; ++s)
#pragma unroll
                    for (int n = 0; n < WIDTH; ++n)
                        to[s * TILE_N + (part * LANES + lane) * WIDTH + n] = results[part][s][n];
    }

    // Add the sums that all warps have left, and store them.
    __device__ void store_sums(float* sums, int columns) const {
        const int row = blockIdx.z * gridDim.x + blockIdx.x;
        for (int i = threadIdx.x; i < 2 * TILE_N; i += THREADS) {
            const int s = i / TILE_N, column = left + i % TILE_N;
            float sum = 0.0f;
#pragma unroll
            for (int warp = 0; warp < THREADS / 32; ++warp) sum += warp_memory(warp)[i];
            if (column < columns) sums[(row * 2 + s) * columns + column] = sum;
        }
    }

    // Store the sums of each column of the tile, which all warps have exchanged. All threads call
    // this; those of a column sum a part of the rows each.
    template <class Store> __device__ void sum_columns(const Store& store, float* sums) const {
        constexpr int PARTS = THREADS / TILE_N, PART_ROWS = TILE_M / PARTS;
        static_assert(!C_TRANSPOSED && THREADS % TILE_N == 0, "threads must divide the tile");
        __shared__ ShiftedSums parts[PARTS > 1 ? THREADS : 1];
        const int part = threadIdx.x / TILE_N, column = threadIdx.x % TILE_N;
        const int stop = part < PARTS ? min(PART_ROWS, store.rows - top - part * PART_ROWS) : 0;
        const float bias = left + column < store.columns ? __ldg(store.bias + left + column) : 0.0f;
        ShiftedSums own;
#pragma unroll 8
        for (int i = 0; i < stop; ++i) {
            const int row = part * PART_ROWS + i;
            own.add(stored_value(warp_memory(row / 16)[row % 16 * PITCH + column] + bias));
        }
        if constexpr (PARTS > 1) {
            if (part < PARTS) parts[threadIdx.x] = own;
            __syncthreads();
            if (part == 0)
#pragma unroll
                for (int other = 1; other < PARTS; ++other)
                    own.join(parts[threadIdx.x + other * TILE_N]);
        }
        if (part == 0) own.store(sums, blockIdx.x, store.columns, left + column);
    }
};

// Sums of columns that are stored with a tile: none, those of output_sums.cuh, or of gradient_sums.cuh.
enum Summed { NO_SUMS, OUTPUT_SUMS, GRADIENT_SUMS };

// Compute the tile (blockIdx.x, blockIdx.y) of Σ over k in [first, stop) of A[i, k] B[k, j] and
// store it. `first` is a multiple of TILE_K; the operands end at `stop` or it is a multiple too.
template <bool C_TRANSPOSED, Summed SUMMED = NO_SUMS, class A, class B, class Store>
__device__ void wgmma_gemm(const A& a, const B& b, int first, int stop, const Store& store,
                           float* sums = nullptr) {
    extern __shared__ __align__(1024) char memory[];
    WgmmaGemm<C_TRANSPOSED, A, B> gemm{a, b, memory};
#if TENSOR_MAPS
    if (threadIdx.x == 0) gemm.init();
    __syncthreads();
    wait_for_previous_kernel();
    const int steps = max(stop - first + TILE_K - 1, 0) / TILE_K;
    if (threadIdx.x >= THREADS) {
        if (threadIdx.x == THREADS) gemm.produce(first, steps);
        __syncwarp();
    } else {
        gemm.consume(steps);
    }
#else
    wait_for_previous_kernel();
    if (threadIdx.x < THREADS) gemm.multiply_scalar(first, stop);
#endif
    __syncthreads();
    if (threadIdx.x < THREADS) gemm.exchange();
    if constexpr (SUMMED == OUTPUT_SUMS) {
        __syncthreads();
        gemm.sum_columns(store, sums);
    }
    if constexpr (SUMMED == GRADIENT_SUMS) {
        if (threadIdx.x < THREADS) gemm.store_and_sum(store);
        __syncthreads();
        if (threadIdx.x < THREADS) gemm.store_sums(sums, store.columns);
    } else {
        if (threadIdx.x < THREADS) gemm.store_tile(store);
    }
}
