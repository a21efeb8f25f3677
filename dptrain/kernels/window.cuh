// Convolutions of stride 1 between wide maps: patches that overlap are read once.
//
// gemm.cuh gathers every patch from memory, so a pixel is fetched R S times. Here a block keeps the
// window of the map that its pixels look at in shared memory, zeros around the map included, and a
// tap of the filter is one distance between addresses, the same for all pixels. Rows of pixels
// follow each other without a gap: what pads a row on its right pads the next on its left, and what
// pads a map below pads the next above. So no instruction of the main loop asks where a map ends,
// and what is read, made and rounded is so once, not once for each tap.
//
// Channels lie in runs of 16 bytes. SLAB runs of a pixel are side by side, then the same of the next
// pixel, and so on: a *slab*; behind it lies the slab of the next runs. Within 128 bytes runs change
// places as the bits above say, so that eight pixels' runs of the same channels are in different
// banks, wherever the first of the pixels lies: what CUDA calls a swizzle of as many bytes as a
// pixel has in a slab. wgmma reads pixels so, and the engine for bulk copies writes them so
// (bulk.cuh). Both go by bits of addresses, so slabs begin at multiples of 1024 bytes.

#pragma once

#ifndef PRECISION
#define PRECISION 2  // There are none in float32.
#endif
#include "conv2d.cuh"
#include "bulk.cuh"
#include "copy.cuh"

#ifndef SLAB
#define SLAB 8     // Runs of a pixel side by side: 8, 4 or 2.
#define PIXELS 8   // Of a slab.
#define MAPPED 0   // Whether maps come by tensor maps.
#endif

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
    // As many pixels as keep the right padding of a row clear of its map; rows begin at multiples of
    // 128 bytes.
    constexpr int WHOLE = 8 / SLAB;
    const int padded = width + max(left, out_width + s - 1 - width - left);
    const int across = (padded + WHOLE - 1) / WHOLE * WHOLE;
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

