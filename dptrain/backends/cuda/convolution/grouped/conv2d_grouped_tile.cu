// Convolution with groups on tensor cores, and its gradient with respect to the input:
//
//     forward           y[n, p, q, k]  = b[k] + Σ x[n, h, w, c] w[r, s, c, k]
//     BACKWARD          dx[n, h, w, c] = Σ dy[n, p, q, k] w[r, s, c, k]
//
// with h = p · stride_h + r · dilation_h − pad_top, w likewise, and sums over the taps and the
// channels or filters of a group. x (N, H, W, C), w (R, S, C / groups, K) float32, y (N, Ho, Wo, K).
//
// Algorithm: implicit GEMM with halo tiles (grouped_tile.cuh). A block keeps the weights of its units
// in shared memory and iterates over tiles of pixels; the next one is copied meanwhile. A warp
// multiplies 16 pixels of a tile, or a few times as many, by 16 or 32 results of a unit.
//
// With strides, the pixels of dx with the same remainders of row and column modulo the strides form
// a class: row i · stride + class receives row i + (class + pad − r · dilation) / stride of dy through
// the taps r for which that is an integer. A tile consists of the same i of all classes.
//
// Launch: grid (blocks, slabs, parts), WARPS · 32 threads. A slab consists of UNITS units, and a part
// of PART_COLUMNS results of each of them.

#include "grouped_tile.cuh"

#ifndef BACKWARD
#define BACKWARD 0
#endif
// Warps of a block, tiles of 16 pixels that a warp multiplies together, and columns of a warp and of
// a block.
#ifndef WARPS
#define WARPS 4
#define WARP_PIXEL_TILES 4
#define WARP_COLUMNS 16
#define PART_COLUMNS 16
#endif

constexpr int MOVE_H = BACKWARD ? 1 : STEP_H, MOVE_W = BACKWARD ? 1 : STEP_W;
constexpr int CLASSES_H = BACKWARD ? STEP_H : 1, CLASSES_W = BACKWARD ? STEP_W : 1;
// Rows and columns of dy, relative to those of a class, that are the first and the last it receives.
__device__ constexpr int first_of(int extent, int stride, int pad) {
    return (pad + 1 >= extent ? pad + 1 - extent : pad + 2 - extent - stride) / stride;
}
constexpr int FIRST_H = first_of(EXTENT_H, STEP_H, PAD_H),
              FIRST_W = first_of(EXTENT_W, STEP_W, PAD_W);
constexpr int REACH_H = BACKWARD ? (STEP_H - 1 + PAD_H) / STEP_H - FIRST_H + 1 : EXTENT_H,
              REACH_W = BACKWARD ? (STEP_W - 1 + PAD_W) / STEP_W - FIRST_W + 1 : EXTENT_W;
// Pixels of the source that a tile reaches.
constexpr int HALO_H = (TILE_ROWS - 1) * MOVE_H + REACH_H,
              HALO_W = (TILE_COLUMNS - 1) * MOVE_W + REACH_W;

// Channels of a unit that are summed, and results; in shared memory they are completed with zeros.
constexpr int SUMMED = BACKWARD ? UNIT_FILTERS : UNIT_CHANNELS,
              RESULTS = BACKWARD ? UNIT_CHANNELS : UNIT_FILTERS;
constexpr int TERMS = round_up(SUMMED, STEP_K), COLUMNS = PART_COLUMNS;
constexpr int SLAB_CHANNELS = UNITS * SUMMED + TERMS - SUMMED;
constexpr int PIXEL_PITCH = pixel_pitch(SLAB_CHANNELS), WEIGHT_PITCH = pixel_pitch(TERMS);
constexpr int SOURCE_SIZE = HALO_H * HALO_W * PIXEL_PITCH,
              WEIGHT_SIZE = TAPS * UNITS * COLUMNS * WEIGHT_PITCH;
constexpr int PIXEL_TILES = (TILE_PIXELS + 15) / 16;
constexpr int JOBS = UNITS * (COLUMNS / WARP_COLUMNS) *
                     ((PIXEL_TILES + WARP_PIXEL_TILES - 1) / WARP_PIXEL_TILES);
constexpr int LANE_RESULTS = WARP_COLUMNS / 4;  // Adjacent results of a lane.

// Result of a unit that column `column` of its weights computes: the columns of a lane in different
// instructions are adjacent results.
__device__ inline int result_of(int column) {
    const int own = column % WARP_COLUMNS, lane = own % 8 / 2;
    return column - own + lane * LANE_RESULTS + own / 8 * 2 + own % 2;
}

