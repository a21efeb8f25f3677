// Convolutions of stride 1 between wide maps: patches that overlap are read once.
//
// gemm.cuh gathers every patch from memory, so a pixel is fetched R S times. Here a block keeps the
// window of the map that its pixels look at in shared memory, zeros around the map included, and a
// tap of the filter is one distance between addresses, the same for all pixels. Rows of pixels
// follow each other without a gap: what pads a row on its right pads the next on its left, and what
// pads a map below pads the next above. So no instruction of the main loop asks where a map ends,
// and what is read, made and rounded is so once, not once for each tap.
//
// Channels lie in runs of 16 bytes. SLAB_PACKS runs of a pixel are side by side, then the same of the
// next pixel, and so on: a *slab*; behind it lies the slab of the next runs. Within 128 bytes runs
// change places as the bits above say, so that eight pixels' runs of the same channels are in
// different banks, wherever the first of the pixels lies: what CUDA calls a swizzle of as many
// bytes as a pixel has in a slab. wgmma reads pixels so, and the engine for bulk copies writes them
// so (tma.cuh). Both go by bits of addresses, so slabs begin at multiples of 1024 bytes.

#pragma once

#ifndef PRECISION
#define PRECISION 2  // There are none in float32.
#endif
#include "conv2d.cuh"
#include "tma.cuh"
#include "cp_async.cuh"

#ifndef SLAB_PACKS
#define SLAB_PACKS 8     // Runs of a pixel side by side: 8, 4 or 2.
#define SLAB_PIXELS 8   // Of a slab.
#define TENSOR_MAPS 0   // Tensor maps by which maps come, or none.
#endif
#ifndef CROPPED_WIDTH
#define CROPPED_WIDTH 0  // Columns of narrow windows, which have no more than their segments look at.
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
    // As many pixels as keep the right padding of a row clear of its map; rows begin at multiples
    // of 128 bytes.
    constexpr int WHOLE = 8 / SLAB_PACKS;
    const int padded = width + max(left, out_width + s - 1 - width - left);
    const int across = CROPPED_WIDTH ? CROPPED_WIDTH : (padded + WHOLE - 1) / WHOLE * WHOLE;
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
__device__ inline int swizzled(int piece) { return piece ^ (piece >> 3 & (SLAB_PACKS - 1)); }

// Some rows of a map in shared memory; of each pixel some of its runs.
struct Window {
    const View& view;
    Number* numbers;
    int samples;      // Behind their maps there is nothing.
    int from, each;   // Runs of a pixel, from which on and how many.
    int first, stop;  // Rows, counted from the first sample's padding on.
    int column;       // Of the patches that begin in the first one.

    // The row of taps that pixel's patch begins with.
    __device__ int row(const Pixel& p) const { return p.sample * view.down() + p.row; }

    // Where a pixel's patch begins, in pieces of a slab that is not swizzled.
    __device__ int place(const Pixel& p) const {
        return ((row(p) - first) * view.across + p.column - column) * SLAB_PACKS;
    }

    // Pixels and runs of all of them, and where one lies.
    __device__ int pixels() const { return (stop - first) * view.across + view.s - 1; }
    __device__ int runs() const { return pixels() * each; }
    __device__ Run<Number>* run(int at, int q) const {
        const int piece = swizzled(at * SLAB_PACKS + q % SLAB_PACKS) + q / SLAB_PACKS * (SLAB_PIXELS * SLAB_PACKS);
        return reinterpret_cast<Run<Number>*>(numbers) + piece;
    }
    __device__ Run<Number>* run(int i) const { return run(i / each, i % each); }

    // Whether a pixel lies in the first rows and columns of a map.
    __device__ bool covers(int at, int rows, int columns) const {
        const int y = first + at / view.across, sample = y / view.down();
        return sample < samples && unsigned(y % view.down() - view.top) < unsigned(rows) &&
               unsigned(at % view.across + column - view.left) < unsigned(columns);
    }

    // Where the map has a run; -1 outside of it.
    __device__ int source(int i) const {
        const int at = i / each, y = first + at / view.across;
        const int sample = y / view.down(), row = y % view.down() - view.top;
        const int x = at % view.across + column - view.left;
        const bool inside = sample < samples && unsigned(row) < unsigned(view.height) &&
                            unsigned(x) < unsigned(view.width);
        const int pixels = (sample * view.height + row) * view.width + x;
        return inside ? pixels * view.channels + (from + i % each) * RUN : -1;
    }
};

// Maps as they lie in memory. Their copies are under way when `ask` returns; when they have
// arrived, `make` rounds what the thread has brought, as tensor cores would cut it off.
struct Maps {
    // Whether windows come as they are, so that one may while another is read.
    static constexpr bool TWO = true;

    const Number* x;
    const TensorMap* map;

#if TENSOR_MAPS
    // What is outside of the map comes as zeros: a window at once, or a row a lane of the first
    // warp.
    __device__ void ask(const Window& window, Number*, Barrier* barrier) const {
        if (threadIdx.x >= (CROPPED_WIDTH ? 1 : 32)) return;
        const View& view = window.view;
        const int rows = window.stop - window.first, slabs = window.each / SLAB_PACKS;
        const int width = CROPPED_WIDTH ? view.across : view.out_width + view.s - 1;
        if (threadIdx.x == 0) barrier->expect(rows * slabs * width * SLAB_PACKS * 16);
        if (!CROPPED_WIDTH) __syncwarp();
        for (int i = threadIdx.x; i < (CROPPED_WIDTH ? 1 : rows); i += 32) {
            const int y = window.first + i;
            Number* const row = window.numbers + i * view.across * SLAB_PACKS * RUN;
            for (int q = 0; q < slabs; ++q)
                bring_box(row + q * (SLAB_PIXELS * SLAB_PACKS * RUN), map, (window.from + q * SLAB_PACKS) * RUN,
                          window.column - view.left, y % view.down() - view.top, y / view.down(),
                          barrier);
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
#if PRECISION == 1 && !TENSOR_MAPS
        in_batches<Run<Number>, 6>(
            window.runs(), [&](int i) { return *window.run(i); },
            [&](int i, const Run<Number>& run) { *window.run(i) = as_factors(run); });
#endif
    }
};

#if EPILOGUE == 2
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

// Those of a narrow window, of one sample: a box of them, where what is outside of the pooled map
// is zeros. What the box has comes run by run, behind it the marks.
struct PooledBox {
    const Window& window;
    int sample, line, column;  // The first one; may be outside.
    int top, left;             // Where its first pixel would be in the window.
    int lines, across;

