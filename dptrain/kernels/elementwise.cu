// Kernels that treat every element alike. NaN passes through all of them.

#include "vector.cuh"

// y = x.
extern "C" __global__ void copy(const Floats* x, Floats* y, int count) {
    int i;
    if (mine(count, i)) y[i] = x[i];
}

// y = max(x, 0); y may be x.
extern "C" __global__ void relu_forward(const Floats* x, Floats* y, int count) {
    int i;
    if (!mine(count, i)) return;
    Floats values = x[i];
    for (float& value : values.at) value = value <= 0.0f ? 0.0f : value;
    y[i] = values;
}

// dx = dy where y > 0, else 0; dx may be dy.
extern "C" __global__ void relu_backward(const Floats* dy, const Floats* y, Floats* dx, int count) {
    int i;
    if (!mine(count, i)) return;
    Floats gradient = dy[i];
    const Floats output = y[i];
    for (int k = 0; k < VECTOR; ++k)
        gradient.at[k] = output.at[k] > 0.0f ? gradient.at[k] : 0.0f;
    dx[i] = gradient;
}

// In place: dy · factor where y > 0, else 0. With y rectified and then dropped out this is the
// gradient of both: what was dropped is 0.
extern "C" __global__ void relu_mask(Floats* dy, const Floats* y, float factor, int count) {
    int i;
    if (!mine(count, i)) return;
    Floats gradient = dy[i];
    const Floats output = y[i];
    for (int k = 0; k < VECTOR; ++k)
        gradient.at[k] = output.at[k] > 0.0f ? gradient.at[k] * factor : 0.0f;
    dy[i] = gradient;
}

// y = (1 + tanh(x / 2)) / 2, which never overflows.
extern "C" __global__ void sigmoid_forward(const Floats* x, Floats* y, int count) {
    int i;
    if (!mine(count, i)) return;
    Floats values = x[i];
    for (float& value : values.at) value = 0.5f + 0.5f * tanhf(0.5f * value);
    y[i] = values;
}

// dx = dy y (1 − y).
extern "C" __global__ void sigmoid_backward(
    const Floats* dy, const Floats* y, Floats* dx, int count) {
    int i;
    if (!mine(count, i)) return;
    Floats gradient = dy[i];
    const Floats output = y[i];
    for (int k = 0; k < VECTOR; ++k) gradient.at[k] *= output.at[k] * (1.0f - output.at[k]);
    dx[i] = gradient;
}
