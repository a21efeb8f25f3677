// Sums of products whose columns are pixels of a window: what a lane has, and a step of them.
//
// Filters (backward by the input: channels) are rows of A, 64 of them. Pixels are columns of B,
// which wgmma reads from the slabs of a window by itself, a tap of the filter being one distance.
// pack_weights.cu lays weights out in one of two orders. Where a block has one tile, they come
// straight to registers: a lane reads the words of one instruction at once, and nothing in the main
// loop waits for other warps. Where it goes from tile to tile, they lie in shared memory, and wgmma
// reads them there, too.

#pragma once

#include "implicit_gemm_tile.cuh"

// Channels of two runs and one tap are a step of the sum: all taps of the first two runs, of the
// next two, and so on.
struct Steps {
    const View& view;

    __device__ int taps() const { return (view.r + LINES_IN_M - 1) * view.s; }
    __device__ int count(int runs) const { return runs / 2 * taps(); }
};

// How far a step's pixels lie from those of the first, in pieces; one step after the other.
struct Walk {
    const View& view;
    int run, row, column, distance;

    __device__ Walk(const View& view, int step) : view(view) {
        const int taps = Steps{view}.taps(), tap = step % taps;
        run = step / taps * 2, row = tap / view.s, column = tap % view.s;
        distance = run / SLAB_PACKS * (SLAB_PIXELS * SLAB_PACKS) + run % SLAB_PACKS + (row * view.across + column) * SLAB_PACKS;
    }
    __device__ void next() {
        ++column, distance += SLAB_PACKS;
        if (column < view.s) return;
        column = 0, ++row, distance += (view.across - view.s) * SLAB_PACKS;
        if (row < view.r + LINES_IN_M - 1) return;
        row = 0, run += 2, distance += 2 - (view.r + LINES_IN_M - 1) * view.across * SLAB_PACKS;
        if (run % SLAB_PACKS == 0) distance += (SLAB_PIXELS - 1) * SLAB_PACKS;
    }
};

// Pixels between eights of columns.
__device__ inline int eights_apart(const View& view) { return PIXEL_TILE_STRIP ? LINES_IN_M * view.across : 8; }

// A lane's row of its warp's sixteen and word of a row: those of word 0 of an instruction's four.
// Words 1 and 3 are eight rows below, words 2 and 3 four words further.
struct Place {
    int row, word;
};
__device__ inline Place place_of_lane(int lane, int word) {
    return {lane / 32 * 16 + lane % 32 / 4 + word % 2 * 8, lane % 4 + word / 2 * 4};
}
// Of a word of a piece: eight rows' first pieces lie side by side, then their second ones.
__device__ inline Place place_in_piece(int piece, int word) {
    return {piece / 16 * 8 + piece % 8, piece / 8 % 2 * 4 + word};
}
// Which piece has a word.
__device__ inline int piece_of(const Place& p) {
    return p.row / 8 * 16 + p.word / 4 * 8 + p.row % 8;
}

#if __CUDA_ARCH__ >= 800 && !(WGMMA && PERSISTENT)
// A lane's words of STAGE_STEPS steps, asked for where this stands: compilers would ask when it is too
// late.
__device__ inline void ask(Run<Number> (&words)[STAGE_STEPS], const Number* from) {
#pragma unroll
    for (int d = 0; d < STAGE_STEPS; ++d) {
        Run<unsigned, 4> run;
        const Number* const at = from + d * TEAM * RUN;
#if PERSISTENT && WEIGHT_STAGES == 0
        const int lane = threadIdx.x % 32;
        const Place place = {int(threadIdx.x) % TEAM / 32 * 16 + lane / 8 % 2 * 8 + lane % 8,
                             lane / 16 * 4};
        read_matrices(run.at, at + piece_of(place) * RUN);
#elif PERSISTENT
#pragma unroll
        for (int q = 0; q < 4; ++q) {
            const Place place = place_of_lane(threadIdx.x % TEAM, q);
            run.at[q] = reinterpret_cast<const unsigned*>(at)[piece_of(place) * 4 + place.word % 4];
        }
#else
        asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(run.at[0]), "=r"(run.at[1]), "=r"(run.at[2]), "=r"(run.at[3])
                     : "l"(at + threadIdx.x % TEAM * RUN));
#endif
        words[d] = as<Run<Number>>(run);
    }
}
#endif

