// Depthwise convolution: filter k reads channel k only.
//
//     forward          y[n, p, q, k]  = b[k] + Σ over (r, s) of x[n, h, w, k] w[r, s, k]
//     backward_input   dx[n, h, w, k] = Σ over (r, s) of dy[n, p, q, k] w[r, s, k]
//     backward_weight  dw[r, s, k]    = Σ over pixels of x[n, h, w, k] dy[n, p, q, k],   db[k] = Σ dy
//
// with h = p · stride_h + r · dilation_h − pad_top and w likewise. x (N, H, W, K), w (R, S, 1, K)
// float32, y (N, Ho, Wo, K).
//
// Algorithm: there are R · S multiply-adds for each result, too few for tensor cores. A thread
// computes STRIP adjacent pixels of a row for a vector of channels, so that a row of taps needs each
// of its weights once, and each pixel of the source once. Adjacent threads have SLOTS adjacent
// vectors, then adjacent rows, whose windows overlap in the L1 cache.
//
// Launch of forward and backward_input: blocks · K / VECTOR / SLOTS blocks of SLOTS · LINES threads. A
// line is a strip of a row.

#include "dependent_launch.cuh"
#include "geometry.cuh"
#include "vector.cuh"

// Rows and columns of the window, strides, dilations, and padding before the map.
#ifndef WINDOW_R
#define WINDOW_R 3
#define WINDOW_S 3
#define STEP_H 1
#define STEP_W 1
#define DILATION_H 1
#define DILATION_W 1
#define PAD_H 1
#define PAD_W 1
#endif
// Pixels of a thread; for the input gradient a multiple of the stride.
#ifndef STRIP
#define STRIP 4
#define SLOTS 8
#define LINES 32
#endif
#ifndef HAS_BIAS
#define HAS_BIAS 0
#endif

constexpr int TAPS = WINDOW_R * WINDOW_S;
constexpr int LAST_TAP = (WINDOW_S - 1) * DILATION_W;  // Column of the last tap.

// The lines and channels of a block. Adjacent blocks have the same lines, so that the parts of cache
// lines that they read are fetched from memory once.
struct Block {
    int index, slot, count;

    __device__ explicit Block(int vectors) {
        const int columns = vectors / SLOTS;
        index = blockIdx.x / columns, slot = blockIdx.x % columns * SLOTS;
        count = gridDim.x / columns;
    }
};

// Strip `index` of maps of height × width pixels, whose rows are ordered by their remainder modulo
// `step`: rows with the same remainder receive the same taps.
struct Line {
    int sample, row, column;

    __device__ Line(int index, int height, int width, int step) {
        const int rows = (height + step - 1) / step, all = rows * step;
        const int strips = (width + STRIP - 1) / STRIP, i = index % all, strip = index / all;
        row = i % rows * step + i / rows;
        column = strip % strips * STRIP, sample = strip / strips;
    }
    // First column of the last strip.
    __device__ static int last(int width) { return (width - 1) / STRIP * STRIP; }
    __device__ static int count(int samples, int height, int width, int step) {
        return samples * ((width + STRIP - 1) / STRIP) * ((height + step - 1) / step * step);
    }
};

// A row of a map, of which this thread reads a vector of channels.
struct Row {
    const Number* map;
    int start, width, vectors;

    __device__ Row(const Number* map, int sample, int row, int height, int width, int vectors,
                   int slot)
        : map(map), start((sample * height + row) * width * vectors + slot), width(width),
          vectors(vectors) {}
    // The pixel of a column, or zeros outside of the map. `first` and `last` are the columns of this
    // pixel in the first and in the last strip: constants of a compiled geometry, so that only pixels
    // near the borders need conditions.
    __device__ Floats at(int column, int first, int last) const {
        if ((first < 0 && column < 0) || (last >= width && column >= width)) return {};
        return load(map, start + column * vectors);
    }
};

