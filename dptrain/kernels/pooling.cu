// Pooling of maps x (N, H, W, C) to y (N, Ho, Wo, C). Window positions outside the map take no part.
//
// Forward, a thread computes a vector of channels of y; backward, one of dx: it gathers what the
// windows that hold its pixel give it, in order, so that no two threads add to one element.

#include "vector.cuh"

// Windows of `rows` by `columns`, `down` and `across` apart; the first begins `top` above the map
// and `left` before it.
struct Geometry {
    int samples, height, width, channels, out_height, out_width, rows, columns, down, across, top,
        left;
};

#define GEOMETRY                                                                                \
    int samples, int height, int width, int channels, int out_height, int out_width, int rows, \
        int columns, int down, int across, int top, int left
#define GEOMETRY_VALUES                                                                       \
    {samples, height, width,  channels, out_height, out_width, rows, columns, down, across, top, \
     left}

// A pixel of a map, and a vector of its channels.
struct Place {
    int sample, row, column, channel;
};

__device__ inline Place place(int i, int height, int width, int vectors) {
    const int pixel = i / vectors, line = pixel / width;
    return {line / height, line % height, pixel % width, i % vectors};
}

// Positions first … last of a window, or windows of a position, along one axis.
struct Range {
    int first, last;
};

// What of window `i` lies inside the map, in positions of the window.
__device__ inline Range inside(int i, int stride, int before, int window, int size) {
    const int start = i * stride - before;
    return {max(0, -start), min(window, size - start) - 1};
}

// Windows that hold position `at` of the map.
__device__ inline Range holders(int at, int stride, int before, int window, int windows) {
    const int from = at + before - window + 1;
    return {from <= 0 ? 0 : (from + stride - 1) / stride, min((at + before) / stride, windows - 1)};
}

// y = largest of each window, argmax = which of its elements that is, row by row; the first, among
// equals. A NaN is larger than all, and stays.
extern "C" __global__ void max_forward(const Floats* x, Floats* y, Ints* argmax, GEOMETRY) {
    const Geometry g = GEOMETRY_VALUES;
    int i;
    if (!mine(g.samples * g.out_height * g.out_width * g.channels, i)) return;
    const int vectors = g.channels / VECTOR;
    const Place at = place(i, g.out_height, g.out_width, vectors);
    const Range rows_inside = inside(at.row, g.down, g.top, g.rows, g.height);
    const Range columns_inside = inside(at.column, g.across, g.left, g.columns, g.width);
    Floats best;
    Ints which;
    for (int k = 0; k < VECTOR; ++k) which.at[k] = -1;
    for (int r = rows_inside.first; r <= rows_inside.last; ++r) {
        const int row = at.row * g.down - g.top + r;
        for (int s = columns_inside.first; s <= columns_inside.last; ++s) {
            const int column = at.column * g.across - g.left + s;
            const int pixel = (at.sample * g.height + row) * g.width + column;
            const Floats values = x[pixel * vectors + at.channel];
            for (int k = 0; k < VECTOR; ++k) {
                const float value = values.at[k];
                if (which.at[k] < 0 || value > best.at[k] || value != value) {
                    best.at[k] = value;
                    which.at[k] = r * g.columns + s;
                }
            }
        }
    }
    y[i] = best;
    argmax[i] = which;
}

// dx = sum of dy over the windows whose largest element this is.
extern "C" __global__ void max_backward(
    const Floats* dy, const Ints* argmax, Floats* dx, GEOMETRY) {
    const Geometry g = GEOMETRY_VALUES;
    int i;
    if (!mine(g.samples * g.height * g.width * g.channels, i)) return;
    const int vectors = g.channels / VECTOR;
    const Place at = place(i, g.height, g.width, vectors);
    const Range down_range = holders(at.row, g.down, g.top, g.rows, g.out_height);
    const Range across_range = holders(at.column, g.across, g.left, g.columns, g.out_width);
    Floats sum = {};
    for (int p = down_range.first; p <= down_range.last; ++p) {
        const int r = at.row + g.top - p * g.down;
        for (int q = across_range.first; q <= across_range.last; ++q) {
            const int here = r * g.columns + at.column + g.left - q * g.across;
            const int window = (at.sample * g.out_height + p) * g.out_width + q;
            const Floats gradient = dy[window * vectors + at.channel];
            const Ints which = argmax[window * vectors + at.channel];
            for (int k = 0; k < VECTOR; ++k)
                sum.at[k] += which.at[k] == here ? gradient.at[k] : 0.0f;
        }
    }
    dx[i] = sum;
}

// What a window's sum is multiplied with: 1, or 1 / (its elements inside the map).
__device__ inline float weight(const Geometry& g, int p, int q, int average) {
    if (!average) return 1.0f;
    const Range r = inside(p, g.down, g.top, g.rows, g.height);
    const Range s = inside(q, g.across, g.left, g.columns, g.width);
    return 1.0f / float((r.last - r.first + 1) * (s.last - s.first + 1));
}

// y = sum, or mean, of each window.
extern "C" __global__ void sum_forward(const Floats* x, Floats* y, int average, GEOMETRY) {
    const Geometry g = GEOMETRY_VALUES;
    int i;
    if (!mine(g.samples * g.out_height * g.out_width * g.channels, i)) return;
    const int vectors = g.channels / VECTOR;
    const Place at = place(i, g.out_height, g.out_width, vectors);
    const Range rows_inside = inside(at.row, g.down, g.top, g.rows, g.height);
    const Range columns_inside = inside(at.column, g.across, g.left, g.columns, g.width);
    Floats sum = {};
    for (int r = rows_inside.first; r <= rows_inside.last; ++r) {
        const int row = at.row * g.down - g.top + r;
        for (int s = columns_inside.first; s <= columns_inside.last; ++s) {
            const int column = at.column * g.across - g.left + s;
            const int pixel = (at.sample * g.height + row) * g.width + column;
            const Floats values = x[pixel * vectors + at.channel];
            for (int k = 0; k < VECTOR; ++k) sum.at[k] += values.at[k];
        }
    }
    const float factor = weight(g, at.row, at.column, average);
    for (float& value : sum.at) value *= factor;
    y[i] = sum;
}

// dx = sum of dy over the windows that hold this element, over their size where averaged.
extern "C" __global__ void sum_backward(const Floats* dy, Floats* dx, int average, GEOMETRY) {
    const Geometry g = GEOMETRY_VALUES;
    int i;
    if (!mine(g.samples * g.height * g.width * g.channels, i)) return;
    const int vectors = g.channels / VECTOR;
    const Place at = place(i, g.height, g.width, vectors);
    const Range down_range = holders(at.row, g.down, g.top, g.rows, g.out_height);
    const Range across_range = holders(at.column, g.across, g.left, g.columns, g.out_width);
    Floats sum = {};
    for (int p = down_range.first; p <= down_range.last; ++p) {
        for (int q = across_range.first; q <= across_range.last; ++q) {
            const int window = (at.sample * g.out_height + p) * g.out_width + q;
            const Floats gradient = dy[window * vectors + at.channel];
            const float factor = weight(g, p, q, average);
            for (int k = 0; k < VECTOR; ++k) sum.at[k] += factor * gradient.at[k];
        }
    }
    dx[i] = sum;
}
