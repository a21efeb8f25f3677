// Gradients of the weights of convolutions of stride 1: sums over pixels, of which a block keeps a
// window (window.cuh) in shared memory.
//
//     dw[(r, s, c), k] = sum over pixels of x[pixel + (r, s), c] dz[pixel, k]
//
// Filters are the rows of a product whose columns are the channels of TAP_ROWS rows of taps: so dz
// comes to registers once for all of them, and what follows the convolution is undone there. x is
// read by tensor cores themselves, from pieces of 16 bytes: in bf16 eight channels of a pixel, so
// that a piece lies along columns and is read transposed. tf32 has nothing of that kind, so there a
// piece is one channel of four pixels, which need not be neighbours: they are APART_ACROSS columns
// or APART_DOWN rows from each other, and the four stand for one *position* that a tap moves as if
// it were a pixel.
//
// A strip of a map is taken at a time: LINES lines of POSITIONS positions. Halves of an instruction's
// terms are HALF positions side by side, wherever they begin: in tf32 a position, column by column; in
// bf16 eight, line by line, but in SEGMENT lines on through what lies between lines, where dz is 0.
//
// Where a map has few channels (NARROW), the channels of a pixel here are those of S pixels in a
// row, so that a row of taps is one tap.

#ifndef LINES
#define TILE_M 64
#define TILE_N 64
#define WARP_M 16
#define WARP_N 64
#define WORDS 16
#define NARROW 0
#define CHANNELS 32
#define FILTERS 64
#define TAP_ROWS 1
#define TAP_COLUMNS 2
#define LINES 2
#define SEGMENT 1
#define POSITIONS 8
#define LINE_STEP 10
#define APART_DOWN 0
#define APART_ACROSS 8
#define BUFFERS 1
#define BLOCKS 2
#endif

#include "window.cuh"

constexpr bool FOURFOLD = PRECISION == 1;
constexpr int EACH = FOURFOLD ? 4 : 1;                // Pixels of a position.
constexpr int HALF = STEP_K / 2 / EACH;               // Positions of half an instruction.
constexpr int TALL = APART_DOWN ? 4 * LINES : LINES;  // Lines of the map that a strip has.
constexpr int UNIT = BEHIND == 2 ? 2 : 1;             // Of pixels, what dz comes by.

// Halves of a segment and of all.
constexpr int HALVES = ((SEGMENT - 1) * LINE_STEP + POSITIONS + HALF - 1) / HALF;
constexpr int ALL_HALVES = LINES / SEGMENT * HALVES;
// Steps are taken two in a turn: where dz is pooled, those of two lines of the same windows.
constexpr int TURNS = (ALL_HALVES + 3) / 4;

// Rows and columns of positions of a window, as far as anyone reads.
constexpr int REACH = (SEGMENT == 1 ? 0 : (LINES - SEGMENT + TAP_ROWS - 1) * LINE_STEP) +
                      HALVES * HALF + TAP_COLUMNS - 1;
constexpr int ROWS = SEGMENT == 1 ? LINES + TAP_ROWS - 1 : (REACH + LINE_STEP - 1) / LINE_STEP;
constexpr int RUNS_EACH = CHANNELS / RUN;  // Of a pixel.

// The least number from `least` on that is `rest` more than a multiple of eight.
__device__ constexpr int more_than_eights(int least, int rest) {
    return (least + 7 - rest) / 8 * 8 + rest;
}

// Eight threads that bring pieces side by side write them to different banks.
constexpr int REST = RUNS_EACH < 8 ? 8 / RUNS_EACH : 1;
constexpr int COLUMNS =
    SEGMENT > 1 ? LINE_STEP : FOURFOLD ? REACH : more_than_eights(REACH, REST);

