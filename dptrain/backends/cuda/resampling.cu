// Padding and resizing: pixels of y (N, Ho, Wo, C) are weighted sums of pixels of x (N, H, W, C),
//
//     y[n, i, j] = Σ_a Σ_b row_weights[a] · column_weights[b] · x[n, row_sources[a], column_sources[b]]
//
// over a from row_starts[i] to row_starts[i + 1] − 1, and b likewise. Backward, x is dy and y is dx,
// with transposed taps. Launched with one thread for each vector of y, in blocks of 256.

#include "dependent_launch.cuh"
#include "vector.cuh"

// count = samples · Ho · Wo · C.
extern "C" __global__ void resample(const Number* __restrict__ x, Number* y,
                                    const int* __restrict__ row_starts,
                                    const int* __restrict__ row_sources,
                                    const float* __restrict__ row_weights,
                                    const int* __restrict__ column_starts,
                                    const int* __restrict__ column_sources,
                                    const float* __restrict__ column_weights, int height, int width,
                                    int out_height, int out_width, int channels, int count) {
    wait_for_previous_kernel();
    int index;
    if (!vector_index(count, index)) return;
    const int vectors = channels / VECTOR, pixel = index / vectors, line = pixel / out_width;
    const int i = line % out_height, j = pixel % out_width, sample = line / out_height;
    Floats sum = {};
    for (int a = row_starts[i]; a < row_starts[i + 1]; ++a) {
        const int row = (sample * height + row_sources[a]) * width;
        for (int b = column_starts[j]; b < column_starts[j + 1]; ++b) {
            const float weight = row_weights[a] * column_weights[b];
            const Floats values = load(x, (row + column_sources[b]) * vectors + index % vectors);
            for (int k = 0; k < VECTOR; ++k) sum.at[k] += weight * values.at[k];
        }
    }
    store_or_add(y, index, sum);
}
