// Tiles of x and dz in shared memory for the gradient of convolution weights
// (conv2d_backward_weight_halo.cu): layout and asynchronous copies. The macros are set by
// wgrad_tiles.py.
//
// A block processes one strip of the output map at a time: STRIP_LINES lines of LINE_POSITIONS
// positions. The K dimension of an MMA instruction consists of two halves, and each half is
// HALF_POSITIONS consecutive positions that may begin anywhere. In tf32 a half is one position
// (four pixels), taken column by column. In bf16 it is eight positions, taken line by line; within
// CONTIGUOUS_LINES lines, halves continue across line ends, where dz is 0.
//
// SAMPLES_ACROSS samples with small maps can be processed together: a line then consists of the
// first pixels of LINE_SAMPLES samples, followed by their second pixels and so on, so that neighbours
// of a sample are LINE_SAMPLES positions apart. In tf32, the four pixels of a position belong to
// different samples. Samples that do not exist are zeros.
//
// If the map has few channels (FEW_CHANNELS), the channels of S consecutive pixels are treated as
// the channels of one pixel, so that a row of taps becomes one tap.

#pragma once

#ifndef STRIP_LINES
#define TILE_M 64
#define TILE_N 64
#define WARP_M 16
#define WARP_N 64
#define TILE_K_WORDS 16
#define FEW_CHANNELS 0
#define TILE_CHANNELS 32
#define TILE_FILTERS 64
#define TAP_ROWS 1
#define TAP_COLUMNS 2
#define STRIP_LINES 2
#define CONTIGUOUS_LINES 1
#define LINE_POSITIONS 8
#define LINE_PITCH 10
#define QUAD_ROWS_APART 0
#define QUAD_COLUMNS_APART 8
#define BUFFERS 1
#define MIN_BLOCKS 2
#endif

#include "halo_tile.cuh"

#ifndef PADDED_FILTERS
#define PADDED_FILTERS 0  // 1 if the filters are no multiple of 16.
#endif
#ifndef SAMPLES_ACROSS
#define SAMPLES_ACROSS 1
#endif

constexpr bool PIXEL_QUADS = PRECISION < 2;
constexpr int POSITION_PIXELS = PIXEL_QUADS ? 4 : 1;  // Pixels of a position.
// Positions of half an MMA instruction.
constexpr int HALF_POSITIONS = STEP_K / 2 / POSITION_PIXELS;
constexpr int STRIP_HEIGHT =
    QUAD_ROWS_APART ? 4 * STRIP_LINES : STRIP_LINES;  // Lines of the map that a strip covers.
constexpr int LINE_SAMPLES =
    SAMPLES_ACROSS == 1 ? 1 : SAMPLES_ACROSS / POSITION_PIXELS;  // Samples that a line alternates.
constexpr int POOL = EPILOGUE == 2 ? 2 : 1;  // Side of the pooling window of the epilogue, or 1.

// Halves of a group of contiguous lines, and of the strip.
constexpr int LINE_HALVES =
    ((CONTIGUOUS_LINES - 1) * LINE_PITCH + LINE_POSITIONS + HALF_POSITIONS - 1) / HALF_POSITIONS;
constexpr int STRIP_HALVES = STRIP_LINES / CONTIGUOUS_LINES * LINE_HALVES;
// Two MMA steps are processed together. If the epilogue pools, these are two lines of the same
// pooling windows.
constexpr int STEP_PAIRS = (STRIP_HALVES + 3) / 4;

// Number of positions that the halves and taps reach; rows and columns of the halo tile follow from
// it.
constexpr int HALO_REACH =
    (CONTIGUOUS_LINES == 1 ? 0 : (STRIP_LINES - CONTIGUOUS_LINES + TAP_ROWS - 1) * LINE_PITCH) +
    LINE_HALVES * HALF_POSITIONS + (TAP_COLUMNS - 1) * LINE_SAMPLES;
