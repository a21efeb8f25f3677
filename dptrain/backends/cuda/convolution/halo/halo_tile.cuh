// Halo tiles: input tiles in shared memory for convolutions, so that overlapping patches are loaded
// once. Convolutions with strides are computed as those of stride 1 on a folded map (`StoredMap`).
//
// gemm.cuh gathers each patch from global memory and therefore loads a pixel R · S times. Here a
// block keeps the rows of the map that its output pixels need in shared memory, including the zero
// padding (the halo). All pixels then reach a tap of the filter by the same address offset. Rows
// follow each other without a gap: the padding to the right of a row is also the padding to the
// left of the next row, and the padding below a map is also the padding above the next map. The
// main loop therefore needs no bounds checks, and each element is loaded, transformed and rounded
// once instead of once per tap.
//
// Layout: channels are stored in packs of 16 bytes. SLAB_PACKS packs of a pixel are adjacent,
// followed by those of the next pixel; this array is a *slab*. The next slab holds the next packs
// of all pixels. Packs are swizzled within 128 bytes (32-, 64- or 128-byte swizzle, according to
// the bytes of a pixel in a slab), so that the packs of eight consecutive pixels lie in different
// banks. wgmma reads this layout and TMA writes it (tma.cuh). Both derive the swizzle from address
// bits, so slabs are aligned to 1024 bytes.
//
// If a map has less than eight columns, the pixels of ROW_SAMPLES samples alternate in a row: the
// first pixels of all these samples, then their second pixels and so on. Adjacent pixels of a sample
// are ROW_SAMPLES apart, and eight adjacent pixels of the tile are eight columns of a product. Such
// a group of samples takes the part of a sample. TMA does not copy such rows.
//
// Source: PTX ISA, "Tensor Swizzling modes" and "Matrix descriptor format" of wgmma; Chetlur et
// al., 2014, for implicit GEMM.

#pragma once

#ifndef PRECISION
#define PRECISION 2  // Halo tiles exist for tensor cores only: tf32, bf16, and fp32 with TF32X3.
#endif
#include "conv2d.cuh"
#include "tma.cuh"
#include "cp_async.cuh"

#ifndef SLAB_PACKS
#define SLAB_PACKS 8   // Packs of a pixel that are adjacent: 8, 4 or 2.
#define SLAB_PIXELS 8  // Pixels of a slab.
#define TENSOR_MAPS 0  // Number of tensor maps for TMA; 0 without TMA.
#endif
#ifndef CROPPED_WIDTH
#define CROPPED_WIDTH 0  // Width of halo tiles that are cropped to what is read, or 0.
#endif
// 1 if the channels of the map in memory do not fill whole steps of the sum, or if it is folded.
#ifndef PADDED_CHANNELS
#define PADDED_CHANNELS 0
#endif
#ifndef ROW_SAMPLES
#define ROW_SAMPLES 1  // Samples whose pixels alternate in a row.
#endif
#ifndef FOLDED
#define FOLDED 0  // 1 if the convolution has strides other than 1.
#endif

static_assert(ROW_SAMPLES == 1 || !TENSOR_MAPS, "a tensor map has rows of one sample");

// True if a pack of channels is contiguous in memory and lies in one pixel.
constexpr bool WHOLE_PACKS = !PADDED_CHANNELS && !FOLDED;

// Channels that whole steps of the sum cover; further channels are zero.
__device__ inline int whole_steps(int channels) { return (channels + STEP_K - 1) / STEP_K * STEP_K; }

// The map in memory from which a View is read. A convolution with strides is computed as one of
// stride 1 on the *folded* map (space to depth): a pixel of it consists of fold_h × fold_w pixels
// in memory, with channels in the order (row, column, channel). The first folded pixel begins `top`
// rows above the map in memory and `left` columns to the left of it. Only the first `parts` pixels
// of each are read: all, or one if the filter has one tap.
struct StoredMap {
    int height, width, channels, fold_h, fold_w, top, left, parts;