// Pieces from a position to the next, from a line to the next, and, in bf16, from a run of channels
// to the next. Rows of taps are further columns, as far apart as the runs before, where no half
// reaches over a line's end.
constexpr bool ROWS_AT_ONCE = SEGMENT == 1 && TAP_ROWS * CHANNELS <= 256;
constexpr int POSITION = FOURFOLD ? ROWS * CHANNELS + 1 : 1;
constexpr int LINE = FOURFOLD ? CHANNELS : SEGMENT == 1 ? RUNS_EACH * COLUMNS : LINE_STEP;
constexpr int PLANE = SEGMENT == 1 ? COLUMNS : more_than_eights(ROWS * COLUMNS, REST);
constexpr int PIECES = FOURFOLD ? COLUMNS * POSITION
                       : SEGMENT == 1 ? ROWS * LINE : RUNS_EACH * PLANE;

// dz as it is brought: rows of FILTERS filters, a term each, or a pooling window; such that lanes
// that read words of four rows meet in no bank.
constexpr int TURN_ROWS = BEHIND == 2 ? (FOURFOLD ? 4 : 8) : 2 * STEP_K;
constexpr int DZ_ROWS = TURNS * TURN_ROWS;
constexpr int PITCH =
    FILTERS + (FOURFOLD ? 2 * RUN : BEHIND < 2 ? RUN : FILTERS > 16 ? 2 * RUN : 0);
constexpr int MARKS = BEHIND == 2 ? FILTERS + 16 : BEHIND ? PITCH : 0;  // Of a row.

// Where there are two BUFFERS, the next strip comes while one is multiplied. Then positions of four
// pixels are put together when these have come, to RAW pieces of rows.
constexpr bool LATER = FOURFOLD && !NARROW && BUFFERS == 2;
constexpr int RAW_ROWS = ROWS + 3 * APART_DOWN, RAW_COLUMNS = COLUMNS + 3 * APART_ACROSS;
constexpr int RAW_PIXEL = RUNS_EACH + 2;  // Pieces: two of each of four pixels lie in different banks.
constexpr int RAW = LATER ? RAW_ROWS * RAW_COLUMNS * RAW_PIXEL : 0;
constexpr int WINDOWS = LATER ? 1 : BUFFERS;
constexpr int DZ = DZ_ROWS * PITCH * sizeof(Number), DZ_BUFFER = DZ + DZ_ROWS * MARKS * sizeof(Mark);

static_assert(TILE_M == 64 && WARP_M == 16 && WARP_N == TILE_N, "a warp has sixteen filters");
static_assert(TILE_N == TAP_ROWS * TAP_COLUMNS * CHANNELS, "all taps of a block");
static_assert(!FOURFOLD || SEGMENT == 1, "halves are positions, of any line");
static_assert(LINES % UNIT == 0 && (UNIT == 1 || SEGMENT == 1), "a strip has whole windows");
static_assert(UNIT == 1 || !FOURFOLD || POSITIONS % 2 == 0, "so has a quarter");

constexpr int ALL_THREADS = THREADS * GROUPS, WARPS = ALL_THREADS / 32;
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

