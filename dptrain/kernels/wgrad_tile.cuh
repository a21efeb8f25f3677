// Strips of maps, of x and of dz, as conv2d_backward_weight_halo.cu takes them: how they lie in shared
// memory, and bringing them there.
//
// A strip of a map is taken at a time: STRIP_LINES lines of LINE_POSITIONS positions. Halves of an
// instruction's terms are HALF positions side by side, wherever they begin: in tf32 a position,
// column by column; in bf16 eight, line by line, but in CONTIGUOUS_LINES lines on through what lies between
// lines, where dz is 0.
//
// Where a map has few channels (FEW_CHANNELS), the channels of a pixel here are those of S pixels in a
// row, so that a row of taps is one tap.

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

constexpr bool PIXEL_QUADS = PRECISION == 1;
constexpr int POSITION_PIXELS = PIXEL_QUADS ? 4 : 1;          // Pixels of a position.
constexpr int HALF_POSITIONS = STEP_K / 2 / POSITION_PIXELS;  // Positions of half an instruction.
constexpr int STRIP_HEIGHT =
    QUAD_ROWS_APART ? 4 * STRIP_LINES : STRIP_LINES;  // Lines of the map that a strip has.
constexpr int POOL = EPILOGUE == 2 ? 2 : 1;           // Of pixels, what dz comes by.

// Halves of a segment and of all.
constexpr int LINE_HALVES =
    ((CONTIGUOUS_LINES - 1) * LINE_PITCH + LINE_POSITIONS + HALF_POSITIONS - 1) / HALF_POSITIONS;
constexpr int STRIP_HALVES = STRIP_LINES / CONTIGUOUS_LINES * LINE_HALVES;
// Steps are taken two in a turn: where dz is pooled, those of two lines of the same windows.
constexpr int STEP_PAIRS = (STRIP_HALVES + 3) / 4;

// Rows and columns of positions of a window, as far as anyone reads.
constexpr int HALO_REACH =
    (CONTIGUOUS_LINES == 1 ? 0 : (STRIP_LINES - CONTIGUOUS_LINES + TAP_ROWS - 1) * LINE_PITCH) +
    LINE_HALVES * HALF_POSITIONS + TAP_COLUMNS - 1;
constexpr int HALO_ROWS =
    CONTIGUOUS_LINES == 1 ? STRIP_LINES + TAP_ROWS - 1 : (HALO_REACH + LINE_PITCH - 1) / LINE_PITCH;
constexpr int PIXEL_PACKS = TILE_CHANNELS / PACK;  // Of a pixel.

// The least number from `least` on that is `rest` more than a multiple of eight.
__device__ constexpr int round_up_to_residue(int least, int rest) {
    return (least + 7 - rest) / 8 * 8 + rest;
}

// Eight threads that bring pieces side by side write them to different banks.
constexpr int BANK_OFFSET = PIXEL_PACKS < 8 ? 8 / PIXEL_PACKS : 1;
constexpr int HALO_COLUMNS = CONTIGUOUS_LINES > 1 ? LINE_PITCH
                             : PIXEL_QUADS        ? HALO_REACH
                                                  : round_up_to_residue(HALO_REACH, BANK_OFFSET);

// Pieces from a position to the next, from a line to the next, and, in bf16, from a run of channels
// to the next. Rows of taps are further columns, as far apart as the runs before, where no half
// reaches over a line's end.
constexpr bool ROWS_AT_ONCE = CONTIGUOUS_LINES == 1 && TAP_ROWS * TILE_CHANNELS <= 256;
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

// dz as it is brought: rows of TILE_FILTERS filters, a term each, or a pooling window; such that lanes
// that read words of four rows meet in no bank.
constexpr int PAIR_DZ_ROWS = EPILOGUE == 2 ? (PIXEL_QUADS ? 4 : 8) : 2 * STEP_K;
constexpr int DZ_ROWS = STEP_PAIRS * PAIR_DZ_ROWS;
constexpr int DZ_PITCH = TILE_FILTERS + (PIXEL_QUADS         ? 2 * PACK
                                         : EPILOGUE < 2      ? PACK
                                         : TILE_FILTERS > 16 ? 2 * PACK
                                                             : 0);
constexpr int SAVED_PITCH = EPILOGUE == 2 ? TILE_FILTERS + 16
                            : EPILOGUE    ? DZ_PITCH
                                          : 0;  // Of a row.

// Where there are two BUFFERS, the next strip comes while one is multiplied. Then positions of four
// pixels are put together when these have come, to RAW pieces of rows.
constexpr bool STAGED_TRANSPOSE = PIXEL_QUADS && !FEW_CHANNELS && BUFFERS == 2;
constexpr int STAGING_ROWS = HALO_ROWS + 3 * QUAD_ROWS_APART,
              STAGING_COLUMNS = HALO_COLUMNS + 3 * QUAD_COLUMNS_APART;
