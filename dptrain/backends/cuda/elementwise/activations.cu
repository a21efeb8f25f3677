// A function y = f(x) of single elements and its gradient dx = dy f', on contiguous arrays of `count`
// elements of any shape. Launched with one thread for each vector of VECTOR elements, in blocks of
// 256. NaN propagates.
//
// activations.py writes the function from its expression, as macros:
// FORWARD        statements that return y from x
// BACKWARD       statements that return dx from dy and SAVED
// SAVED          x or y, which BACKWARD reads
// FORWARD_NAME   name of the kernel of y, such as relu_forward
// BACKWARD_NAME  name of the kernel of dx

#include "dependent_launch.cuh"
#include "vector.cuh"

#ifndef FORWARD
#define FORWARD return x;
#define BACKWARD return dy;
#define SAVED y
#define FORWARD_NAME identity_forward
#define BACKWARD_NAME identity_backward
#endif

__device__ inline float forward(float x) { FORWARD }

__device__ inline float backward(float dy, float SAVED) { BACKWARD }

// y = f(x); x and y (count,) may be the same array.
extern "C" __global__ void FORWARD_NAME(const Number* x, Number* y, int count) {
    wait_for_previous_kernel();
    int i;
    if (!vector_index(count, i)) return;
    Floats values = load(x, i);
    for (float& value : values.at) value = forward(value);
    store(y, i, values);
}

// dx = dy f'; dy, saved and dx (count,), where `saved` is x or y. dx may be dy.
extern "C" __global__ void BACKWARD_NAME(const Number* dy, const Number* saved, Number* dx,
                                         int count) {
    wait_for_previous_kernel();
    int i;
    if (!vector_index(count, i)) return;
    Floats gradient = load(dy, i);
    const Floats values = load(saved, i);
    for (int k = 0; k < VECTOR; ++k) gradient.at[k] = backward(gradient.at[k], values.at[k]);
    store(dx, i, gradient);
}