constexpr int HALO_ROWS =
    CONTIGUOUS_LINES == 1 ? STRIP_LINES + TAP_ROWS - 1 : (HALO_REACH + LINE_PITCH - 1) / LINE_PITCH;
constexpr int PIXEL_PACKS = TILE_CHANNELS / PACK;  // Packs of a pixel.

// Smallest integer that is not below `least` and congruent to `rest` modulo 8.
__device__ constexpr int round_up_to_residue(int least, int rest) {
    return (least + 7 - rest) / 8 * 8 + rest;
}

// With this residue, eight threads that store adjacent packs write to different banks.
constexpr int BANK_OFFSET = PIXEL_PACKS < 8 ? 8 / PIXEL_PACKS : 1;
constexpr int HALO_COLUMNS = CONTIGUOUS_LINES > 1 ? LINE_PITCH
                             : PIXEL_QUADS        ? HALO_REACH
                                                  : round_up_to_residue(HALO_REACH, BANK_OFFSET);

// Strides in packs: from a position to the next, from a line to the next and, in bf16, from a pack
// of channels to the next. If no half crosses a line end, the rows of taps have the same stride as
// packs of channels, so that one instruction covers all of them.
constexpr int MAX_MMA_COLUMNS = TF32X3 ? 64 : 256;  // Sums that are promoted take registers.
constexpr bool ROWS_AT_ONCE = CONTIGUOUS_LINES == 1 && TAP_ROWS * TILE_CHANNELS <= MAX_MMA_COLUMNS;
constexpr int TAP_ROWS_PER_MMA = ROWS_AT_ONCE ? TAP_ROWS : 1,
              N8_TILES = TAP_ROWS_PER_MMA * TILE_CHANNELS / 8;
constexpr int POSITION_STRIDE = PIXEL_QUADS ? HALO_ROWS * TILE_CHANNELS + 1 : 1;
constexpr int LINE_STRIDE = PIXEL_QUADS             ? TILE_CHANNELS
                            : CONTIGUOUS_LINES == 1 ? PIXEL_PACKS * HALO_COLUMNS
                                                    : LINE_PITCH;
constexpr int PLANE_STRIDE = CONTIGUOUS_LINES == 1
                                 ? HALO_COLUMNS
                                 : round_up_to_residue(HALO_ROWS * HALO_COLUMNS, BANK_OFFSET);
constexpr int HALO_PACKS = PIXEL_QUADS             ? HALO_COLUMNS * POSITION_STRIDE
                           : CONTIGUOUS_LINES == 1 ? HALO_ROWS * LINE_STRIDE
                                                   : PIXEL_PACKS * PLANE_STRIDE;

// Layout of dz: one row of TILE_FILTERS filters per term of the sum, or per pooling window. The
// pitch avoids bank conflicts between lanes that read four rows.
constexpr int PAIR_DZ_ROWS = EPILOGUE == 2 ? (PIXEL_QUADS ? 4 : 8) : 2 * STEP_K;
constexpr int DZ_ROWS = STEP_PAIRS * PAIR_DZ_ROWS;
constexpr int DZ_PITCH = TILE_FILTERS + (PIXEL_QUADS         ? 2 * PACK
                                         : EPILOGUE < 2      ? PACK
                                         : TILE_FILTERS > 16 ? 2 * PACK
                                                             : 0);
constexpr int SAVED_PITCH = EPILOGUE == 2 ? TILE_FILTERS + 16
                            : EPILOGUE    ? DZ_PITCH
                                          : 0;  // Pitch of a row of the saved tensor.

// With two BUFFERS, the next strip is copied while the current one is multiplied. Positions of four
// pixels must then be copied to a staging buffer first and transposed after the copy has completed.
constexpr bool STAGED_TRANSPOSE = PIXEL_QUADS && !FEW_CHANNELS && BUFFERS == 2;
constexpr int STAGING_ROWS = HALO_ROWS + 3 * QUAD_ROWS_APART,
              STAGING_COLUMNS = HALO_COLUMNS + 3 * QUAD_COLUMNS_APART;
