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
constexpr int PIXEL_PITCH = pixel_pitch(SLAB_CHANNELS);
constexpr int SOURCE_SIZE = TILE_SAMPLES * HALO_H * HALO_W * PIXEL_PITCH;
constexpr int PIXEL_TILES = (TILE_PIXELS + 15) / 16;
constexpr int JOBS = UNITS * (COLUMNS / WARP_COLUMNS) *
                     ((PIXEL_TILES + WARP_PIXEL_TILES - 1) / WARP_PIXEL_TILES);
constexpr int LANE_RESULTS = WARP_COLUMNS / 4;  // Adjacent results of a lane.

// Weights of a unit and a tap in shared memory: rows are channels, adjacent elements filters, as in
// global memory. Terms are the rows, or with BACKWARD the columns. With words of four bytes, the
// lanes that read a transposed fragment lie in different banks.
constexpr int WEIGHT_ROWS = BACKWARD ? COLUMNS : TERMS;
constexpr int WEIGHT_PITCH = BACKWARD           ? pixel_pitch(TERMS)
                             : PRECISION == 2 ? pixel_pitch(COLUMNS)
                                              : round_up(COLUMNS, 16) + 8;
constexpr int UNIT_SIZE = WEIGHT_ROWS * WEIGHT_PITCH, WEIGHT_SIZE = TAPS * UNITS * UNIT_SIZE;

// Column of the weights of a unit that computes a result: adjacent results are computed by the same
// lane in different instructions.
__device__ inline int column_of(int result) {
    const int own = result % WARP_COLUMNS, lane = own / LANE_RESULTS, at = own % LANE_RESULTS;
    return result - own + at / 2 * 8 + lane * 2 + at % 2;
}

// The weights of a block: vectors of adjacent filters, as long as one group has them all.
struct BlockWeights {
    static constexpr int WIDTH = GROUP_FILTERS % 4 == 0 ? 4 : GROUP_FILTERS % 2 == 0 ? 2 : 1;
    // A part has some filters of the only unit, or with BACKWARD some channels of it.
    static constexpr bool CUTS_FILTERS = !BACKWARD && COLUMNS < UNIT_FILTERS,
                          CUTS_CHANNELS = BACKWARD && COLUMNS < UNIT_CHANNELS;
    static constexpr int FILTERS = CUTS_FILTERS ? COLUMNS : UNITS * UNIT_FILTERS;
    static constexpr int VECTORS = FILTERS / WIDTH, SIZE = TAPS * GROUP_CHANNELS * VECTORS;
    // True if all rows and columns are weights of one group.
    static constexpr bool IS_DENSE =
        UNIT_GROUPS == 1 && TERMS == SUMMED && RESULTS % COLUMNS == 0;
    using Vector = Pack<float, WIDTH>;

    const float* w;
    int filters, first_unit;

    // Load vector i. Set `at` to its offset in shared memory, or to -1 if the block has no such one:
    // the first vector is loaded then, because loads after branches would wait for each other.
    __device__ Vector load(int i, int& at) const {
        const int part = blockIdx.z * COLUMNS, first_filter = CUTS_FILTERS ? part : 0;
        const int slab_filter = i % VECTORS * WIDTH, row = i / VECTORS;
        const int unit = slab_filter / UNIT_FILTERS;
        const int filter = slab_filter % UNIT_FILTERS + first_filter;
        const int channel = filter / GROUP_FILTERS * GROUP_CHANNELS + row % GROUP_CHANNELS;
        const int k = first_unit * UNIT_FILTERS + slab_filter + first_filter;
        const bool there = i < SIZE && k < filters && (!CUTS_FILTERS || filter < UNIT_FILTERS) &&
                           (!CUTS_CHANNELS || unsigned(channel - part) < unsigned(COLUMNS));
        const int base = (row / GROUP_CHANNELS * UNITS + unit) * UNIT_SIZE;
        at = !there ? -1
             : BACKWARD
                 ? base + column_of(channel - (CUTS_CHANNELS ? part : 0)) * WEIGHT_PITCH + filter
                 : base + channel * WEIGHT_PITCH + column_of(filter - first_filter);
        return *reinterpret_cast<const Vector*>(w + (there ? row * filters + k : 0));
    }
    // Two adjacent results are adjacent columns, too.
    __device__ static void store(Number* to, const Vector& values) {
        constexpr int RUN = BACKWARD || WIDTH < 2 ? WIDTH : 2;
#pragma unroll
        for (int v = 0; v < WIDTH; v += RUN) {
            Pack<Number, RUN> run;
#pragma unroll
            for (int e = 0; e < RUN; ++e) run.at[e] = round_operand(values.at[v + e]);
            *reinterpret_cast<Pack<Number, RUN>*>(to + v / 2 * 8) = run;
        }
    }
    // Store all weights. Several loads of a thread are in flight: one after another, their latencies
    // would be longer than the products of small maps.
    __device__ void store_all(Number* to) const {
        constexpr int LOADS = 32 / WIDTH;
        if (!IS_DENSE) {
            for (int i = threadIdx.x; i < WEIGHT_SIZE / PACK; i += blockDim.x)
                reinterpret_cast<Pack<Number>*>(to)[i] = {};
            __syncthreads();
        }
        for (int first = threadIdx.x; first < SIZE; first += blockDim.x * LOADS) {
            Vector values[LOADS];
            int at[LOADS];
#pragma unroll
            for (int n = 0; n < LOADS; ++n) values[n] = load(first + n * blockDim.x, at[n]);
#pragma unroll
            for (int n = 0; n < LOADS; ++n)
                if (at[n] >= 0) store(to + at[n], values[n]);
        }
    }
};

