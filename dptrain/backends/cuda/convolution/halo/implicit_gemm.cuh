// Implicit GEMM on halo tiles: convolution of stride 1, forward or with respect to the input. A
// block loads halo tiles (halo_tile.cuh), multiplies them with packed weights
// (implicit_gemm_mainloop.cuh) into the accumulators of pixel tiles (implicit_gemm_tile.cuh), and
// passes these to the epilogue.
//
// Rows of C are filters and columns are pixels. A block computes either one work tile per warp
// group, or, as a persistent kernel, a sequence of work tiles with double-buffered halo tiles and
// with weights in shared memory.

#pragma once

#include "weight_pipeline.cuh"

static_assert(!PERSISTENT || WARP_GROUPS * K_WARP_GROUPS == 1,
              "a persistent group is one warp group");

// Epilogue units of a pixel tile that one warp group stores, and those of all its pixel tiles.
constexpr int UNITS_PER_GROUP = (EPILOGUE_UNITS + K_WARP_GROUPS - 1) / K_WARP_GROUPS,
              STORED_UNITS = PIXEL_TILES * UNITS_PER_GROUP;

#if EPILOGUE_DROPOUT
static_assert(POOLED && STORED_UNITS * TileRows::LANE_FILTERS <= 32,
              "the dropout bits of a lane must fit into 32 bits");
constexpr int PHILOX_LANES =
    // Lanes that share a Philox block, which has four random words for four filters.
    4 / TileRows::LANE_FILTERS;

// Return the dropout bits of a lane's outputs: LANE_FILTERS bits for each of its epilogue units, in
// order. Lanes that share Philox blocks divide the work: each lane draws every PHILOX_LANES-th
// unit, by block(k, draw_index) for unit k + draw_index, and the lanes exchange the bits by
// shuffles. Units outside the map are drawn as well, so that all lanes take part in the shuffles.
template <class Block> __device__ inline unsigned draw_shared(const Block& block) {
    constexpr unsigned FILTER_BITS = ~0u / 15 * ((1 << TileRows::LANE_FILTERS) - 1);
    const int lane = threadIdx.x % 32, draw_index = lane / 4 % PHILOX_LANES;
    unsigned drawn = 0, kept = 0;
#pragma unroll
    for (int k = 0; k < STORED_UNITS; k += PHILOX_LANES)
        drawn |= block(k, draw_index) << k / PHILOX_LANES * 4;
#pragma unroll
    for (int other = 0; other < PHILOX_LANES; ++other) {
        const unsigned theirs = __shfl_sync(~0u, drawn, lane + (other - draw_index) * 4);
        kept |= (theirs >> draw_index * TileRows::LANE_FILTERS & FILTER_BITS)
                << other * TileRows::LANE_FILTERS;
    }
    return kept;
}
#endif

// Store the gradient of a folded input, whose columns are channels of folded pixels.
struct StoreFolded {
    Number* dx;
    StoredMap map;
    const Number* other;  // Of `read_or_other`.

    template <int N>
    __device__ void pixel(const Pixel& p, int column, const float (&values)[N]) const {
        constexpr int PIECE = IN_VECTOR < N ? IN_VECTOR : N;
#pragma unroll
        for (int v = 0; v < N; v += PIECE) {
            put(map.offset(p.sample, p.row, p.column, column + v),
                rounded<Number, PIECE>(values + v));
            // No tap reads the other pixels.
            for (int part = map.parts; !ADD_GRADIENT && part < map.fold_h * map.fold_w; ++part)
                if (column + v < map.channels)
                    put(map.part_offset(p.sample, p.row, p.column, part, column + v),
                        Pack<Number, PIECE>{});
        }
    }
    template <int N> __device__ void put(int at, const Pack<Number, N>& pack) const {
        if (at >= 0) *reinterpret_cast<Pack<Number, N>*>(dx + at) = pack;
    }

    // What is stored in a pixel from `column` on; any numbers unless the pixel `exists`.
    template <int N>
    __device__ Pack<Number, N> stored(const Pixel& p, int column, bool exists) const {
        return read_or_other<N, IN_VECTOR>(dx, other, exists, [&](int v) {
            return map.offset(p.sample, p.row, p.column, column + v);
        });
    }
};

