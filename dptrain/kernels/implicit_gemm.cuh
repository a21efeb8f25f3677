// Convolutions over pixels that are columns of a product: blocks bring windows (halo_tile.cuh), make
// sums (implicit_gemm_mainloop.cuh) of segments (implicit_gemm_tile.cuh), and give them to what stores them.

#pragma once

#include "weight_pipeline.cuh"

static_assert(!PERSISTENT || WARP_GROUPS * K_WARP_GROUPS == 1, "four warps go from tile to tile");

// Units of a segment that a team gives, and of all its segments.
constexpr int TURNS = (UNITS + K_WARP_GROUPS - 1) / K_WARP_GROUPS, GIVEN = PIXEL_TILES * TURNS;

#if EPILOGUE_DROPOUT
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
// values, kept) those of the members of a window, both counted over all samples. Of K_WARP_GROUPS teams
// that have the same ones this is number `share`.
template <class Store>
__device__ void give(const ColumnSums& sums, const Segments& segments, const Segment& at, int i,
                     const View& view, int samples, int share, unsigned kept, const Store& store) {
    const int filter = filter_of_lane();
    if (at.sample >= samples) return;
#pragma unroll
    for (int u = 0; u < UNITS; ++u) {
        if (u % K_WARP_GROUPS != share) continue;
#if POOLED
        const UnitWindow window(segments, at, u);
        if (!window.inside) continue;
        const int g = u / BESIDE * UnitWindow::HEIGHT * BESIDE + u % BESIDE;
        float values[4][OwnRows::OWN];
#pragma unroll
        for (int m = 0; m < 4; ++m)
#pragma unroll
            for (int n = 0; n < OwnRows::OWN; ++n)
                values[m][n] = LINES_IN_M == 2 ? sums.c[g][m]
                                         : sums.c[g + m / 2 * BESIDE][m % 2 + n * 2];
        store.window(at.sample * UnitWindow::count(segments) + window.number, filter, values,
                     kept >> (i * TURNS + u / K_WARP_GROUPS) * OwnRows::OWN);
#else
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int beside = u * 8 + threadIdx.x % 4 * 2 + e;
            const int line = PIXEL_TILE_STRIP ? u : beside / view.across;
            const int x = PIXEL_TILE_STRIP ? at.column + beside % 8 : beside % view.across;
            const int y = (at.line + line) * LINES_IN_M + OwnRows::line(row_of_lane());
            const bool inside = line < PIXEL_TILE_LINES && y < view.out_height && x < view.out_width;
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
    __device__ Segment segment(int tile, int i) const { return segments(tile * PIXEL_TILES + i); }

    static __device__ Pixel top(const Segment& s) { return {s.sample, s.line * LINES_IN_M, s.column}; }

    // That the segments of all teams look at, of a chunk of the channels; tile `first` is the first
    // team's.
    __device__ Window window(int first, int chunk, Number* numbers) const {
        const int each = view.channels / RUN / CHANNEL_CHUNKS;
        const Segment begin = segment(first, 0);
        const Segment end = CROPPED_WIDTH ? begin : segment(first + WARP_GROUPS - 1, PIXEL_TILES - 1);
        return {view, numbers, samples, chunk * each, each, row(begin),
                row(end) + (PIXEL_TILE_LINES - 1) * LINES_IN_M + view.r + LINES_IN_M - 1, CROPPED_WIDTH ? begin.column : 0};
    }
    __device__ int row(const Segment& s) const { return s.sample * view.down() + s.line * LINES_IN_M; }

    // Where segments begin in a window, in pieces.
    __device__ void find(int (&places)[PIXEL_TILES], int tile, const Window& window) const {
#pragma unroll
        for (int i = 0; i < PIXEL_TILES; ++i) places[i] = window.place(top(segment(tile, i)));
    }

    // Steps of a chunk.
    __device__ int steps() const { return Steps{view}.count(view.channels / RUN / CHANNEL_CHUNKS); }

    // Of the block's rows, and pieces of 16 bytes that they are.
    __device__ const Number* own_weights() const { return weights + blockIdx.y * pieces() * RUN; }
    __device__ int pieces() const { return CHANNEL_CHUNKS * steps() * TEAM; }

    __device__ void give_all(const ColumnSums (&sums)[PIXEL_TILES], int tile, int share,
                             unsigned kept) const {
#pragma unroll
        for (int i = 0; i < PIXEL_TILES; ++i)
            give(sums[i], segments, segment(tile, i), i, view, samples, share, kept, store);
    }

    // What dropout keeps of what the thread gives.
    __device__ unsigned draw(int tile, int share) const {
#if EPILOGUE_DROPOUT
        unsigned identities[PIXEL_TILES];
#pragma unroll
        for (int i = 0; i < PIXEL_TILES; ++i) {
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
                const UnitWindow window(segments, segment(tile, i), at % TURNS * K_WARP_GROUPS + share);
                if (other == mine) identity = identities[i], block = window.number * blocks + own;
            }
            return draw_block(store.dropout, identity, block);
        });
#else
        return 0;
#endif
    }