// What a block brings of a strip, LINES lines of outputs from `line` on.
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
        if (LATER) return to.raw + ((row * RAW_COLUMNS + column) * RAW_PIXEL + q) * RUN;
        return to.window + (row * LINE + q * PLANE + column) * RUN;
    }
    static constexpr int MAP_COLUMNS = LATER ? RAW_COLUMNS : COLUMNS;

    // A row, by a warp. What lies beside the map is 0 for good.
    __device__ void bring_row(const Number* x, int row, const Places& to) const {
        const Row from = find(x, row);
        constexpr int BESIDE = 32 / RUNS_EACH;
        const int q = own_lane() % RUNS_EACH, first = own_lane() / RUNS_EACH;
        if constexpr (NARROW) {
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
        for (int i = 0; i < CHANNELS; i += 32) {
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
                const Row from = find(x, row + quarter * APART_DOWN);
                const int at = column + quarter * APART_ACROSS - g.left;
                if constexpr (NARROW) return gather(from, at, q * RUN);
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
                    at, row + quarter * APART_DOWN, column + quarter * APART_ACROSS, q));
            });
    }

    // Rows of dz that a line has, where no half reaches over its end.
    static constexpr int BESIDE = FOURFOLD ? POSITIONS / UNIT : HALVES * HALF / UNIT;

    // Where position `beside` of a line lies among them.
    static __device__ int dz_row(int down, int beside, int quarter) {
        if (FOURFOLD)
            return (BEHIND == 2 ? down * BESIDE + beside : beside * LINES + down) * 4 + quarter;
        if (SEGMENT == 1) return down * BESIDE + beside;
        return down / SEGMENT * HALVES * HALF + down % SEGMENT * LINE_STEP + beside;
    }

    // A line of gradients by the outputs, or by pooling windows, or of what says who gets them, by a
    // warp. What lies between lines and behind the last is 0 for good.
    template <int PIECE, class T>
    __device__ void bring_line(const T* from, int i, T* to, int pitch) const {
        constexpr int PIECES_EACH = FILTERS / PIECE, STEP = 32 / PIECES_EACH;
        const int height = g.out_height / UNIT, width = g.out_width / UNIT;
        const int down = i / EACH, quarter = i % EACH;
        const int y = line / UNIT + down + quarter * (APART_DOWN / UNIT);
        const int before = quarter * (APART_ACROSS / UNIT);
        const int at = own_lane() % PIECES_EACH * PIECE, first = own_lane() / PIECES_EACH;
        const bool exists = y < height && filter + at < g.filters;
        const int pixel = exists ? (sample * height + y) * width + before + first : 0;
        const T* source = from + pixel * g.filters + (exists ? filter + at : 0);
        T* own = to + dz_row(down, first, quarter) * pitch + at;
        const int step = (dz_row(0, STEP, 0) - dz_row(0, 0, 0)) * pitch;
#pragma unroll 8
        for (int beside = first; beside < POSITIONS / UNIT; beside += STEP, own += step) {
            const bool inside = exists && before + beside < width;
            copy_later(reinterpret_cast<Number*>(own),
                       reinterpret_cast<const Number*>(inside ? source : from), !inside);
            source += STEP * g.filters;
        }
    }
    static __device__ void clear_dz(const Places& to) {
        constexpr int PIECES_EACH = FILTERS / RUN;
        for (int i = own_thread(); i < DZ_ROWS * PIECES_EACH; i += ALL_THREADS)
            *reinterpret_cast<Run<Number>*>(to.dz + i / PIECES_EACH * PITCH +
                                            i % PIECES_EACH * RUN) = {};
    }

    // All but positions that are put together at once comes in units, each of them by a warp.
    static constexpr bool AT_ONCE = FOURFOLD && !LATER;
    static constexpr int X_UNITS = AT_ONCE ? 0 : LATER ? RAW_ROWS : ROWS;
    static constexpr int DZ_UNITS = LINES / UNIT * EACH;
    static constexpr int UNITS = X_UNITS + DZ_UNITS * (BEHIND ? 2 : 1);
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
        if (!AT_ONCE && !NARROW) clear_beside(to);
        if (DZ_ROWS != LINES * POSITIONS * EACH / (UNIT * UNIT)) clear_dz(to);
    }
};

// A: rows g and g + 8 of a warp's sixteen are neighbouring filters, which a lane reads at once.
struct GradientRows {
    const Number* dy;
    const Mark* marks;
    float totals[2] = {};  // Of both filters, the lane's share.

    static __device__ int filter(int row) { return row / 16 * 16 + row % 8 * 2 + row % 16 / 8; }
    // Of the lane.
    static __device__ int first() {
        return threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 * 2;
    }

