// Convolutions over pixels that are columns of a product: blocks bring windows (window.cuh), make
// sums (column_sums.cuh) of segments (segments.cuh), and give them to what stores them.

#pragma once

#include "column_sums.cuh"

static_assert(!LATER || SHARES == 1, "teams would add where the next window comes");

// Units of a segment that a team gives, and of all its segments.
constexpr int TURNS = (UNITS + SHARES - 1) / SHARES, GIVEN = SEGMENTS * TURNS;

#if DROPS
static_assert(POOLED && GIVEN * OwnRows::OWN <= 32, "a word has a bit for each output of a lane");
constexpr int LANES = 4 / OwnRows::OWN;  // That have the four filters of a block of random numbers.

// What dropout keeps of a lane's outputs: bits of its OWN filters for each unit that it gives, in
// order. Lanes that have the same blocks take turns: each draws for every LANES-th unit, by
// block(k, mine) for unit k + mine, and tells the others. Units outside of the map are drawn for,
// too, so that nobody is missing.
template <class Block> __device__ inline unsigned draw_together(const Block& block) {
    constexpr unsigned OWN_OF_FOURS = ~0u / 15 * ((1 << OwnRows::OWN) - 1);
    const int lane = threadIdx.x % 32, mine = lane / 4 % LANES;
    unsigned drawn = 0, kept = 0;
#pragma unroll
    for (int k = 0; k < GIVEN; k += LANES) drawn |= block(k, mine) << k / LANES * 4;
#pragma unroll
    for (int other = 0; other < LANES; ++other) {
        const unsigned theirs = __shfl_sync(~0u, drawn, lane + (other - mine) * 4);
        kept |= (theirs >> mine * OwnRows::OWN & OWN_OF_FOURS) << other * OwnRows::OWN;
    }
    return kept;
}
#endif

// Gives `store` the outputs of segment i of a team, values of a lane's filters from `filter` on:
// store.pixel(pixel, filter, values) those of a pixel, or, POOLED, store.window(window, filter,
// values, kept) those of the members of a window, both counted over all samples. Of SHARES teams
// that have the same ones this is number `share`.
template <class Store>
__device__ void give(const ColumnSums& sums, const Segments& segments, const Segment& at, int i,
                     const View& view, int samples, int share, unsigned kept, const Store& store) {
    const int filter = filter_of_lane();
    if (at.sample >= samples) return;
#pragma unroll
    for (int u = 0; u < UNITS; ++u) {
        if (u % SHARES != share) continue;
#if POOLED
        const UnitWindow window(segments, at, u);
        if (!window.inside) continue;
        const int g = u / BESIDE * UnitWindow::HEIGHT * BESIDE + u % BESIDE;
        float values[4][OwnRows::OWN];
#pragma unroll
        for (int m = 0; m < 4; ++m)
#pragma unroll
            for (int n = 0; n < OwnRows::OWN; ++n)
                values[m][n] = TALL == 2 ? sums.c[g][m]
                                         : sums.c[g + m / 2 * BESIDE][m % 2 + n * 2];
        store.window(at.sample * UnitWindow::count(segments) + window.number, filter, values,
                     kept >> (i * TURNS + u / SHARES) * OwnRows::OWN);
#else
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int beside = u * 8 + threadIdx.x % 4 * 2 + e;
            const int line = STRIP ? u : beside / view.across;
            const int x = STRIP ? at.column + beside % 8 : beside % view.across;
            const int y = (at.line + line) * TALL + OwnRows::line(row_of_lane());
            const bool inside = line < LINES && y < view.out_height && x < view.out_width;
            const float values[2] = {sums.c[u][e], sums.c[u][e + 2]};
            if (inside)
                store.pixel((at.sample * view.out_height + y) * view.out_width + x, filter,
                            values);
        }
#endif
    }
}

// What a block computes: rows of `weights` by the pixels of all samples, to `store`.
template <class Source, class Store>
struct Convolution {
    const View& view;
    const Source& source;
    int samples;
    const Number* weights;
    const Store& store;
    Number* memory;
    Segments segments{view};

