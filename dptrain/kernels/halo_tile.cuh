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
#define SLAB_PACKS 8   // Runs of a pixel side by side: 8, 4 or 2.
#define SLAB_PIXELS 8  // Of a slab.
#define TENSOR_MAPS 0  // Tensor maps by which maps come, or none.
#endif
#ifndef CROPPED_WIDTH
#define CROPPED_WIDTH \
    0  // Columns of narrow windows, which have no more than their segments look at.
#endif

// A map as a convolution of stride 1 reads it: out_height x out_width patches of r x s pixels, the
// first `top` rows above it and `left` columns before it.
struct View {
    int height, width, channels, pad_top, pad_left, out_height, out_width, r, s;
    int row_pitch;  // Pixels from a row to the next in shared memory.

    // Rows from a sample to the next.
    __device__ int rows_per_sample() const {
        return height + max(pad_top, out_height + r - 1 - height - pad_top);
    }
};

__device__ inline View make_view(int height, int width, int channels, int top, int left,
                                 int out_height, int out_width, int r, int s) {
    // As many pixels as keep the right padding of a row clear of its map; rows begin at multiples
    // of 128 bytes.
    constexpr int WHOLE = 8 / SLAB_PACKS;
    const int padded = width + max(left, out_width + s - 1 - width - left);
    const int pitch = CROPPED_WIDTH ? CROPPED_WIDTH : (padded + WHOLE - 1) / WHOLE * WHOLE;
    return {height, width, channels, top, left, out_height, out_width, r, s, pitch};
}

// x as z is made of it, and dz as dx is.
__device__ inline View forward_view(const Geometry& g) {
    return make_view(g.height, g.width, g.channels, g.pad_top, g.pad_left, g.out_height,
                     g.out_width, g.r, g.s);
}
__device__ inline View backward_view(const Geometry& g) {
    return make_view(g.out_height, g.out_width, g.filters, g.r - 1 - g.pad_top,
                     g.s - 1 - g.pad_left, g.height, g.width, g.r, g.s);
}

// 16 bytes that come to shared memory by themselves, or zeros.
__device__ inline void cp_async_pack(Number* to, const Number* from, bool zeros = false) {
    cp_async<16>(to, from, !zeros);
}