// In packs; two packs of each of four pixels lie in different banks.
constexpr int STAGING_PIXEL_PITCH = PIXEL_PACKS + 2;
constexpr int STAGING_PACKS =
    STAGED_TRANSPOSE ? STAGING_ROWS * STAGING_COLUMNS * STAGING_PIXEL_PITCH : 0;
constexpr int HALO_BUFFERS = STAGED_TRANSPOSE ? 1 : BUFFERS;
// With 3xTF32, a halo tile has two planes: the high and the low parts of float32.
#if TF32X3_WGMMA
constexpr int PLANES = 2;
#else
constexpr int PLANES = 1;
#endif
constexpr int ALL_HALO_PACKS = HALO_BUFFERS * PLANES * HALO_PACKS;
constexpr int DZ = DZ_ROWS * DZ_PITCH * sizeof(Number);
constexpr int DZ_BUFFER = DZ + DZ_ROWS * SAVED_PITCH * sizeof(Saved);

static_assert(TILE_M == 64 && WARP_M == 16 && WARP_N == TILE_N,
              "a warp has sixteen filters and all columns");
static_assert(TILE_N == TAP_ROWS * TAP_COLUMNS * TILE_CHANNELS,
              "the columns are the taps and channels of the block");
static_assert(!PIXEL_QUADS || CONTIGUOUS_LINES == 1, "tf32 does not support contiguous lines");
static_assert(SAMPLES_ACROSS == 1 || SAMPLES_ACROSS % POSITION_PIXELS == 0 && !FEW_CHANNELS &&
                                         EPILOGUE < 2 && QUAD_ROWS_APART == 0 &&
                                         (!PIXEL_QUADS || QUAD_COLUMNS_APART == HALO_COLUMNS),
              "the samples of a position are next to each other; nothing is pooled");
static_assert(STRIP_LINES % POOL == 0 && (POOL == 1 || CONTIGUOUS_LINES == 1),
              "a strip consists of whole pooling windows");
static_assert(POOL == 1 || !PIXEL_QUADS || LINE_POSITIONS % 2 == 0,
              "each of the four pixels of a position needs whole pooling windows");

constexpr int ALL_THREADS = THREADS * K_GROUPS, BLOCK_WARPS = ALL_THREADS / 32;
__device__ inline int thread_index() { return threadIdx.y * THREADS + threadIdx.x; }
__device__ inline int warp_index() { return thread_index() / 32; }
__device__ inline int lane_index() { return threadIdx.x % 32; }

// Addresses of a strip's data in shared memory.
struct Buffers {
    Number* halo;
    Number* staging;
    Number* dz;
    Saved* saved;
};

// The part of a strip that a block loads; `line` is its first output line, and `sample` the first
// of SAMPLES_ACROSS samples.
struct Strip {
    const Geometry& g;  // Of the convolution of stride 1.
    const StoredMap& stored;
    int samples;  // Of the minibatch.
    int sample, line;
    int tap_row, channel, filter;  // First tap row, channel and filter of the block.

    // Row of the map that contains a row of the tile.
    __device__ int map_row(int row) const { return line + tap_row + row - g.pad_top; }

    // Sample of a column of a line, for one of the four pixels of a position in tf32.
    __device__ int sample_of(int column, int quarter) const {
        if (SAMPLES_ACROSS == 1) return sample;
        return sample + quarter * LINE_SAMPLES + column % LINE_SAMPLES;
    }

    // Offset of element v of pack q of a pixel of the tile in memory, or -1 in the padding.
    __device__ int source(int row, int column, int q, int v) const {
        int own = sample;
        if (SAMPLES_ACROSS > 1) {
            own = sample_of(column % HALO_COLUMNS, column / HALO_COLUMNS);
            if (own >= samples) return -1;
            column = column % HALO_COLUMNS / LINE_SAMPLES;
        }
        return stored.offset(own, map_row(row), column - g.pad_left, channel + q * PACK + v);
    }
    // Elements of a pack that are adjacent in memory.
    static constexpr int IN_STEP = WHOLE_PACKS ? PACK : IN_VECTOR;

