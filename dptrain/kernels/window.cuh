// Convolutions of stride 1 between wide maps: patches that overlap are read once.
//
// gemm.cuh gathers every patch from memory, so a pixel is fetched R S times. Here a block keeps the
// window of the map that its pixels look at in shared memory, zeros around the map included, and a
// tap of the filter is one distance between addresses, the same for all pixels. Rows of pixels
// follow each other without a gap: what pads a row on its right pads the next on its left, and what
// pads a map below pads the next above. So no instruction of the main loop asks where a map ends, and
// what is read, made and rounded is so once, not once for each tap.
//
// The other operand lies in *planes* of pieces of 16 bytes, RUN numbers each: terms of one column, or
// columns of one term where it is transposed. That is what wgmma reads by itself (wgmma.cuh), and
// ldmatrix for mma.sync on other GPUs.

#pragma once

#ifndef PRECISION
#define PRECISION 2  // There are none in float32.
#endif
#ifndef TILE_M
#define TILE_M 128
#define TILE_N 64
#define WARP_M 32
#define WARP_N 64
#define WORDS 16
#endif
#ifndef RUNS
#define RUNS 4
#define STAGES 4
#define BLOCKS 2
#endif

#include "conv2d.cuh"
#include "wgmma.cuh"

static_assert(WARP_N == TILE_N, "a warp has all columns of its rows");

// A map as a convolution of stride 1 reads it: out_height x out_width patches of r x s pixels, the
// first `top` rows above it and `left` columns before it.
struct View {
    int height, width, channels, top, left, out_height, out_width, r, s;
    int across;  // Pixels from a row to the next in shared memory.

    // Rows from a sample to the next.
    __device__ int down() const { return height + max(top, out_height + r - 1 - height - top); }
};

__device__ inline View view_of(int height, int width, int channels, int top, int left,
                               int out_height, int out_width, int r, int s) {
    // As many pixels as keep the right padding of a row clear of its map.
    const int across = width + max(left, out_width + s - 1 - width - left);
    return {height, width, channels, top, left, out_height, out_width, r, s, across};
}

// x as z is made of it, and dz as dx is.
__device__ inline View forward_view(const Geometry& g) {
    return view_of(g.height, g.width, g.channels, g.top, g.left, g.out_height, g.out_width, g.r,
                   g.s);
}
__device__ inline View backward_view(const Geometry& g) {
    return view_of(g.out_height, g.out_width, g.filters, g.r - 1 - g.top, g.s - 1 - g.left,
                   g.height, g.width, g.r, g.s);
}

// 16 bytes that come to shared memory by themselves, or zeros; `arrive<N>` waits for all groups but
// the last N.
__device__ inline void copy_later(Number* to, const Number* from, bool zeros = false) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                     unsigned(__cvta_generic_to_shared(to))),
                 "l"(from), "r"(zeros ? 0 : 16)
                 : "memory");
#else
    Run<Number> run = {};
    if (!zeros) run = *reinterpret_cast<const Run<Number>*>(from);
    *reinterpret_cast<Run<Number>*>(to) = run;
#endif
}
__device__ inline void close_group() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
template <int N> __device__ inline void arrive() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
#endif
}

// fetch(i) for each of the thread's i < all, BATCH of them on their way at a time, then
// put(i, fetched).
template <class Raw, int BATCH, class Fetch, class Put>
__device__ inline void in_batches(int all, const Fetch& fetch, const Put& put) {
    for (int begin = threadIdx.x; begin < all; begin += BATCH * THREADS) {
        Raw raws[BATCH];
#pragma unroll
        for (int q = 0; q < BATCH; ++q)
            if (begin + q * THREADS < all) raws[q] = fetch(begin + q * THREADS);
#pragma unroll
        for (int q = 0; q < BATCH; ++q)
            if (begin + q * THREADS < all) put(begin + q * THREADS, raws[q]);
    }
}

// Some rows of a map in shared memory.
struct Window {
    const View& view;
    Number* numbers;
    int pixel;        // Numbers from a pixel to the next.
    int samples;      // Behind their maps there is nothing.
    int first, stop;  // Rows, counted from the first sample's padding on.