__device__ inline void add_product(Floats& sum, const Floats& a, const Floats& b) {
#pragma unroll
    for (int k = 0; k < VECTOR; ++k) sum.at[k] = fmaf(a.at[k], b.at[k], sum.at[k]);
}

// Results of a strip from `source` (samples, height, width, K), which is x, or dy with BACKWARD.
template <bool BACKWARD>
__device__ inline void convolve(const Number* source, const float* w, const float* bias,
                                Number* result, int samples, int height, int width,
                                int result_height, int result_width, int channels) {
    const int vectors = channels / VECTOR;
    const Block block(vectors);
    const int slot = block.slot + threadIdx.x % SLOTS;
    const int line = block.index * LINES + threadIdx.x / SLOTS, step = BACKWARD ? STEP_H : 1;
    if (line >= Line::count(samples, result_height, result_width, step)) return;
    const Line to(line, result_height, result_width, step);
    if (to.row >= result_height) return;
    // Columns of the source that the strip receives, relative to the first one of the strip.
    constexpr int FIRST =
        BACKWARD ? (PAD_W - LAST_TAP - (PAD_W < LAST_TAP ? STEP_W - 1 : 0)) / STEP_W : -PAD_W;
    constexpr int LAST = BACKWARD ? (STRIP - 1 + PAD_W) / STEP_W
                                  : (STRIP - 1) * STEP_W + LAST_TAP - PAD_W;
    const auto source_column = [](int column) {
        return BACKWARD ? column / STEP_W : column * STEP_W;
    };
    const int left = source_column(to.column), last = source_column(Line::last(result_width));
    Floats sums[STRIP] = {};
    if (!BACKWARD && bias != nullptr) {
        const Floats start = load(bias, slot);
#pragma unroll
        for (Floats& sum : sums) sum = start;
    }
#pragma unroll 1
    for (int r = 0; r < WINDOW_R; ++r) {
        const int down = r * DILATION_H;
        const int below = BACKWARD ? to.row + PAD_H - down : to.row * STEP_H + down - PAD_H;
        if (BACKWARD && below % STEP_H) continue;
        const int row = BACKWARD ? below / STEP_H : below;
        if (below < 0 || row >= height) continue;
        const Row pixels(source, to.sample, row, height, width, vectors, slot);
        Floats weights[WINDOW_S];
#pragma unroll
        for (int s = 0; s < WINDOW_S; ++s)
            weights[s] = load(w, (r * WINDOW_S + s) * vectors + slot);
#pragma unroll
        for (int j = FIRST; j <= LAST; ++j) {
            const Floats values = pixels.at(left + j, j, last + j);
#pragma unroll
            for (int s = 0; s < WINDOW_S; ++s) {
                // Pixel t of the strip that receives column j by tap s, if there is one.
                const int across = s * DILATION_W;
                const int scaled = BACKWARD ? j * STEP_W + across - PAD_W : j + PAD_W - across;
                const int t = BACKWARD ? scaled : scaled / STEP_W;
                if (scaled >= 0 && t < STRIP && (BACKWARD || scaled % STEP_W == 0))
                    add_product(sums[t], values, weights[s]);
            }
        }
    }
#pragma unroll
    for (int t = 0; t < STRIP; ++t)
        if (to.column + t < result_width)
            store_or_add(
                result,
                ((to.sample * result_height + to.row) * result_width + to.column + t) * vectors +
                    slot,
                sums[t]);
}

extern "C" __global__ void __launch_bounds__(SLOTS * LINES)
    conv2d_depthwise_forward(const Number* __restrict__ x, const float* __restrict__ w,
                             const float* __restrict__ bias, Number* __restrict__ y, int has_bias,
                             int samples, GEOMETRY_PARAMETERS) {
    wait_for_previous_kernel();
    const Geometry g = GEOMETRY_ARGUMENTS;
    convolve<false>(x, w, has_bias ? bias : nullptr, y, samples, g.height, g.width, g.out_height,
                    g.out_width, g.channels);
}