// Number i of the weights (tap, unit, column, term) of a block: its value, which is 0 between different
// groups, and its offset in shared memory. Adjacent threads read adjacent filters.
__device__ inline float load_weight(int i, const float* w, int filters, int first_unit, int& at) {
    const int term = BACKWARD ? i % TERMS : i / COLUMNS % TERMS;
    const int column = BACKWARD ? i / TERMS % COLUMNS : i % COLUMNS;
    const int unit = i / (COLUMNS * TERMS) % UNITS, tap = i / (COLUMNS * TERMS * UNITS);
    const int result = blockIdx.z * COLUMNS + result_of(column);
    const int channel = BACKWARD ? result : term, filter = BACKWARD ? term : result;
    const int k = (first_unit + unit) * UNIT_FILTERS + filter;
    at = ((tap * UNITS + unit) * COLUMNS + column) * WEIGHT_PITCH + term;
    const bool there = term < SUMMED && result < RESULTS && k < filters &&
                       channel / GROUP_CHANNELS == filter / GROUP_FILTERS;
    const int from = (tap * GROUP_CHANNELS + channel % GROUP_CHANNELS) * filters + k;
    return there ? __ldg(w + from) : 0.0f;
}

// Store the weights of a block. Several loads of a thread are in flight: one after another, their
// latencies would be longer than the products of small maps.
__device__ inline void load_weights(Number* to, const float* w, int filters, int first_unit) {
    constexpr int SIZE = TAPS * UNITS * COLUMNS * TERMS, LOADS = 16;
    for (int first = threadIdx.x; first < SIZE; first += blockDim.x * LOADS) {
        float values[LOADS];
        int at[LOADS];
#pragma unroll
        for (int load = 0; load < LOADS; ++load) {
            const int i = first + load * blockDim.x;
            values[load] = i < SIZE ? load_weight(i, w, filters, first_unit, at[load]) : 0.0f;
        }
#pragma unroll
        for (int load = 0; load < LOADS; ++load)
            if (first + load * int(blockDim.x) < SIZE) to[at[load]] = round_operand(values[load]);
    }
}

#if TENSOR_CORES
// The sums of a warp: for WARP_PIXEL_TILES · 16 pixels and WARP_COLUMNS results.
struct WarpSums {
    float c[WARP_PIXEL_TILES][WARP_COLUMNS / 16][2][4];

    // Multiply all taps of a class. `pixels` are the rows of this lane for ldmatrix.
    __device__ void multiply(const Number* const (&pixels)[WARP_PIXEL_TILES], const Number* weights,
                             int count, int class_h, int class_w) {
        for (int r = 0; r < WINDOW_R; ++r) {
            const int down = BACKWARD ? class_h + PAD_H - r * DILATION_H : r * DILATION_H;
            if (BACKWARD && down % STEP_H) continue;
            const int row = BACKWARD ? down / STEP_H - FIRST_H : down;
#pragma unroll
            for (int s = 0; s < WINDOW_S; ++s) {
                const int across = BACKWARD ? class_w + PAD_W - s * DILATION_W : s * DILATION_W;
                if (BACKWARD && across % STEP_W) continue;
                const int column = BACKWARD ? across / STEP_W - FIRST_W : across;
                add(pixels, weights + (r * WINDOW_S + s) * UNITS * COLUMNS * WEIGHT_PITCH, count,
                    (row * HALO_W + column) * PIXEL_PITCH);
            }
        }
    }
    __device__ void add(const Number* const (&pixels)[WARP_PIXEL_TILES], const Number* weights,
                        int count, int offset) {
#pragma unroll
        for (int term = 0; term < TERMS; term += STEP_K) {
            Fragment a, b[WARP_COLUMNS / 16];
#pragma unroll
            for (int j = 0; j < WARP_COLUMNS / 16; ++j)
                b[j].load(weights + j * 16 * WEIGHT_PITCH + term, false);
#pragma unroll
            for (int i = 0; i < WARP_PIXEL_TILES; ++i)
                if (i < count) {
                    a.load(pixels[i] + offset + term, true);
#pragma unroll
                    for (int j = 0; j < WARP_COLUMNS / 16; ++j) add_product(c[i][j], a, b[j]);
                }
        }
    }
    // The adjacent results of this lane for row `half` · 8 + lane / 4 of tile i of pixels.
    __device__ void row(int i, int half, float (&values)[LANE_RESULTS]) const {
#pragma unroll
        for (int v = 0; v < LANE_RESULTS; ++v)
            values[v] = c[i][v / 4][v / 2 % 2][half * 2 + v % 2];
    }
};
#endif