    // Address of pack q of a pixel in the halo tile, or in the staging buffer.
    static __device__ Number* pack_address(const Buffers& to, int row, int column, int q) {
        if (STAGED_TRANSPOSE)
            return to.staging + ((row * STAGING_COLUMNS + column) * STAGING_PIXEL_PITCH + q) * PACK;
        return to.halo + (row * LINE_STRIDE + q * PLANE_STRIDE + column) * PACK;
    }
    static constexpr int MAP_COLUMNS = STAGED_TRANSPOSE ? STAGING_COLUMNS : HALO_COLUMNS;

    // A warp loads a row. The padding to its left and right was cleared once.
    __device__ void load_row(const Number* x, int row, const Buffers& to) const {
        constexpr int PIXELS_AT_ONCE = 32 / PIXEL_PACKS;
        const int q = lane_index() % PIXEL_PACKS, first = lane_index() / PIXEL_PACKS;
        if constexpr (FEW_CHANNELS) {
            for (int column = first; column < HALO_COLUMNS; column += PIXELS_AT_ONCE)
                *reinterpret_cast<Pack<Number>*>(pack_address(to, row, column, q)) =
                    gather_channels(x, row, column, q * PACK);
        } else {
            // The columns of several samples include their padding.
            const int left = SAMPLES_ACROSS > 1 ? 0 : g.pad_left;
            const int stop =
                SAMPLES_ACROSS > 1 ? MAP_COLUMNS : min(g.pad_left + g.width, MAP_COLUMNS);
            const bool exists = unsigned(map_row(row)) < unsigned(g.height);
            const Number* from = x + (exists ? source(row, left + first, q, 0) : 0);
            // Elements that are gathered one by one are enough loads in flight, and each copy of the
            // loop costs a second of compilation.
            constexpr int COPIES = WHOLE_PACKS ? 8 : 2;
#pragma unroll COPIES
            for (int column = left + first; column < stop; column += PIXELS_AT_ONCE) {
                Number* const own = pack_address(to, row, column, q);
                if constexpr (WHOLE_PACKS && SAMPLES_ACROSS == 1)
                    cp_async<16>(own, from, exists);
                else
                    cp_async_parts<PACK, IN_STEP>(own, x, [&](int v) {
                        return source(row, column, q, v);
                    });
                from += PIXELS_AT_ONCE * g.channels;
            }
        }
    }
    __device__ void clear_padding(const Buffers& to) const {
        const int stop = min(g.pad_left + g.width, MAP_COLUMNS),
                  rest = MAP_COLUMNS - stop + g.pad_left;
        for (int i = thread_index(); i < X_UNITS * rest * PIXEL_PACKS; i += ALL_THREADS) {
            const int padding = i / PIXEL_PACKS % rest, row = i / PIXEL_PACKS / rest;
            const int column = padding < g.pad_left ? padding : stop + padding - g.pad_left;
            *reinterpret_cast<Pack<Number>*>(pack_address(to, row, column, i % PIXEL_PACKS)) = {};
        }
    }

    // Channels [c, c + PACK) of a pixel if S pixels are treated as one (FEW_CHANNELS).
    __device__ Pack<Number> gather_channels(const Number* x, int row, int column, int c) const {
        const int y = map_row(row), at = column - g.pad_left;
        const int width = unsigned(y) < unsigned(g.height) ? g.width : 0;
        const Number* const from = x + ((sample * g.height + y) * g.width + at) * g.channels + c;
        Pack<Number> pack = {};
#pragma unroll
        for (int n = 0; n < PACK; ++n)
            if (c + n < g.s * g.channels && unsigned(at + (c + n) / g.channels) < unsigned(width))
                pack.at[n] = from[n];
        return round_operands(pack);
    }