// The argument by which a store identifies a pixel.
template <class Store>
__device__ inline int stored_pixel(const Store&, const View& view, const Pixel& p) {
    return (p.sample * view.out_height + p.row) * view.out_width + p.column;
}
__device__ inline Pixel stored_pixel(const StoreFolded&, const View&, const Pixel& p) { return p; }

// A pixel of a pixel tile, and its line there in units of LINES_IN_M output lines.
struct TilePixel {
    int line;
    Pixel pixel;

    // Column of C and row of A.
    __device__ TilePixel(const View& view, const PixelTile& at, int row, int column) {
        line = PIXEL_TILE_STRIP ? column / 8 : column / view.row_pitch;
        const int along = PIXEL_TILE_STRIP ? at.column + column % 8 : column % view.row_pitch;
        pixel = {at.sample * ROW_SAMPLES + along % ROW_SAMPLES,
                 (at.line + line) * LINES_IN_M + TileRows::line(row), along / ROW_SAMPLES};
    }

    // True if it is stored.
    __device__ bool inside(const View& view, int samples) const {
        return (line < PIXEL_TILE_LINES) & (pixel.row < view.out_height) &
               (pixel.column < view.out_width) & (pixel.sample < samples);
    }
};

// Accumulators of a lane by groups of eight columns.
struct AccumulatorGroups {
    static constexpr int UNROLL = EPILOGUE_UNITS;
    const PixelAccumulators& acc;

    __device__ Pack<float, 4> operator()(int g) const { return as<Pack<float, 4>>(acc.c[g]); }
};

// True if the main loop multiplies zeros that complete the taps of several output lines or of a
// folded filter, or splits operands. Then sums can differ from those of float32 arithmetic.
constexpr bool CHECKS_SUMS = LINES_IN_M > 1 || FOLDED || TF32X3;

// Epilogue of pixel tile i: call store.pixel(pixel, filter, values) for each pixel, or with POOLED
// store.pooling_window(window, filter, values, kept) for each pooling window. Pixels and windows
// are counted over all samples. If several warp groups share the accumulators (intra-block
// split-K), warp group `k_group` stores its part. Return true if one of the sums
// `needs_scalar_sum`. Without STORES, only check that.
template <bool STORES = true, class Groups, class Store>
__device__ bool store_tile(const Groups& groups, const PixelTileMap& pixel_tiles,
                           const PixelTile& at, int i, const View& view, int samples, int k_group,
                           unsigned kept, const Store& store) {
    const int filter = filter_of_lane();
    bool needs_scalar = false;
    if (at.sample * ROW_SAMPLES >= samples) return false;
#pragma unroll Groups::UNROLL
    for (int u = 0; u < EPILOGUE_UNITS; ++u) {
        if (u % K_WARP_GROUPS != k_group) continue;
#if POOLED
        const PoolingUnit unit(pixel_tiles, at, u);
        if (!unit.inside) continue;
        const int g = u / N8_ACROSS * PoolingUnit::HEIGHT * N8_ACROSS + u % N8_ACROSS;
        const Pack<float, 4> upper = groups(g),
                             lower = LINES_IN_M == 2 ? upper : groups(g + N8_ACROSS);
        float values[4][TileRows::LANE_FILTERS];
#pragma unroll
        for (int m = 0; m < 4; ++m)
#pragma unroll
            for (int n = 0; n < TileRows::LANE_FILTERS; ++n) {
                values[m][n] = LINES_IN_M == 2 ? upper.at[m]
                                               : (m < 2 ? upper : lower).at[m % 2 + n * 2];
                needs_scalar |= CHECKS_SUMS && needs_scalar_sum(values[m][n]);
            }
        store.pooling_window(
            at.sample * PoolingUnit::count(pixel_tiles) + unit.number, filter, values,
            kept >> (i * UNITS_PER_GROUP + u / K_WARP_GROUPS) * TileRows::LANE_FILTERS);
#else
        const Pack<float, 4> sums = groups(u);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const TilePixel own(view, at, row_of_lane(), u * 8 + threadIdx.x % 4 * 2 + e);
            const float values[2] = {sums.at[e], sums.at[e + 2]};
            if (!own.inside(view, samples)) continue;
            if (CHECKS_SUMS)
                needs_scalar |= needs_scalar_sum(values[0]) || needs_scalar_sum(values[1]);
            if (STORES) store.pixel(stored_pixel(store, view, own.pixel), filter, values);
        }
#endif
    }
    return needs_scalar;
}

