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

constexpr bool FOURFOLD = PRECISION == 1;
constexpr int EACH = FOURFOLD ? 4 : 1;                // Pixels of a position.
constexpr int HALF = STEP_K / 2 / EACH;               // Positions of half an instruction.
constexpr int STRIP_HEIGHT = QUAD_ROWS_APART ? 4 * STRIP_LINES : STRIP_LINES;  // Lines of the map that a strip has.
constexpr int UNIT = EPILOGUE == 2 ? 2 : 1;             // Of pixels, what dz comes by.

// Halves of a segment and of all.
constexpr int HALVES = ((CONTIGUOUS_LINES - 1) * LINE_PITCH + LINE_POSITIONS + HALF - 1) / HALF;
constexpr int ALL_HALVES = STRIP_LINES / CONTIGUOUS_LINES * HALVES;
// Steps are taken two in a turn: where dz is pooled, those of two lines of the same windows.
constexpr int TURNS = (ALL_HALVES + 3) / 4;

// Rows and columns of positions of a window, as far as anyone reads.
constexpr int REACH = (CONTIGUOUS_LINES == 1 ? 0 : (STRIP_LINES - CONTIGUOUS_LINES + TAP_ROWS - 1) * LINE_PITCH) +
                      HALVES * HALF + TAP_COLUMNS - 1;
constexpr int ROWS = CONTIGUOUS_LINES == 1 ? STRIP_LINES + TAP_ROWS - 1 : (REACH + LINE_PITCH - 1) / LINE_PITCH;
constexpr int RUNS_EACH = TILE_CHANNELS / RUN;  // Of a pixel.

// The least number from `least` on that is `rest` more than a multiple of eight.
__device__ constexpr int more_than_eights(int least, int rest) {
    return (least + 7 - rest) / 8 * 8 + rest;
}

// Eight threads that bring pieces side by side write them to different banks.
constexpr int REST = RUNS_EACH < 8 ? 8 / RUNS_EACH : 1;
constexpr int COLUMNS =
    CONTIGUOUS_LINES > 1 ? LINE_PITCH : FOURFOLD ? REACH : more_than_eights(REACH, REST);

// Pieces from a position to the next, from a line to the next, and, in bf16, from a run of channels
// to the next. Rows of taps are further columns, as far apart as the runs before, where no half
// reaches over a line's end.
constexpr bool ROWS_AT_ONCE = CONTIGUOUS_LINES == 1 && TAP_ROWS * TILE_CHANNELS <= 256;
constexpr int POSITION = FOURFOLD ? ROWS * TILE_CHANNELS + 1 : 1;
constexpr int LINE = FOURFOLD ? TILE_CHANNELS : CONTIGUOUS_LINES == 1 ? RUNS_EACH * COLUMNS : LINE_PITCH;
constexpr int PLANE = CONTIGUOUS_LINES == 1 ? COLUMNS : more_than_eights(ROWS * COLUMNS, REST);
constexpr int PIECES = FOURFOLD ? COLUMNS * POSITION
                       : CONTIGUOUS_LINES == 1 ? ROWS * LINE : RUNS_EACH * PLANE;

// dz as it is brought: rows of TILE_FILTERS filters, a term each, or a pooling window; such that lanes
// that read words of four rows meet in no bank.
constexpr int TURN_ROWS = EPILOGUE == 2 ? (FOURFOLD ? 4 : 8) : 2 * STEP_K;
constexpr int DZ_ROWS = TURNS * TURN_ROWS;
constexpr int PITCH =
    TILE_FILTERS + (FOURFOLD ? 2 * RUN : EPILOGUE < 2 ? RUN : TILE_FILTERS > 16 ? 2 * RUN : 0);
constexpr int MARKS = EPILOGUE == 2 ? TILE_FILTERS + 16 : EPILOGUE ? PITCH : 0;  // Of a row.

// Where there are two BUFFERS, the next strip comes while one is multiplied. Then positions of four
// pixels are put together when these have come, to RAW pieces of rows.
constexpr bool STAGED_TRANSPOSE = FOURFOLD && !FEW_CHANNELS && BUFFERS == 2;
constexpr int RAW_ROWS = ROWS + 3 * QUAD_ROWS_APART, RAW_COLUMNS = COLUMNS + 3 * QUAD_COLUMNS_APART;
// Pieces: two of each of four pixels lie in different banks.
constexpr int RAW_PIXEL = RUNS_EACH + 2;
constexpr int RAW = STAGED_TRANSPOSE ? RAW_ROWS * RAW_COLUMNS * RAW_PIXEL : 0;
constexpr int WINDOWS = STAGED_TRANSPOSE ? 1 : BUFFERS;
constexpr int DZ = DZ_ROWS * PITCH * sizeof(Number);
constexpr int DZ_BUFFER = DZ + DZ_ROWS * MARKS * sizeof(Mark);