    // A warp stores four positions of four pixels each. Eight adjacent threads handle two packs of
    // each position. get(row, column, pack, quarter) loads a pack of one of the four pixels.
    static constexpr int ROW_QUADS = (HALO_COLUMNS + 3) / 4;
    template <class Get>
    static __device__ void store_quads(int unit, Number* halo, const Get& get) {
        const int row = unit / ROW_QUADS, column = unit % ROW_QUADS * 4 + lane_index() / 2 % 4;
#pragma unroll
        for (int i = 0; i < TILE_CHANNELS; i += 32) {
            const int q = (lane_index() / 8 + i / 8) * 2 + lane_index() % 2;
            if (column >= HALO_COLUMNS || q >= PIXEL_PACKS) continue;
            Pack<Number> packs[POSITION_PIXELS];
#pragma unroll
            for (int quarter = 0; quarter < POSITION_PIXELS; ++quarter)
                packs[quarter] = get(row, column, q, quarter);
            Number* const own =
                halo + (column * POSITION_STRIDE + row * LINE_STRIDE + q * PACK) * PACK;
#pragma unroll
            for (int n = 0; n < PACK; ++n) {
                Pack<Number> piece;
#pragma unroll
                for (int quarter = 0; quarter < POSITION_PIXELS; ++quarter)
                    piece.at[quarter] = packs[quarter].at[n];
                store_position(own + n * PACK, piece);
            }
        }
    }
    static __device__ void store_position(Number* to, const Pack<Number>& piece) {
#if TF32X3_WGMMA
        SplitFragment parts;
        parts.split(as<Pack<unsigned, 4>>(piece).at);
        *reinterpret_cast<Pack<Number>*>(to) = as<Pack<Number>>(parts.high);
        *reinterpret_cast<Pack<Number>*>(to + HALO_PACKS * PACK) = as<Pack<Number>>(parts.low);
#else
        *reinterpret_cast<Pack<Number>*>(to) = round_operands(piece);
#endif
    }
    __device__ void load_quads(const Number* x, int warp, int warps, const Buffers& to) const {
#pragma unroll 4
        for (int unit = warp; unit < HALO_ROWS * ROW_QUADS; unit += warps)
            store_quads(unit, to.halo, [&](int row, int column, int q, int quarter) {
                row += quarter * QUAD_ROWS_APART, column += quarter * QUAD_COLUMNS_APART;
                if constexpr (FEW_CHANNELS) return gather_channels(x, row, column, q * PACK);
                return read_parts<PACK, IN_STEP>(
                    x, [&](int v) { return source(row, column, q, v); });
            });
    }
    // Transpose all positions from the staging buffer into the halo tile.
    static __device__ void transpose_staging(const Buffers& at) {
#pragma unroll 2
        for (int unit = warp_index(); unit < HALO_ROWS * ROW_QUADS; unit += BLOCK_WARPS)
            store_quads(unit, at.halo, [&](int row, int column, int q, int quarter) {
                return *reinterpret_cast<const Pack<Number>*>(pack_address(
                    at, row + quarter * QUAD_ROWS_APART, column + quarter * QUAD_COLUMNS_APART, q));
            });
    }

    // Rows of dz per line, if no half crosses a line end.
    static constexpr int LINE_DZ_ROWS =
        PIXEL_QUADS ? LINE_POSITIONS / POOL : LINE_HALVES * HALF_POSITIONS / POOL;

    // Row of dz of a position in a line.
    static __device__ int dz_row(int down, int column, int quarter) {
        if (PIXEL_QUADS)
            return (EPILOGUE == 2 ? down * LINE_DZ_ROWS + column : column * STRIP_LINES + down) *
                       4 +
                   quarter;
        if (CONTIGUOUS_LINES == 1) return down * LINE_DZ_ROWS + column;
        return down / CONTIGUOUS_LINES * LINE_HALVES * HALF_POSITIONS +
               down % CONTIGUOUS_LINES * LINE_PITCH + column;
    }

