// Iteration over pooling windows of maps x (N, H, W, C), which become the pixels of y (N, Ho, Wo,
// C). Elements of a window outside the map take no part.
#pragma once

#include "geometry.cuh"
#include "vector.cuh"

// Index of a maximum within its window, row by row; NO_MAXIMUM if no element receives the gradient.
#ifndef WIDE_ARGMAX
#define WIDE_ARGMAX 0
#endif
#if WIDE_ARGMAX
using ArgmaxIndex = int;
#else
using ArgmaxIndex = unsigned char;
#endif
constexpr ArgmaxIndex NO_MAXIMUM = ArgmaxIndex(-1);

// A pixel of a map and a vector of its channels.
struct MapIndex {
    int sample, row, column, channel;
};

__device__ inline MapIndex map_index(int i, int height, int width, int vectors) {
    const int pixel = i / vectors, line = pixel / width;
    return {line / height, line % height, pixel % width, i % vectors};
}

// Call visit(row, column, element, inside) for each element of window (row p, column q). If an
// element lies outside the map, visit receives the nearest element inside. All addresses are then
// valid, so that all loads can start at once.
template <class Visit>
__device__ inline void for_each_in_window(const Geometry& g, int p, int q, Visit visit) {
    const int top = p * g.stride_h - g.pad_top, left = q * g.stride_w - g.pad_left;
#pragma unroll
    for (int r = 0; r < g.r; ++r) {
        const int row = min(max(top + r, 0), g.height - 1);
#pragma unroll
        for (int s = 0; s < g.s; ++s) {
            const int column = min(max(left + s, 0), g.width - 1);
            const bool inside = row == top + r && column == left + s;
            visit(row, column, (row - top) * g.s + column - left, inside);
        }
    }
}

struct Maximum {
    Floats value;
    int which[VECTOR];
};

// Return the maximum of a window and its index, the first among equals. NaN counts as larger than
// all values. at(row, column) returns a vector.
template <class At>
__device__ inline Maximum window_maximum(const Geometry& g, int p, int q, At at) {
    Maximum best;
    for (int k = 0; k < VECTOR; ++k) best.which[k] = -1;
    for_each_in_window(g, p, q, [&](int row, int column, int element, bool) {
        const Floats values = at(row, column);
        for (int k = 0; k < VECTOR; ++k) {
            const float value = values.at[k];
            const bool more = best.which[k] < 0 || value > best.value.at[k] || value != value;
            best.value.at[k] = more ? value : best.value.at[k];
            best.which[k] = more ? element : best.which[k];
        }
    });
    return best;
}

// The same for outputs of a ReLU, whose bits compare like the values; NaN compares as the largest.
// If all are 0, the index is NO_MAXIMUM, because ReLU has no gradient there. With ROUNDED the
// values are bfloat16, and the index is kept in the lower half of the bits.
template <bool ROUNDED, class At>
__device__ inline Maximum relu_window_maximum(const Geometry& g, int p, int q, At at) {
    unsigned best[VECTOR] = {};
    Maximum result;
    for (int k = 0; k < VECTOR; ++k) result.which[k] = NO_MAXIMUM;
    for_each_in_window(g, p, q, [&](int row, int column, int element, bool) {
        const Floats values = at(row, column);
        for (int k = 0; k < VECTOR; ++k) {
            unsigned bits = __float_as_uint(values.at[k]);
            if (ROUNDED)
                bits |= 0xFFFFu - unsigned(element);
            else
                result.which[k] = bits > best[k] ? element : result.which[k];
            best[k] = max(best[k], bits);
        }
    });
    for (int k = 0; k < VECTOR; ++k) {
        if (ROUNDED && best[k] > 0xFFFFu) result.which[k] = int(0xFFFFu - (best[k] & 0xFFFFu));
        result.value.at[k] = __uint_as_float(ROUNDED ? best[k] & 0xFFFF0000u : best[k]);
    }
    return result;
}

__device__ inline void store(Number* y, ArgmaxIndex* argmax, int i, const Maximum& best) {
    store(y, i, best.value);
    Vector<ArgmaxIndex> which;
    for (int k = 0; k < VECTOR; ++k) which.at[k] = ArgmaxIndex(best.which[k]);
    reinterpret_cast<Vector<ArgmaxIndex>*>(argmax)[i] = which;
}

// Call visit(row, column, element) for each window that may cover a pixel, in a fixed order. If a
// window does not exist, `element` is negative and another window is passed. The pixel is (a, b) of
// the cell of stride_h × stride_w pixels with which window (p, q) begins.
template <class Visit>
__device__ inline void for_each_covering_window(const Geometry& g, int p, int q, int a, int b,
                                                Visit visit) {
#pragma unroll
    for (int r = a + (g.r - 1) / g.stride_h * g.stride_h; r >= a; r -= g.stride_h) {
        const int row = p - (r - a) / g.stride_h;
#pragma unroll
        for (int s = b + (g.s - 1) / g.stride_w * g.stride_w; s >= b; s -= g.stride_w) {
            const int column = q - (s - b) / g.stride_w;
            if (r < g.r && s < g.s) {
                const bool inside = unsigned(row) < unsigned(g.out_height) &&
                                    unsigned(column) < unsigned(g.out_width);
                visit(inside ? row : 0, inside ? column : 0, inside ? r * g.s + s : -2);
            }
        }
    }
}

// Sum, in a fixed order, of the gradients of the windows whose maximum is this pixel. dy and argmax
// (N, Ho, Wo, C).
__device__ inline Floats gather_gradient(const Number* __restrict__ dy,
                                         const ArgmaxIndex* __restrict__ argmax, const Geometry& g,
                                         int vectors, const MapIndex& cell, int a, int b) {
    Floats sum = {};
    for_each_covering_window(g, cell.row, cell.column, a, b, [&](int row, int column, int element) {
        const int window = (cell.sample * g.out_height + row) * g.out_width + column;
        const int i = window * vectors + cell.channel;
        const Floats gradient = load(dy, i);
        const Vector<ArgmaxIndex> which = load_vector(argmax, i);
        for (int k = 0; k < VECTOR; ++k)
            sum.at[k] += which.at[k] == element ? gradient.at[k] : 0.0f;
    });
    return sum;
}
