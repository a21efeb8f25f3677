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

// y = max(x, 0); x and y (count,) may be the same array.
extern "C" __global__ void relu_forward(const Number* x, Number* y, int count) {
    wait_for_previous_kernel();
    int i;
    if (!vector_index(count, i)) return;
    Floats values = load(x, i);
    for (float& value : values.at) value = value <= 0.0f ? 0.0f : value;
    store(y, i, values);
}

// dx = dy where y > 0, else 0. dy, y and dx (count,); dx may be dy.
extern "C" __global__ void relu_backward(const Number* dy, const Number* y, Number* dx, int count) {
    wait_for_previous_kernel();
    int i;
    if (!vector_index(count, i)) return;
    Floats gradient = load(dy, i);
    const Floats output = load(y, i);
    for (int k = 0; k < VECTOR; ++k) gradient.at[k] = output.at[k] > 0.0f ? gradient.at[k] : 0.0f;
    store(dx, i, gradient);
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

// y = 1 / (1 + exp(−x)); x and y (count,). At x < −88 the exponential overflows to infinity, and y
// is 0.
extern "C" __global__ void sigmoid_forward(const Number* x, Number* y, int count) {
    wait_for_previous_kernel();
    int i;
    if (!vector_index(count, i)) return;
    Floats values = load(x, i);
    for (float& value : values.at) value = 1.0f / (1.0f + expf(-value));
    store(y, i, values);
}

// dx = dy y (1 − y); dy, y and dx (count,).
extern "C" __global__ void sigmoid_backward(const Number* dy, const Number* y, Number* dx,
                                            int count) {
    wait_for_previous_kernel();
    int i;
    if (!vector_index(count, i)) return;
    Floats gradient = load(dy, i);
    const Floats output = load(y, i);
    for (int k = 0; k < VECTOR; ++k) gradient.at[k] *= output.at[k] * (1.0f - output.at[k]);
    store(dx, i, gradient);
}