// fetch(i) for each of the thread's i < all, BATCH of them on their way at a time, then
// put(i, fetched).
template <class Raw, int BATCH, class Fetch, class Put>
__device__ inline void for_each_batched(int all, const Fetch& fetch, const Put& put) {
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
struct HaloTile {
    const View& view;
    Number* numbers;
    int samples;      // Behind their maps there is nothing.
    int from, each;   // Runs of a pixel, from which on and how many.
    int first, stop;  // Rows, counted from the first sample's padding on.
    int column;       // Of the patches that begin in the first one.

    // The row of taps that pixel's patch begins with.
    __device__ int row(const Pixel& p) const { return p.sample * view.rows_per_sample() + p.row; }

    // Where a pixel's patch begins, in pieces of a slab that is not swizzled.
    __device__ int offset(const Pixel& p) const {
        return ((row(p) - first) * view.row_pitch + p.column - column) * SLAB_PACKS;
    }

    // Pixels and runs of all of them, and where one lies.
    __device__ int pixels() const { return (stop - first) * view.row_pitch + view.s - 1; }
    __device__ int packs() const { return pixels() * each; }
    __device__ Pack<Number>* pack(int at, int q) const {
        const int piece = swizzled(at * SLAB_PACKS + q % SLAB_PACKS) +
                          q / SLAB_PACKS * (SLAB_PIXELS * SLAB_PACKS);
        return reinterpret_cast<Pack<Number>*>(numbers) + piece;
    }
    __device__ Pack<Number>* pack(int i) const { return pack(i / each, i % each); }

    // Whether a pixel lies in the first rows and columns of a map.
    __device__ bool covers(int at, int rows, int columns) const {
        const int y = first + at / view.row_pitch, sample = y / view.rows_per_sample();
        return sample < samples &&
               unsigned(y % view.rows_per_sample() - view.pad_top) < unsigned(rows) &&
               unsigned(at % view.row_pitch + column - view.pad_left) < unsigned(columns);
    }

    // Where the map has a run; -1 outside of it.
    __device__ int source(int i) const {
        const int at = i / each, y = first + at / view.row_pitch;
        const int sample = y / view.rows_per_sample(),
                  row = y % view.rows_per_sample() - view.pad_top;
        const int x = at % view.row_pitch + column - view.pad_left;
        const bool inside = sample < samples && unsigned(row) < unsigned(view.height) &&
                            unsigned(x) < unsigned(view.width);
        const int pixels = (sample * view.height + row) * view.width + x;
        return inside ? pixels * view.channels + (from + i % each) * PACK : -1;
    }
};

// Maps as they lie in memory. Their copies are under way when `ask` returns; when they have
// arrived, `make` rounds what the thread has brought, as tensor cores would cut it off.
struct InputSource {
    // Whether windows come as they are, so that one may while another is read.
    static constexpr bool DOUBLE_BUFFERED = true;

    const Number* x;
    const TensorMap* map;

#if TENSOR_MAPS
    // What is outside of the map comes as zeros: a window at once, or a row a lane of the first
    // warp.
    __device__ void start_copy(const HaloTile& halo, Number*, MBarrier* barrier) const {
        if (threadIdx.x >= (CROPPED_WIDTH ? 1 : 32)) return;
        const View& view = halo.view;
        const int rows = halo.stop - halo.first, slabs = halo.each / SLAB_PACKS;
        const int width = CROPPED_WIDTH ? view.row_pitch : view.out_width + view.s - 1;
        if (threadIdx.x == 0) barrier->arrive_expect_tx(rows * slabs * width * SLAB_PACKS * 16);
        if (!CROPPED_WIDTH) __syncwarp();
        for (int i = threadIdx.x; i < (CROPPED_WIDTH ? 1 : rows); i += 32) {
            const int y = halo.first + i;
            Number* const row = halo.numbers + i * view.row_pitch * SLAB_PACKS * PACK;
            for (int q = 0; q < slabs; ++q)
                tma_copy_box(row + q * (SLAB_PIXELS * SLAB_PACKS * PACK), map,
                             (halo.from + q * SLAB_PACKS) * PACK, halo.column - view.pad_left,
                             y % view.rows_per_sample() - view.pad_top, y / view.rows_per_sample(),
                             barrier);
        }
    }
#else
    __device__ void start_copy(const HaloTile& halo, Number*, MBarrier*) const {
        // Unrolled, so that the addresses of several are worked out side by side.
#pragma unroll 6
        for (int i = threadIdx.x; i < halo.packs(); i += THREADS) {
            const int at = halo.source(i);
            cp_async_pack(halo.pack(i)->at, x + max(at, 0), at < 0);
        }
    }
#endif
    __device__ void convert(const HaloTile& halo, const Number*) const {
#if PRECISION == 1 && !TENSOR_MAPS
        for_each_batched<Pack<Number>, 6>(
            halo.packs(), [&](int i) { return *halo.pack(i); },
            [&](int i, const Pack<Number>& pack) { *halo.pack(i) = round_operands(pack); });
#endif
    }
};

#if EPILOGUE == 2
// Gradients by a run of pooled outputs, rounded, and to whom they go.
struct PooledPack {
    Pack<Number> dy;
    Pack<unsigned, PACK / 4> saved;

    __device__ static PooledPack read(const Number* dy, const Saved* saved) {
        return {*reinterpret_cast<const Pack<Number>*>(dy),
                *reinterpret_cast<const Pack<unsigned, PACK / 4>*>(saved)};
    }

    __device__ void scale(float factor) {
        Pack<float> scaled;
#pragma unroll
        for (int v = 0; v < PACK; ++v) scaled.at[v] = to_float(dy.at[v]) * factor;
        dy = round_operands(scaled);
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
    __device__ Pack<Number> member(int member) const {
        constexpr int BYTES = sizeof(Number), EACH = 4 / BYTES;  // Of a number; numbers of a word.
        Pack<unsigned, 4> dz = as<Pack<unsigned, 4>>(dy);
#pragma unroll
        for (int q = 0; q < 4; ++q) {
            const unsigned other = saved.at[q * EACH / 4] ^ member * 0x01010101u;
            // The highest bit of each byte that is 0, then all bits of it.
            const unsigned zero = ~(((other & 0x7F7F7F7Fu) + 0x7F7F7F7Fu) | other) & 0x80808080u;
            dz.at[q] &= spread<BYTES>((zero >> 7) * 255u, q * EACH % 4);
        }
        return as<Pack<Number>>(dz);
    }
};

// Windows of pooling that a window of the map has pixels of: whole lines of them, run by run.
struct PooledLines {
    const HaloTile& halo;
    int height, width;
    int first_line, packs;  // The first line, counted from the first sample's; of all lines.

    __device__ explicit PooledLines(const HaloTile& halo)
        : halo(halo),
          height(halo.view.height / 2),
          width(halo.view.width / 2),
          first_line(line(halo.first, 0)) {
        const int end = min(line(halo.stop - 1, 1), halo.samples * height);
        packs = max(end - first_line, 0) * width * halo.each;
    }

    // Lines of windows, of all samples, that begin above row `y`; or, `with` it, at it.
    __device__ int line(int y, int with) const {
        const View& view = halo.view;
        const int row = y % view.rows_per_sample() - view.pad_top,
                  lines = row < 0 ? 0 : row / 2 + with;
        return y / view.rows_per_sample() * height + min(lines, height);
    }

    // Where run i lies in dy.
    __device__ int source(int i) const {
        const int pack = halo.from + i % halo.each;
        return (first_line * width + i / halo.each) * halo.view.channels + pack * PACK;
    }

    // To those of the window's four pixels that are here.
    __device__ void scatter(int i, const PooledPack& pack) const {
        const View& view = halo.view;
        const int q = i % halo.each, at = first_line + i / (width * halo.each);
        const int column = i / halo.each % width * 2 + view.pad_left;
        const int top =
            at / height * view.rows_per_sample() + at % height * 2 + view.pad_top - halo.first;
#pragma unroll
        for (int m = 0; m < 4; ++m)
            if (unsigned(top + m / 2) < unsigned(halo.stop - halo.first))
                *halo.pack((top + m / 2) * view.row_pitch + column + m % 2, q) = pack.member(m);
    }
};

// Those of a narrow window, of one sample: a box of them, where what is outside of the pooled map
// is zeros. What the box has comes run by run, behind it the marks.
struct PooledBox {
    const HaloTile& halo;
    int sample, line, column;  // The first one; may be outside.
    int top, left;             // Where its first pixel would be in the window.
    int lines, columns;

    __device__ explicit PooledBox(const HaloTile& halo) : halo(halo) {
        const View& view = halo.view;
        const int row = halo.first % view.rows_per_sample() - view.pad_top,
                  x = halo.column - view.pad_left;
        sample = halo.first / view.rows_per_sample(), line = row >> 1, column = x >> 1;
        top = line * 2 - row, left = column * 2 - x;
        lines = (halo.stop - halo.first) / 2 + 1, columns = view.row_pitch / 2 + 1;
    }
    __device__ int packs() const { return lines * columns * halo.each; }

    // Where marks lie behind the runs.
    __device__ Saved* saved(Number* raw) const {
        return reinterpret_cast<Saved*>(raw) + (packs() * 16 + 127) / 128 * 128;
    }

    // Where run i lies in dy; -1 outside.
    __device__ int source(int i) const {
        const View& view = halo.view;
        const int y = line + i / (columns * halo.each), x = column + i / halo.each % columns;
        const int height = view.height / 2, width = view.width / 2;
        if (sample >= halo.samples || unsigned(y) >= unsigned(height) ||
            unsigned(x) >= unsigned(width))
            return -1;
        const int pack = halo.from + i % halo.each;
        return ((sample * height + y) * width + x) * view.channels + pack * PACK;
    }

    // To those of its four pixels that are here.
    __device__ void scatter(int i, const PooledPack& pack) const {
        const int q = i % halo.each, pixel = i / halo.each, width = halo.view.row_pitch;
        const int y = pixel / columns * 2 + top, x = pixel % columns * 2 + left;
        // Eight threads write 128 bytes at once: where those are of several windows of pooling,
        // some write the right pixel where others write the left one, so that all banks are
        // different.
        const int other = SLAB_PACKS == 8 ? 0 : pixel / (4 / SLAB_PACKS) % 2;
#pragma unroll
        for (int m = 0; m < 4; ++m) {
            const int down = m / 2, beside = m % 2 ^ other;
            if (unsigned(y + down) < unsigned(halo.stop - halo.first) &&
                unsigned(x + beside) < unsigned(width))
                *halo.pack((y + down) * width + x + beside, q) = pack.member(down * 2 + beside);
        }
    }
};
#endif

// dz, made of what follows the convolution: of pooled maps, as these are asked for (RAW) or as they
// lie in memory.
template <bool RAW> struct GradientSource {
    static constexpr bool DOUBLE_BUFFERED = EPILOGUE == 0;

    Gradient dz;
    const TensorMap* maps;  // Of dz; or of dy and of the marks.

    __device__ void start_copy(const HaloTile& halo, Number* raw, MBarrier* barrier) const {
#if EPILOGUE == 0
        InputSource{dz.dy, maps}.start_copy(halo, raw, barrier);
#elif EPILOGUE == 2
        if (!RAW) return;
        const PooledBox box(halo);
        Saved* const saved = box.saved(raw);
#if TENSOR_MAPS
        if (threadIdx.x > 0) return;
        barrier->arrive_expect_tx(box.packs() * (16 + PACK));
        tma_copy_box(raw, maps, halo.from * PACK, box.column, box.line, box.sample, barrier);
        tma_copy_box(saved, maps + 1, halo.from * PACK, box.column, box.line, box.sample, barrier);
#else
#pragma unroll 4
        for (int i = threadIdx.x; i < box.packs(); i += THREADS) {
            const int at = box.source(i);
            cp_async<16>(raw + i * PACK, dz.dy + max(at, 0), at >= 0);
            cp_async<PACK>(saved + i * PACK, dz.saved + max(at, 0), at >= 0);
        }
#endif
#endif
    }

    __device__ void convert(const HaloTile& halo, const Number* raw) const {
#if EPILOGUE == 0
        InputSource{dz.dy, maps}.convert(halo, raw);
#elif EPILOGUE == 1
        const auto fetch = [&](int i) {
            Gradient::Raw raw = {};
            const int at = halo.source(i);
            if (at >= 0) dz.piece(raw, 0, at, 0);
            return raw;
        };
        for_each_batched<Gradient::Raw, 2>(
            halo.packs(), fetch,
            [&](int i, const Gradient::Raw& raw) { *halo.pack(i) = dz.value(raw); });
#else
        if constexpr (RAW) {
            const PooledBox box(halo);
            const Saved* const saved = box.saved(const_cast<Number*>(raw));
            scatter(box, box.packs(),
                    [&](int i) { return PooledPack::read(raw + i * PACK, saved + i * PACK); });
        } else {
            // A map may have a last row or column that is in no window; it counts as padding here.
            for (int at = threadIdx.x; at < halo.pixels(); at += THREADS)
                if (!halo.covers(at, halo.view.height / 2 * 2, halo.view.width / 2 * 2))
                    for (int q = 0; q < halo.each; ++q) *halo.pack(at, q) = {};
            const PooledLines pooled(halo);
            scatter(pooled, pooled.packs, [&](int i) {
                return PooledPack::read(dz.dy + pooled.source(i), dz.saved + pooled.source(i));
            });
        }
#endif
    }

#if EPILOGUE == 2
   private:
    // Each run of dy is read once and goes to four pixels.
    template <class Pooling, class Fetch>
    __device__ void scatter(const Pooling& pooling, int packs, const Fetch& fetch) const {
        for_each_batched<PooledPack, 4>(packs, fetch, [&](int i, PooledPack pack) {
            pack.scale(dz.factor);
            pooling.scatter(i, pack);
        });
    }
#endif
};

// What this thread wrote to shared memory is seen by tensor cores behind the next barrier.
__device__ inline void fence_async_proxy() {
#if WGMMA
    wgmma::fence_async_proxy();
#endif
}
