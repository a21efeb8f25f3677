// Activation functions of single elements, on contiguous arrays of `count` elements of any shape.
// NaN propagates. Launched with one thread for each vector of VECTOR elements, in blocks of 256.
// ReLU and sigmoid are in elementwise.cu.

#include "dependent_launch.cuh"
#include "vector.cuh"

// y = f(x) for each element of x and y (count,).
template <class F>
__device__ inline void map(const Number* x, Number* y, int count, F f) {
    int i;
    if (!vector_index(count, i)) return;
    Floats values = load(x, i);
    for (float& value : values.at) value = f(value);
    store(y, i, values);
}

// dx = dy · slope(saved) for each element, where `saved` (count,) is x or y.
template <class F>
__device__ inline void scale(const Number* dy, const Number* saved, Number* dx, int count,
                             F slope) {
    int i;
    if (!vector_index(count, i)) return;
    Floats gradient = load(dy, i);
    const Floats values = load(saved, i);
    for (int k = 0; k < VECTOR; ++k) gradient.at[k] *= slope(values.at[k]);
    store(dx, i, gradient);
}

// σ(x). At x < −88 the exponential overflows to infinity, and the result is 0.
__device__ inline float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// Φ(x), the distribution function of the standard normal distribution.
__device__ inline float normal_distribution(float x) {
    return 0.5f + 0.5f * erff(x * 0.70710678118654752f);
}

// y = x if x > 0, else slope · x.
extern "C" __global__ void leaky_relu_forward(const Number* x, Number* y, float slope, int count) {
    wait_for_previous_kernel();
    map(x, y, count, [=](float x) { return x > 0.0f ? x : slope * x; });
}

// The sign of x is that of y, unless the slope is 0; then y ≤ 0 has the slope, too.
extern "C" __global__ void leaky_relu_backward(const Number* dy, const Number* y, Number* dx,
                                               float slope, int count) {
    wait_for_previous_kernel();
    scale(dy, y, dx, count, [=](float y) { return y > 0.0f ? 1.0f : slope; });
}

// y = tanh(x); dx = dy (1 − y²).
extern "C" __global__ void tanh_forward(const Number* x, Number* y, int count) {
    wait_for_previous_kernel();
    map(x, y, count, [](float x) { return tanhf(x); });
}

extern "C" __global__ void tanh_backward(const Number* dy, const Number* y, Number* dx, int count) {
    wait_for_previous_kernel();
    scale(dy, y, dx, count, [](float y) { return 1.0f - y * y; });
}

// y = x Φ(x); dx = dy (Φ(x) + x φ(x)) with the density φ.
extern "C" __global__ void gelu_forward(const Number* x, Number* y, int count) {
    wait_for_previous_kernel();
    map(x, y, count, [](float x) { return x * normal_distribution(x); });
}

extern "C" __global__ void gelu_backward(const Number* dy, const Number* x, Number* dx, int count) {
    wait_for_previous_kernel();
    scale(dy, x, dx, count, [](float x) {
        const float density = 0.39894228040143268f * expf(-0.5f * x * x);
        return normal_distribution(x) + x * density;
    });
}

// y = x σ(x); dx = dy σ(x) (1 + x (1 − σ(x))).
extern "C" __global__ void silu_forward(const Number* x, Number* y, int count) {
    wait_for_previous_kernel();
    map(x, y, count, [](float x) { return x * sigmoid(x); });
}

extern "C" __global__ void silu_backward(const Number* dy, const Number* x, Number* dx, int count) {
    wait_for_previous_kernel();
    scale(dy, x, dx, count, [](float x) {
        const float s = sigmoid(x);
        return s * (1.0f + x * (1.0f - s));
    });
}