    // Segment i of a team's tile.
    __device__ Segment segment(int tile, int i) const { return segments(tile * SEGMENTS + i); }

    static __device__ Pixel top(const Segment& s) { return {s.sample, s.line * TALL, s.column}; }

    // That the segments of all teams look at, of a chunk of the channels; tile `first` is the first
    // team's.
    __device__ Window window(int first, int chunk, Number* numbers) const {
        Window window = Window::planes(view, numbers, PIXELS, samples);
        window.each /= CHUNKS;
        window.from = chunk * window.each;
        window.first = window.row(top(segment(first, 0)));
        window.stop = window.row(top(segment(first + TEAMS - 1, SEGMENTS - 1))) +
                      (LINES - 1) * TALL + view.r + TALL - 1;
        return window;
    }

    // Adds a share of the steps of a window.
    __device__ void multiply(ColumnSums (&sums)[SEGMENTS], int tile, const Window& window,
                             int share) const {
        int places[SEGMENTS];
#pragma unroll
        for (int i = 0; i < SEGMENTS; ++i)
            places[i] = window.place(top(segment(tile, i))) / RUN;
        const int all = Steps{view}.count(window.each), own = all / SHARES, first = share * own;
        const int lane = (window.from / window.each * all + first) * TEAM + threadIdx.x % TEAM;
        const Number* const words = (HOLDERS ? memory : own_weights()) + lane * RUN;
        multiply_steps(sums, words, window, places, first, own);
    }

    // Of the block's rows, and the lanes that read them.
    __device__ const Number* own_weights() const { return weights + blockIdx.y * lanes() * RUN; }
    __device__ int lanes() const { return Steps{view}.count(view.channels / RUN) * TEAM; }

    __device__ void give_all(const ColumnSums (&sums)[SEGMENTS], int tile, int share,
                             unsigned kept) const {
#pragma unroll
        for (int i = 0; i < SEGMENTS; ++i)
            give(sums[i], segments, segment(tile, i), i, view, samples, share, kept, store);
    }

    // What dropout keeps of what the thread gives.
    __device__ unsigned draw(int tile, int share) const {
#if DROPS
        unsigned identities[SEGMENTS];
#pragma unroll
        for (int i = 0; i < SEGMENTS; ++i) {
            const int sample = min(segment(tile, i).sample, samples - 1);
            identities[i] = unsigned(store.dropout.samples[sample]);
        }
        const int blocks = store.columns / 4, own = filter_of_lane() / 4;
        return draw_together([&](int k, int mine) {
            unsigned identity = 0;
            int block = 0;
#pragma unroll
            for (int other = 0; other < LANES; ++other) {
                const int at = min(k + other, GIVEN - 1), i = at / TURNS;
                const UnitWindow window(segments, segment(tile, i), at % TURNS * SHARES + share);
                if (other == mine) identity = identities[i], block = window.number * blocks + own;
            }
            return draw_block(store.dropout, identity, block);
        });
#else
        return 0;
#endif
    }

    // One tile of each team; or, LATER, one after the other, the next window being on its way while
    // the sums of the present one are made and given.
    __device__ void compute() const {
        const int tiles = (samples * segments.each + SEGMENTS - 1) / SEGMENTS;
        const int each = TEAMS * (ALL_THREADS / THREADS), begin = blockIdx.x * each;
        const int ahead = threadIdx.y * TEAMS;  // Of the block's tiles, those of others.
        if (HOLDERS)
            for (int i = threadIdx.y * THREADS + threadIdx.x; i < lanes(); i += ALL_THREADS)
                bring<16>(memory + i * RUN, own_weights() + i * RUN);
        if (LATER) source.ask(window(begin + ahead, 0, numbers(0)), raw());
        if (HOLDERS) {
            arrived();
            __syncthreads();
        }
        int own = 0;  // Of two windows.
#pragma unroll 1
        for (int at = begin; at < tiles; at += gridDim.x * each) {
            own = compute(at + ahead, gridDim.x * each, tiles, own);
            if (!LATER) break;
        }
    }