    // A warp loads a line of dy, or of the saved tensor. Rows between the lines and after the last
    // line were set to 0 once.
    template <int PIECE, class T>
    __device__ void load_dz_line(const T* from, int i, T* to, int pitch) const {
        constexpr int PIECES_EACH = TILE_FILTERS / PIECE, STEP = 32 / PIECES_EACH;
        const int height = g.out_height / POOL, width = g.out_width / POOL;
        const int down = i / POSITION_PIXELS, quarter = i % POSITION_PIXELS;
        const int y = line / POOL + down + quarter * (QUAD_ROWS_APART / POOL);
        const int before = SAMPLES_ACROSS > 1 ? 0 : quarter * (QUAD_COLUMNS_APART / POOL);
        const int at = lane_index() % PIECES_EACH * PIECE, first = lane_index() / PIECES_EACH;
        const bool exists = y < height && filter + at < g.filters;
        constexpr int PART = PADDED_FILTERS ? OUT_VECTOR : PIECE;
        const int pixel = exists ? (sample * height + y) * width + before + first : 0;
        const T* source = from + pixel * g.filters + (exists ? filter + at : 0);
        T* own = to + dz_row(down, first, quarter) * pitch + at;
        const int step = (dz_row(0, STEP, 0) - dz_row(0, 0, 0)) * pitch;
#pragma unroll 8
        for (int column = first; column < LINE_POSITIONS / POOL; column += STEP, own += step) {
            const int own_sample = sample_of(column, quarter);
            if (SAMPLES_ACROSS > 1)
                source = from + ((own_sample * height + y) * width + column / LINE_SAMPLES) *
                                    g.filters + filter + at;
#pragma unroll
            for (int v = 0; v < PIECE; v += PART) {
                const bool there = exists && before + column < width * LINE_SAMPLES &&
                                   (SAMPLES_ACROSS == 1 || own_sample < samples) &&
                                   (!PADDED_FILTERS || filter + at + v < g.filters);
                cp_async<PART * sizeof(T)>(own + v, there ? source + v : from, there);
            }
            source += STEP * g.filters;
        }
    }
    static __device__ void clear_dz(const Buffers& to) {
        constexpr int PIECES_EACH = TILE_FILTERS / PACK;
        for (int i = thread_index(); i < DZ_ROWS * PIECES_EACH; i += ALL_THREADS)
            *reinterpret_cast<Pack<Number>*>(to.dz + i / PIECES_EACH * DZ_PITCH +
                                             i % PIECES_EACH * PACK) = {};
    }

    // Copies are divided into units, each of which is performed by one warp. Positions that are
    // transposed during the load (DIRECT_QUADS) are not part of the units.
    static constexpr bool DIRECT_QUADS = PIXEL_QUADS && !STAGED_TRANSPOSE;
    static constexpr int X_UNITS = DIRECT_QUADS ? 0 : STAGED_TRANSPOSE ? STAGING_ROWS : HALO_ROWS;
    static constexpr int DZ_UNITS = STRIP_LINES / POOL * POSITION_PIXELS;
    static constexpr int UNITS = X_UNITS + DZ_UNITS * (EPILOGUE ? 2 : 1);
    __device__ void load_unit(int unit, const Number* x, const Number* dy, const Saved* saved,
                              const Buffers& to) const {
        if (unit < X_UNITS)
            load_row(x, unit, to);
        else if (unit < X_UNITS + DZ_UNITS)
            load_dz_line<PACK>(dy, unit - X_UNITS, to.dz, DZ_PITCH);
        else
            load_dz_line<16 / sizeof(Saved)>(saved, unit - X_UNITS - DZ_UNITS, to.saved,
                                             SAVED_PITCH);
    }
    // Clear the data that no copy writes; called once.
    __device__ void clear(const Buffers& to) const {
        if (!DIRECT_QUADS && !FEW_CHANNELS && SAMPLES_ACROSS == 1) clear_padding(to);
        if (DZ_ROWS != STRIP_LINES * LINE_POSITIONS * POSITION_PIXELS / (POOL * POOL)) clear_dz(to);
    }
};