    // Offset of channel c of the folded pixel (y, x) of a sample, or -1 in the padding.
    __device__ int offset(int sample, int y, int x, int c) const {
        const int part = WHOLE_PACKS ? 0 : c / channels;
        return part < parts ? part_offset(sample, y, x, part, c - part * channels) : -1;
    }
    // The same for a channel of a pixel in memory.
    __device__ int part_offset(int sample, int y, int x, int part, int c) const {
        y = y * fold_h + part / fold_w - top, x = x * fold_w + part % fold_w - left;
        const bool inside = unsigned(y) < unsigned(height) && unsigned(x) < unsigned(width);
        const int pixels = (sample * height + y) * width + x;
        return inside ? pixels * channels + c : -1;
    }
};

// The filters (height, width, channels, filters) of a convolution with strides, as filters of the
// convolution of stride 1 on the folded map. Without strides, both folds are 1.
struct FoldedFilter {
    int height, width, channels, filters, fold_h, fold_w;

    __device__ int r() const { return FOLDED ? (height + fold_h - 1) / fold_h : height; }
    __device__ int s() const { return FOLDED ? (width + fold_w - 1) / fold_w : width; }
    // Pixels of a folded pixel that the filter reads.
    __device__ int parts() const {
        return FOLDED && !(height == 1 && width == 1) ? fold_h * fold_w : 1;
    }
    // Channels of the folded map.
    __device__ int all_channels() const { return parts() * channels; }

    // Index (row, column, channel) of the weights of a tap of the convolution of stride 1 and of a
    // channel of the folded map, or -1 if the filter has no such tap.
    __device__ int index(int row, int column, int channel) const {
        const int part = WHOLE_PACKS ? 0 : channel / channels;
        row = row * fold_h + part / fold_w, column = column * fold_w + part % fold_w;
        const bool exists = WHOLE_PACKS || part < parts() && row < height && column < width;
        return exists ? (row * width + column) * channels + channel - part * channels : -1;
    }
};

// A map as a convolution of stride 1 reads it: out_height × out_width patches of r × s pixels. The
// first patch begins pad_top rows above the map and pad_left columns to the left of it.
struct View {
    int height, width, channels, pad_top, pad_left, out_height, out_width, r, s;
    int row_pitch;  // Pixels between consecutive rows in shared memory.
    StoredMap stored;
    FoldedFilter filter;
    bool rotated;  // True if the filters are rotated by 180 degrees.

    // True if the filter connects a channel of this map, by a tap, with a channel of the result.
    __device__ bool has_tap(int row, int column, int channel, int result) const {
        if (!FOLDED) return true;
        return (rotated ? filter.index(r - 1 - row, s - 1 - column, result)
                        : filter.index(row, column, channel)) >= 0;
    }

    // Rows between consecutive samples, including the padding that they share.
    __device__ int rows_per_sample() const {
        return height + max(pad_top, out_height + r - 1 - height - pad_top);
    }
};

__device__ inline View make_view(int height, int width, int channels, int top, int left,
                                 int out_height, int out_width, int r, int s,
                                 const StoredMap& stored, const FoldedFilter& filter,
                                 bool rotated) {
    // The pitch keeps the right padding of a row clear of the next row's map. Rows begin at
    // multiples of 128 bytes.
    constexpr int WHOLE = 8 / SLAB_PACKS;
    const int padded = ROW_SAMPLES * (width + max(left, out_width + s - 1 - width - left));
    const int pitch = CROPPED_WIDTH ? CROPPED_WIDTH : (padded + WHOLE - 1) / WHOLE * WHOLE;
    return {height,    width, whole_steps(channels), top,   left,   out_height,
            out_width, r,     s,                     pitch, stored, filter,
            rotated};
}

__device__ inline FoldedFilter folded_filter(const Geometry& g) {
    return {g.r, g.s, g.channels, g.filters, FOLDED ? g.stride_h : 1, FOLDED ? g.stride_w : 1};
}