#if !PERSISTENT
    // One tile of each team. What is outside of the maps is computed, and not given.
    __device__ void compute_one() const {
        const int warpgroup = threadIdx.x / TEAM, first = blockIdx.x * WARP_GROUPS;
        const int tile = first + warpgroup % WARP_GROUPS, share = K_WARP_GROUPS > 1 ? warpgroup / WARP_GROUPS : 0;
        const int own = steps() / K_WARP_GROUPS;
        Barrier& come = barriers().windows[0][0];
        begin(come);
        ColumnSums sums[PIXEL_TILES];
        unsigned kept = 0;
        for (int chunk = 0; chunk < CHANNEL_CHUNKS; ++chunk) {
            const Window window = this->window(first, chunk, memory);
            if (chunk > 0) __syncthreads();
            source.ask(window, nullptr, &come);
            // There is nothing else to do while the window is on its way.
            if (chunk == 0) kept = draw(tile, share);
            make(window, nullptr, come, chunk);
            int places[PIXEL_TILES];
            find(places, tile, window);
            const int step = chunk * steps() + share * own;
            multiply_steps(sums, own_weights() + step * TEAM * RUN, window, places, share * own,
                           own);
        }
        if (K_WARP_GROUPS > 1) join(sums, warpgroup % WARP_GROUPS, share);
        give_all(sums, tile, share, kept);
    }

#else
    // One tile after the other. Two windows take turns, one on its way while the other is read; or
    // what the next is made of is on its way.
    __device__ void compute() const {
        Barrier(&come)[2] = barriers().windows[threadIdx.y];
        const int tiles = (samples * segments.each + PIXEL_TILES - 1) / PIXEL_TILES;
        const int ahead = threadIdx.y, step = gridDim.x * PERSISTENT_GROUPS;  // To the next tile.
        const int begin_tile = blockIdx.x * PERSISTENT_GROUPS;
        const int rounds = (tiles - begin_tile + step - 1) / step, all = rounds * CHANNEL_CHUNKS;
        // Window i of all that the group takes.
        const auto window = [&](int i) {
            return this->window(begin_tile + ahead + i / CHANNEL_CHUNKS * step, i % CHANNEL_CHUNKS,
                                numbers(Source::TWO ? i % 2 : 0));
        };
        const auto ask = [&](int i) {
            if (i < all) source.ask(window(i), numbers(1), &come[i % 2]);
            close_group();
        };
        begin(come[0]), begin(come[1]);
#if WGMMA
        HeldWeights held{memory, own_weights(), barriers().weights, pieces() / HeldWeights::STAGE,
                         all * steps() / STAGE_STEPS};
        if (threadIdx.x == 0 && threadIdx.y == 0) held.begin();
        __syncthreads();
        if (threadIdx.x == 0 && threadIdx.y == 0) held.ask();
#elif WEIGHT_STAGES == 0
        for (int i = threadIdx.y * THREADS + threadIdx.x; i < pieces(); i += ALL_THREADS)
            bring<16>(memory + i * RUN, own_weights() + i * RUN);
        arrived();
        __syncthreads();
#endif
        ask(0);
        if (Source::TWO) ask(1);
#if WGMMA
        if (WEIGHT_STAGES == 0) held.wait();
#endif
        int next = 0;
#pragma unroll 1
        for (int tile = begin_tile + ahead; next < all; tile += step) {
            ColumnSums sums[PIXEL_TILES];
            const unsigned kept = draw(tile, 0);
#pragma unroll 1
            for (int chunk = 0; chunk < CHANNEL_CHUNKS; ++chunk, ++next) {
                Number* const own = numbers(Source::TWO ? next % 2 : 0);
                const Window window = this->window(tile, chunk, own);
                make(window, numbers(1), come[next % 2], next / 2);
                if (!Source::TWO) ask(next + 1);
                int places[PIXEL_TILES];
                find(places, tile, window);
#if WGMMA
                held.multiply(sums, window, places, chunk * steps(), steps() / STAGE_STEPS);
#else
                multiply_steps(sums,
                               (WEIGHT_STAGES ? own_weights() : memory) + chunk * steps() * TEAM * RUN,
                               window, places, 0, steps());
#endif
                // Nobody reads the window any more.
                meet();
                if (Source::TWO) ask(next + 2);
            }
            give_all(sums, tile, 0, kept);
        }
    }