// 16 bytes that come to shared memory by themselves, or zeros.
__device__ inline void copy_later(Number* to, const Number* from, bool zeros = false) {
    bring<16>(to, from, !zeros);
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

// Where a piece of 16 bytes lies that would be number `piece` of a slab.
__device__ inline int swizzled(int piece) { return piece ^ (piece >> 3 & (SLAB - 1)); }

// Some rows of a map in shared memory; of each pixel some of its runs.
struct Window {
    const View& view;
    Number* numbers;
    int samples;      // Behind their maps there is nothing.
    int from, each;   // Runs of a pixel, from which on and how many.
    int first, stop;  // Rows, counted from the first sample's padding on.

    // The row of taps that pixel's patch begins with.
    __device__ int row(const Pixel& p) const { return p.sample * view.down() + p.row; }

    // Where a pixel's patch begins, in pieces of a slab that is not swizzled.
    __device__ int place(const Pixel& p) const {
        return ((row(p) - first) * view.across + p.column) * SLAB;
    }

    // Pixels and runs of all of them, and where one lies.
    __device__ int pixels() const { return (stop - first) * view.across + view.s - 1; }
    __device__ int runs() const { return pixels() * each; }
    __device__ Run<Number>* run(int at, int q) const {
        const int piece = swizzled(at * SLAB + q % SLAB) + q / SLAB * (PIXELS * SLAB);
        return reinterpret_cast<Run<Number>*>(numbers) + piece;
    }
    __device__ Run<Number>* run(int i) const { return run(i / each, i % each); }

    // Whether a pixel lies in the first rows and columns of a map.
    __device__ bool covers(int at, int rows, int columns) const {
        const int y = first + at / view.across, sample = y / view.down();
        return sample < samples && unsigned(y % view.down() - view.top) < unsigned(rows) &&
               unsigned(at % view.across - view.left) < unsigned(columns);
    }

    // Where the map has a run; -1 outside of it.
    __device__ int source(int i) const {
        const int at = i / each, y = first + at / view.across;
        const int sample = y / view.down(), row = y % view.down() - view.top;
        const int column = at % view.across - view.left;
        const bool inside = sample < samples && unsigned(row) < unsigned(view.height) &&
                            unsigned(column) < unsigned(view.width);
        const int pixels = (sample * view.height + row) * view.width + column;
        return inside ? pixels * view.channels + (from + i % each) * RUN : -1;
    }
};

// Maps as they lie in memory. Their copies are under way when `ask` returns; when they have
// arrived, `make` rounds what the thread has brought, as tensor cores would cut it off.
struct Maps {
    // Whether windows come as they are, so that one may while another is read.
    static constexpr bool TWO = true;
    // Whether a barrier tells of them, and nothing is left to be made.
    static constexpr bool BULK = MAPPED;

    const Number* x;
    const TensorMap* map;

#if MAPPED
    // A row a lane of the first warp; what is outside of the map comes as zeros.
    __device__ void ask(const Window& window, Number*, Barrier* barrier) const {
        if (threadIdx.x >= 32) return;
        const View& view = window.view;
        const int width = view.out_width + view.s - 1, slabs = window.each / SLAB;
        if (threadIdx.x == 0)
            barrier->expect((window.stop - window.first) * slabs * width * SLAB * 16);
        __syncwarp();
        for (int y = window.first + threadIdx.x; y < window.stop; y += 32) {
            Number* const row = window.numbers + (y - window.first) * view.across * SLAB * RUN;
            for (int q = 0; q < slabs; ++q)
                bring_box(row + q * (PIXELS * SLAB * RUN), map, (window.from + q * SLAB) * RUN,
                          -view.left, y % view.down() - view.top, y / view.down(), barrier);
        }
    }
#else
    __device__ void ask(const Window& window, Number*, Barrier*) const {
        // Unrolled, so that the addresses of several are worked out side by side.
#pragma unroll 6
        for (int i = threadIdx.x; i < window.runs(); i += THREADS) {
            const int at = window.source(i);
            copy_later(window.run(i)->at, x + max(at, 0), at < 0);
        }
    }
#endif
    __device__ void make(const Window& window, const Number*) const {
#if PRECISION == 1 && !MAPPED
        in_batches<Run<Number>, 6>(
            window.runs(), [&](int i) { return *window.run(i); },
            [&](int i, const Run<Number>& run) { *window.run(i) = as_factors(run); });
#endif
    }
};

#if BEHIND == 2
// Gradients by a run of pooled outputs, rounded, and to whom they go.
struct PooledRun {
    Run<Number> dy;
    Run<unsigned, RUN / 4> marks;

    __device__ static PooledRun read(const Number* dy, const Mark* marks) {
        return {*reinterpret_cast<const Run<Number>*>(dy),
                *reinterpret_cast<const Run<unsigned, RUN / 4>*>(marks)};
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

// Windows of pooling that a window of the map has pixels of: whole lines of them, run by run.
struct Pooled {
    const Window& window;
    int height, width;
    int begin, runs;  // The first line, counted from the first sample's; of all lines.

    __device__ explicit Pooled(const Window& window)
        : window(window), height(window.view.height / 2), width(window.view.width / 2),
          begin(line(window.first, 0)) {
        const int end = min(line(window.stop - 1, 1), window.samples * height);
        runs = max(end - begin, 0) * width * window.each;
    }

    // Lines of windows, of all samples, that begin above row `y`; or, `with` it, at it.
    __device__ int line(int y, int with) const {
        const View& view = window.view;
        const int row = y % view.down() - view.top, lines = row < 0 ? 0 : row / 2 + with;
        return y / view.down() * height + min(lines, height);
    }

    // Where run i lies in dy.
    __device__ int source(int i) const {
        const int run = window.from + i % window.each;
        return (begin * width + i / window.each) * window.view.channels + run * RUN;
    }

    // To those of the window's four pixels that are here.
    __device__ void put(int i, const PooledRun& run) const {
        const View& view = window.view;
        const int q = i % window.each, at = begin + i / (width * window.each);
        const int column = i / window.each % width * 2 + view.left;
        const int top = at / height * view.down() + at % height * 2 + view.top - window.first;
#pragma unroll
        for (int m = 0; m < 4; ++m)
            if (unsigned(top + m / 2) < unsigned(window.stop - window.first))
                *window.run((top + m / 2) * view.across + column + m % 2, q) = run.member(m);
    }
};
#endif

// dz, made of what follows the convolution: of pooled maps, as these are asked for (RAW) or as they
// lie in memory.
template <bool RAW> struct GradientMaps {
    static constexpr bool TWO = BEHIND == 0, BULK = MAPPED;

    Gradient dz;
    const TensorMap* map;

    __device__ void ask(const Window& window, Number* raw, Barrier* barrier) const {
#if BEHIND == 0
        Maps{dz.dy, map}.ask(window, raw, barrier);
#elif BEHIND == 2
        if (!RAW) return;
        const Pooled pooled(window);
        Mark* const marks = reinterpret_cast<Mark*>(raw + pooled.runs * RUN);
#pragma unroll 4
        for (int i = threadIdx.x; i < pooled.runs; i += THREADS) {
            const int at = pooled.source(i);
            bring<16>(raw + i * RUN, dz.dy + at);
            bring<RUN>(marks + i * RUN, dz.marks + at);
        }
#endif
    }

    __device__ void make(const Window& window, const Number* raw) const {
#if BEHIND == 0
        Maps{dz.dy, map}.make(window, raw);
#elif BEHIND == 1
        const auto fetch = [&](int i) {
            Gradient::Raw raw = {};
            const int at = window.source(i);
            if (at >= 0) dz.piece(raw, 0, at, 0);
            return raw;
        };
        in_batches<Gradient::Raw, 2>(window.runs(), fetch, [&](int i, const Gradient::Raw& raw) {
            *window.run(i) = dz.value(raw);
        });
#else
        // A map may have a last row or column that is in no window; it counts as padding here.
        for (int at = threadIdx.x; at < window.pixels(); at += THREADS)
            if (!window.covers(at, window.view.height / 2 * 2, window.view.width / 2 * 2))
                for (int q = 0; q < window.each; ++q) *window.run(at, q) = {};
        const Pooled pooled(window);
        const Mark* const marks = reinterpret_cast<const Mark*>(raw + pooled.runs * RUN);
        const auto fetch = [&](int i) {
            if (RAW) return PooledRun::read(raw + i * RUN, marks + i * RUN);
            return PooledRun::read(dz.dy + pooled.source(i), dz.marks + pooled.source(i));
        };
        // Each run of dy is read once and goes to four pixels.
        in_batches<PooledRun, 4>(pooled.runs, fetch, [&](int i, PooledRun run) {
            run.scale(dz.factor);
            pooled.put(i, run);
        });
#endif
    }
};

// What this thread wrote to shared memory is seen by tensor cores behind the next barrier.
__device__ inline void publish() {
#if WGMMA
    wgmma::publish();
#endif
}