#if ADD_GRADIENT
// What is stored for a group of eight columns: the lane's filters of its two columns.
struct StoredGroup {
    using Words = Pack<unsigned, sizeof(Number) / 2>;
    Words columns[2];

    template <class Store>
    __device__ void load(const PixelTile& at, int g, const View& view, int samples, bool exists,
                         const Store& store) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const TilePixel own(view, at, row_of_lane(), g * 8 + threadIdx.x % 4 * 2 + e);
            columns[e] = as<Words>(store.template stored<2>(stored_pixel(store, view, own.pixel),
                                                            filter_of_lane(),
                                                            exists & own.inside(view, samples)));
        }
    }

    // Keep the compiler from using what is loaded before this point.
    __device__ void fence() {
#ifdef __CUDA_ARCH__
#pragma unroll
        for (int e = 0; e < 2; ++e)
#pragma unroll
            for (unsigned& word : columns[e].at) asm volatile("" : "+r"(word));
#endif
    }

    // The value that element e of the lane's accumulators begins with.
    __device__ float operator[](int e) const {
        return to_float(as<Pack<Number, 2>>(columns[e % 2]).at[e / 2]);
    }
};
#endif

// The computation of a block: packed `weights` times the pixels of all samples.
template <class Source, class Store> struct Convolution {
    const View& view;
    const Source& source;
    int samples;
    const Number* weights;
    const Store& store;
    Number* memory;
    PixelTileMap pixel_tiles{view};

    // Pixel tile i of a work tile.
    __device__ PixelTile pixel_tile(int tile, int i) const {
        return pixel_tiles(tile * PIXEL_TILES + i);
    }

    static __device__ Pixel top(const PixelTile& s) {
        return {s.sample, s.line * LINES_IN_M, s.column};
    }

    // Halo tile that the pixel tiles of all warp groups read, for one chunk of the channels;
    // `first` is the work tile of the first warp group.
    __device__ HaloTile halo(int first, int chunk, Number* numbers) const {
        const int each = view.channels / PACK / CHANNEL_CHUNKS;
        const PixelTile begin = pixel_tile(first, 0);
        const PixelTile end =
            CROPPED_WIDTH ? begin : pixel_tile(first + WARP_GROUPS - 1, PIXEL_TILES - 1);
        return {view,
                numbers,
                samples,
                chunk * each,
                each,
                row(begin),
                row(end) + (PIXEL_TILE_LINES - 1) * LINES_IN_M + view.r + LINES_IN_M - 1,
                CROPPED_WIDTH ? begin.column : 0};
    }
    __device__ int row(const PixelTile& s) const {
        return s.sample * view.rows_per_sample() + s.line * LINES_IN_M;
    }

    // Offsets of the pixel tiles within the halo tile, in packs.
    __device__ void find_offsets(int (&offsets)[PIXEL_TILES], int tile,
                                 const HaloTile& halo) const {
#pragma unroll
        for (int i = 0; i < PIXEL_TILES; ++i) offsets[i] = halo.offset(top(pixel_tile(tile, i)));
    }

    // Steps along the sum per chunk of channels.
    __device__ int steps() const {
        return KSteps{view}.count(view.channels / PACK / CHANNEL_CHUNKS);
    }

    // Packed weights of the block's rows, and their number of packs.
    __device__ const Number* block_weights() const {
        return weights + blockIdx.y * weight_packs() * PACK;
    }
    __device__ int weight_packs() const { return CHANNEL_CHUNKS * steps() * WARP_GROUP_THREADS; }

    __device__ void store_all(const PixelAccumulators (&acc)[PIXEL_TILES], int tile, int k_group,
                              unsigned kept) const {
        if (ADD_GRADIENT) tile = hidden(tile);
        // Scalar sums begin with what is stored, which must then not have been overwritten.
        bool needs_scalar =
            ADD_GRADIENT && CHECKS_SUMS && store_each<false>(acc, tile, k_group, kept);
        if (!needs_scalar) needs_scalar = store_each<true>(acc, tile, k_group, kept);
        if (!needs_scalar) return;
#pragma unroll 1
        for (int i = 0; i < PIXEL_TILES; ++i)
            store_tile(ScalarGroups{*this, pixel_tile(tile, i)}, pixel_tiles, pixel_tile(tile, i),
                       i, view, samples, k_group, kept, store);
    }

    template <bool STORES>
    __device__ bool store_each(const PixelAccumulators (&acc)[PIXEL_TILES], int tile, int k_group,
                               unsigned kept) const {
        bool needs_scalar = false;
#pragma unroll
        for (int i = 0; i < PIXEL_TILES; ++i)
            needs_scalar |=
                store_tile<STORES>(AccumulatorGroups{acc[i]}, pixel_tiles, pixel_tile(tile, i), i,
                                   view, samples, k_group, kept, store);
        return needs_scalar;
    }

    // Return `value`. Compilers do not know that, so they compute the addresses of a tile again
    // instead of keeping those of `load_all` in registers.
    static __device__ int hidden(int value) {
#ifdef __CUDA_ARCH__
        asm volatile("" : "+r"(value));
#endif
        return value;
    }

    // Values that the sums begin with: 0, or what is stored.
    __device__ void load_all(PixelAccumulators (&acc)[PIXEL_TILES], int tile, int k_group) const {
#if ADD_GRADIENT
#pragma unroll
        for (int i = 0; i < PIXEL_TILES; ++i) load_tile(acc[i], pixel_tile(tile, i), k_group);
#endif
        // Otherwise compilers can move these values between wgmma instructions.
        if (ADD_GRADIENT || FOLDED) fence_accumulators(acc);
    }

#if ADD_GRADIENT
    // Begin the sums of a pixel tile with what is stored. All loads are started before the first is
    // used. If several warp groups share the accumulators, each loads the part that it stores.
    __device__ void load_tile(PixelAccumulators& acc, const PixelTile& at, int k_group) const {
        StoredGroup groups[N8_TILES];
#pragma unroll
        for (int g = 0; g < N8_TILES; ++g)
            groups[g].load(at, g, view, samples, g % K_WARP_GROUPS == k_group, store);
#pragma unroll
        for (int g = 0; g < N8_TILES; ++g) groups[g].fence();
#pragma unroll
        for (int g = 0; g < N8_TILES; ++g)
#pragma unroll
            for (int e = 0; e < 4; ++e)
                acc.c[g][e] = g % K_WARP_GROUPS == k_group ? groups[g][e] : 0.0f;
    }
#endif

    // Sums of a lane by groups of eight columns, computed with scalar instructions from global
    // memory.
    struct ScalarGroups {
        static constexpr int UNROLL = 1;
        const Convolution& product;
        const PixelTile& at;

        __device__ Pack<float, 4> operator()(int g) const {
            const View& view = product.view;
            const int first = blockIdx.y * TileRows::FILTERS;
            Pack<float, 4> sums = {};
#if ADD_GRADIENT
            StoredGroup stored;
            stored.load(at, g, view, product.samples, true, product.store);
            for (int e = 0; e < 4; ++e) sums.at[e] = stored[e];
#endif
#pragma unroll 1
            for (int i = 0; i < view.r * view.s * view.channels; ++i) {
                const int c = i % view.channels, tap = i / view.channels;
                const int r = tap / view.s, s = tap % view.s;
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const int row = row_of_lane() + e / 2 * 8;
                    if (!view.has_tap(r, s, c, first + TileRows::filter(row))) continue;
                    const Pixel p =
                        TilePixel(view, at, row, g * 8 + threadIdx.x % 4 * 2 + e % 2).pixel;
                    if (ROW_SAMPLES > 1 && p.sample >= product.samples) continue;
                    sums.at[e] += product.weight(row, r + TileRows::line(row), s, c) *
                                  product.source.element(view, p.sample, p.row + r - view.pad_top,
                                                         p.column + s - view.pad_left, c);
                }
            }
            return sums;
        }
    };

    // Weight of a row of A for a tap of the step order (`KSteps`) and a channel.
    __device__ float weight(int row, int tap_row, int tap_column, int c) const {
        constexpr int UNIT = PACK / 4;  // Elements of a 32-bit word.
        const int step = c / STEP_K * KSteps{view}.taps() + tap_row * view.s + tap_column;
        const FragmentIndex index = {row, c % STEP_K / UNIT};
        const int word = PERSISTENT ? pack_index(index) * 4 + index.word % 4 : lane_word(index);
        return to_float(
            block_weights()[step * WARP_GROUP_THREADS * PACK + word * UNIT + c % UNIT]);
    }

    // Dropout bits of the outputs that this thread stores.
    __device__ unsigned draw(int tile, int k_group) const {
#if EPILOGUE_DROPOUT
        unsigned sample_ids[PIXEL_TILES];
#pragma unroll
        for (int i = 0; i < PIXEL_TILES; ++i) {
            const int sample = min(pixel_tile(tile, i).sample, samples - 1);
            sample_ids[i] = unsigned(store.dropout.samples[sample]);
        }
        const int blocks = store.columns / 4, own = filter_of_lane() / 4;
        return draw_shared([&](int k, int draw_index) {
            unsigned sample_id = 0;
            int block = 0;
#pragma unroll
            for (int other = 0; other < PHILOX_LANES; ++other) {
                const int at = min(k + other, STORED_UNITS - 1), i = at / UNITS_PER_GROUP;
                const PoolingUnit unit(pixel_tiles, pixel_tile(tile, i),
                                       at % UNITS_PER_GROUP * K_WARP_GROUPS + k_group);
                if (other == draw_index)
                    sample_id = sample_ids[i], block = unit.number * blocks + own;
            }
            return draw_block(store.dropout, sample_id, block);
        });
#else
        return 0;
#endif
    }

