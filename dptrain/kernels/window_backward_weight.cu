// Terms of the sum that a block takes at a time.
#ifndef TERMS
#define TERMS 128
#define TILE_M 320
#define TILE_N 64
#define WARP_M 80
#define WARP_N 64
#define WORDS 16
#endif

#include "order.cuh"
#include "window.cuh"

// tf32 has no transposed operands, so there a piece of B is four terms of a column.
constexpr bool TRANSPOSED = PRECISION == 2;
constexpr int PIECES = TRANSPOSED ? TERMS : TILE_N, PLANES = TERMS * TILE_N / RUN / PIECES;
// One piece more, so that planes begin in different banks.
constexpr int DISTANCE = (PIECES + 1) * RUN;

constexpr int MEMBERS = BEHIND == 2 ? 4 : 1, UNIT = BEHIND == 2 ? 2 : 1;

// Pixels from a row to the next, such that a window's members lie in different banks.
__device__ inline int apart(int across) {
    if (BEHIND != 2) return across;
    return PRECISION == 1 ? (across + 1) / 4 * 4 + 2 : (across + 3) / 8 * 8 + 4;
}

// Pixels in the order of the sum: window by window where these are pooled.
struct SumOrder {
    const View& view;

    __device__ Pixel operator()(int k) const {
        const int i = k / MEMBERS, member = k % MEMBERS;
        const int width = view.out_width / UNIT, height = view.out_height / UNIT, row = i / width;
        return {row / height, row % height * UNIT + member / UNIT,
                i % width * UNIT + member % UNIT};
    }
};

// A: a row is (r, s, c), a term a pixel.
struct TapRows {
    const Window& window;
    const int* places;  // Of the pixels.
    int top;            // First row.
    int offsets[Sums::DOWN];

    __device__ TapRows(const Window& window, const int* places, int top)
        : window(window), places(places), top(top) {
#pragma unroll
        for (int i = 0; i < Sums::DOWN; ++i) offsets[i] = offset(Sums::top() + i * 16);
    }

    // Of a row of the tile; of the last tap, of which nobody asks, behind it.
    __device__ int offset(int row) const {
        const View& v = window.view;
        const int i = top + row, tap = min(i / v.channels, v.r * v.s - 1);
        return (tap / v.s * v.across + tap % v.s) * window.pixel + i % v.channels;
    }
    __device__ Number element(int row, int k) const {
        return window.numbers[places[k] + offset(row)];
    }
#if __CUDA_ARCH__ >= 800
    int at[PRECISION == 1 ? 2 : 1];

    __device__ void term(int k) {
        const int lane = threadIdx.x % 32;
#if PRECISION == 1
        at[0] = places[k + lane % 4] + lane / 4;
        at[1] = places[k + lane % 4 + 4] + lane / 4;
#else
        at[0] = places[k + lane % 8 + lane / 16 * 8] + lane / 8 % 2 * 8;
#endif
    }
    __device__ void words(unsigned (&words)[4], int i) const {
#if PRECISION == 1
#pragma unroll
        for (int q = 0; q < 4; ++q)
            words[q] = __float_as_uint(window.numbers[at[q / 2] + offsets[i] + q % 2 * 8]);
#else
        read_transposed(words, window.numbers + at[0] + offsets[i]);
#endif
    }
#endif
};

// B, dz: terms [k, stop) of the columns from `left` on, TERMS at the most, and their sums.
struct GradientPlanes {
    Gradient dz;
    int filters, left;
    Number* numbers;
    float totals[TRANSPOSED ? RUN : 1] = {};  // Of columns, the thread's share.

    static constexpr int COLUMNS = TILE_N / RUN;  // Runs of columns.
    static_assert(THREADS % TILE_N == 0, "a thread's pieces are of one column");

    __device__ Run<Number>* at(int plane, int piece) const {
        return reinterpret_cast<Run<Number>*>(numbers + plane * DISTANCE + piece * RUN);
    }

    // Work is cut into runs of columns of FOUR terms or of one.
    static constexpr int FOUR = TRANSPOSED && BEHIND != 2 ? 1 : 4;

    // Of item i. Where pieces are terms, eight lanes side by side write two columns of four pieces,
    // in different banks.
    static __device__ int column(int i) {
        return TRANSPOSED ? i % COLUMNS : i % 2 + i / 8 % (COLUMNS / 2) * 2;
    }
    static __device__ int term(int i) {
        return (TRANSPOSED ? i / COLUMNS : i / 2 % 4 + i / (COLUMNS * 4) * 4) * FOUR;
    }