// The convolution of stride 1 on the folded input. The folded map includes the padding.
__device__ inline Geometry folded(const Geometry& g) {
    if (!FOLDED) return g;
    const int r = folded_filter(g).r(), s = folded_filter(g).s();
    const int rows = (g.height + g.pad_top + g.stride_h - 1) / g.stride_h;
    const int columns = (g.width + g.pad_left + g.stride_w - 1) / g.stride_w;
    return {max(rows, g.out_height + r - 1),
            max(columns, g.out_width + s - 1),
            folded_filter(g).all_channels(),
            g.out_height,
            g.out_width,
            g.filters,
            r,
            s,
            1,
            1,
            0,
            0,
            1,
            1};
}
__device__ inline StoredMap stored_input(const Geometry& g) {
    if (!FOLDED) return {g.height, g.width, g.channels, 1, 1, 0, 0, 1};
    return {g.height,   g.width,   g.channels, g.stride_h,
            g.stride_w, g.pad_top, g.pad_left, folded_filter(g).parts()};
}

// Forward reads x to compute z. Backward with respect to the input reads dz to compute dx.
__device__ inline View forward_view(const Geometry& layer) {
    const Geometry g = folded(layer);
    return make_view(g.height, g.width, g.channels, g.pad_top, g.pad_left, g.out_height,
                     g.out_width, g.r, g.s, stored_input(layer), folded_filter(layer), false);
}
__device__ inline View backward_view(const Geometry& layer) {
    const Geometry g = folded(layer);
    return make_view(g.out_height, g.out_width, g.filters, g.r - 1 - g.pad_top,
                     g.s - 1 - g.pad_left, g.height, g.width, g.r, g.s,
                     {g.out_height, g.out_width, g.filters, 1, 1, 0, 0, 1}, folded_filter(layer),
                     true);
}

// Start the asynchronous copy of N elements in parts of STEP adjacent ones. Element v is at offset
// find(v), or zero if that is negative.
template <int N, int STEP, class T, class Find>
__device__ inline void cp_async_parts(T* to, const T* from, const Find& find) {
#pragma unroll
    for (int v = 0; v < N; v += STEP) {
        const int at = find(v);
        cp_async<STEP * sizeof(T)>(to + v, from + max(at, 0), at >= 0);
    }
}
// Read them into registers.
template <int N, int STEP, class T, class Find>
__device__ inline Pack<T, N> read_parts(const T* from, const Find& find) {
    Pack<T, N> pack = {};
#pragma unroll
    for (int v = 0; v < N; v += STEP) {
        const int at = find(v);
        if (at >= 0) read<STEP>(pack, v, from + at);
    }
    return pack;
}

// Call put(i, fetch(i)) for each i < all of this thread. BATCH loads are in flight at a time.
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

// Position of a pack of 16 bytes after swizzling, given its index within the slab.
__device__ inline int swizzled(int index) { return index ^ (index >> 3 & (SLAB_PACKS - 1)); }

// Consecutive rows of a map in shared memory, with some packs of each pixel.
struct HaloTile {
    const View& view;
    Number* numbers;
    int samples;      // Of the minibatch. Rows beyond the last sample are zero.
    int from, each;   // First pack of a pixel, and number of packs.
    int first, stop;  // Range of rows, counted from the padding above the first sample.
    int column;       // Column of the patches that begin in the tile's first column.

    // Row in which the pixel's patch begins.
    __device__ int row(const Pixel& p) const { return p.sample * view.rows_per_sample() + p.row; }

    // Offset of the pixel's patch in an unswizzled slab, in packs.
    __device__ int offset(const Pixel& p) const {
        return ((row(p) - first) * view.row_pitch + p.column - column) * SLAB_PACKS;
    }

    // Number of pixels and of packs, and the address of a pack. The patches of the last row reach
    // beyond it, unless the tile is cropped to whole patches.
    __device__ int pixels() const {
        return (stop - first) * view.row_pitch + (CROPPED_WIDTH ? 0 : ROW_SAMPLES * (view.s - 1));
    }
    __device__ int packs() const { return pixels() * each; }
    __device__ Pack<Number>* pack(int at, int q) const {
        const int index = swizzled(at * SLAB_PACKS + q % SLAB_PACKS) +
                          q / SLAB_PACKS * (SLAB_PIXELS * SLAB_PACKS);
        return reinterpret_cast<Pack<Number>*>(numbers) + index;
    }
    __device__ Pack<Number>* pack(int i) const { return pack(i / each, i % each); }