    // Of step `z` of a turn.
    __device__ Number element(int turn, int z, int row, int k) const {
        const int own = filter(row), h = k / (STEP_K / 2), at = k % (STEP_K / 2);
        const Number zero = from_float<Number>(0.0f);
        if (own >= FILTERS) return zero;
        const int pooled = FOURFOLD ? at : h * 4 + at / 2;
        const int i = turn * TURN_ROWS + (BEHIND == 2 ? pooled : z * STEP_K + k);
#if BEHIND == 0
        const bool counts = true;
#elif BEHIND == 1
        const bool counts = to_float(marks[i * MARKS + own]) > 0.0f;
#else
        const bool counts = marks[i * MARKS + own] == z * 2 + (FOURFOLD ? h : at % 2);
#endif
        return counts ? as_factor(dy[i * PITCH + own]) : zero;
    }
    static __device__ Number as_factor(Number value) {
#if PRECISION == 1
        return as_tf32(value);
#else
        return value;
#endif
    }

#if __CUDA_ARCH__ >= 800
    template <class T> __device__ static Run<T, 2> pair(const T* from, int at) {
        return *reinterpret_cast<const Run<T, 2>*>(from + at);
    }

    // Filters first() and first() + 1 of the lane's terms of both steps of a turn.
    __device__ void words(unsigned (&words)[2][4], int turn) {
#pragma unroll
        for (int q = 0; q < 8; ++q) words[q / 4][q % 4] = 0;
        if (threadIdx.x / 32 * 16 >= FILTERS) return;
        const int t = threadIdx.x % 4, row = turn * TURN_ROWS + t * (BEHIND < 2 && !FOURFOLD ? 2 : 1);
        const Number* const own = dy + row * PITCH + first();
#if BEHIND
        const Mark* const mark = marks + row * MARKS + first();
#endif
#if PRECISION == 1 && BEHIND == 2
        const Run<float, 2> dz = pair(own, 0);
        const Run<Mark, 2> chosen = pair(mark, 0);
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            const float rounded = as_tf32(dz.at[n]);
            totals[n] += chosen.at[n] < 4 ? rounded : 0.0f;
#pragma unroll
            for (int m = 0; m < 4; ++m)
                words[m / 2][m % 2 * 2 + n] = chosen.at[n] == m ? __float_as_uint(rounded) : 0u;
        }
#elif PRECISION == 1
#pragma unroll
        for (int h = 0; h < 4; ++h) {
            const Run<float, 2> dz = pair(own, h * 4 * PITCH);
#if BEHIND
            const Run<float, 2> y = pair(mark, h * 4 * MARKS);
#endif
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                float rounded = as_tf32(dz.at[n]);
#if BEHIND
                if (!(y.at[n] > 0.0f)) rounded = 0.0f;
#endif
                words[h / 2][h % 2 * 2 + n] = __float_as_uint(rounded);
                totals[n] += rounded;
            }
        }
#elif BEHIND == 2
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const unsigned both = as<unsigned>(pair(own, h * 4 * PITCH));
            const Run<Mark, 2> chosen = pair(mark, h * 4 * MARKS);
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                const unsigned twice = __byte_perm(both, 0, n ? 0x3232 : 0x1010);
                totals[n] += chosen.at[n] < 4 ? __uint_as_float(twice & 0xFFFF0000u) : 0.0f;
#pragma unroll
                for (int z = 0; z < 2; ++z)
                    words[z][h * 2 + n] = twice & only(chosen.at[n] - unsigned(z) * 2);
            }
        }
#else
#pragma unroll
        for (int h = 0; h < 4; ++h) {
            unsigned terms[2];
#pragma unroll
            for (int m = 0; m < 2; ++m) {
                terms[m] = as<unsigned>(pair(own, (h * 8 + m) * PITCH));
#if BEHIND
                const Run<Bfloat16, 2> y = pair(mark, (h * 8 + m) * MARKS);
                if (!(to_float(y.at[0]) > 0.0f)) terms[m] &= 0xFFFF0000u;
                if (!(to_float(y.at[1]) > 0.0f)) terms[m] &= 0xFFFFu;
#endif
                totals[0] += __uint_as_float(terms[m] << 16);
                totals[1] += __uint_as_float(terms[m] & 0xFFFF0000u);
            }
            words[h / 2][h % 2 * 2] = __byte_perm(terms[0], terms[1], 0x5410);
            words[h / 2][h % 2 * 2 + 1] = __byte_perm(terms[0], terms[1], 0x7632);
        }
