// Elementwise kernels on contiguous arrays of `count` elements of any shape. NaN propagates.
// Launched with one thread for each vector of VECTOR elements, in blocks of 256.

#include "dependent_launch.cuh"
#include "vector.cuh"

// y (count,) = x (count,).
extern "C" __global__ void copy(const Number* x, Number* y, int count) {
    wait_for_previous_kernel();
    int i;
    if (vector_index(count, i)) store(y, i, load(x, i));
}

// y = x + bias; x and y (count,) are rows of `channels` values, bias (channels,).
extern "C" __global__ void add_bias(const Number* x, const float* bias, Number* y, int channels,
                                    int count) {
    wait_for_previous_kernel();
    int i;
    if (!vector_index(count, i)) return;
    Floats values = load(x, i);
    const int first = i * VECTOR % channels;
    // A vector may end in the next row.
    for (int k = 0; k < VECTOR; ++k) values.at[k] += bias[(first + k) % channels];
    store(y, i, values);
}

// In place, dy = dy · factor where y > 0, else 0; dy and y (count,). If y is the output of ReLU and
// dropout, this is the gradient through both, because dropped outputs are 0.
extern "C" __global__ void relu_dropout_backward(Number* dy, const Number* y, float factor,
                                                 int count) {
    wait_for_previous_kernel();
    int i;
    if (!vector_index(count, i)) return;
    Floats gradient = load(dy, i);
    const Floats output = load(y, i);
    for (int k = 0; k < VECTOR; ++k)
        gradient.at[k] = output.at[k] > 0.0f ? gradient.at[k] * factor : 0.0f;
    store(dy, i, gradient);
}