#if !PERSISTENT
    // Compute one work tile per warp group. Pixels outside the map are computed but not stored.
    __device__ void compute_single() const {
        const int warpgroup = threadIdx.x / WARP_GROUP_THREADS, first = blockIdx.x * WARP_GROUPS;
        const int tile = first + warpgroup % WARP_GROUPS,
                  k_group = K_WARP_GROUPS > 1 ? warpgroup / WARP_GROUPS : 0;
        const int own = steps() / K_WARP_GROUPS;
        MBarrier& full = barriers().halo[0][0];
        init_barrier(full);
        PixelAccumulators acc[PIXEL_TILES];
        load_all(acc, tile, k_group);
        unsigned kept = 0;
        for (int chunk = 0; chunk < CHANNEL_CHUNKS; ++chunk) {
            const HaloTile halo = this->halo(first, chunk, memory);
            if (chunk > 0) __syncthreads();
            source.start_copy(halo, nullptr, &full);
            // Drawing random numbers overlaps with the copy of the halo tile.
            if (chunk == 0) kept = draw(tile, k_group);
            finish_copy(halo, nullptr, full, chunk);
            int offsets[PIXEL_TILES];
            find_offsets(offsets, tile, halo);
            const int step = chunk * steps() + k_group * own;
            multiply_steps(acc, block_weights() + step * WARP_GROUP_THREADS * PACK, halo, offsets,
                           k_group * own, own);
        }
        if (K_WARP_GROUPS > 1) reduce_warp_groups(acc, warpgroup % WARP_GROUPS, k_group);
        store_all(acc, tile, k_group, kept);
    }

