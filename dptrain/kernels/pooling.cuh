// Windows of maps x (N, H, W, C) that pooling makes one pixel each of y (N, Ho, Wo, C). Window
// positions outside the map take no part.
#pragma once

#include "geometry.cuh"
#include "vector.cuh"

// Which element of its window a maximum is, row by row; NOBODY where no element is to have the
// gradient.
#ifndef WIDE_ARGMAX
#define WIDE_ARGMAX 0
#endif
#if WIDE_ARGMAX
using Which = int;
#else
using Which = unsigned char;
#endif
constexpr Which NOBODY = Which(-1);

// A pixel of a map, and a vector of its channels.
struct Place {
    int sample, row, column, channel;
};

__device__ inline Place place(int i, int height, int width, int vectors) {
    const int pixel = i / vectors, line = pixel / width;
    return {line / height, line % height, pixel % width, i % vectors};
}

// Calls visit(row, column, element, inside) for each element of window (row p, column q). Where an
// element lies outside the map, it is told of the nearest one of the window that does not: every
// address can be read, so that all loads may start at once.
template <class Visit>
__device__ inline void each_of_window(const Geometry& g, int p, int q, Visit visit) {
    const int top = p * g.down - g.top, left = q * g.across - g.left;
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

struct Largest {
    Floats value;
    int which[VECTOR];
};

// Largest of a window, and which it is; the first, among equals. A NaN is larger than all, and
// stays. at(row, column) gives a vector.
template <class At> __device__ inline Largest largest(const Geometry& g, int p, int q, At at) {
    Largest best;
    for (int k = 0; k < VECTOR; ++k) best.which[k] = -1;
    each_of_window(g, p, q, [&](int row, int column, int element, bool) {
        const Floats values = at(row, column);
        for (int k = 0; k < VECTOR; ++k) {
            const float value = values.at[k];
            const bool more =
                best.which[k] < 0 || value > best.value.at[k] || value != value;
            best.value.at[k] = more ? value : best.value.at[k];
            best.which[k] = more ? element : best.which[k];
        }
    });
    return best;
}

// The same for numbers that a rectifier left, whose bits are ordered as they are; a NaN's are above
// all. Nobody is chosen where all are 0: a rectifier has no gradient there. ROUNDED: they are
// bfloat16, and the lower half of their bits is free to say which.
template <bool ROUNDED, class At>
__device__ inline Largest largest_rectified(const Geometry& g, int p, int q, At at) {
    unsigned best[VECTOR] = {};
    Largest result;
    for (int k = 0; k < VECTOR; ++k) result.which[k] = NOBODY;
    each_of_window(g, p, q, [&](int row, int column, int element, bool) {
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

__device__ inline void store(Number* y, Which* argmax, int i, const Largest& best) {
    store(y, i, best.value);
    Vector<Which> which;
    for (int k = 0; k < VECTOR; ++k) which.at[k] = Which(best.which[k]);
    reinterpret_cast<Vector<Which>*>(argmax)[i] = which;
}

// Calls visit(row, column, element) for each window that may hold a pixel, in order; where it does
// not, `element` is negative, and the window some other. The pixel is number (a, b) of the cell of
// down × across pixels with which window (p, q) begins.
template <class Visit>
__device__ inline void each_holder(const Geometry& g, int p, int q, int a, int b, Visit visit) {
#pragma unroll
    for (int r = a + (g.r - 1) / g.down * g.down; r >= a; r -= g.down) {
        const int row = p - (r - a) / g.down;
#pragma unroll
        for (int s = b + (g.s - 1) / g.across * g.across; s >= b; s -= g.across) {
            const int column = q - (s - b) / g.across;
            if (r < g.r && s < g.s) {
                const bool inside = unsigned(row) < unsigned(g.out_height) &&
                                    unsigned(column) < unsigned(g.out_width);
                visit(inside ? row : 0, inside ? column : 0, inside ? r * g.s + s : -2);
            }
        }
    }
}

// What windows give a pixel whose maxima they chose, summed in order.
__device__ inline Floats given_back(const Number* __restrict__ dy,
                                    const Which* __restrict__ argmax, const Geometry& g,
                                    int vectors, const Place& cell, int a, int b) {
    Floats sum = {};
    each_holder(g, cell.row, cell.column, a, b, [&](int row, int column, int element) {
        const int window = (cell.sample * g.out_height + row) * g.out_width + column;
        const int i = window * vectors + cell.channel;
        const Floats gradient = load(dy, i);
        const Vector<Which> which = whole(argmax, i);
        for (int k = 0; k < VECTOR; ++k)
            sum.at[k] += which.at[k] == element ? gradient.at[k] : 0.0f;
    });
    return sum;
}
