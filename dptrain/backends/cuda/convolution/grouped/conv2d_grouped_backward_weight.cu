// Gradients of weights and bias of a convolution with groups on tensor cores:
//
//     dw[r, s, c, k] = Σ over pixels of x[n, h, w, c] dy[n, p, q, k],   db[k] = Σ dy
//
// with h and w as in conv2d_grouped_tile.cu, and c and k of the same group.
//
// Algorithm: the sum over pixels is the K dimension of the products. A block copies tiles of dy, and
// the part of x that they reach, to shared memory (grouped_tile.cuh). A warp adds 16 channels × 16
// filters of a unit for one row of taps, whose sums stay in registers over all tiles of the block.
// Elements between different groups of a unit are computed and left out.
//
// partial (gridDim.x, R · S · C / groups · K [+ K if HAS_BIAS]) float32; split_k_reduce.cu adds the
// rows. Launch: grid (blocks, slabs, parts of a unit), UNITS · CHANNEL_CHUNKS · FILTER_CHUNKS ·
// WINDOW_R warps.

#include "grouped_tile.cuh"

// 16 channels, and 16 filters, of a unit that a block computes.
#ifndef CHANNEL_CHUNKS
#define CHANNEL_CHUNKS 1
#define FILTER_CHUNKS 1
#endif
#ifndef HAS_BIAS
#define HAS_BIAS 0
#endif

constexpr int HALO_H = (TILE_ROWS - 1) * STEP_H + EXTENT_H,
              HALO_W = (TILE_COLUMNS - 1) * STEP_W + EXTENT_W;
constexpr int UNIT_PARTS = (UNIT_CHANNELS + CHANNEL_CHUNKS * 16 - 1) / (CHANNEL_CHUNKS * 16);
// Channels and filters of a block in shared memory; chunks may extend beyond them.
constexpr int X_CHANNELS = UNITS > 1 ? UNITS * UNIT_CHANNELS : CHANNEL_CHUNKS * 16,
              DY_FILTERS = UNITS > 1 ? UNITS * UNIT_FILTERS : FILTER_CHUNKS * 16;
constexpr int X_PITCH = pixel_pitch(X_CHANNELS), DY_PITCH = pixel_pitch(DY_FILTERS);
constexpr int STEPS = (TILE_PIXELS + STEP_K - 1) / STEP_K;
constexpr int X_SIZE = TILE_SAMPLES * HALO_H * HALO_W * X_PITCH + 16, DY_SIZE = STEPS * STEP_K * DY_PITCH + 16;
constexpr int BUFFER_SIZE = X_SIZE + DY_SIZE;
constexpr int UNROLLED = 4;
constexpr int WARPS = UNITS * CHANNEL_CHUNKS * FILTER_CHUNKS * WINDOW_R;

#if TENSOR_CORES
// The sums of a warp for a row of taps.
struct RowSums {
    float c[WINDOW_S][2][4], ones[2][4];

    // Add a tile. `x` is the first pixel of the halo tile for the row of taps, and `offsets` are
    // those of the pixels of the tile. Several steps are in flight, each of which is a chain of
    // loads and products.
    __device__ void add(const Number* x, const Number* dy, const int* offsets, bool adds_ones) {
#pragma unroll UNROLLED
        for (int step = 0; step < STEPS; ++step) {
            int pixels[2], terms[2];
#pragma unroll
            for (int q = 0; q < 2; ++q) {
                const int pixel = step * STEP_K + lane_term(q);
                pixels[q] = offsets[pixel];
                terms[q] = pixel * DY_PITCH;
            }
            Fragment a, b;
            b.load_transposed(dy, terms, true);
#pragma unroll
            for (int s = 0; s < WINDOW_S; ++s) {
                a.load_transposed(x + s * DILATION_W * X_PITCH, pixels, true);
                add_product(c[s], a, b);
            }
            if (HAS_BIAS && adds_ones) {
                const float one = 1.0f;
                unsigned words[4];
#pragma unroll
                for (unsigned& word : words)
                    word = PRECISION == 2 ? 0x3F803F80u : __float_as_uint(one);
                a.set(words, false);
                add_product(ones, a, b);
            }
        }
    }
};
#endif