static_assert(TILE_M == 64 && WARP_M == 16 && WARP_N == TILE_N, "a warp has sixteen filters");
static_assert(TILE_N == TAP_ROWS * TAP_COLUMNS * TILE_CHANNELS, "all taps of a block");
static_assert(!FOURFOLD || CONTIGUOUS_LINES == 1, "halves are positions, of any line");
static_assert(STRIP_LINES % UNIT == 0 && (UNIT == 1 || CONTIGUOUS_LINES == 1), "a strip has whole windows");
static_assert(UNIT == 1 || !FOURFOLD || LINE_POSITIONS % 2 == 0, "so has a quarter");

constexpr int ALL_THREADS = THREADS * K_GROUPS, WARPS = ALL_THREADS / 32;
__device__ inline int own_thread() { return threadIdx.y * THREADS + threadIdx.x; }
__device__ inline int own_warp() { return own_thread() / 32; }
__device__ inline int own_lane() { return threadIdx.x % 32; }

// Where a strip lies in shared memory.
struct Places {
    Number* window;
    Number* raw;
    Number* dz;
    Mark* marks;
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
        const int y = line + tap_row + row - g.top;
        const bool exists = unsigned(y) < unsigned(g.height);
        const int pixel = exists ? (sample * g.height + y) * g.width : 0;
        return {x + pixel * g.channels + channel, exists ? g.width : 0};
    }

    // Where a run of a pixel of the map goes, in the window or among raw pieces.
    static __device__ Number* target(const Places& to, int row, int column, int q) {
        if (STAGED_TRANSPOSE) return to.raw + ((row * RAW_COLUMNS + column) * RAW_PIXEL + q) * RUN;
        return to.window + (row * LINE + q * PLANE + column) * RUN;
    }
    static constexpr int MAP_COLUMNS = STAGED_TRANSPOSE ? RAW_COLUMNS : COLUMNS;

    // A row, by a warp. What lies beside the map is 0 for good.
    __device__ void bring_row(const Number* x, int row, const Places& to) const {
        const Row from = find(x, row);
        constexpr int BESIDE = 32 / RUNS_EACH;
        const int q = own_lane() % RUNS_EACH, first = own_lane() / RUNS_EACH;
        if constexpr (FEW_CHANNELS) {
            for (int column = first; column < COLUMNS; column += BESIDE)
                *reinterpret_cast<Run<Number>*>(target(to, row, column, q)) =
                    gather(from, column - g.left, q * RUN);
        } else {
            const int stop = min(g.width, MAP_COLUMNS - g.left);
            const Number* source = from.x + first * g.channels + q * RUN;
            Number* own = target(to, row, g.left + first, q);
            const int step = target(to, 0, BESIDE, 0) - target(to, 0, 0, 0);
#pragma unroll 8
            for (int at = first; at < stop; at += BESIDE, own += step) {
                copy_later(own, source, from.width == 0);
                source += BESIDE * g.channels;
            }
        }
    }
    __device__ void clear_beside(const Places& to) const {
        const int stop = min(g.left + g.width, MAP_COLUMNS), rest = MAP_COLUMNS - stop + g.left;
        for (int i = own_thread(); i < X_UNITS * rest * RUNS_EACH; i += ALL_THREADS) {
            const int beside = i / RUNS_EACH % rest, row = i / RUNS_EACH / rest;
            const int column = beside < g.left ? beside : stop + beside - g.left;
            *reinterpret_cast<Run<Number>*>(target(to, row, column, i % RUNS_EACH)) = {};
        }
    }

    // Channels [c, c + RUN) of a pixel of a narrow map, which has them in those behind it.
    __device__ Run<Number> gather(const Row& from, int at, int c) const {
        Run<Number> run = {};
#pragma unroll
        for (int n = 0; n < RUN; ++n)
            if (c + n < g.s * g.channels &&
                unsigned(at + (c + n) / g.channels) < unsigned(from.width))
                run.at[n] = from.x[at * g.channels + c + n];
        return as_factors(run);
    }

    // Positions of four pixels each, four of a row at a time, by a warp: eight threads side by side
    // have two runs of each of four positions. get(row, column, run, quarter) reads a run.
    static constexpr int FOURS = (COLUMNS + 3) / 4;
    template <class Get>
    static __device__ void put_fours(int unit, Number* window, const Get& get) {
        const int row = unit / FOURS, column = unit % FOURS * 4 + own_lane() / 2 % 4;
#pragma unroll
        for (int i = 0; i < TILE_CHANNELS; i += 32) {
            const int q = (own_lane() / 8 + i / 8) * 2 + own_lane() % 2;
            if (column >= COLUMNS || q >= RUNS_EACH) continue;
            Run<Number> runs[EACH];
#pragma unroll
            for (int quarter = 0; quarter < EACH; ++quarter)
                runs[quarter] = get(row, column, q, quarter);
            Number* const own = window + (column * POSITION + row * LINE + q * RUN) * RUN;
#pragma unroll
            for (int n = 0; n < RUN; ++n) {
                Run<Number> piece;
#pragma unroll
                for (int quarter = 0; quarter < EACH; ++quarter)
                    piece.at[quarter] = runs[quarter].at[n];
                *reinterpret_cast<Run<Number>*>(own + n * RUN) = as_factors(piece);
            }
        }
    }
    __device__ void bring_fours(const Number* x, int warp, int warps, const Places& to) const {
#pragma unroll 4
        for (int unit = warp; unit < ROWS * FOURS; unit += warps)
            put_fours(unit, to.window, [&](int row, int column, int q, int quarter) {
                const Row from = find(x, row + quarter * QUAD_ROWS_APART);
                const int at = column + quarter * QUAD_COLUMNS_APART - g.left;
                if constexpr (FEW_CHANNELS) return gather(from, at, q * RUN);
                Run<Number> run = {};
                if (unsigned(at) < unsigned(from.width))
                    run = *reinterpret_cast<const Run<Number>*>(from.x + at * g.channels +
                                                                q * RUN);
                return run;
            });
    }
    // The same of raw pieces, all of them.
    static __device__ void settle(const Places& at) {
#pragma unroll 2
        for (int unit = own_warp(); unit < ROWS * FOURS; unit += WARPS)
            put_fours(unit, at.window, [&](int row, int column, int q, int quarter) {
                return *reinterpret_cast<const Run<Number>*>(target(
                    at, row + quarter * QUAD_ROWS_APART, column + quarter * QUAD_COLUMNS_APART, q));
            });
    }

    // Rows of dz that a line has, where no half reaches over its end.
    static constexpr int BESIDE = FOURFOLD ? LINE_POSITIONS / UNIT : HALVES * HALF / UNIT;

    // Where position `beside` of a line lies among them.
    static __device__ int dz_row(int down, int beside, int quarter) {
        if (FOURFOLD)
            return (EPILOGUE == 2 ? down * BESIDE + beside : beside * STRIP_LINES + down) * 4 + quarter;
        if (CONTIGUOUS_LINES == 1) return down * BESIDE + beside;
        return down / CONTIGUOUS_LINES * HALVES * HALF + down % CONTIGUOUS_LINES * LINE_PITCH + beside;
    }

    // A line of gradients by the outputs, or by pooling windows, or of what says who gets them, by
    // a warp. What lies between lines and behind the last is 0 for good.
    template <int PIECE, class T>
    __device__ void bring_line(const T* from, int i, T* to, int pitch) const {
        constexpr int PIECES_EACH = TILE_FILTERS / PIECE, STEP = 32 / PIECES_EACH;
        const int height = g.out_height / UNIT, width = g.out_width / UNIT;
        const int down = i / EACH, quarter = i % EACH;
        const int y = line / UNIT + down + quarter * (QUAD_ROWS_APART / UNIT);
        const int before = quarter * (QUAD_COLUMNS_APART / UNIT);
        const int at = own_lane() % PIECES_EACH * PIECE, first = own_lane() / PIECES_EACH;
        const bool exists = y < height && filter + at < g.filters;
        const int pixel = exists ? (sample * height + y) * width + before + first : 0;
        const T* source = from + pixel * g.filters + (exists ? filter + at : 0);
        T* own = to + dz_row(down, first, quarter) * pitch + at;
        const int step = (dz_row(0, STEP, 0) - dz_row(0, 0, 0)) * pitch;
#pragma unroll 8
        for (int beside = first; beside < LINE_POSITIONS / UNIT; beside += STEP, own += step) {
            const bool inside = exists && before + beside < width;
            copy_later(reinterpret_cast<Number*>(own),
                       reinterpret_cast<const Number*>(inside ? source : from), !inside);
            source += STEP * g.filters;
        }
    }
    static __device__ void clear_dz(const Places& to) {
        constexpr int PIECES_EACH = TILE_FILTERS / RUN;
        for (int i = own_thread(); i < DZ_ROWS * PIECES_EACH; i += ALL_THREADS)
            *reinterpret_cast<Run<Number>*>(to.dz + i / PIECES_EACH * PITCH +
                                            i % PIECES_EACH * RUN) = {};
    }

    // All but positions that are put together at once comes in units, each of them by a warp.
    static constexpr bool AT_ONCE = FOURFOLD && !STAGED_TRANSPOSE;
    static constexpr int X_UNITS = AT_ONCE ? 0 : STAGED_TRANSPOSE ? RAW_ROWS : ROWS;
    static constexpr int DZ_UNITS = STRIP_LINES / UNIT * EACH;
    static constexpr int UNITS = X_UNITS + DZ_UNITS * (EPILOGUE ? 2 : 1);
    __device__ void bring(int unit, const Number* x, const Number* dy, const Mark* marks,
                          const Places& to) const {
        if (unit < X_UNITS)
            bring_row(x, unit, to);
        else if (unit < X_UNITS + DZ_UNITS)
            bring_line<RUN>(dy, unit - X_UNITS, to.dz, PITCH);
        else
            bring_line<16 / sizeof(Mark)>(marks, unit - X_UNITS - DZ_UNITS, to.marks, MARKS);
    }
    // What nobody brings, once.
    __device__ void clear(const Places& to) const {
        if (!AT_ONCE && !FEW_CHANNELS) clear_beside(to);
        if (DZ_ROWS != STRIP_LINES * LINE_POSITIONS * EACH / (UNIT * UNIT)) clear_dz(to);
    }
};
