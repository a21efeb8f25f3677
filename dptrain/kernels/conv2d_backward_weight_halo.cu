// Gradients of the weights of convolutions of stride 1: sums over pixels, of which a block keeps a
// window (halo_tile.cuh) in shared memory.
//
//     dw[(r, s, c), k] = sum over pixels of x[pixel + (r, s), c] dz[pixel, k]
//
// Filters are the rows of a product whose columns are the channels of TAP_ROWS rows of taps: so dz
// comes to registers once for all of them, and what follows the convolution is undone there. x is
// read by tensor cores themselves, from pieces of 16 bytes: in bf16 eight channels of a pixel, so
// that a piece lies along columns and is read transposed. tf32 has nothing of that kind, so there a
// piece is one channel of four pixels, which need not be neighbours: they are QUAD_COLUMNS_APART columns
// or QUAD_ROWS_APART rows from each other, and the four stand for one *position* that a tap moves as if
// it were a pixel.

#include "dependent_launch.cuh"
#include "wgrad_tile.cuh"

#ifndef SCHEDULING_BARRIER
#define SCHEDULING_BARRIER 0  // Whether the compiler has to be kept from moving what `wgmma` reads.
#endif

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
        if (own >= TILE_FILTERS) return zero;
        const int pooled = FOURFOLD ? at : h * 4 + at / 2;
        const int i = turn * TURN_ROWS + (EPILOGUE == 2 ? pooled : z * STEP_K + k);
#if EPILOGUE == 0
        const bool counts = true;
#elif EPILOGUE == 1
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
    // What a lane reads of dz for a turn, and of what says who gets it.
    static constexpr int READS = EPILOGUE == 2 ? (FOURFOLD ? 1 : 2) : FOURFOLD ? 4 : 8;
    // Of two filters; bytes are taken apart when they are wanted.
#if EPILOGUE == 2
    using Both = unsigned short;
#else
    using Both = Run<Mark, 2>;
#endif
    struct Raw {
        Run<Number, 2> dz[READS];
        Both marks[READS];
    };
    // Nothing waits for it here.
    __device__ Raw read(int turn) const {
        Raw raw;
        // Warps without filters read those of others: what becomes of it is thrown away.
        const int own = TILE_FILTERS < TILE_M ? first() % TILE_FILTERS : first();
        constexpr bool TWOS = EPILOGUE < 2 && !FOURFOLD;
        const int row = turn * TURN_ROWS + threadIdx.x % 4 * (TWOS ? 2 : 1);
#pragma unroll
        for (int i = 0; i < READS; ++i) {
            const int at = row + (TWOS ? i / 2 * 8 + i % 2 : i * 4);
            raw.dz[i] = *reinterpret_cast<const Run<Number, 2>*>(dy + at * PITCH + own);
            if (EPILOGUE) raw.marks[i] = *reinterpret_cast<const Both*>(marks + at * MARKS + own);
        }
        return raw;
    }

    // Filters first() and first() + 1 of the lane's terms of both steps of a turn.
    __device__ void words(unsigned (&words)[2][4], const Raw& raw) {
#if PRECISION == 1 && EPILOGUE == 2
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            const float rounded = as_tf32(raw.dz[0].at[n]);
            const unsigned chosen = raw.marks[0] >> n * 8 & 0xFFu;
            totals[n] += chosen < 4 ? rounded : 0.0f;
#pragma unroll
            for (int m = 0; m < 4; ++m)
                words[m / 2][m % 2 * 2 + n] = chosen == m ? __float_as_uint(rounded) : 0u;
        }
#elif PRECISION == 1
#pragma unroll
        for (int h = 0; h < 4; ++h)
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                float rounded = as_tf32(raw.dz[h].at[n]);
#if EPILOGUE
                if (!(raw.marks[h].at[n] > 0.0f)) rounded = 0.0f;
#endif
                words[h / 2][h % 2 * 2 + n] = __float_as_uint(rounded);
                totals[n] += rounded;
            }
#elif EPILOGUE == 2
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const unsigned both = as<unsigned>(raw.dz[h]);
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                const unsigned own = n ? both >> 16 : both & 0xFFFFu;
                const unsigned chosen = raw.marks[h] >> n * 8 & 0xFFu;
                totals[n] += chosen < 4 ? __uint_as_float(own << 16) : 0.0f;
                // Terms 0 and 1 of the first step, 2 and 3 of the second.
                words[0][h * 2 + n] = shifted(own, chosen * 16);
                words[1][h * 2 + n] = shifted(own, chosen * 16 - 32);
            }
        }