    // Some copies may be under way when this returns.
    __device__ void fill(int k, int stop) const {
        const auto source = [&](int i, int v) {
            const int filter = left + column(i) * RUN, at = k + term(i) + v;
            const bool inside = at < stop && filter < filters;
            return inside ? at / MEMBERS * filters + filter : -1;
        };
        constexpr int ALL = TERMS / FOUR * COLUMNS;
#if BEHIND == 2
        const auto fetch = [&](int i) {
            const int at = source(i, 0);
            return at < 0 ? PooledRun{} : PooledRun::read(dz, at);
        };
        in_batches<PooledRun, 2>(ALL, fetch, [&](int i, PooledRun run) {
            run.scale(dz.factor);
            const Run<Number> runs[4] = {run.member(0), run.member(1), run.member(2),
                                         run.member(3)};
            put(i, runs);
        });
#else
        if constexpr (BEHIND == 0 && TRANSPOSED) {
            for (int i = threadIdx.x; i < ALL; i += THREADS)
                copy_later(at(column(i), term(i))->at, dz.dy + max(source(i, 0), 0),
                           source(i, 0) < 0);
        } else {
            struct Raws {
                Gradient::Raw at[FOUR];
            };
            const auto fetch = [&](int i) {
                Raws raws = {};
#pragma unroll
                for (int v = 0; v < FOUR; ++v)
                    if (source(i, v) >= 0) dz.piece(raws.at[v], 0, source(i, v), 0);
                return raws;
            };
            in_batches<Raws, FOUR == 1 ? 2 : 1>(ALL, fetch, [&](int i, const Raws& raws) {
                Run<Number> runs[FOUR];
#pragma unroll
                for (int v = 0; v < FOUR; ++v) runs[v] = dz.value(raws.at[v]);
                put(i, runs);
            });
        }
#endif
    }

    __device__ void put(int i, const Run<Number> (&runs)[FOUR]) const {
        if constexpr (TRANSPOSED) {
#pragma unroll
            for (int v = 0; v < FOUR; ++v) *at(column(i), term(i) + v) = runs[v];
        } else {
#pragma unroll
            for (int n = 0; n < RUN; ++n) {
                Run<Number> terms;
#pragma unroll
                for (int v = 0; v < RUN; ++v) terms.at[v] = runs[v].at[n];
                *at(term(i) / RUN, column(i) * RUN + n) = terms;
            }
        }
    }

    // Adds what the planes hold to the totals.
    __device__ void add() {
#pragma unroll 4
        for (int i = threadIdx.x; i < TERMS * COLUMNS; i += THREADS) {
            const Run<Number> run =
                TRANSPOSED ? *at(i % COLUMNS, i / COLUMNS) : *at(i / TILE_N, i % TILE_N);
#pragma unroll
            for (int n = 0; n < RUN; ++n) totals[TRANSPOSED ? n : 0] += to_float(run.at[n]);
        }
    }

    // The totals of all threads, added in order in the block's `memory`.
    __device__ void give_totals(float* memory, float* to) const {
        constexpr int OWN = TRANSPOSED ? RUN : 1, SHARES = THREADS * OWN / TILE_N;
        __syncthreads();
#pragma unroll
        for (int n = 0; n < OWN; ++n) memory[threadIdx.x * OWN + n] = totals[n];
        __syncthreads();
        const int own = threadIdx.x;
        if (own >= TILE_N || left + own >= filters) return;
        float sum = 0.0f;
        for (int share = 0; share < SHARES; ++share) sum += memory[share * TILE_N + own];
        to[left + own] = sum;
    }
};

// dw and db of the positions [z part, (z + 1) part) of the sum, z = blockIdx.z, into part z.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    window_backward_weight(const Number* x, const Number* dy, const Mark* marks, float factor,
                           float* dw, float* db, int samples, int part, GEOMETRY) {
    in_order();
    const Geometry g = GEOMETRY_VALUES;
    View view = forward_view(g);
    view.across = apart(view.across);
    const int rows = g.r * g.s * g.channels, terms = output_rows(g, samples) * MEMBERS;
    const int first = blockIdx.z * part, stop = min(first + part, terms);
    const int first_row = blockIdx.x * TILE_M, first_column = blockIdx.y * TILE_N;
    // Rows of taps that the tile has.
    const int begin = first_row / (g.s * g.channels);
    const int end = min((first_row + TILE_M - 1) / (g.s * g.channels) + 1, g.r);

    extern __shared__ __align__(16) char memory[];
    int* const places = reinterpret_cast<int*>(memory);
    Number* const numbers = reinterpret_cast<Number*>(places + TERMS);
    GradientPlanes gradients{{dy, marks, factor}, g.filters, first_column, numbers};
    // In tf32 lanes read single words: of four pixels, eight channels each, in different banks.
    const int pixel = g.channels + (PRECISION == 1 ? 2 : 1) * RUN;
    Window window{view, numbers + PLANES * DISTANCE, pixel, samples, 0, 0};
    const SumOrder order{view};
    Sums sums;
    for (int k = first; k < stop; k += TERMS) {
        const int last = min(k + TERMS, stop) - 1;
        __syncthreads();
        window.first = window.row(order(k)) + begin;
        window.stop = window.row(order(last)) + end;
        Maps{x}.fill(window);
        gradients.fill(k, stop);
        close_group();
        for (int i = threadIdx.x; i < TERMS; i += THREADS)
            places[i] = window.place(order(min(k + i, last)));
        arrive<0>();
        Maps{x}.settle(window);
        publish();
        __syncthreads();
        if (blockIdx.x == 0) gradients.add();
        const Planes<TRANSPOSED, DISTANCE> planes{numbers};
        for (int at = 0; at < TERMS; at += 2 * STEP_K) {
            TapRows taps(window, places + at, first_row);
            multiply_terms<2 * STEP_K>(sums, taps, Planes<TRANSPOSED, DISTANCE>{planes.from(at)});
        }
        finish(sums);
    }
    const int size = blockIdx.z * (rows + 1) * g.filters;
    sums.give(first_row, first_column,
              StorePlain<float, OUT_STEP>{dw + size, rows, g.filters});
    if (blockIdx.x == 0) gradients.give_totals(reinterpret_cast<float*>(memory), db + size);
}