extern "C" __global__ void __launch_bounds__(WARPS * 32)
    conv2d_grouped_backward_weight_tile(const Number* __restrict__ x,
                                        const Number* __restrict__ dy,
                                        float* __restrict__ partial, int samples,
                                        GEOMETRY_PARAMETERS) {
    wait_for_previous_kernel();
#if TENSOR_CORES
    extern __shared__ __align__(16) char memory[];
    const Geometry g = GEOMETRY_ARGUMENTS;
    Number* const buffers = reinterpret_cast<Number*>(memory);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int tap_row = warp % WINDOW_R, filter_chunk = warp / WINDOW_R % FILTER_CHUNKS;
    const int channel_chunk = warp / WINDOW_R / FILTER_CHUNKS % CHANNEL_CHUNKS;
    const int unit = warp / WINDOW_R / FILTER_CHUNKS / CHANNEL_CHUNKS;
    const int first_unit = blockIdx.y * UNITS;
    const int part_channel = blockIdx.z % UNIT_PARTS * CHANNEL_CHUNKS * 16;
    const int part_filter = blockIdx.z / UNIT_PARTS * FILTER_CHUNKS * 16;
    const int tiles = TilePosition::count(samples, g.out_height, g.out_width);

    const auto copy = [&](int tile, int buffer) {
        if (tile < tiles) {
            const TilePosition at(tile, g.out_height, g.out_width);
            Number* const to = buffers + buffer * BUFFER_SIZE;
            copy_rectangle<HALO_H, HALO_W, X_CHANNELS>(
                to, x, samples, g.height, g.width, g.channels, at.sample,
                at.row * STEP_H - PAD_H, at.column * STEP_W - PAD_W,
                first_unit * UNIT_CHANNELS + part_channel, min((first_unit + UNITS) * UNIT_CHANNELS, g.channels));
            copy_rectangle<TILE_ROWS, TILE_COLUMNS, DY_FILTERS>(
                to + X_SIZE, dy, samples, g.out_height, g.out_width, g.filters, at.sample,
                at.row, at.column, first_unit * UNIT_FILTERS + part_filter,
                min((first_unit + UNITS) * UNIT_FILTERS, g.filters));
        }
        cp_async_commit();
    };
    int* const offsets = reinterpret_cast<int*>(buffers + BUFFERS * BUFFER_SIZE);
    for (int i = threadIdx.x; i < STEPS * STEP_K; i += blockDim.x)
        offsets[i] = TilePixel(i).halo_pixel<HALO_H, HALO_W>(STEP_H, STEP_W) * X_PITCH;
    // Terms after the last pixel of a tile are zeros.
    for (int i = threadIdx.x; i < BUFFERS * BUFFER_SIZE / PACK; i += blockDim.x)
        reinterpret_cast<Pack<Number>*>(buffers)[i] = {};
    __syncthreads();
    copy(blockIdx.x, 0);
    RowSums sums = {};
    int buffer = 0;
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        if (BUFFERS == 2) {
            copy(tile + gridDim.x, buffer ^ 1);
            cp_async_wait<1>();
        } else {
            cp_async_wait<0>();
        }
        __syncthreads();
        const Number* const own = buffers + buffer * BUFFER_SIZE;
        sums.add(own + tap_row * DILATION_H * HALO_W * X_PITCH + unit * UNIT_CHANNELS +
                     channel_chunk * 16,
                 own + X_SIZE + unit * UNIT_FILTERS + filter_chunk * 16, offsets,
                 tap_row == 0 && channel_chunk == 0 && part_channel == 0);
        __syncthreads();
        if (BUFFERS == 2)
            buffer ^= 1;
        else
            copy(tile + gridDim.x, 0);
    }
    const int size = TAPS * GROUP_CHANNELS * g.filters;
    float* const to = partial + blockIdx.x * (size + (HAS_BIAS ? g.filters : 0));
    const int first_channel = part_channel + channel_chunk * 16 + lane / 4;
    const int first_filter = part_filter + filter_chunk * 16 + lane % 4 * 2;
    // Adjacent filters of a lane belong to the same group if groups have an even number of them.
    constexpr int RUN = GROUP_FILTERS % 2 == 0 ? 2 : 1;
    const auto store_run = [&](int at, const float* values) {
        Pack<float, RUN> run;
#pragma unroll
        for (int v = 0; v < RUN; ++v) run.at[v] = values[v];
        *reinterpret_cast<Pack<float, RUN>*>(to + at) = run;
    };
#pragma unroll
    for (int e = 0; e < 8; e += RUN) {
        const int channel = first_channel + e / 2 % 2 * 8;
        const int filter = first_filter + e / 4 * 8 + e % 2;
        const int column = (first_unit + unit) * UNIT_FILTERS + filter;
        if (filter >= UNIT_FILTERS || column >= g.filters) continue;
        if (channel < UNIT_CHANNELS && channel / GROUP_CHANNELS == filter / GROUP_FILTERS)
#pragma unroll
            for (int s = 0; s < WINDOW_S; ++s) {
                const int tap = tap_row * WINDOW_S + s;
                store_run(
                    (tap * GROUP_CHANNELS + channel % GROUP_CHANNELS) * g.filters + column,
                    &sums.c[s][e / 4][e % 4]);
            }
        if (HAS_BIAS && tap_row == 0 && channel == 0)
            store_run(size + column, &sums.ones[e / 4][e % 4]);
    }
#endif
}
