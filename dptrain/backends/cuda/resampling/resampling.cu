// Resampling of maps x (samples, Hi, Wi, C) to y (samples, H, W, C): y = R x Cᵀ for each sample and
// channel, with sparse matrices R and C. Launched with one thread for each vector of y.
//
// The terms of output i of an axis are first[i] to first[i + 1] − 1; each has a position in the
// input and a weight (dptrain/backends/resampling.py).

#include "dependent_launch.cuh"
#include "vector.cuh"

extern "C" __global__ void resample(const Number* __restrict__ x, Number* __restrict__ y,
                                    const int* row_first, const int* row_source,
                                    const float* row_weight, const int* column_first,
                                    const int* column_source, const float* column_weight,
                                    int in_height, int in_width, int height, int width,
                                    int channels, int count) {
    wait_for_previous_kernel();
    int i;
    if (!vector_index(count, i)) return;
    const int vectors = channels / VECTOR, slot = i % vectors, pixel = i / vectors;
    const int column = pixel % width, line = pixel / width, row = line % height;
    const int first = line / height * in_height;
    Floats sum = {};
    for (int a = row_first[row]; a < row_first[row + 1]; ++a)
        for (int b = column_first[column]; b < column_first[column + 1]; ++b) {
            const float weight = row_weight[a] * column_weight[b];
            const int source = (first + row_source[a]) * in_width + column_source[b];
            const Floats values = load(x, source * vectors + slot);
            for (int k = 0; k < VECTOR; ++k) sum.at[k] += weight * values.at[k];
        }
    store(y, i, sum);
}