    // True if the pixel lies in the first `rows` rows and `columns` columns of a map.
    __device__ bool covers(int at, int rows, int columns) const {
        const int y = first + at / view.row_pitch, sample = y / view.rows_per_sample();
        return sample < samples &&
               unsigned(y % view.rows_per_sample() - view.pad_top) < unsigned(rows) &&
               unsigned(at % view.row_pitch + column - view.pad_left) < unsigned(columns);
    }

    // Offset of element v of pack i in memory, or -1 if it lies in the padding.
    __device__ int source(int i, int v = 0) const {
        const int at = i / each, y = first + at / view.row_pitch;
        const int along = at % view.row_pitch + column, x = along / ROW_SAMPLES - view.pad_left;
        const int sample = y / view.rows_per_sample() * ROW_SAMPLES + along % ROW_SAMPLES,
                  row = y % view.rows_per_sample() - view.pad_top;
        const int offset = view.stored.offset(sample, row, x, (from + i % each) * PACK + v);
        return sample < samples ? offset : -1;
    }
};

// Source of halo tiles that are copied from memory unchanged. `start_copy` starts the asynchronous
// copies. After they have completed, `convert` rounds the elements to nearest, because tensor cores
// would truncate them. An access covers STEP elements; STEP divides the channels in memory.
template <int STEP> struct InputSource {
    // True if tiles need no conversion, so that the next tile can be copied while this one is read.
    static constexpr bool DOUBLE_BUFFERED = true;

    const Number* x;
    const TensorMap* map;

    // Channel c of the pixel (y, x) of a sample of the view, or 0 in the padding.
    __device__ float element(const View& view, int sample, int y, int column, int c) const {
        const int at = view.stored.offset(sample, y, column, c);
        return at < 0 ? 0.0f : to_float(round_operand(to_float(x[at])));
    }

#if TENSOR_MAPS
    // TMA fills padding with zeros. It copies a cropped tile with one box per slab, or a full tile
    // with one box per row, which the lanes of the first warp issue.
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
        // Unrolled, so that the address computations of several packs overlap.
#pragma unroll 6
        for (int i = threadIdx.x; i < halo.packs(); i += THREADS)
            cp_async_parts<PACK, STEP>(halo.pack(i)->at, x,
                                       [&](int v) { return halo.source(i, v); });
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
// A pack of gradients with respect to pooled outputs, and their argmax.
struct PooledPack {
    Pack<Number> dy;
    Pack<unsigned, PACK / 4> saved;

    __device__ static PooledPack read(const Number* dy, const Saved* saved) {
        return {*reinterpret_cast<const Pack<Number>*>(dy),
                *reinterpret_cast<const Pack<unsigned, PACK / 4>*>(saved)};
    }
    // The same from parts of OUT_VECTOR elements: element v of the pack is at offset find(v), or
    // zero if that is negative.
    template <class Find>
    __device__ static PooledPack read(const Number* dy, const Saved* saved, const Find& find) {
        if constexpr (WHOLE_PACKS) return read(dy + find(0), saved + find(0));
        return {read_parts<PACK, OUT_VECTOR>(dy, find),
                as<Pack<unsigned, PACK / 4>>(read_parts<PACK, OUT_VECTOR>(saved, find))};
    }

    __device__ void scale(float factor) {
        Pack<float> scaled;
#pragma unroll
        for (int v = 0; v < PACK; ++v) scaled.at[v] = to_float(dy.at[v]) * factor;
        dy = round_operands(scaled);
    }

    // Broadcast byte `v` of the word to all four bytes, or bytes v and v + 1 to two bytes each.
    template <int BYTES> __device__ static unsigned spread(unsigned word, int v) {
#ifdef __CUDA_ARCH__
        return __byte_perm(word, 0, BYTES == 4 ? 0x1111 * v : 0x1100 + 0x1111 * v);
#else
        if (BYTES == 4) return (word >> v * 8 & 0xFFu) * 0x01010101u;
        return (word >> v * 8 & 0xFFu) * 0x0101u | (word >> v * 8 + 8 & 0xFFu) * 0x01010000u;
#endif
    }

    // Gradient with respect to one of the four pixels of the windows: dy where this pixel is the
    // maximum, else 0.
    __device__ Pack<Number> member(int member) const {
        // Bytes of an element, and elements of a 32-bit word.
        constexpr int BYTES = sizeof(Number), EACH = 4 / BYTES;
        Pack<unsigned, 4> dz = as<Pack<unsigned, 4>>(dy);
#pragma unroll
        for (int q = 0; q < 4; ++q) {
            const unsigned other = saved.at[q * EACH / 4] ^ member * 0x01010101u;
            // Sets the highest bit of each byte that is 0, then all bits of that byte.
            const unsigned zero = ~(((other & 0x7F7F7F7Fu) + 0x7F7F7F7Fu) | other) & 0x80808080u;
            dz.at[q] &= spread<BYTES>((zero >> 7) * 255u, q * EACH % 4);
        }
        return as<Pack<Number>>(dz);
    }
};

// Rows of the pooled map that overlap the halo tile, pack by pack.
struct PooledLines {
    const HaloTile& halo;
    int height, width;
    int first_line, packs;  // First pooled row, counted over all samples, and number of packs.

    __device__ explicit PooledLines(const HaloTile& halo)
        : halo(halo),
          height(halo.view.height / 2),
          width(halo.view.width / 2),
          first_line(line(halo.first, 0)) {
        const int end = min(line(halo.stop - 1, 1), halo.samples * height);
        packs = max(end - first_line, 0) * width * halo.each;
    }

    // Number of pooled rows, over all samples, that begin above row `y`, or with `with` = 1 at or
    // above it.
    __device__ int line(int y, int with) const {
        const View& view = halo.view;
        const int row = y % view.rows_per_sample() - view.pad_top,
                  lines = row < 0 ? 0 : row / 2 + with;
        return y / view.rows_per_sample() * height + min(lines, height);
    }

    // Offset of element v of pack i in dy, or -1 beyond the last channel.
    __device__ int source(int i, int v) const {
        const int channels = halo.view.stored.channels, c = (halo.from + i % halo.each) * PACK + v;
        const int offset = (first_line * width + i / halo.each) * channels + c;
        return WHOLE_PACKS || c < channels ? offset : -1;
    }

    // Write the gradients of the window's four pixels that lie in the tile.
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

// Part of the pooled map that overlaps a cropped halo tile of one sample. TMA copies it as one box
// and fills the outside with zeros. The packs of dy are followed by those of the argmax.
struct PooledBox {
    const HaloTile& halo;
    int sample, line, column;  // First pooled pixel; it may lie outside the map.
    int top, left;             // Position of its first pixel relative to the halo tile.
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

    // Address of the argmax, which follows the packs of dy.
    __device__ Saved* saved(Number* raw) const {
        return reinterpret_cast<Saved*>(raw) + (packs() * 16 + 127) / 128 * 128;
    }

    // Offset of element v of pack i in dy, or -1 outside the map.
    __device__ int source(int i, int v) const {
        const View& view = halo.view;
        const int y = line + i / (columns * halo.each), x = column + i / halo.each % columns;
        const int height = view.height / 2, width = view.width / 2,
                  channels = view.stored.channels, c = (halo.from + i % halo.each) * PACK + v;
        if (sample >= halo.samples || unsigned(y) >= unsigned(height) ||
            unsigned(x) >= unsigned(width) || !WHOLE_PACKS && c >= channels)
            return -1;
        return ((sample * height + y) * width + x) * channels + c;
    }

    // Write the gradients of the window's four pixels that lie in the tile.
    __device__ void scatter(int i, const PooledPack& pack) const {
        const int q = i % halo.each, pixel = i / halo.each, width = halo.view.row_pitch;
        const int y = pixel / columns * 2 + top, x = pixel % columns * 2 + left;
        // Eight threads write 128 bytes together. If these belong to several pooling windows, some
        // threads write the right pixel first and others the left one, which avoids bank conflicts.
        const int other = SLAB_PACKS == 8 ? 0 : pixel / (4 / SLAB_PACKS) % 2;
#pragma unroll
        for (int m = 0; m < 4; ++m) {
            const int below = m / 2, right = m % 2 ^ other;
            if (unsigned(y + below) < unsigned(halo.stop - halo.first) &&
                unsigned(x + right) < unsigned(width))
                *halo.pack((y + below) * width + x + right, q) = pack.member(below * 2 + right);
        }
    }
};
#endif

// Source of halo tiles of dz, which is computed from dy according to the epilogue. With a pooling
// epilogue, dy and the argmax are copied to shared memory first (RAW) or read from global memory.
template <bool RAW> struct GradientSource {
    static constexpr bool DOUBLE_BUFFERED = EPILOGUE == 0;

    Gradient dz;
    const TensorMap* maps;  // Tensor map of dz, or those of dy and of the argmax.

    // Filter k of the pixel (y, x) of a sample, or 0 in the padding.
    __device__ float element(const View& view, int sample, int y, int x, int k) const {
        constexpr int POOL = EPILOGUE == 2 ? 2 : 1;
        const int height = view.height / POOL, width = view.width / POOL;
        const bool inside = unsigned(y) < unsigned(height * POOL) &&
                            unsigned(x) < unsigned(width * POOL) && k < view.stored.channels;
        const int pixel = (sample * height + y / POOL) * width + x / POOL;
        return inside ? dz.element(pixel * view.stored.channels + k, y % 2 * 2 + x % 2) : 0.0f;
    }

    __device__ void start_copy(const HaloTile& halo, Number* raw, MBarrier* barrier) const {
#if EPILOGUE == 0
        InputSource<OUT_VECTOR>{dz.dy, maps}.start_copy(halo, raw, barrier);
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
            const auto find = [&](int v) { return box.source(i, v); };
            cp_async_parts<PACK, OUT_VECTOR>(raw + i * PACK, dz.dy, find);
            cp_async_parts<PACK, OUT_VECTOR>(saved + i * PACK, dz.saved, find);
        }
#endif
#endif
    }

    __device__ void convert(const HaloTile& halo, const Number* raw) const {
#if EPILOGUE == 0
        InputSource<OUT_VECTOR>{dz.dy, maps}.convert(halo, raw);
#elif EPILOGUE == 1
        const auto fetch = [&](int i) {
            Gradient::Raw raw = {};
#pragma unroll
            for (int v = 0; v < PACK; v += OUT_VECTOR) {
                const int at = halo.source(i, v);
                if (at >= 0) dz.piece(raw, v, at, 0);
            }
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
            // The last row or column of a map may belong to no pooling window; it is treated as
            // padding.
            for (int at = threadIdx.x; at < halo.pixels(); at += THREADS)
                if (!halo.covers(at, halo.view.height / 2 * 2, halo.view.width / 2 * 2))
                    for (int q = 0; q < halo.each; ++q) *halo.pack(at, q) = {};
            const PooledLines pooled(halo);
            scatter(pooled, pooled.packs, [&](int i) {
                return PooledPack::read(dz.dy, dz.saved,
                                        [&](int v) { return pooled.source(i, v); });
            });
        }
#endif
    }

#if EPILOGUE == 2
   private:
    // Each pack of dy is read once and written to four pixels.
    template <class Pooling, class Fetch>
    __device__ void scatter(const Pooling& pooling, int packs, const Fetch& fetch) const {
        for_each_batched<PooledPack, 4>(packs, fetch, [&](int i, PooledPack pack) {
            pack.scale(dz.factor);
            pooling.scatter(i, pack);
        });
    }
#endif
};

// Make this thread's writes to shared memory visible to the tensor cores (async proxy) after the
// next barrier.
__device__ inline void fence_async_proxy() {
#if WGMMA
    wgmma::fence_async_proxy();
#endif
}