// Pieces: two of each of four pixels lie in different banks.
constexpr int STAGING_PIXEL_PITCH = PIXEL_PACKS + 2;
constexpr int STAGING_PACKS =
    STAGED_TRANSPOSE ? STAGING_ROWS * STAGING_COLUMNS * STAGING_PIXEL_PITCH : 0;
constexpr int HALO_BUFFERS = STAGED_TRANSPOSE ? 1 : BUFFERS;
constexpr int DZ = DZ_ROWS * DZ_PITCH * sizeof(Number);
constexpr int DZ_BUFFER = DZ + DZ_ROWS * SAVED_PITCH * sizeof(Saved);

static_assert(TILE_M == 64 && WARP_M == 16 && WARP_N == TILE_N, "a warp has sixteen filters");
static_assert(TILE_N == TAP_ROWS * TAP_COLUMNS * TILE_CHANNELS, "all taps of a block");
static_assert(!PIXEL_QUADS || CONTIGUOUS_LINES == 1, "halves are positions, of any line");
static_assert(STRIP_LINES % POOL == 0 && (POOL == 1 || CONTIGUOUS_LINES == 1),
              "a strip has whole windows");
static_assert(POOL == 1 || !PIXEL_QUADS || LINE_POSITIONS % 2 == 0, "so has a quarter");

constexpr int ALL_THREADS = THREADS * K_GROUPS, BLOCK_WARPS = ALL_THREADS / 32;
__device__ inline int thread_index() { return threadIdx.y * THREADS + threadIdx.x; }
__device__ inline int warp_index() { return thread_index() / 32; }
__device__ inline int lane_index() { return threadIdx.x % 32; }

// Where a strip lies in shared memory.
struct Buffers {
    Number* halo;
    Number* staging;
    Number* dz;
    Saved* saved;
};

// What a block brings of a strip, STRIP_LINES lines of outputs from `line` on.
struct Strip {
    const Geometry& g;
    int sample, line;
    int tap_row, channel, filter;  // The block's first ones.

    // A row of the map.
    struct Row {
        const Number* x;  // Its first pixel, if it exists.
        int width;        // 0 if it does not.
    };
    __device__ Row find(const Number* x, int row) const {
        const int y = line + tap_row + row - g.pad_top;
        const bool exists = unsigned(y) < unsigned(g.height);
        const int pixel = exists ? (sample * g.height + y) * g.width : 0;
        return {x + pixel * g.channels + channel, exists ? g.width : 0};
    }

    // Where a run of a pixel of the map goes, in the window or among raw pieces.
    static __device__ Number* pack_address(const Buffers& to, int row, int column, int q) {
        if (STAGED_TRANSPOSE)
            return to.staging + ((row * STAGING_COLUMNS + column) * STAGING_PIXEL_PITCH + q) * PACK;
        return to.halo + (row * LINE_STRIDE + q * PLANE_STRIDE + column) * PACK;
    }
    static constexpr int MAP_COLUMNS = STAGED_TRANSPOSE ? STAGING_COLUMNS : HALO_COLUMNS;

    // A row, by a warp. What lies beside the map is 0 for good.
    __device__ void load_row(const Number* x, int row, const Buffers& to) const {
        const Row from = find(x, row);
        constexpr int PIXELS_AT_ONCE = 32 / PIXEL_PACKS;
        const int q = lane_index() % PIXEL_PACKS, first = lane_index() / PIXEL_PACKS;
        if constexpr (FEW_CHANNELS) {
            for (int column = first; column < HALO_COLUMNS; column += PIXELS_AT_ONCE)
                *reinterpret_cast<Pack<Number>*>(pack_address(to, row, column, q)) =
                    gather_channels(from, column - g.pad_left, q * PACK);
        } else {
            const int stop = min(g.width, MAP_COLUMNS - g.pad_left);
            const Number* source = from.x + first * g.channels + q * PACK;
            Number* own = pack_address(to, row, g.pad_left + first, q);
            const int step = pack_address(to, 0, PIXELS_AT_ONCE, 0) - pack_address(to, 0, 0, 0);
#pragma unroll 8
            for (int at = first; at < stop; at += PIXELS_AT_ONCE, own += step) {
                cp_async_pack(own, source, from.width == 0);
                source += PIXELS_AT_ONCE * g.channels;
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

    // Channels [c, c + PACK) of a pixel of a narrow map, which has them in those behind it.
    __device__ Pack<Number> gather_channels(const Row& from, int at, int c) const {
        Pack<Number> pack = {};
#pragma unroll
        for (int n = 0; n < PACK; ++n)
            if (c + n < g.s * g.channels &&
                unsigned(at + (c + n) / g.channels) < unsigned(from.width))
                pack.at[n] = from.x[at * g.channels + c + n];
        return round_operands(pack);
    }

    // Positions of four pixels each, four of a row at a time, by a warp: eight threads side by side
    // have two runs of each of four positions. get(row, column, run, quarter) reads a run.
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
                *reinterpret_cast<Pack<Number>*>(own + n * PACK) = round_operands(piece);
            }
        }
    }
    __device__ void load_quads(const Number* x, int warp, int warps, const Buffers& to) const {
#pragma unroll 4
        for (int unit = warp; unit < HALO_ROWS * ROW_QUADS; unit += warps)
            store_quads(unit, to.halo, [&](int row, int column, int q, int quarter) {
                const Row from = find(x, row + quarter * QUAD_ROWS_APART);
                const int at = column + quarter * QUAD_COLUMNS_APART - g.pad_left;
                if constexpr (FEW_CHANNELS) return gather_channels(from, at, q * PACK);
                Pack<Number> pack = {};
                if (unsigned(at) < unsigned(from.width))
                    pack =
                        *reinterpret_cast<const Pack<Number>*>(from.x + at * g.channels + q * PACK);
                return pack;
            });
    }
    // The same of raw pieces, all of them.
    static __device__ void transpose_staging(const Buffers& at) {
#pragma unroll 2
        for (int unit = warp_index(); unit < HALO_ROWS * ROW_QUADS; unit += BLOCK_WARPS)
            store_quads(unit, at.halo, [&](int row, int column, int q, int quarter) {
                return *reinterpret_cast<const Pack<Number>*>(pack_address(
                    at, row + quarter * QUAD_ROWS_APART, column + quarter * QUAD_COLUMNS_APART, q));
            });
    }