#endif
    }
    // All bits of one of a word's two terms, or of neither.
    static __device__ unsigned only(unsigned term) {
        return term < 2 ? 0xFFFFu << term * 16 : 0u;
    }
#else
    // Adds the lane's share of a step to the totals.
    __device__ void add(int turn, int z) {
        const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
        for (int k = 0; k < STEP_K; ++k)
            if (k / (FOURFOLD ? 1 : 2) % 4 == threadIdx.x % 4)
                for (int n = 0; n < 2; ++n) totals[n] += to_float(element(turn, z, row + n * 8, k));
    }
#endif
};

// Where the halves of a step begin in a window: pieces, and, in the upper half, how many further the
// second one does. Halves come in such an order that these are never less than none.
__device__ inline unsigned step_place(int turn, int z) {
    int at[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        int half = turn * 4 + z * 2 + h;
        const bool exists = BEHIND == 2 ? turn * 4 + h * 2 < ALL_HALVES : half < ALL_HALVES;
        int down, beside;
        if (BEHIND == 2 && FOURFOLD) {
            down = turn / (POSITIONS / 2) * 2 + z, beside = turn % (POSITIONS / 2) * 2 + h;
        } else if (BEHIND == 2) {
            half = turn * 2 + h;
            down = half / HALVES * 2 + z, beside = half % HALVES * HALF;
        } else if (FOURFOLD) {
            down = half % LINES, beside = half / LINES;
        } else {
            down = half / HALVES * SEGMENT, beside = half % HALVES * HALF;
        }
        at[h] = exists ? down * LINE + beside * POSITION : h ? at[0] : 0;
    }
    return unsigned(at[0]) | unsigned(at[1] - at[0]) << 16;
}

// B: columns are (s, r, c), terms the positions of two halves.
struct WindowColumns {
    const Number* numbers;
    unsigned place;  // Of the step.

    __device__ int at(int h) const { return (place & 0xFFFFu) + (h ? place >> 16 : 0u); }
    static __device__ constexpr int tap(int r, int s) { return r * LINE + s * POSITION; }

    __device__ Number element(int column, int k) const {
        const int c = column % CHANNELS, r = column / CHANNELS % TAP_ROWS;
        const int half = at(k / (STEP_K / 2)) + tap(r, column / CHANNELS / TAP_ROWS);
        const int own = k % (STEP_K / 2);
        if (FOURFOLD) return numbers[(half + c) * RUN + own];
        return numbers[(half + own + c / RUN * PLANE) * RUN + c % RUN];
    }
#if WGMMA
    __device__ unsigned long long descriptor() const {
        return wgmma::descriptor(numbers, 0, FOURFOLD ? 8 * 16 : PLANE * 16) + place;
    }
#elif __CUDA_ARCH__ >= 800
    // Of channels [c, c + 16) of a tap, as read_words of a slice.
    __device__ void words(unsigned (&words)[4], int tap, int c) const {
        const int lane = threadIdx.x % 32, piece = at(lane / 16) + tap;
        if (FOURFOLD)
            read_matrices(words, numbers + (piece + c + lane % 16) * RUN);
        else
            read_transposed(words, numbers + (piece + lane % 8 +
                                              (c / RUN + lane / 8 % 2) * PLANE) * RUN);
    }
#endif
};

// sums += A B over the terms of a step.
#if __CUDA_ARCH__ >= 800
__device__ inline void multiply_step(Sums& sums, const unsigned (&words)[4],
                                     const WindowColumns& columns) {
#if WGMMA
    constexpr int BESIDE = ROWS_AT_ONCE ? TAP_ROWS : 1, EIGHTS = BESIDE * CHANNELS / 8;
    const unsigned long long first = columns.descriptor();
#pragma unroll
    for (int s = 0; s < TAP_COLUMNS; ++s)
#pragma unroll
        for (int r = 0; r < TAP_ROWS; r += BESIDE)
            wgmma::multiply_add<!FOURFOLD>(
                reinterpret_cast<float(&)[EIGHTS][4]>(
                    sums.c[0][(s * TAP_ROWS + r) * CHANNELS / 8]),
                words, first + WindowColumns::tap(r, s));
#else
#pragma unroll
    for (int j = 0; j < TILE_N; j += 16) {
        const int tap = j / CHANNELS;
        unsigned column[4];
        columns.words(column, WindowColumns::tap(tap % TAP_ROWS, tap / TAP_ROWS), j % CHANNELS);
        multiply_add(sums.c[0][j / 8], words, column[0], column[2]);
        multiply_add(sums.c[0][j / 8 + 1], words, column[1], column[3]);
    }
#endif
}
#else
struct StepRows {
    const GradientRows& rows;
    int turn, z;
    __device__ Number element(int row, int k) const { return rows.element(turn, z, row, k); }
};
#endif