#else
    // Persistent kernel: compute one work tile after the other. The next halo tile, or the data
    // from which it is converted, is copied while the current one is multiplied.
    __device__ void compute_persistent() const {
        MBarrier(&full)[2] = barriers().halo[threadIdx.y];
        const int groups = (samples + ROW_SAMPLES - 1) / ROW_SAMPLES;
        const int tiles = (groups * pixel_tiles.each + PIXEL_TILES - 1) / PIXEL_TILES;
        // Distance to the group's next work tile.
        const int group = threadIdx.y, step = gridDim.x * PERSISTENT_GROUPS;
        const int begin_tile = blockIdx.x * PERSISTENT_GROUPS;
        const int num_rounds = (tiles - begin_tile + step - 1) / step,
                  all = num_rounds * CHANNEL_CHUNKS;
        // Halo tile i of all that the group processes.
        const auto halo = [&](int i) {
            return this->halo(begin_tile + group + i / CHANNEL_CHUNKS * step, i % CHANNEL_CHUNKS,
                              numbers(Source::DOUBLE_BUFFERED ? i % 2 : 0));
        };
        const auto start_copy = [&](int i) {
            if (i < all) source.start_copy(halo(i), numbers(1), &full[i % 2]);
            cp_async_commit();
        };
        init_barrier(full[0]), init_barrier(full[1]);
#if WGMMA
        WeightPipeline pipeline{memory, block_weights(), barriers().weights,
                                weight_packs() / WeightPipeline::STAGE_PACKS,
                                all * steps() / STAGE_STEPS};
        if (threadIdx.x == 0 && threadIdx.y == 0) pipeline.init();
        __syncthreads();
        if (threadIdx.x == 0 && threadIdx.y == 0) pipeline.start();
#elif WEIGHT_STAGES == 0
        for (int i = threadIdx.y * THREADS + threadIdx.x; i < weight_packs(); i += ALL_THREADS)
            cp_async<16>(memory + i * PACK, block_weights() + i * PACK);
        cp_async_wait_all();
        __syncthreads();
#endif
        start_copy(0);
        if (Source::DOUBLE_BUFFERED) start_copy(1);
#if WGMMA
        if (WEIGHT_STAGES == 0) pipeline.wait();
#endif
        int next = 0;
#pragma unroll 1
        for (int tile = begin_tile + group; next < all; tile += step) {
            PixelAccumulators acc[PIXEL_TILES];
            load_all(acc, tile, 0);
            const unsigned kept = draw(tile, 0);
#pragma unroll 1
            for (int chunk = 0; chunk < CHANNEL_CHUNKS; ++chunk, ++next) {
                Number* const own = numbers(Source::DOUBLE_BUFFERED ? next % 2 : 0);
                const HaloTile halo = this->halo(tile, chunk, own);
                finish_copy(halo, numbers(1), full[next % 2], next / 2);
                if (!Source::DOUBLE_BUFFERED) start_copy(next + 1);
                int offsets[PIXEL_TILES];
                find_offsets(offsets, tile, halo);
#if WGMMA
                pipeline.multiply(acc, halo, offsets, chunk * steps(), steps() / STAGE_STEPS);
#else
                multiply_steps(acc,
                               (WEIGHT_STAGES ? block_weights() : memory) +
                                   chunk * steps() * WARP_GROUP_THREADS * PACK,
                               halo, offsets, 0, steps());
#endif
                // From here on no thread of the group reads the halo tile.
                sync_group();
                if (Source::DOUBLE_BUFFERED) start_copy(next + 2);
            }
            store_all(acc, tile, 0, kept);
        }
    }
