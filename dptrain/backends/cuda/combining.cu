// Layers that combine tensors, and the mean over all pixels.
//
// Launched with one thread for each vector of VECTOR elements, in blocks of 256, except
// global_average_pool_forward.

#include "channel_sums.cuh"

// 1 if `add` ends with a ReLU.
#ifndef RELU
#define RELU 0
#endif

// y = x + x2; x, x2 and y (count,), y may be x or x2.
extern "C" __global__ void add(const Number* x, const Number* x2, Number* y, int count) {
    wait_for_previous_kernel();
    int i;
    if (!vector_index(count, i)) return;
    Floats sum = load(x, i);
    const Floats other = load(x2, i);
    for (int k = 0; k < VECTOR; ++k) {
        const float value = sum.at[k] + other.at[k];
        sum.at[k] = RELU && value <= 0.0f ? 0.0f : value;
    }
    store(y, i, sum);
}

// Copy `channels` channels of each pixel, from channel x_first of x (pixels, x_channels) to channel
// y_first of y (pixels, y_channels). All numbers of channels are multiples of VECTOR. count = pixels
// · channels.
extern "C" __global__ void copy_channels(const Number* x, Number* y, int channels, int x_first,
                                         int x_channels, int y_first, int y_channels, int count) {
    wait_for_previous_kernel();
    int i;
    if (!vector_index(count, i)) return;
    const int vectors = channels / VECTOR, pixel = i / vectors, slot = i % vectors;
    const int from = (pixel * x_channels + x_first) / VECTOR + slot;
    const int to = (pixel * y_channels + y_first) / VECTOR + slot;
    reinterpret_cast<Vector<Number>*>(y)[to] = load_vector(x, from);
}

// y[n, c] = mean of x[n, :, c]; x (samples, pixels, C), y (samples, C). Block (n, column) adds the
// pixels of sample n; launch as in channel_sums.cuh.
extern "C" __global__ void __launch_bounds__(CHANNEL_THREADS)
    global_average_pool_forward(const Number* __restrict__ x, Number* y, int pixels, int channels) {
    wait_for_previous_kernel();
    const ChannelThread thread(channels);
    Floats sums[1] = {};
    const int start = blockIdx.x * pixels;
    if (thread.has_channels())
#pragma unroll 4
        for (int pixel = threadIdx.x / CHANNEL_VECTORS; pixel < pixels; pixel += BLOCK_ROWS) {
            const Floats values = load(x, thread.at(start + pixel));
            for (int k = 0; k < VECTOR; ++k) sums[0].at[k] += values.at[k];
        }
    const float factor = 1.0f / float(pixels);
    sum_block(sums, channels, [&](int, int c, float sum) {
        y[blockIdx.x * channels + c] = from_float<Number>(sum * factor);
    });
}

// dx[n, pixel, c] = dy[n, c] / pixels; count = samples · pixels · C.
extern "C" __global__ void global_average_pool_backward(const Number* dy, Number* dx, int pixels,
                                                        int channels, int count) {
    wait_for_previous_kernel();
    int i;
    if (!vector_index(count, i)) return;
    const int vectors = channels / VECTOR;
    Floats gradient = load(dy, i / vectors / pixels * vectors + i % vectors);
    const float factor = 1.0f / float(pixels);
    for (float& value : gradient.at) value *= factor;
    store(dx, i, gradient);
}