// The same of both steps of a turn. With wgmma it may still be under way when this returns, with
// `words`, which no other turn than the last but one may have used.
__device__ inline void multiply_turn(Sums& sums, GradientRows& rows, const Number* window,
                                     const unsigned* places, int turn, unsigned (&words)[2][4]) {
    const Run<unsigned, 2> place = *reinterpret_cast<const Run<unsigned, 2>*>(places + turn * 2);
#if WGMMA
    wgmma::finish<1>();
#endif
#if __CUDA_ARCH__ >= 800
    rows.words(words, turn);
#if WGMMA
    wgmma::start();
#endif
#pragma unroll
    for (int z = 0; z < 2; ++z) multiply_step(sums, words[z], {window, place.at[z]});
#if WGMMA
    wgmma::commit();
#endif
#else
    for (int z = 0; z < 2; ++z) {
        rows.add(turn, z);
        sums.add_each(StepRows{rows, turn, z}, WindowColumns{window, place.at[z]}, STEP_K);
    }
#endif
}

// Waits for all products.
__device__ inline void finish(Sums& sums) {
#if WGMMA
    wgmma::finish<0>();
    // The compiler must not read sums earlier.
#pragma unroll
    for (int j = 0; j < Sums::ACROSS; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) asm volatile("" : "+f"(sums.c[0][j][e])::"memory");
#endif
}

// Adds what the other groups' threads have, in order, to the totals of the first.
__device__ inline void join_totals(float (&totals)[2], float* memory) {
    __syncthreads();
    for (int n = 0; n < 2; ++n) memory[(threadIdx.y * 2 + n) * THREADS + threadIdx.x] = totals[n];
    __syncthreads();
    for (int n = 0; n < 2; ++n)
        for (int group = 1; group < GROUPS; ++group)
            totals[n] += memory[(group * 2 + n) * THREADS + threadIdx.x];
}

