// Pooling of maps x (N, H, W, C) to y (N, Ho, Wo, C).
//
// Forward, a thread computes a vector of channels of y. Backward, a cell of dx as large as the
// distance of windows: it gathers what the windows that hold its pixels give them, in order, so that
// no two threads add to one element, and reads each of those windows once.

#include "philox.cuh"
#include "pooling.cuh"

// Writes largest values and which they are, after finish(place, largest) has had its way with them.
template <class Finish>
__device__ inline void pool_largest(const Number* x, Number* y, Which* argmax, int samples,
                                    const Geometry& g, Finish finish) {
    int i;
    if (!mine(samples * g.out_height * g.out_width * g.channels, i)) return;
    const int vectors = g.channels / VECTOR;
    const Place to = place(i, g.out_height, g.out_width, vectors);
    Largest best = largest(g, to.row, to.column, [&](int row, int column) {
        const int pixel = (to.sample * g.height + row) * g.width + column;
        return load(x, pixel * vectors + to.channel);
    });
    finish(to, best);
    store(y, argmax, i, best);
}

// The gradient of a rectifier in front: none where the largest is not above 0.
__device__ inline void rectify(Largest& best) {
    for (int k = 0; k < VECTOR; ++k)
        if (!(best.value.at[k] > 0.0f)) best.which[k] = NOBODY;
}

// y = largest of each window, argmax = which of its elements that is, row by row.
extern "C" __global__ void max_forward(
    const Number* x, Number* y, Which* argmax, int samples, GEOMETRY) {
    const Geometry g = GEOMETRY_VALUES;
    pool_largest(x, y, argmax, samples, g, [](const Place&, Largest&) {});
}

// The same for x that is rectified: max_backward then gives the gradient in front of the rectifier.
extern "C" __global__ void rectified_max_forward(
    const Number* x, Number* y, Which* argmax, int samples, GEOMETRY) {
    const Geometry g = GEOMETRY_VALUES;
    pool_largest(x, y, argmax, samples, g, [](const Place&, Largest& best) { rectify(best); });
}

// The same with dropout behind; max_backward needs its factor.
extern "C" __global__ void dropped_max_forward(
    const Number* x, Number* y, Which* argmax, int samples, GEOMETRY, DROPOUT) {
    const Geometry g = GEOMETRY_VALUES;
    const Dropout d = DROPOUT_VALUES;
    pool_largest(x, y, argmax, samples, g, [&](const Place& to, Largest& best) {
        rectify(best);
        const int pixel = to.row * g.out_width + to.column;
        const unsigned kept =
            kept_of_vector(d, to.sample, pixel * g.channels + to.channel * VECTOR);
        for (int k = 0; k < VECTOR; ++k)
            if (!(kept >> k & 1)) best.which[k] = NOBODY;
        drop(best.value, kept, d.factor);
    });
}

// Calls visit(i, a, b) for each pixel of a cell that lies inside the map: vector i of it, pixel
// (a, b) of the cell.
template <class Visit>
__device__ inline void each_of_cell(const Geometry& g, int vectors, const Place& cell, Visit visit) {
#pragma unroll
    for (int a = 0; a < g.down; ++a) {
        const int row = cell.row * g.down - g.top + a;
#pragma unroll
        for (int b = 0; b < g.across; ++b) {
            const int column = cell.column * g.across - g.left + b;
            if (unsigned(row) >= unsigned(g.height) || unsigned(column) >= unsigned(g.width))
                continue;
            visit(((cell.sample * g.height + row) * g.width + column) * vectors + cell.channel, a,
                  b);
        }
    }
}

// The cell of thread i; false behind the last.
__device__ inline bool my_cell(const Geometry& g, int samples, Place& cell) {
    const int rows = (g.height + g.top + g.down - 1) / g.down;
    const int columns = (g.width + g.left + g.across - 1) / g.across;
    int i;
    if (!mine(samples * rows * columns * g.channels, i)) return false;
    cell = place(i, rows, columns, g.channels / VECTOR);
    return true;
}

// dx = factor · sum of dy over the windows whose largest element this is.
extern "C" __global__ void max_backward(const Number* __restrict__ dy,
                                        const Which* __restrict__ argmax, Number* __restrict__ dx,
                                        float factor, int samples, GEOMETRY) {
    const Geometry g = GEOMETRY_VALUES;
    const int vectors = g.channels / VECTOR;
    Place cell;
    if (!my_cell(g, samples, cell)) return;
    each_of_cell(g, vectors, cell, [&](int i, int a, int b) {
        Floats sum = given_back(dy, argmax, g, vectors, cell, a, b);
        for (float& value : sum.at) value *= factor;
        store(dx, i, sum);
    });
}

// What a window's sum is multiplied with: 1, or 1 / (its elements inside the map).
__device__ inline float weight(const Geometry& g, int p, int q, int average) {
    if (!average) return 1.0f;
    const int row = p * g.down - g.top, column = q * g.across - g.left;
    const int rows = min(row + g.r, g.height) - max(row, 0);
    const int columns = min(column + g.s, g.width) - max(column, 0);
    return 1.0f / float(rows * columns);
}

// y = sum, or mean, of each window.
extern "C" __global__ void sum_forward(
    const Number* x, Number* y, int average, int samples, GEOMETRY) {
    const Geometry g = GEOMETRY_VALUES;
    int i;
    if (!mine(samples * g.out_height * g.out_width * g.channels, i)) return;
    const int vectors = g.channels / VECTOR;
    const Place to = place(i, g.out_height, g.out_width, vectors);
    Floats sum = {};
    each_of_window(g, to.row, to.column, [&](int row, int column, int, bool inside) {
        const int pixel = (to.sample * g.height + row) * g.width + column;
        const Floats values = load(x, pixel * vectors + to.channel);
        for (int k = 0; k < VECTOR; ++k) sum.at[k] += inside ? values.at[k] : 0.0f;
    });
    const float factor = weight(g, to.row, to.column, average);
    for (float& value : sum.at) value *= factor;
    store(y, i, sum);
}

// dx = sum of dy over the windows that hold this element, over their size where averaged.
extern "C" __global__ void sum_backward(const Number* __restrict__ dy, Number* __restrict__ dx,
                                        int average, int samples, GEOMETRY) {
    const Geometry g = GEOMETRY_VALUES;
    const int vectors = g.channels / VECTOR;
    Place cell;
    if (!my_cell(g, samples, cell)) return;
    each_of_cell(g, vectors, cell, [&](int i, int a, int b) {
        Floats sum = {};
        each_holder(g, cell.row, cell.column, a, b, [&](int row, int column, int element) {
            const int window = (cell.sample * g.out_height + row) * g.out_width + column;
            const Floats gradient = load(dy, window * vectors + cell.channel);
            const float factor = weight(g, row, column, average);
            for (int k = 0; k < VECTOR; ++k)
                sum.at[k] += element >= 0 ? factor * gradient.at[k] : 0.0f;
        });
        store(dx, i, sum);
    });
}