#else
#pragma unroll
        for (int h = 0; h < 4; ++h) {
            unsigned terms[2];
#pragma unroll
            for (int m = 0; m < 2; ++m) {
                terms[m] = as<unsigned>(raw.dz[h * 2 + m]);
#if EPILOGUE
                const Run<Bfloat16, 2>& y = raw.marks[h * 2 + m];
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
    // None of its bits where these are more than a word has.
    static __device__ unsigned shifted(unsigned word, unsigned bits) {
        unsigned result;
        asm("shl.b32 %0, %1, %2;" : "=r"(result) : "r"(word), "r"(bits));
        return result;
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

// Where the halves of a step begin in a window: pieces, and, in the upper half, how many further
// the second one does. Halves come in such an order that these are never less than none.
__device__ inline unsigned step_place(int turn, int z) {
    int at[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        int half = turn * 4 + z * 2 + h;
        const bool exists = EPILOGUE == 2 ? turn * 4 + h * 2 < ALL_HALVES : half < ALL_HALVES;
        int down, beside;
        if (EPILOGUE == 2 && FOURFOLD) {
            down = turn / (LINE_POSITIONS / 2) * 2 + z, beside = turn % (LINE_POSITIONS / 2) * 2 + h;
        } else if (EPILOGUE == 2) {
            half = turn * 2 + h;
            down = half / HALVES * 2 + z, beside = half % HALVES * HALF;
        } else if (FOURFOLD) {
            down = half % STRIP_LINES, beside = half / STRIP_LINES;
        } else {
            down = half / HALVES * CONTIGUOUS_LINES, beside = half % HALVES * HALF;
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
        const int c = column % TILE_CHANNELS, r = column / TILE_CHANNELS % TAP_ROWS;
        const int half = at(k / (STEP_K / 2)) + tap(r, column / TILE_CHANNELS / TAP_ROWS);
        const int own = k % (STEP_K / 2);
        if (FOURFOLD) return numbers[(half + c) * RUN + own];
        return numbers[(half + own + c / RUN * PLANE) * RUN + c % RUN];
    }
#if WGMMA
    // Descriptors differ in their lower half alone.
    __device__ unsigned long long descriptor(int tap) const {
        const auto all = wgmma::descriptor(numbers, 0, FOURFOLD ? 8 * 16 : PLANE * 16);
        return all >> 32 << 32 | (unsigned(all) + place + tap);
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
    constexpr int BESIDE = ROWS_AT_ONCE ? TAP_ROWS : 1, EIGHTS = BESIDE * TILE_CHANNELS / 8;
#pragma unroll
    for (int s = 0; s < TAP_COLUMNS; ++s)
#pragma unroll
        for (int r = 0; r < TAP_ROWS; r += BESIDE)
            wgmma::multiply_add<!FOURFOLD>(
                reinterpret_cast<float(&)[EIGHTS][4]>(
                    sums.c[0][(s * TAP_ROWS + r) * TILE_CHANNELS / 8]),
                words, columns.descriptor(WindowColumns::tap(r, s)));
#else
#pragma unroll
    for (int j = 0; j < TILE_N; j += 16) {
        const int tap = j / TILE_CHANNELS;
        unsigned column[4];
        columns.words(column, WindowColumns::tap(tap % TAP_ROWS, tap / TAP_ROWS), j % TILE_CHANNELS);
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

// Turns of a strip, each of two steps.
struct Turns {
    Sums& sums;
    GradientRows& rows;
    const Number* window;
    const unsigned* places;
#if __CUDA_ARCH__ >= 800
    // What one reads is on its way while the one before is multiplied; but narrow ones in bf16 read
    // twice as many numbers for as many products, and take longer so.
    static constexpr bool READS_AHEAD = !FEW_CHANNELS || FOURFOLD;
    GradientRows::Raw raw;
    Run<unsigned, 2> place;   // Of both steps.
    unsigned words[2][2][4];  // Of two turns: the one before may be under way with its own.

    __device__ void begin(int turn) {
        if (READS_AHEAD) read(turn);
    }
    // With wgmma it may be under way when this returns. `parity` is that of the turns before.
    __device__ void multiply(int turn, int parity) {
        if (!READS_AHEAD) read(turn);
        const unsigned begins[2] = {of_all(place.at[0]), of_all(place.at[1])};
#if WGMMA
        wgmma::finish<1>();
#endif
        unsigned(&own)[2][4] = words[parity];
        rows.words(own, raw);
        // Behind the last turn its own again.
        if (READS_AHEAD) read(min(turn + K_GROUPS, TURNS - 1));
#if WGMMA
        if (SCHEDULING_BARRIER) settle(own);
        wgmma::start();
#endif
#pragma unroll
        for (int z = 0; z < 2; ++z) multiply_step(sums, own[z], {window, begins[z]});
#if WGMMA
        wgmma::commit();
#endif
    }

   private:
    __device__ void read(int turn) {
        raw = rows.read(turn);
        place = *reinterpret_cast<const Run<unsigned, 2>*>(places + turn * 2);
    }
    // What is the same for all lanes, as compilers know of what a shuffle gives: then one register
    // for all is enough for what many instructions take. Few take it as it is.
    static __device__ unsigned of_all(unsigned same) {
        return FEW_CHANNELS ? same : __shfl_sync(~0u, same, 0);
    }
#if WGMMA
    // Compilers that move the making of words to behind `start` then have every product wait for
    // the one before. They move nothing that decides whether something is done before it, which
    // next to never is: no bit of a word may be 0.
    static __device__ void settle(const unsigned (&words)[2][4]) {
        unsigned all = ~0u;
#pragma unroll
        for (int q = 0; q < 8; ++q) all &= words[q / 4][q % 4];
        if (all == ~0u) asm volatile("nanosleep.u32 0;");
        __syncwarp();
    }
#endif
#else
    __device__ void begin(int) {}
    __device__ void multiply(int turn, int) {
        for (int z = 0; z < 2; ++z) {
            rows.add(turn, z);
            sums.add_each(StepRows{rows, turn, z}, WindowColumns{window, places[turn * 2 + z]},
                          STEP_K);
        }
    }
#endif
};

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
        for (int group = 1; group < K_GROUPS; ++group)
            totals[n] += memory[(group * 2 + n) * THREADS + threadIdx.x];
}

// dw and db of the strips [z part, (z + 1) part), z = blockIdx.z, into part z.
extern "C" __global__ void __launch_bounds__(ALL_THREADS, MIN_BLOCKS)
    conv2d_backward_weight_halo(const Number* x, const Number* dy, const Mark* marks, float factor,
                           float* dw, float* db, int samples, int part, GEOMETRY) {
    const Geometry g = GEOMETRY_VALUES;
    const int lines = EPILOGUE == 2 ? g.out_height / 2 * 2 : g.out_height;
    const int strips = (lines + STRIP_HEIGHT - 1) / STRIP_HEIGHT;
    const int begin = blockIdx.z * part, end = min(begin + part, samples * strips);
    const int tiles = FEW_CHANNELS ? 1 : g.channels / TILE_CHANNELS;  // Of channels.
    const int tap_row = blockIdx.x / tiles * TAP_ROWS, channel = blockIdx.x % tiles * TILE_CHANNELS;
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
        return Strip{g, i / strips, i % strips * STRIP_HEIGHT, tap_row, channel, filter};
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
    wait_for_previous_kernel();
    if (begin < end) bring(begin, own_warp(), WARPS);
    Sums sums;
    GradientRows rows{};
    for (int i = begin; i < end; ++i) {
        const Places at = places(i);
        if (STAGED_TRANSPOSE) {
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
        Turns turns{sums, rows, at.window, steps};
        turns.begin(min(int(threadIdx.y), TURNS - 1));
        for (int turn = threadIdx.y; turn < TURNS; turn += 2 * K_GROUPS) {
            turns.multiply(turn, 0);
            meanwhile();
            if (turn + K_GROUPS >= TURNS) break;
            turns.multiply(turn + K_GROUPS, 1);
            meanwhile();
        }
        if (more) bring(i + 1, unit, WARPS);
        finish(sums);
        if (BUFFERS == 1 && i + 1 < end) {
            __syncthreads();
            bring(i + 1, own_warp(), WARPS);
        }
    }
    if (K_GROUPS > 1) {
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
    if (own >= g.filters || GradientRows::first() >= TILE_FILTERS) return;
    if (blockIdx.x == 0 && threadIdx.x % 4 == 0) give(db + size, rows.totals[0], rows.totals[1]);
#pragma unroll
    for (int j = 0; j < Sums::ACROSS; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int column = j * 8 + threadIdx.x % 4 * 2 + e, tap = column / TILE_CHANNELS;
            const int r = tap_row + tap % TAP_ROWS, s = tap / TAP_ROWS, c = column % TILE_CHANNELS;
            if (r >= g.r || FEW_CHANNELS && c >= g.s * g.channels) continue;
            const int row = FEW_CHANNELS ? r * g.s * g.channels + c
                                   : (r * g.s + s) * g.channels + channel + c;
            give(dw + size + row * g.filters, sums.c[0][j][e], sums.c[0][j][e + 2]);
        }
}
