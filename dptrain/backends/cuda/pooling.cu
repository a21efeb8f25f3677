// Pooling of x (N, H, W, C) to y (N, Ho, Wo, C):
//
//     max      y = max over the window of x,   argmax = index of the maximum within its window
//     sum      y = Σ over the window of x
//     average  y = Σ over the window of x / (elements of the window inside the map)
//
// Elements of windows outside the map (padding) take no part. argmax has the shape of y, uint8, or
// int32 for windows of more than 255 elements.
//
// Algorithm: forward, a thread computes a vector of channels of y. Backward, a thread computes a
// cell of stride_h × stride_w pixels of dx: it gathers the gradients of all windows that cover its
// pixels in a fixed order, so that no atomics are needed and each window is read once. Launched
// with one thread per vector or cell, in blocks of 256.

#include "dependent_launch.cuh"
#include "philox.cuh"
#include "pooling.cuh"

// Reads vectors of x at the pixels of a sample.
struct Pixels {
    const Number* x;
    const Geometry& g;
    MapIndex to;

    __device__ Floats operator()(int row, int column) const {
        const int pixel = (to.sample * g.height + row) * g.width + column;
        return load(x, pixel * (g.channels / VECTOR) + to.channel);
    }
};

// Set i and `to` to the vector of y that this thread computes. Return false beyond the last.
__device__ inline bool find_vector(const Geometry& g, int samples, int& i, MapIndex& to) {
    if (!vector_index(samples * g.out_height * g.out_width * g.channels, i)) return false;
    to = map_index(i, g.out_height, g.out_width, g.channels / VECTOR);
    return true;
}

__device__ inline Maximum relu_maximum(const Number* x, const Geometry& g, const MapIndex& to) {
    return relu_window_maximum<PRECISION == 2>(g, to.row, to.column, Pixels{x, g, to});
}

// x (samples, H, W, C); y and argmax (samples, Ho, Wo, C). argmax counts the window's elements row
// by row.
extern "C" __global__ void max_pool2d_forward(const Number* x, Number* y, ArgmaxIndex* argmax,
                                              int samples, GEOMETRY_PARAMETERS) {
    wait_for_previous_kernel();
    const Geometry g = GEOMETRY_ARGUMENTS;
    int i;
    MapIndex to;
    if (!find_vector(g, samples, i, to)) return;
    store(y, argmax, i, window_maximum(g, to.row, to.column, Pixels{x, g, to}));
}

// The same if x is the output of a ReLU; max_pool2d_backward then yields the gradient before the
// ReLU. Shapes as above.
extern "C" __global__ void relu_max_pool2d_forward(const Number* x, Number* y, ArgmaxIndex* argmax,
                                                   int samples, GEOMETRY_PARAMETERS) {
    wait_for_previous_kernel();
    const Geometry g = GEOMETRY_ARGUMENTS;
    int i;
    MapIndex to;
    if (find_vector(g, samples, i, to)) store(y, argmax, i, relu_maximum(x, g, to));
}

// The same with dropout after pooling; max_pool2d_backward is then called with its factor.
extern "C" __global__ void relu_max_pool2d_dropout_forward(const Number* x, Number* y,
                                                           ArgmaxIndex* argmax, int samples,
                                                           GEOMETRY_PARAMETERS,
                                                           DROPOUT_PARAMETERS) {
    wait_for_previous_kernel();
    const Geometry g = GEOMETRY_ARGUMENTS;
    const Dropout d = DROPOUT_ARGUMENTS;
    int i;
    MapIndex to;
    if (!find_vector(g, samples, i, to)) return;
    Maximum best = relu_maximum(x, g, to);
    const int first = (to.row * g.out_width + to.column) * g.channels + to.channel * VECTOR;
    const unsigned kept = kept_in_vector(d, to.sample, first);
    for (int k = 0; k < VECTOR; ++k)
        if (!(kept >> k & 1)) best.which[k] = NO_MAXIMUM;
    drop(best.value, kept, d.factor);
    store(y, argmax, i, best);
}

// Store sum(a, b), a vector of dx, for each pixel (a, b) of a cell that lies inside the map. sum is
// evaluated for the other pixels too: without a branch the compiler recognises that pixels share
// windows.
template <class Sum>
__device__ inline void write_cell(Number* dx, const Geometry& g, int vectors, const MapIndex& cell,
                                  Sum sum) {
#pragma unroll
    for (int a = 0; a < g.stride_h; ++a) {
        const int row = cell.row * g.stride_h - g.pad_top + a;
#pragma unroll
        for (int b = 0; b < g.stride_w; ++b) {
            const int column = cell.column * g.stride_w - g.pad_left + b;
            const int pixel = (cell.sample * g.height + row) * g.width + column;
            const Floats values = sum(a, b);
            if (unsigned(row) < unsigned(g.height) && unsigned(column) < unsigned(g.width))
                store(dx, pixel * vectors + cell.channel, values);
        }
    }
}