    // The row of taps that pixel's patch begins with.
    __device__ int row(const Pixel& p) const { return p.sample * view.down() + p.row; }

    // Where a pixel's patch begins.
    __device__ int place(const Pixel& p) const {
        return ((row(p) - first) * view.across + p.column) * pixel;
    }

    // Runs of all pixels, and where one lies.
    __device__ int runs() const {
        return ((stop - first) * view.across + view.s - 1) * (view.channels / RUN);
    }
    __device__ Run<Number>* run(int i) const {
        const int each = view.channels / RUN;
        return reinterpret_cast<Run<Number>*>(numbers + i / each * pixel + i % each * RUN);
    }

    // Where the map has a run; -1 outside of it.
    __device__ int source(int i) const {
        const int each = view.channels / RUN, at = i / each, y = first + at / view.across;
        const int sample = y / view.down(), row = y % view.down() - view.top;
        const int column = at % view.across - view.left;
        const bool inside = sample < samples && unsigned(row) < unsigned(view.height) &&
                            unsigned(column) < unsigned(view.width);
        const int pixels = (sample * view.height + row) * view.width + column;
        return inside ? pixels * view.channels + i % each * RUN : -1;
    }
};

// Maps as they lie in memory. Their copies are under way when `fill` returns; when they have arrived,
// `settle` rounds what the thread has brought, as tensor cores would cut it off.
struct Maps {
    const Number* x;

    __device__ void fill(const Window& window) const {
        for (int i = threadIdx.x; i < window.runs(); i += THREADS) {
            const int at = window.source(i);
            copy_later(window.run(i)->at, x + max(at, 0), at < 0);
        }
    }
    __device__ void settle(const Window& window) const {
#if PRECISION == 1
        for (int i = threadIdx.x; i < window.runs(); i += THREADS)
            *window.run(i) = as_factors(*window.run(i));
#endif
    }
};

#if BEHIND == 2
// Gradients by a run of pooled outputs, rounded, and to whom they go.
struct PooledRun {
    Run<Number> dy;
    Run<unsigned, RUN / 4> marks;

    __device__ static PooledRun read(const Gradient& from, int at) {
        PooledRun run;
        run.dy = *reinterpret_cast<const Run<Number>*>(from.dy + at);
        run.marks = *reinterpret_cast<const Run<unsigned, RUN / 4>*>(from.marks + at);
        return run;
    }

    __device__ void scale(float factor) {
        Run<float> scaled;
#pragma unroll
        for (int v = 0; v < RUN; ++v) scaled.at[v] = to_float(dy.at[v]) * factor;
        dy = as_factors(scaled);
    }

    // Byte `v` of a word in every byte, or each of two in two.
    template <int BYTES> __device__ static unsigned spread(unsigned word, int v) {
#ifdef __CUDA_ARCH__
        return __byte_perm(word, 0, BYTES == 4 ? 0x1111 * v : 0x1100 + 0x1111 * v);
#else
        if (BYTES == 4) return (word >> v * 8 & 0xFFu) * 0x01010101u;
        return (word >> v * 8 & 0xFFu) * 0x0101u | (word >> v * 8 + 8 & 0xFFu) * 0x01010000u;
#endif
    }

    // The gradient by a member of the windows: dy where it was chosen, else 0.
    __device__ Run<Number> member(int member) const {
        constexpr int BYTES = sizeof(Number), EACH = 4 / BYTES;  // Of a number; numbers of a word.
        Run<unsigned, 4> dz = as<Run<unsigned, 4>>(dy);
#pragma unroll
        for (int q = 0; q < 4; ++q) {
            const unsigned other = marks.at[q * EACH / 4] ^ member * 0x01010101u;
            // The highest bit of each byte that is 0, then all bits of it.
            const unsigned zero = ~(((other & 0x7F7F7F7Fu) + 0x7F7F7F7Fu) | other) & 0x80808080u;
            dz.at[q] &= spread<BYTES>((zero >> 7) * 255u, q * EACH % 4);
        }
        return as<Run<Number>>(dz);
    }
};
#endif