#endif

    // Initialise the barrier; all threads that share it take part.
    static __device__ void init_barrier(MBarrier& full) {
#if TENSOR_MAPS
        if (threadIdx.x == 0) full.init();
        if (!PERSISTENT) __syncthreads();
#endif
    }

    // Wait until a halo tile has been copied, then convert it.
    __device__ void finish_copy(const HaloTile& halo, const Number* raw, const MBarrier& full,
                                int phase) const {
#if TENSOR_MAPS
        full.wait(phase);
        if (Source::DOUBLE_BUFFERED) return;
#else
        // The next tile may still be in flight.
        if (PERSISTENT && Source::DOUBLE_BUFFERED)
            cp_async_wait<1>();
        else
            cp_async_wait_all();
#endif
        source.convert(halo, raw);
#if TF32X3_WGMMA
        sync_group();
        split_planes(halo);
#endif
        fence_async_proxy();
        sync_group();
    }

#if TF32X3_WGMMA
    // Replace a halo tile of float32 by the high parts, and store the low parts in a second plane.
    static __device__ void split_planes(const HaloTile& halo) {
        const int all = halo.each * SLAB_PIXELS, pixels = halo.pixels();
        Pack<Number>* const packs = reinterpret_cast<Pack<Number>*>(halo.numbers);
        const auto read = [&](int i) {
            // The last columns can begin beyond the tile. Their results are not used.
            return i / SLAB_PACKS % SLAB_PIXELS < pixels ? packs[i] : Pack<Number>{};
        };
        for_each_batched<Pack<Number>, 4>(
            all, read,
            [&](int i, const Pack<Number>& pack) {
                SplitFragment parts;
                parts.split(as<Pack<unsigned, 4>>(pack).at);
                packs[i] = as<Pack<Number>>(parts.high);
                packs[all + i] = as<Pack<Number>>(parts.low);
            });
    }