extern "C" __global__ void __launch_bounds__(WARPS * 32)
    conv2d_grouped_tile(const Number* __restrict__ source, const float* __restrict__ w,
                        const float* __restrict__ bias, Number* __restrict__ result, int has_bias,
                        int samples, GEOMETRY_PARAMETERS) {
    wait_for_previous_kernel();
#if TENSOR_CORES
    extern __shared__ __align__(16) char memory[];
    const Geometry g = GEOMETRY_ARGUMENTS;
    Number* const weights = reinterpret_cast<Number*>(memory);
    Number* const sources = weights + WEIGHT_SIZE;
    const int first_unit = blockIdx.y * UNITS, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    // Extent and channels of the map that is read, and of the result.
    const int source_height = BACKWARD ? g.out_height : g.height;
    const int source_width = BACKWARD ? g.out_width : g.width;
    const int source_channels = BACKWARD ? g.filters : g.channels;
    const int results = BACKWARD ? g.channels : g.filters;
    const int result_height = BACKWARD ? g.height : g.out_height;
    const int result_width = BACKWARD ? g.width : g.out_width;
    // Rows and columns of a class, of which tiles consist.
    const int rows = BACKWARD ? (g.height + STEP_H - 1) / STEP_H : g.out_height;
    const int columns = BACKWARD ? (g.width + STEP_W - 1) / STEP_W : g.out_width;
    const int tiles = TilePosition::count(samples, rows, columns);

    const auto copy = [&](int tile, int buffer) {
        if (tile < tiles) {
            const TilePosition at(tile, rows, columns);
            const int top = BACKWARD ? at.row + FIRST_H : at.row * STEP_H - PAD_H;
            const int left = BACKWARD ? at.column + FIRST_W : at.column * STEP_W - PAD_W;
            copy_rectangle<HALO_H, HALO_W, SLAB_CHANNELS>(
                sources + buffer * SOURCE_SIZE, source, source_height, source_width,
                source_channels, at.sample, top, left, first_unit * SUMMED,
                min((first_unit + UNITS) * SUMMED, source_channels));
        }
        cp_async_commit();
    };
    copy(blockIdx.x, 0);
    load_weights(weights, w, g.filters, first_unit);
    int buffer = 0;
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        if (BUFFERS == 2) {
            copy(tile + gridDim.x, buffer ^ 1);
            cp_async_wait<1>();
        } else {
            cp_async_wait<0>();
        }
        __syncthreads();
        const TilePosition at(tile, rows, columns);
        const Number* const own = sources + buffer * SOURCE_SIZE;
        for (int job = warp; job < JOBS * CLASSES_H * CLASSES_W; job += WARPS) {
            constexpr int CHUNKS = COLUMNS / WARP_COLUMNS;
            const int chunk = job % CHUNKS, unit = job / CHUNKS % UNITS;
            const int rest = job / CHUNKS / UNITS, of_classes = rest % (CLASSES_H * CLASSES_W);
            const int class_h = of_classes / CLASSES_W, class_w = of_classes % CLASSES_W;
            const int first = rest / (CLASSES_H * CLASSES_W) * WARP_PIXEL_TILES;
            const Number* pixels[WARP_PIXEL_TILES];
#pragma unroll
            for (int i = 0; i < WARP_PIXEL_TILES; ++i) {
                const TilePixel pixel((first + i) * 16 + lane % 16);
                pixels[i] = own +
                            (pixel.row * MOVE_H * HALO_W + pixel.column * MOVE_W) * PIXEL_PITCH +
                            unit * SUMMED + lane / 16 * PACK;
            }
            WarpSums sums = {};
            sums.multiply(pixels,
                          weights + (unit * COLUMNS + chunk * WARP_COLUMNS + lane % 16) *
                                        WEIGHT_PITCH + lane / 16 * PACK,
                          PIXEL_TILES - first, class_h, class_w);
            const int column =
                blockIdx.z * COLUMNS + chunk * WARP_COLUMNS + lane % 4 * LANE_RESULTS;
            const int channel = (first_unit + unit) * RESULTS + column;
            if (column >= RESULTS || channel >= results) continue;
#pragma unroll
            for (int m = 0; m < 2 * WARP_PIXEL_TILES; ++m) {
                const int index = (first + m / 2) * 16 + m % 2 * 8 + lane / 4;
                const TilePixel pixel(index);
                int row = at.row + pixel.row, across = at.column + pixel.column;
                if (BACKWARD) {
                    row = row * STEP_H + class_h;
                    across = across * STEP_W + class_w;
                }
                if (index >= TILE_PIXELS || unsigned(row) >= unsigned(result_height) ||
                    unsigned(across) >= unsigned(result_width))
                    continue;
                float values[LANE_RESULTS];
                sums.row(m / 2, m % 2, values);
                const int pixel_index = (at.sample * result_height + row) * result_width + across;
                auto& to = *reinterpret_cast<Pack<Number, LANE_RESULTS>*>(
                    result + pixel_index * results + channel);
                Pack<Number, LANE_RESULTS> stored = {};
                if (ADD_GRADIENT) stored = to;
#pragma unroll
                for (int v = 0; v < LANE_RESULTS; ++v) {
                    const float start = ADD_GRADIENT            ? to_float(stored.at[v])
                                        : !BACKWARD && has_bias ? bias[channel + v]
                                                                : 0.0f;
                    stored.at[v] = from_float<Number>(values[v] + start);
                }
                to = stored;
            }
        }
        __syncthreads();
        if (BUFFERS == 2)
            buffer ^= 1;
        else
            copy(tile + gridDim.x, 0);
    }
#endif
}