    __device__ explicit PooledBox(const Window& window) : window(window) {
        const View& view = window.view;
        const int row = window.first % view.down() - view.top, x = window.column - view.left;
        sample = window.first / view.down(), line = row >> 1, column = x >> 1;
        top = line * 2 - row, left = column * 2 - x;
        lines = (window.stop - window.first) / 2 + 1, across = view.across / 2 + 1;
    }
    __device__ int runs() const { return lines * across * window.each; }

    // Where marks lie behind the runs.
    __device__ Mark* marks(Number* raw) const {
        return reinterpret_cast<Mark*>(raw) + (runs() * 16 + 127) / 128 * 128;
    }

    // Where run i lies in dy; -1 outside.
    __device__ int source(int i) const {
        const View& view = window.view;
        const int y = line + i / (across * window.each), x = column + i / window.each % across;
        const int height = view.height / 2, width = view.width / 2;
        if (sample >= window.samples || unsigned(y) >= unsigned(height) ||
            unsigned(x) >= unsigned(width))
            return -1;
        const int run = window.from + i % window.each;
        return ((sample * height + y) * width + x) * view.channels + run * RUN;
    }

    // To those of its four pixels that are here.
    __device__ void put(int i, const PooledRun& run) const {
        const int q = i % window.each, pixel = i / window.each, width = window.view.across;
        const int y = pixel / across * 2 + top, x = pixel % across * 2 + left;
        // Eight threads write 128 bytes at once: where those are of several windows of pooling,
        // some write the right pixel where others write the left one, so that all banks are
        // different.
        const int other = SLAB_PACKS == 8 ? 0 : pixel / (4 / SLAB_PACKS) % 2;
#pragma unroll
        for (int m = 0; m < 4; ++m) {
            const int down = m / 2, beside = m % 2 ^ other;
            if (unsigned(y + down) < unsigned(window.stop - window.first) &&
                unsigned(x + beside) < unsigned(width))
                *window.run((y + down) * width + x + beside, q) = run.member(down * 2 + beside);
        }
    }
};
#endif

// dz, made of what follows the convolution: of pooled maps, as these are asked for (RAW) or as they
// lie in memory.
template <bool RAW> struct GradientMaps {
    static constexpr bool TWO = EPILOGUE == 0;

    Gradient dz;
    const TensorMap* maps;  // Of dz; or of dy and of the marks.

    __device__ void ask(const Window& window, Number* raw, Barrier* barrier) const {
#if EPILOGUE == 0
        Maps{dz.dy, maps}.ask(window, raw, barrier);
#elif EPILOGUE == 2
        if (!RAW) return;
        const PooledBox box(window);
        Mark* const marks = box.marks(raw);
#if TENSOR_MAPS
        if (threadIdx.x > 0) return;
        barrier->expect(box.runs() * (16 + RUN));
        bring_box(raw, maps, window.from * RUN, box.column, box.line, box.sample, barrier);
        bring_box(marks, maps + 1, window.from * RUN, box.column, box.line, box.sample, barrier);
#else
#pragma unroll 4
        for (int i = threadIdx.x; i < box.runs(); i += THREADS) {
            const int at = box.source(i);
            bring<16>(raw + i * RUN, dz.dy + max(at, 0), at >= 0);
            bring<RUN>(marks + i * RUN, dz.marks + max(at, 0), at >= 0);
        }
#endif
#endif
    }

    __device__ void make(const Window& window, const Number* raw) const {
#if EPILOGUE == 0
        Maps{dz.dy, maps}.make(window, raw);
#elif EPILOGUE == 1
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
        if constexpr (RAW) {
            const PooledBox box(window);
            const Mark* const marks = box.marks(const_cast<Number*>(raw));
            put(box, box.runs(),
                [&](int i) { return PooledRun::read(raw + i * RUN, marks + i * RUN); });
        } else {
            // A map may have a last row or column that is in no window; it counts as padding here.
            for (int at = threadIdx.x; at < window.pixels(); at += THREADS)
                if (!window.covers(at, window.view.height / 2 * 2, window.view.width / 2 * 2))
                    for (int q = 0; q < window.each; ++q) *window.run(at, q) = {};
            const Pooled pooled(window);
            put(pooled, pooled.runs, [&](int i) {
                return PooledRun::read(dz.dy + pooled.source(i), dz.marks + pooled.source(i));
            });
        }
#endif
    }

#if EPILOGUE == 2
   private:
    // Each run of dy is read once and goes to four pixels.
    template <class Places, class Fetch>
    __device__ void put(const Places& places, int runs, const Fetch& fetch) const {
        in_batches<PooledRun, 4>(runs, fetch, [&](int i, PooledRun run) {
            run.scale(dz.factor);
            places.put(i, run);
        });
    }
#endif
};

// What this thread wrote to shared memory is seen by tensor cores behind the next barrier.
__device__ inline void publish() {
#if WGMMA
    wgmma::publish();
#endif
}