// A lane's sums of ROWS x MMA_N: elements 0 and 1 are those of row g, 2 and 3 of row g + 8, of
// columns 2 t and 2 t + 1 of every eight.
struct ColumnSums {
    float c[EIGHTS][4] = {};

#if !WGMMA && __CUDA_ARCH__ >= 800
    // Of the step whose pixels begin at piece `b` of a window.
    __device__ void add(const Run<Number>& a, const Number* numbers, int b, int apart) {
        const Run<unsigned, 4> words = as<Run<unsigned, 4>>(a);
        const int lane = threadIdx.x % 32;
        b += lane / 8 % 2 + lane % 8 * SLAB_PACKS;
#pragma unroll
        for (int g = 0; g < EIGHTS; g += 2) {
            // An odd last eight is read twice.
            const int other = g + 1 < EIGHTS ? lane / 16 : 0;
            unsigned pixels[4];
            read_matrices(pixels, numbers + swizzled(b + (g + other) * apart * SLAB_PACKS) * RUN);
            multiply_add(c[g], words.at, pixels[0], pixels[1]);
            if (g + 1 < EIGHTS) multiply_add(c[g + 1], words.at, pixels[2], pixels[3]);
        }
    }
#elif !WGMMA
    // The same, number by number, of a step's pieces of weights.
    __device__ void add(const Run<Number>* a, const Number* numbers, int b, int apart) {
        constexpr int UNIT = RUN / 4;  // Numbers of a word.
        const int lane = threadIdx.x % TEAM, t = lane % 4;
        for (int k = 0; k < STEP_K; ++k)
            for (int h = 0; h < 2; ++h) {
                const Place place = {place_of_lane(lane, h).row, k / UNIT};
                const Run<Number> words =
                    a[PERSISTENT ? piece_of(place) : lane - t + place.word % 4];
                const int word = PERSISTENT ? place.word % 4 : place.word / 4 * 2 + h;
                const float weight = to_float(words.at[word * UNIT + k % UNIT]);
                for (int g = 0; g < EIGHTS; ++g)
                    for (int e = 0; e < 2; ++e) {
                        const int pixel = g * apart + t * 2 + e;
                        const int piece = swizzled(b + k / RUN + pixel * SLAB_PACKS);
                        c[g][h * 2 + e] += weight * to_float(numbers[piece * RUN + k % RUN]);
                    }
            }
    }
#endif
};

// The compiler must not read sums earlier than products are done.
__device__ inline void keep_behind(ColumnSums (&sums)[PIXEL_TILES]) {
#if WGMMA
#pragma unroll
    for (int i = 0; i < PIXEL_TILES; ++i)
#pragma unroll
        for (int g = 0; g < EIGHTS; ++g)
#pragma unroll
            for (int e = 0; e < 4; ++e) asm volatile("" : "+f"(sums[i].c[g][e])::"memory");
#endif
}

#if WGMMA
// Descriptors of a window's columns differ in where they begin alone, and that in their lower half.
struct Columns {
    unsigned lower, upper;

    __device__ explicit Columns(const Window& window) {
        const int across = eights_apart(window.view) * SLAB_PACKS * 16;
        const auto all = wgmma::swizzled_descriptor<SLAB_PACKS>(window.numbers, across);
        lower = unsigned(all), upper = unsigned(all >> 32);
    }
    __device__ unsigned long long from(int piece) const {
        return (unsigned long long)upper << 32 | (lower + piece);
    }
};
#endif

// sums[i] += A B_i over `count` steps, from step `first` of the window on, B_i being the columns
// that begin at piece places[i]; `weights` those of the first.
#if !(WGMMA && PERSISTENT)
__device__ inline void multiply_steps(ColumnSums (&sums)[PIXEL_TILES], const Number* weights,
                                      const Window& window, const int (&places)[PIXEL_TILES],
                                      int first, int count) {
    Walk walk(window.view, first);
#if WGMMA
    const Columns columns(window);
#else
    const int apart = eights_apart(window.view);
#endif
#if __CUDA_ARCH__ >= 800
    Run<Number> words[2][STAGE_STEPS];
    ask(words[0], weights);
    // Multiplies by `now` while words for the next steps come to `next`. Behind the last ones
    // nobody uses what comes: from global memory whatever lies there; held, where windows that
    // others write would be next, the same words again.
    const auto multiply = [&](const Run<Number>(&now)[STAGE_STEPS], Run<Number>(&next)[STAGE_STEPS],
                              bool last) {
#if WGMMA
        wgmma::start();
#endif
#pragma unroll
        for (int d = 0; d < STAGE_STEPS; ++d, walk.next())
#pragma unroll
            for (int i = 0; i < PIXEL_TILES; ++i) {
#if WGMMA
                wgmma::multiply_add<false>(sums[i].c, as<Run<unsigned, 4>>(now[d]).at,
                                           columns.from(places[i] + walk.distance));
#else
                sums[i].add(now[d], window.numbers, places[i] + walk.distance, apart);
#endif
            }
#if WGMMA
        wgmma::commit();
        // Those before are done, and their words free.
        wgmma::finish<1>();
#endif
        if (!PERSISTENT_GROUPS || !last) weights += STAGE_STEPS * TEAM * RUN;
        ask(next, weights);
        return last;
    };
    // Not unrolled: compilers would take minutes.
#pragma unroll 1
    for (int step = 2 * STAGE_STEPS;; step += 2 * STAGE_STEPS) {
        if (multiply(words[0], words[1], step - STAGE_STEPS == count)) break;
        if (multiply(words[1], words[0], step == count)) break;
    }
#else
    for (int step = 0; step < count; ++step, walk.next(), weights += TEAM * RUN)
        for (int i = 0; i < PIXEL_TILES; ++i)
            sums[i].add(reinterpret_cast<const Run<Number>*>(weights), window.numbers,
                        places[i] + walk.distance, apart);
#endif
#if WGMMA
    wgmma::finish<0>();
#endif
    keep_behind(sums);
}
#endif