#endif

    // Synchronise the threads that share a halo tile.
    static __device__ void sync_group() {
#if PERSISTENT && defined(__CUDA_ARCH__)
        asm volatile("bar.sync %0, %1;" ::"r"(int(threadIdx.y) + 1), "n"(THREADS) : "memory");
#else
        __syncthreads();
#endif
    }

    // Bytes of the weights in shared memory. The halo tiles follow: two buffers, or one buffer and
    // the raw data from which it is converted.
    __device__ int weight_bytes() const {
        return (WEIGHT_STAGES ? WEIGHT_STAGES * STAGE_STEPS * WARP_GROUP_THREADS : weight_packs()) *
               16;
    }
    __device__ Number* numbers(int i) const {
        const int own = weight_bytes() + threadIdx.y * HALO_BYTES;
        return reinterpret_cast<Number*>(reinterpret_cast<char*>(memory) + own) +
               i * (view.channels / CHANNEL_CHUNKS * SLAB_PIXELS);
    }
    // Barriers lie after all other data in shared memory, because no other data may overlap them.
    struct Barriers {
        MBarrier halo[PERSISTENT ? PERSISTENT_GROUPS : 1][2];
#if PERSISTENT && WGMMA
        WeightPipeline::Shared weights;
#endif
    };
    __device__ Barriers& barriers() const {
        constexpr int REDUCE_BYTES = K_WARP_GROUPS > 1 ? THREADS * PIXEL_TILES * N8_TILES * 16 : 0;
        const int all = PERSISTENT ? weight_bytes() + PERSISTENT_GROUPS * HALO_BYTES
                                   : max(HALO_BYTES, REDUCE_BYTES);
        return *reinterpret_cast<Barriers*>(reinterpret_cast<char*>(memory) + all);
    }

    // Intra-block split-K: add the accumulators of the warp groups that share a work tile, in a
    // fixed order. Each warp group adds the part that it stores.
    __device__ void reduce_warp_groups(PixelAccumulators (&acc)[PIXEL_TILES], int warp_group,
                                       int k_group) const {
        Pack<float, 4>* const own =
            reinterpret_cast<Pack<float, 4>*>(memory) + threadIdx.x % WARP_GROUP_THREADS;
        const auto pack = [&](int k_group, int i, int g) {
            return own + (((k_group * WARP_GROUPS + warp_group) * PIXEL_TILES + i) * N8_TILES + g) *
                             WARP_GROUP_THREADS;
        };
        __syncthreads();
#pragma unroll
        for (int i = 0; i < PIXEL_TILES; ++i)
#pragma unroll
            for (int g = 0; g < N8_TILES; ++g) {
                Pack<float, 4> sums = as<Pack<float, 4>>(acc[i].c[g]);
#if TF32X3
                // The total shows that a part has overflowed.
                for (int e = 0; e < 4; ++e)
                    if (needs_scalar_sum(sums.at[e])) sums.at[e] = __uint_as_float(0x7FFFFFFFu);
#endif
                *pack(k_group, i, g) = sums;
            }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < PIXEL_TILES; ++i)
#pragma unroll
            for (int g = 0; g < N8_TILES; ++g) {
                if (epilogue_unit_of(g) % K_WARP_GROUPS != k_group) continue;
                Pack<float, 4> total = *pack(0, i, g);
#pragma unroll
                for (int other = 1; other < K_WARP_GROUPS; ++other) {
                    const Pack<float, 4> more = *pack(other, i, g);
#pragma unroll
                    for (int e = 0; e < 4; ++e) total.at[e] += more.at[e];
                }
#pragma unroll
                for (int e = 0; e < 4; ++e) acc[i].c[g][e] = total.at[e];
            }
    }
};

template <class Source, class Store>
__device__ void implicit_gemm(const View& view, const Source& source, int samples,
                              const Number* weights, const Store& store) {
    extern __shared__ __align__(1024) char memory[];
    const Convolution<Source, Store> convolution{
        view, source, samples, weights, store, reinterpret_cast<Number*>(memory)};
#if PERSISTENT
    convolution.compute_persistent();
#else
    convolution.compute_single();
#endif
}