// Set `cell` to the cell of this thread. Return false beyond the last. Cell 0 begins at the first
// window, pad_top rows above the map, so the number of cells includes the padding above and to the
// left of the map, and may exceed 2³¹ although arrays have fewer elements. Pixels of cells outside
// the map are not stored.
__device__ inline bool find_cell(const Geometry& g, int samples, MapIndex& cell) {
    const unsigned rows = (g.height + g.pad_top + g.stride_h - 1) / g.stride_h;
    const unsigned columns = (g.width + g.pad_left + g.stride_w - 1) / g.stride_w;
    const unsigned vectors = g.channels / VECTOR, i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (unsigned long long)samples * rows * columns * vectors) return false;
    const unsigned pixel = i / vectors, line = pixel / columns;
    cell = {int(line / rows), int(line % rows), int(pixel % columns), int(i % vectors)};
    return true;
}

// dx = factor · Σ dy over the windows whose maximum this element is. dy and argmax (samples, Ho,
// Wo, C), dx (samples, H, W, C).
extern "C" __global__ void max_pool2d_backward(const Number* __restrict__ dy,
                                               const ArgmaxIndex* __restrict__ argmax,
                                               Number* __restrict__ dx, float factor, int samples,
                                               GEOMETRY_PARAMETERS) {
    wait_for_previous_kernel();
    const Geometry g = GEOMETRY_ARGUMENTS;
    const int vectors = g.channels / VECTOR;
    MapIndex cell;
    if (!find_cell(g, samples, cell)) return;
    write_cell(dx, g, vectors, cell, [&](int a, int b) {
        Floats sum = gather_gradient(dy, argmax, g, vectors, cell, a, b);
        for (float& value : sum.at) value *= factor;
        return sum;
    });
}

// Weight of the sum of a window: `factor`, or for 0, 1 / (number of its elements inside the map).
__device__ inline float window_weight(const Geometry& g, int p, int q, float factor) {
    if (factor > 0.0f) return factor;
    const int row = p * g.stride_h - g.pad_top, column = q * g.stride_w - g.pad_left;
    const int rows = min(row + g.r, g.height) - max(row, 0);
    const int columns = min(column + g.s, g.width) - max(column, 0);
    return 1.0f / float(rows * columns);
}

// x (samples, H, W, C), y (samples, Ho, Wo, C); sums times window_weight.
extern "C" __global__ void sum_pool2d_forward(const Number* x, Number* y, float factor, int samples,
                                              GEOMETRY_PARAMETERS) {
    wait_for_previous_kernel();
    const Geometry g = GEOMETRY_ARGUMENTS;
    int i;
    MapIndex to;
    if (!find_vector(g, samples, i, to)) return;
    const Pixels at = {x, g, to};
    Floats sum = {};
    for_each_in_window(g, to.row, to.column, [&](int row, int column, int, bool inside) {
        const Floats values = at(row, column);
        for (int k = 0; k < VECTOR; ++k) sum.at[k] += inside ? values.at[k] : 0.0f;
    });
    const float weight = window_weight(g, to.row, to.column, factor);
    for (float& value : sum.at) value *= weight;
    store(y, i, sum);
}

// dx = Σ dy · weight over the windows that cover this element. dy (samples, Ho, Wo, C), dx
// (samples, H, W, C).
extern "C" __global__ void sum_pool2d_backward(const Number* __restrict__ dy,
                                               Number* __restrict__ dx, float factor, int samples,
                                               GEOMETRY_PARAMETERS) {
    wait_for_previous_kernel();
    const Geometry g = GEOMETRY_ARGUMENTS;
    const int vectors = g.channels / VECTOR;
    MapIndex cell;
    if (!find_cell(g, samples, cell)) return;
    write_cell(dx, g, vectors, cell, [&](int a, int b) {
        Floats sum = {};
        for_each_covering_window(
            g, cell.row, cell.column, a, b, [&](int row, int column, int element) {
                const int window = (cell.sample * g.out_height + row) * g.out_width + column;
                const Floats gradient = load(dy, window * vectors + cell.channel);
                const float weight = window_weight(g, row, column, factor);
                for (int k = 0; k < VECTOR; ++k)
                    sum.at[k] += element >= 0 ? weight * gradient.at[k] : 0.0f;
            });
        return sum;
    });
}