    // Rows of dz that a line has, where no half reaches over its end.
    static constexpr int LINE_DZ_ROWS =
        PIXEL_QUADS ? LINE_POSITIONS / POOL : LINE_HALVES * HALF_POSITIONS / POOL;

    // Where position `beside` of a line lies among them.
    static __device__ int dz_row(int down, int column, int quarter) {
        if (PIXEL_QUADS)
            return (EPILOGUE == 2 ? down * LINE_DZ_ROWS + column : column * STRIP_LINES + down) *
                       4 +
                   quarter;
        if (CONTIGUOUS_LINES == 1) return down * LINE_DZ_ROWS + column;
        return down / CONTIGUOUS_LINES * LINE_HALVES * HALF_POSITIONS +
               down % CONTIGUOUS_LINES * LINE_PITCH + column;
    }

    // A line of gradients by the outputs, or by pooling windows, or of what says who gets them, by
    // a warp. What lies between lines and behind the last is 0 for good.
    template <int PIECE, class T>
    __device__ void load_dz_line(const T* from, int i, T* to, int pitch) const {
        constexpr int PIECES_EACH = TILE_FILTERS / PIECE, STEP = 32 / PIECES_EACH;
        const int height = g.out_height / POOL, width = g.out_width / POOL;
        const int down = i / POSITION_PIXELS, quarter = i % POSITION_PIXELS;
        const int y = line / POOL + down + quarter * (QUAD_ROWS_APART / POOL);
        const int before = quarter * (QUAD_COLUMNS_APART / POOL);
        const int at = lane_index() % PIECES_EACH * PIECE, first = lane_index() / PIECES_EACH;
        const bool exists = y < height && filter + at < g.filters;
        const int pixel = exists ? (sample * height + y) * width + before + first : 0;
        const T* source = from + pixel * g.filters + (exists ? filter + at : 0);
        T* own = to + dz_row(down, first, quarter) * pitch + at;
        const int step = (dz_row(0, STEP, 0) - dz_row(0, 0, 0)) * pitch;
#pragma unroll 8
        for (int column = first; column < LINE_POSITIONS / POOL; column += STEP, own += step) {
            const bool inside = exists && before + column < width;
            cp_async_pack(reinterpret_cast<Number*>(own),
                          reinterpret_cast<const Number*>(inside ? source : from), !inside);
            source += STEP * g.filters;
        }
    }
    static __device__ void clear_dz(const Buffers& to) {
        constexpr int PIECES_EACH = TILE_FILTERS / PACK;
        for (int i = thread_index(); i < DZ_ROWS * PIECES_EACH; i += ALL_THREADS)
            *reinterpret_cast<Pack<Number>*>(to.dz + i / PIECES_EACH * DZ_PITCH +
                                             i % PIECES_EACH * PACK) = {};
    }

    // All but positions that are put together at once comes in units, each of them by a warp.
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
    // What nobody brings, once.
    __device__ void clear(const Buffers& to) const {
        if (!DIRECT_QUADS && !FEW_CHANNELS) clear_padding(to);
        if (DZ_ROWS != STRIP_LINES * LINE_POSITIONS * POSITION_PIXELS / (POOL * POOL)) clear_dz(to);
    }
};