    // A tile of each team, `step` before the next. Returns which window comes next. What is outside
    // of the maps is computed, and not given.
    __device__ int compute(int first, int step, int tiles, int own) const {
        const int warpgroup = threadIdx.x / TEAM, tile = first + warpgroup % TEAMS;
        const int share = SHARES > 1 ? warpgroup / TEAMS : 0;
        ColumnSums sums[SEGMENTS];
        unsigned kept = 0;
        for (int chunk = 0; chunk < CHUNKS; ++chunk) {
            const Window window = this->window(first, chunk, numbers(own));
            if (!LATER && chunk > 0) meet();
            if (!LATER) source.ask(window, nullptr);
            // There is nothing else to do while the window is on its way.
            if (chunk == 0) kept = draw(tile, share);
            arrived();
            // Where there is one window, everybody has to be done with what it was.
            if (LATER && !Source::TWO) meet();
            source.make(window, raw());
            publish();
            meet();
            if (LATER) {
                own ^= Source::TWO;
                const bool more = chunk + 1 < CHUNKS;
                const int next = more ? first : first + step;
                if (next < tiles)
                    source.ask(this->window(next, more ? chunk + 1 : 0, numbers(own)), raw());
            }
            multiply(sums, tile, window, share);
        }
        if (SHARES > 1) join(sums, warpgroup % TEAMS, share);
        give_all(sums, tile, share, kept);
        return own;
    }

    // Waits for all who share a window.
    static __device__ void meet() {
#if HOLDERS && defined(__CUDA_ARCH__)
        asm volatile("bar.sync %0, %1;" ::"r"(int(threadIdx.y) + 1), "n"(THREADS) : "memory");
#else
        __syncthreads();
#endif
    }

    // Where windows lie, behind the weights: one after the other, or what one is made of behind it.
    __device__ Number* numbers(int i) const {
        const int all = WINDOW_BYTES / int(sizeof(Number));
        return memory + (HOLDERS ? lanes() * RUN + threadIdx.y * all : 0) +
               i * (view.channels / CHUNKS * PIXELS);
    }
    __device__ Number* raw() const { return LATER ? numbers(1) : nullptr; }

    // Adds what those who share a team's sums have, in order: each the eights that it gives.
    __device__ void join(ColumnSums (&sums)[SEGMENTS], int team, int share) const {
        Run<float, 4>* const own = reinterpret_cast<Run<float, 4>*>(memory) + threadIdx.x % TEAM;
        const auto run = [&](int share, int i, int g) {
            return own + (((share * TEAMS + team) * SEGMENTS + i) * EIGHTS + g) * TEAM;
        };
        __syncthreads();
#pragma unroll
        for (int i = 0; i < SEGMENTS; ++i)
#pragma unroll
            for (int g = 0; g < EIGHTS; ++g)
                *run(share, i, g) = as<Run<float, 4>>(sums[i].c[g]);
        __syncthreads();
#pragma unroll
        for (int i = 0; i < SEGMENTS; ++i)
#pragma unroll
            for (int g = 0; g < EIGHTS; ++g) {
                if (unit_of(g) % SHARES != share) continue;
                Run<float, 4> total = *run(0, i, g);
#pragma unroll
                for (int other = 1; other < SHARES; ++other) {
                    const Run<float, 4> more = *run(other, i, g);
#pragma unroll
                    for (int e = 0; e < 4; ++e) total.at[e] += more.at[e];
                }
#pragma unroll
                for (int e = 0; e < 4; ++e) sums[i].c[g][e] = total.at[e];
            }
    }
};

template <class Source, class Store>
__device__ void convolve(const View& view, const Source& source, int samples,
                         const Number* weights, const Store& store) {
    extern __shared__ __align__(16) char memory[];
    Convolution<Source, Store>{view,    source, samples, weights,
                               store, reinterpret_cast<Number*>(memory)}.compute();
}