#endif

    // By all who share a barrier.
    static __device__ void begin(Barrier& come) {
#if TENSOR_MAPS
        if (threadIdx.x == 0) come.begin();
        if (!PERSISTENT) __syncthreads();
#endif
    }

    // Waits until a window has come, and makes it of what came.
    __device__ void make(const Window& window, const Number* raw, const Barrier& come,
                         int phase) const {
#if TENSOR_MAPS
        come.wait(phase);
        if (Source::TWO) return;
#else
        // The one after it may be on its way.
        if (PERSISTENT && Source::TWO)
            arrive<1>();
        else
            arrived();
#endif
        source.make(window, raw);
        publish();
        meet();
    }

    // Waits for all who share a window.
    static __device__ void meet() {
#if PERSISTENT && defined(__CUDA_ARCH__)
        asm volatile("bar.sync %0, %1;" ::"r"(int(threadIdx.y) + 1), "n"(THREADS) : "memory");
#else
        __syncthreads();
#endif
    }

    // Bytes of weights in shared memory, windows behind them: one after the other, or what one is
    // made of behind it.
    __device__ int held_bytes() const { return (WEIGHT_STAGES ? WEIGHT_STAGES * STAGE_STEPS * TEAM : pieces()) * 16; }
    __device__ Number* numbers(int i) const {
        const int own = held_bytes() + threadIdx.y * HALO_BYTES;
        return reinterpret_cast<Number*>(reinterpret_cast<char*>(memory) + own) +
               i * (view.channels / CHANNEL_CHUNKS * SLAB_PIXELS);
    }
    // Behind all else in shared memory: nothing else may be where one is.
    struct Barriers {
        Barrier windows[PERSISTENT ? PERSISTENT_GROUPS : 1][2];
#if PERSISTENT && WGMMA
        HeldWeights::Shared weights;
#endif
    };
    __device__ Barriers& barriers() const {
        constexpr int SUMS_BYTES = K_WARP_GROUPS > 1 ? THREADS * PIXEL_TILES * EIGHTS * 16 : 0;
        const int all = PERSISTENT ? held_bytes() + PERSISTENT_GROUPS * HALO_BYTES
                              : max(HALO_BYTES, SUMS_BYTES);
        return *reinterpret_cast<Barriers*>(reinterpret_cast<char*>(memory) + all);
    }

    // Adds what those who share a team's sums have, in order: each the eights that it gives.
    __device__ void join(ColumnSums (&sums)[PIXEL_TILES], int team, int share) const {
        Run<float, 4>* const own = reinterpret_cast<Run<float, 4>*>(memory) + threadIdx.x % TEAM;
        const auto run = [&](int share, int i, int g) {
            return own + (((share * WARP_GROUPS + team) * PIXEL_TILES + i) * EIGHTS + g) * TEAM;
        };
        __syncthreads();
#pragma unroll
        for (int i = 0; i < PIXEL_TILES; ++i)
#pragma unroll
            for (int g = 0; g < EIGHTS; ++g)
                *run(share, i, g) = as<Run<float, 4>>(sums[i].c[g]);
        __syncthreads();
#pragma unroll
        for (int i = 0; i < PIXEL_TILES; ++i)
#pragma unroll
            for (int g = 0; g < EIGHTS; ++g) {
                if (unit_of(g) % K_WARP_GROUPS != share) continue;
                Run<float, 4> total = *run(0, i, g);
#pragma unroll
                for (int other = 1; other < K_WARP_GROUPS; ++other) {
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
    extern __shared__ __align__(1024) char memory[];
    const Convolution<Source, Store> convolution{
        view, source, samples, weights, store, reinterpret_cast<Number*>(memory)};
#if PERSISTENT
    convolution.compute();
#else
    convolution.compute_one();
#endif
}