#if TENSOR_CORES
// The sums of a warp: for WARP_PIXEL_TILES · 16 pixels and WARP_COLUMNS results.
struct WarpSums {
    float c[WARP_PIXEL_TILES][WARP_COLUMNS / 16][2][4];

    // Multiply all taps of a class. `pixels` are the rows of this lane for ldmatrix, and `weights`
    // the first columns of this warp.
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
                add(pixels, weights + (r * WINDOW_S + s) * UNITS * UNIT_SIZE, count,
                    (row * HALO_W + column) * PIXEL_PITCH);
            }
        }
    }
    __device__ void add(const Number* const (&pixels)[WARP_PIXEL_TILES], const Number* weights,
                        int count, int offset) {
#pragma unroll
        for (int term = 0; term < TERMS; term += STEP_K) {
            Fragment a, b[WARP_COLUMNS / 16];
            const int rows[2] = {lane_term(0) * WEIGHT_PITCH, lane_term(1) * WEIGHT_PITCH};
            const int lane = threadIdx.x % 32;
#pragma unroll
            for (int j = 0; j < WARP_COLUMNS / 16; ++j)
                if (BACKWARD)
                    b[j].load(weights + (j * 16 + lane % 16) * WEIGHT_PITCH + lane / 16 * PACK +
                                  term, false);
                else
                    b[j].load_transposed(weights + term * WEIGHT_PITCH + j * 16, rows, false);
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
                sources + buffer * SOURCE_SIZE, source, samples, source_height, source_width,
                source_channels, at.sample, top, left, first_unit * SUMMED,
                min((first_unit + UNITS) * SUMMED, source_channels));
        }
        cp_async_commit();
    };
    copy(blockIdx.x, 0);
    BlockWeights{w, g.filters, first_unit}.store_all(weights);
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
                pixels[i] = own + pixel.halo_pixel<HALO_H, HALO_W>(MOVE_H, MOVE_W) * PIXEL_PITCH +
                            unit * SUMMED + lane / 16 * PACK;
            }
            WarpSums sums = {};
            sums.multiply(pixels,
                          weights + unit * UNIT_SIZE +
                              chunk * WARP_COLUMNS * (BACKWARD ? WEIGHT_PITCH : 1),
                          PIXEL_TILES - first, class_h, class_w);
            const int column =
                blockIdx.z * COLUMNS + chunk * WARP_COLUMNS + lane % 4 * LANE_RESULTS;
            const int channel = (first_unit + unit) * RESULTS + column;
            if (column >= RESULTS || channel >= results) continue;
            float start[LANE_RESULTS] = {};
            if (!BACKWARD && has_bias)
#pragma unroll
                for (int v = 0; v < LANE_RESULTS; ++v) start[v] = bias[channel + v];
#pragma unroll
            for (int m = 0; m < 2 * WARP_PIXEL_TILES; ++m) {
                const int index = (first + m / 2) * 16 + m % 2 * 8 + lane / 4;
                const TilePixel pixel(index);
                const int sample = at.sample + pixel.sample;
                const int row = (at.row + pixel.row) * CLASSES_H + class_h;
                const int across = (at.column + pixel.column) * CLASSES_W + class_w;
                // Conditions that tiles of a compiled geometry always fulfil are no instructions.
                if (index >= TILE_PIXELS || (TILE_SAMPLES > 1 && sample >= samples) ||
                    (result_height % (CLASSES_H * TILE_ROWS) && row >= result_height) ||
                    (result_width % (CLASSES_W * TILE_COLUMNS) && across >= result_width))
                    continue;
                float values[LANE_RESULTS];
                sums.row(m / 2, m % 2, values);
                const int pixel_index = (sample * result_height + row) * result_width + across;
                auto& to = *reinterpret_cast<Pack<Number, LANE_RESULTS>*>(
                    result + pixel_index * results + channel);
                Pack<Number, LANE_RESULTS> stored = {};
                if (ADD_GRADIENT) stored = to;
#pragma unroll
                for (int v = 0; v < LANE_RESULTS; ++v)
                    stored.at[v] = from_float<Number>(
                        values[v] + (ADD_GRADIENT ? to_float(stored.at[v]) : start[v]));
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
