// Tiles of maps in shared memory, and fragments of them, for convolutions with groups on tensor
// cores. The macros are set by grouped_tiles.py.
//
// Adjacent groups are joined to units, mostly of at least 16 channels, whose products fill the
// instructions; the last unit may have fewer groups. Weights between different groups of a unit are zeros. Therefore a number
// that is not finite makes all results of its unit that use its pixel NaN.
//
// A block keeps the part of a map that the pixels of its tile reach in shared memory, so that each
// tap reads the same pixels at another offset. If maps are small, a tile consists of the same pixels
// of several samples. The pitch of a pixel is an odd number of packs of 16
// bytes: the rows of a fragment then lie in different banks.

#pragma once

#ifndef PRECISION
#define PRECISION 2  // In fp32, these kernels exist with 3xTF32 only.
#endif
// Rows and columns of the window, strides, dilations, padding before the map, and pixels of a tile.
#ifndef WINDOW_R
#define WINDOW_R 3
#define WINDOW_S 3
#define STEP_H 1
#define STEP_W 1
#define DILATION_H 1
#define DILATION_W 1
#define PAD_H 1
#define PAD_W 1
#define TILE_SAMPLES 1
#define TILE_ROWS 8
#define TILE_COLUMNS 8
#define GROUP_CHANNELS 8
#define GROUP_FILTERS 8
#define UNIT_GROUPS 2
#define UNITS 2
#define BUFFERS 2
#endif

#define NEEDS_TENSOR_CORES 1

#include "gemm.cuh"
#include "cp_async.cuh"
#include "geometry.cuh"

// Pixels that the window extends over.
constexpr int EXTENT_H = (WINDOW_R - 1) * DILATION_H + 1,
              EXTENT_W = (WINDOW_S - 1) * DILATION_W + 1;
constexpr int TILE_PIXELS = TILE_SAMPLES * TILE_ROWS * TILE_COLUMNS, TAPS = WINDOW_R * WINDOW_S;
constexpr int UNIT_CHANNELS = UNIT_GROUPS * GROUP_CHANNELS,
              UNIT_FILTERS = UNIT_GROUPS * GROUP_FILTERS;

__device__ constexpr int round_up(int count, int step) { return (count + step - 1) / step * step; }

// Elements between pixels in shared memory, for a number of channels: an odd number of packs.
__device__ constexpr int pixel_pitch(int channels) {
    return (round_up(channels, PACK) / PACK | 1) * PACK;
}

// A pixel of the tile, or the first one for pixels after the last one.
struct TilePixel {
    int sample, row, column;

    __device__ explicit TilePixel(int pixel) {
        const int own = pixel < TILE_PIXELS ? pixel : 0, line = own / TILE_COLUMNS;
        sample = line / TILE_ROWS, row = line % TILE_ROWS, column = own % TILE_COLUMNS;
    }
    // Its place in halo tiles of HEIGHT × WIDTH pixels, if adjacent pixels are `down` and `across`
    // pixels apart there.
    template <int HEIGHT, int WIDTH> __device__ int halo_pixel(int down, int across) const {
        return (sample * HEIGHT + row * down) * WIDTH + column * across;
    }
};

// Position of a tile: the first sample, row and column.
struct TilePosition {
    int sample, row, column;

    __device__ TilePosition(int tile, int height, int width) {
        const int across = (width + TILE_COLUMNS - 1) / TILE_COLUMNS;
        const int down = (height + TILE_ROWS - 1) / TILE_ROWS, line = tile / across;
        sample = line / down * TILE_SAMPLES, row = line % down * TILE_ROWS;
        column = tile % across * TILE_COLUMNS;
    }
    __device__ static int count(int samples, int height, int width) {
        return (samples + TILE_SAMPLES - 1) / TILE_SAMPLES *
               ((height + TILE_ROWS - 1) / TILE_ROWS) *
               ((width + TILE_COLUMNS - 1) / TILE_COLUMNS);
    }
};

// Copy a rectangle of ROWS × COLUMNS pixels of each sample of a tile from a map (samples, height,
// width, channels), of which CHANNELS channels from `first` on. What lies outside of the map, and
// channels from `last` on, are zeros. The copies are asynchronous.
template <int ROWS, int COLUMNS, int CHANNELS>
__device__ inline void copy_rectangle(Number* to, const Number* map, int samples, int height,
                                      int width, int channels, int sample, int top, int left,
                                      int first, int last) {
    constexpr int PACKS = CHANNELS / PACK, ALL = TILE_SAMPLES * ROWS * COLUMNS * PACKS;
    for (int i = threadIdx.x; i < ALL; i += blockDim.x) {
        const int pixel = i / PACKS, line = pixel / COLUMNS, channel = first + i % PACKS * PACK;
        const int row = top + line % ROWS, column = left + pixel % COLUMNS;
        const int own = sample + line / ROWS;
        const bool there = unsigned(row) < unsigned(height) && unsigned(column) < unsigned(width) &&
                           channel < last && (TILE_SAMPLES == 1 || own < samples);
        const int from = ((own * height + row) * width + column) * channels + channel;
        cp_async<16>(to + pixel * pixel_pitch(CHANNELS) + i % PACKS * PACK,
                     map + (there ? from : 0), there);
    }
}

// Round the words of a fragment of activations as operands are rounded.
__device__ inline void round_fragment(unsigned (&words)[4]) {
#if PRECISION == 1 && !TF32X3
#pragma unroll
    for (unsigned& word : words)
        word = __float_as_uint(round_operand(__uint_as_float(word)));
#endif
}

#if TENSOR_CORES
// The operands of a product of 16 rows and 16 columns: words, or with 3xTF32 their parts.
struct Fragment {
#if TF32X3
    SplitFragment parts[1];
#else
    unsigned words[4];
#endif

    // `row` is the row of 16 bytes that this lane passes to ldmatrix.
    __device__ void load(const Number* row, bool rounds) {
        unsigned own[4];
        ldmatrix_x4(own, row);
        set(own, rounds);
    }
    // Terms are the rows of `from`, at PITCH elements, and columns its channels. `lanes` are the
    // offsets of this lane's terms: of its row in bf16, of words t and t + 4 otherwise.
    __device__ void load_transposed(const Number* from, const int (&lanes)[2], bool rounds) {
        unsigned own[4];
        const int lane = threadIdx.x % 32;
#if PRECISION == 2
        ldmatrix_x4_transposed(own, from + lanes[0] + lane / 8 % 2 * 8);
#else
#pragma unroll
        for (int q = 0; q < 4; ++q)
            own[q] = __float_as_uint(from[lanes[q / 2] + lane / 4 + q % 2 * 8]);
#endif
        set(own, rounds);
    }
    __device__ void set(unsigned (&own)[4], bool rounds) {
        if (rounds) round_fragment(own);
#if TF32X3
        parts[0].split(own);
#else
#pragma unroll
        for (int q = 0; q < 4; ++q) words[q] = own[q];
#endif
    }
};

// The terms of a transposed fragment that this lane provides: see Fragment::load_transposed.
__device__ inline int lane_term(int q) {
    const int lane = threadIdx.x % 32;
    return PRECISION == 2 ? lane % 8 + lane / 16 * 8 : lane % 4 + q * 4;
}

// c += a b, for two times eight columns.
__device__ inline void add_product(float (&c)[2][4], const Fragment& a, const Fragment& b) {
#if TF32X3
    multiply_split(c, a.parts[0], b.parts);
#else
    mma(c[0], a.words, b.words[0], b.words[2]);
    mma(c[1], a.words, b.words[1], b.words[3]);
#endif
}
#endif