extern "C" __global__ void __launch_bounds__(SLOTS * LINES)
    conv2d_depthwise_backward_input(const Number* __restrict__ dy, const float* __restrict__ w,
                                    Number* __restrict__ dx, int samples, GEOMETRY_PARAMETERS) {
    wait_for_previous_kernel();
    const Geometry g = GEOMETRY_ARGUMENTS;
    convolve<true>(dy, w, nullptr, dx, samples, g.out_height, g.out_width, g.height, g.width,
                   g.channels);
}

// A thread adds one row of taps for a vector of channels over the lines of its block. Launch: blocks ·
// K / VECTOR / SLOTS blocks of SLOTS · R · LINES threads. partial (blocks, R · S · K [+ K if HAS_BIAS])
// float32; split_k_reduce.cu adds the rows.
extern "C" __global__ void __launch_bounds__(SLOTS* WINDOW_R* LINES)
    conv2d_depthwise_backward_weight(const Number* __restrict__ x, const Number* __restrict__ dy,
                                     float* __restrict__ partial, int samples,
                                     GEOMETRY_PARAMETERS) {
    wait_for_previous_kernel();
    __shared__ Floats shared[LINES][WINDOW_R * SLOTS];
    const Geometry g = GEOMETRY_ARGUMENTS;
    const int vectors = g.channels / VECTOR;
    const int column = threadIdx.x % (WINDOW_R * SLOTS), own = threadIdx.x / (WINDOW_R * SLOTS);
    const Block block(vectors);
    const int slot = block.slot + column % SLOTS, tap_row = column / SLOTS;
    const int lines = Line::count(samples, g.out_height, g.out_width, 1);
    const int last = Line::last(g.out_width);
    Floats sums[WINDOW_S + HAS_BIAS] = {};
    for (int line = block.index * LINES + own; line < lines; line += block.count * LINES) {
        const Line from(line, g.out_height, g.out_width, 1);
        const int row = from.row * STEP_H + tap_row * DILATION_H - PAD_H;
        const Row gradients(dy, from.sample, from.row, g.out_height, g.out_width, vectors, slot);
        const Row pixels(x, from.sample, row, g.height, g.width, vectors, slot);
        if (HAS_BIAS && tap_row == 0)
#pragma unroll
            for (int t = 0; t < STRIP; ++t) {
                const Floats values = gradients.at(from.column + t, t, last + t);
                for (int k = 0; k < VECTOR; ++k) sums[WINDOW_S * HAS_BIAS].at[k] += values.at[k];
            }
        if (unsigned(row) >= unsigned(g.height)) continue;
        Floats gradient[STRIP];
#pragma unroll
        for (int j = 0; j <= (STRIP - 1) * STEP_W + LAST_TAP; ++j) {
            // A gradient is loaded when its first tap needs it.
            const int t = j / STEP_W;
            if (j % STEP_W == 0 && t < STRIP)
                gradient[t] = gradients.at(from.column + t, t, last + t);
            const int column = j - PAD_W;
            const Floats values =
                pixels.at(from.column * STEP_W + column, column, last * STEP_W + column);
#pragma unroll
            for (int s = 0; s < WINDOW_S; ++s) {
                const int scaled = j - s * DILATION_W;
                if (scaled >= 0 && scaled % STEP_W == 0 && scaled / STEP_W < STRIP)
                    add_product(sums[s], values, gradient[scaled / STEP_W]);
            }
        }
    }
#pragma unroll
    for (int s = 0; s < WINDOW_S + HAS_BIAS; ++s) {
        shared[own][column] = sums[s];
        __syncthreads();
        const bool is_bias = s == WINDOW_S;
        if (own == 0 && (!is_bias || tap_row == 0)) {
            Floats total = sums[s];
            for (int other = 1; other < LINES; ++other)
                for (int k = 0; k < VECTOR; ++k) total.at[k] += shared[other][column].at[k];
            const int tap = is_bias ? TAPS : tap_row * WINDOW_S + s;
            store(partial, (block.index * (TAPS + HAS_BIAS) + tap) * vectors + slot, total);
        }
        __syncthreads();
    }
}