// What this thread wrote to shared memory is seen by tensor cores behind the next barrier.
__device__ inline void publish() {
#if WGMMA
    wgmma::publish();
#endif
}

// B in planes: pieces of columns (or, TRANSPOSED, of terms) side by side, planes DISTANCE numbers
// apart.
template <bool TRANSPOSED_, int DISTANCE>
struct Planes {
    static constexpr bool TRANSPOSED = TRANSPOSED_;

    const Number* numbers;

    __device__ Number element(int column, int k) const {
        const int plane = TRANSPOSED ? column : k, piece = TRANSPOSED ? k : column;
        return numbers[plane / RUN * DISTANCE + piece * RUN + plane % RUN];
    }
    // From term k on.
    __device__ const Number* from(int k) const {
        return numbers + (TRANSPOSED ? k * RUN : k / RUN * DISTANCE);
    }
#if WGMMA
    __device__ unsigned long long descriptor(int k) const {
        constexpr int PLANE = DISTANCE * sizeof(Number), EIGHT = 8 * 16;
        return TRANSPOSED ? wgmma::descriptor(from(k), EIGHT, PLANE)
                          : wgmma::descriptor(from(k), PLANE, EIGHT);
    }
#elif __CUDA_ARCH__ >= 800
    // Of columns [j, j + 16): as read_words of a slice.
    __device__ void words(unsigned (&words)[4], int j, int k) const {
        const int lane = threadIdx.x % 32;
        if constexpr (TRANSPOSED) {
            const int piece = k + lane % 8 + lane / 16 * 8;
            read_transposed(words, numbers + (j / RUN + lane / 8 % 2) * DISTANCE + piece * RUN);
        } else {
            read_matrices(words, from(k) + lane / 16 * DISTANCE + (j + lane % 16) * RUN);
        }
    }
#endif
};

// sums += A B over DEPTH terms. A gives the words of the terms of one instruction: a.term(k) says
// which, a.words(words, i) those of the warp's i-th sixteen rows. With wgmma the last instructions
// may still be under way when this returns, with words of the second half of `words`: so there must
// be an even number.
template <int DEPTH, class A, class B>
__device__ inline void multiply_terms(Sums& sums, A& a, const B& b) {
    static_assert(DEPTH % (2 * STEP_K) == 0, "instructions take turns with their registers");
#if WGMMA
    unsigned words[2][Sums::DOWN][4];
#pragma unroll
    for (int k = 0; k < DEPTH; k += STEP_K) {
        unsigned(&now)[Sums::DOWN][4] = words[k / STEP_K % 2];
        wgmma::finish<1>();
        a.term(k);
#pragma unroll
        for (int i = 0; i < Sums::DOWN; ++i) a.words(now[i], i);
        wgmma::start();
#pragma unroll
        for (int i = 0; i < Sums::DOWN; ++i)
            wgmma::multiply_add<B::TRANSPOSED>(sums.c[i], now[i], b.descriptor(k));
        wgmma::commit();
    }
#elif __CUDA_ARCH__ >= 800
#pragma unroll
    for (int k = 0; k < DEPTH; k += STEP_K) {
        unsigned words[Sums::DOWN][4];
        a.term(k);
#pragma unroll
        for (int i = 0; i < Sums::DOWN; ++i) a.words(words[i], i);
#pragma unroll
        for (int j = 0; j < Sums::ACROSS; j += 2) {
            unsigned column[4];
            b.words(column, j * 8, k);
#pragma unroll
            for (int i = 0; i < Sums::DOWN; ++i) {
                multiply_add(sums.c[i][j], words[i], column[0], column[2]);
                multiply_add(sums.c[i][j + 1], words[i], column[1], column[3]);
            }
        }
    }
#else
    sums.add_each(a, b, DEPTH);
#endif
}