// dw and db of the strips [z part, (z + 1) part), z = blockIdx.z, into part z.
extern "C" __global__ void __launch_bounds__(ALL_THREADS, BLOCKS)
    window_backward_weight(const Number* x, const Number* dy, const Mark* marks, float factor,
                           float* dw, float* db, int samples, int part, GEOMETRY) {
    const Geometry g = GEOMETRY_VALUES;
    const int lines = BEHIND == 2 ? g.out_height / 2 * 2 : g.out_height;
    const int strips = (lines + TALL - 1) / TALL;
    const int begin = blockIdx.z * part, end = min(begin + part, samples * strips);
    const int tiles = NARROW ? 1 : g.channels / CHANNELS;  // Of channels.
    const int tap_row = blockIdx.x / tiles * TAP_ROWS, channel = blockIdx.x % tiles * CHANNELS;
    const int filter = blockIdx.y * TILE_M;

    extern __shared__ __align__(16) char memory[];
    constexpr int STEP_PLACES = (TURNS * 2 * 4 + 15) / 16 * 16;  // Bytes.
    unsigned* const steps = reinterpret_cast<unsigned*>(memory);
    const auto places = [&](int i) {
        Number* const window = reinterpret_cast<Number*>(memory + STEP_PLACES);
        char* const dz = reinterpret_cast<char*>(window + (WINDOWS * PIECES + RAW) * RUN) +
                         i % BUFFERS * DZ_BUFFER;
        return Places{window + i % WINDOWS * PIECES * RUN, window + PIECES * RUN,
                      reinterpret_cast<Number*>(dz), reinterpret_cast<Mark*>(dz + DZ)};
    };
    const auto strip = [&](int i) {
        return Strip{g, i / strips, i % strips * TALL, tap_row, channel, filter};
    };
    // From `unit` on what is left of a strip, by so many warps that take turns.
    const auto bring = [&](int i, int unit, int warps) {
        for (; unit < Strip::UNITS; unit += warps)
            strip(i).bring(unit, x, dy, marks, places(i));
        close_group();
        if (Strip::AT_ONCE) strip(i).bring_fours(x, unit % warps, warps, places(i));
    };

    for (int i = own_thread(); i < TURNS * 2; i += ALL_THREADS) steps[i] = step_place(i / 2, i % 2);
    for (int i = 0; i < BUFFERS; ++i) strip(0).clear(places(i));
    __syncthreads();
    in_order();
    if (begin < end) bring(begin, own_warp(), WARPS);
    Sums sums;
    GradientRows rows{};
    for (int i = begin; i < end; ++i) {
        const Places at = places(i);
        if (LATER) {
            arrive<0>();
            __syncthreads();
            Strip::settle(at);
        }
        arrive<0>();
        publish();
        __syncthreads();
        const bool more = BUFFERS > 1 && i + 1 < end;
        int unit = own_warp();
        const auto meanwhile = [&]() {
            if (!more || unit >= Strip::UNITS) return;
            strip(i + 1).bring(unit, x, dy, marks, places(i + 1));
            unit += WARPS;
        };
        rows.dy = at.dz, rows.marks = at.marks;
        unsigned words[2][2][4];
        for (int turn = threadIdx.y; turn < TURNS; turn += 2 * GROUPS) {
            multiply_turn(sums, rows, at.window, steps, turn, words[0]);
            meanwhile();
            if (turn + GROUPS >= TURNS) break;
            multiply_turn(sums, rows, at.window, steps, turn + GROUPS, words[1]);
            meanwhile();
        }
        if (more) bring(i + 1, unit, WARPS);
        finish(sums);
        if (BUFFERS == 1 && i + 1 < end) {
            __syncthreads();
            bring(i + 1, own_warp(), WARPS);
        }
    }
    if (GROUPS > 1) {
        join_groups(sums, reinterpret_cast<float*>(memory));
        join_totals(rows.totals, reinterpret_cast<float*>(memory));
        if (threadIdx.y > 0) return;
    }

    const int all = g.r * g.s * g.channels, own = filter + GradientRows::first();
    const int size = blockIdx.z * (all + 1) * g.filters;
    const auto give = [&](float* to, float one, float other) {
        *reinterpret_cast<Run<float, 2>*>(to + own) = {one * factor, other * factor};
    };
#pragma unroll
    for (int n = 0; n < 2; ++n) {
        rows.totals[n] += __shfl_xor_sync(0xFFFFFFFFu, rows.totals[n], 1);
        rows.totals[n] += __shfl_xor_sync(0xFFFFFFFFu, rows.totals[n], 2);
    }
    if (own >= g.filters || GradientRows::first() >= FILTERS) return;
    if (blockIdx.x == 0 && threadIdx.x % 4 == 0) give(db + size, rows.totals[0], rows.totals[1]);
#pragma unroll
    for (int j = 0; j < Sums::ACROSS; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int column = j * 8 + threadIdx.x % 4 * 2 + e, tap = column / CHANNELS;
            const int r = tap_row + tap % TAP_ROWS, s = tap / TAP_ROWS, c = column % CHANNELS;
            if (r >= g.r || NARROW && c >= g.s * g.channels) continue;
            const int row = NARROW ? r * g.s * g.channels + c
                                   : (r * g.s + s) * g.channels + channel + c;
            give(dw + size + row * g.filters, sums.c[0][j][e], sums.c[0][j][e + 2]);
        }
}