// Waits for all products.
__device__ inline void finish(Sums& sums) {
#if WGMMA
    wgmma::finish<0>();
    // The compiler must not read sums earlier.
#pragma unroll
    for (int i = 0; i < Sums::DOWN; ++i)
#pragma unroll
        for (int j = 0; j < Sums::ACROSS; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) asm volatile("" : "+f"(sums.c[i][j][e])::"memory");
#endif
}

// Pixels as rows of A: patch by patch, term k being channel k of the tap `offset` away.
template <class Place>
struct PatchRows {
    const Number* window;
    const Place& place;  // Of a row of the tile.
    int lanes[Sums::DOWN];
    int offset, now = 0;

    __device__ PatchRows(const Number* window, const Place& place) : window(window), place(place) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < Sums::DOWN; ++i)
            lanes[i] = place(Sums::top() + i * 16 + lane % 16) + lane / 16 * RUN;
    }
    __device__ Number element(int row, int k) const { return window[place(row) + offset + k]; }
#if __CUDA_ARCH__ >= 800
    __device__ void term(int k) { now = offset + k; }
    __device__ void words(unsigned (&words)[4], int i) const {
        read_matrices(words, window + lanes[i] + now);
    }
#endif
};

// Convolutions over pixels: rows [0, rows) of the product of patches and `weights`, which are cut
// into slices of RUNS runs of one tap (pack_weights.cu). Blocks take tile after tile; where there is
// room for all slices they stay, else they come STAGES - 2 slices ahead.
//
//     order(i)        the pixel whose patch is row i; behind the last, that of the last
//     finished(sums)  what is done to sums before `store` gets them
template <class Source, class Order, class Finished, class Store>
__device__ void slide(const View& view, const Source& source, int samples, int rows,
                      const Number* weights, const Order& order, const Finished& finished,
                      const Store& store) {
    constexpr int DEPTH = RUNS * RUN, SLICE = DEPTH * TILE_N;
    extern __shared__ __align__(16) char memory[];
    Number* const slots = reinterpret_cast<Number*>(memory);
    const int parts = view.channels / DEPTH, slices = view.r * view.s * parts;
    const bool stay = slices <= STAGES;
    const int tiles = (rows + TILE_M - 1) / TILE_M;
    const int all = stay ? slices : (tiles - blockIdx.x + gridDim.x - 1) / gridDim.x * slices;
    weights += blockIdx.y * slices * SLICE;

    const auto fetch = [&](int slice) {
        if (slice < all) {
            for (int i = threadIdx.x * RUN; i < SLICE; i += THREADS * RUN)
                copy_later(slots + slice % STAGES * SLICE + i,
                           weights + slice % slices * SLICE + i);
        }
        close_group();
    };
    for (int slice = 0; slice < (stay ? slices : STAGES - 2); ++slice) fetch(slice);

    Window window{view, slots + STAGES * SLICE, view.channels + RUN, samples, 0, 0};
    int slice = 0;
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const int top = tile * TILE_M;
        __syncthreads();
        window.first = window.row(order(top));
        window.stop = window.row(order(top + TILE_M - 1)) + view.r;
        source.fill(window);
        close_group();
        const auto place = [&](int i) { return window.place(order(top + i)); };
        PatchRows<decltype(place)> patches(window.numbers, place);
        Sums sums;
        arrive<0>();
        source.settle(window);
        if (stay) {
            publish();
            __syncthreads();
        }
        for (int tap = 0; tap < view.r * view.s; ++tap) {
            const int at = (tap / view.s * view.across + tap % view.s) * window.pixel;
            for (int part = 0; part < parts; ++part, ++slice) {
                if (!stay) {
                    arrive<STAGES - 3>();
                    publish();
                    __syncthreads();
                    // All are done with the slice before the last, whose slot this takes.
                    fetch(slice + STAGES - 2);
                }
                const int slot = stay ? tap * parts + part : slice % STAGES;
                patches.offset = at + part * DEPTH;
                multiply_terms<DEPTH>(sums, patches,
                                      Planes<false, TILE_N * RUN>{slots + slot * SLICE});
            }
        }
        finish(sums);
        finished(sums);
        sums.give(top, blockIdx.y * TILE_N, store);
    }
    arrive<0>();
}
