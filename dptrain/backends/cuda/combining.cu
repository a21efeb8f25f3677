// Layers that combine tensors, and the mean over all pixels.
//
// Launched with one thread for each vector of VECTOR elements, in blocks of 256, except
// global_average_pool_forward.

#include "channel_sums.cuh"

// 1 if the second factor of `multiply` has one channel.
#ifndef CHANNEL_GATE
#define CHANNEL_GATE 0
#endif

// 1 if a sum over pixels or channels is added to what another kernel has stored.
#ifndef ADD_SUM
#define ADD_SUM 0
#endif

// 1 if `sum_products_of_pixels` also writes the gradient of the other factor.
#ifndef BOTH_FACTORS
#define BOTH_FACTORS 0
#endif

// 1 if `add` ends with a ReLU.
#ifndef RELU
#define RELU 0
#endif

// Write a sum, or add to it with ADD_SUM.
__device__ inline void write_sum(Number& y, float sum) {
    y = from_float<Number>(ADD_SUM ? to_float(y) + sum : sum);
}

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

// y = x · factor for x and y (pixels, C): pixel p is multiplied by row p / repeats of factor, (rows,
// C), or (rows,) with CHANNEL_GATE. count = pixels · C.
extern "C" __global__ void multiply(const Number* x, const Number* factor, Number* y, int channels,
                                    int repeats, int count) {
    wait_for_previous_kernel();
    int i;
    if (!vector_index(count, i)) return;
    const int vectors = channels / VECTOR, row = i / vectors / repeats;
    Floats product = load(x, i);
#if CHANNEL_GATE
    const float scale = to_float(factor[row]);
    for (float& value : product.at) value *= scale;
#else
    const Floats other = load(factor, row * vectors + i % vectors);
    for (int k = 0; k < VECTOR; ++k) product.at[k] *= other.at[k];
#endif
    store_or_add(y, i, product);
}

// y[n, c] = Σ x[n, :, c] · x2[n, :, c]; x and x2 (samples, pixels, C), y (samples, C). With
// BOTH_FACTORS, also product[n, :, c] = x[n, :, c] · gate[n, c]: if x is dy and x2 the input, these are
// the gradients of the gate and of the input. Launched as global_average_pool_forward.
extern "C" __global__ void __launch_bounds__(CHANNEL_THREADS)
    sum_products_of_pixels(const Number* __restrict__ x, const Number* __restrict__ x2,
                           const Number* __restrict__ gate, Number* product, Number* y, int pixels,
                           int channels) {
    wait_for_previous_kernel();
    const ChannelThread thread(channels);
    Floats sums[1] = {};
    const int start = blockIdx.x * pixels;
    if (thread.has_channels()) {
        Floats scale = {};
        if (BOTH_FACTORS) scale = load(gate, thread.at(blockIdx.x));
#pragma unroll 4
        for (int pixel = threadIdx.x / CHANNEL_VECTORS; pixel < pixels; pixel += BLOCK_ROWS) {
            const int i = thread.at(start + pixel);
            Floats values = load(x, i);
            const Floats others = load(x2, i);
            for (int k = 0; k < VECTOR; ++k) {
                sums[0].at[k] += values.at[k] * others.at[k];
                values.at[k] *= scale.at[k];
            }
            if (BOTH_FACTORS) store_or_add(product, i, values);
        }
    }
    sum_block(sums, channels, [&](int, int c, float sum) {
        write_sum(y[blockIdx.x * channels + c], sum);
    });
}

// y[p] = Σ x[p, :] · x2[p, :]; x and x2 (pixels, C), y (pixels,). A warp adds a pixel.
extern "C" __global__ void sum_products_of_channels(const Number* __restrict__ x,
                                                    const Number* __restrict__ x2, Number* y,
                                                    int channels, int pixels) {
    wait_for_previous_kernel();
    const int pixel = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
    const int vectors = channels / VECTOR;
    float sum = 0.0f;
    if (pixel < pixels)
        for (int v = lane; v < vectors; v += 32) {
            const Floats values = load(x, pixel * vectors + v);
            const Floats others = load(x2, pixel * vectors + v);
            for (int k = 0; k < VECTOR; ++k) sum += values.at[k] * others.at[k];
        }
#pragma unroll
    for (int bit = 1; bit < 32; bit *= 2) sum += __shfl_xor_sync(WHOLE_WARP, sum, bit);
    if (pixel < pixels && lane == 0) write_sum(y[pixel], sum);
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
    if (ADD_GRADIENT)
        store_or_add(y, to, load(x, from));
    else
        reinterpret_cast<Vector<Number>*>(y)[to] = load_vector(x, from);
}

// Channel c of y (pixels, K) is channel first + (c mod groups) · K / groups + c / groups of x (pixels,
// C), or 0 if there is none. K is a multiple of VECTOR, and with one group so are C and first. count =
// pixels · K.
extern "C" __global__ void select_channels(const Number* x, Number* y, int x_channels,
                                           int y_channels, int first, int groups, int count) {
    wait_for_previous_kernel();
    int i;
    if (!vector_index(count, i)) return;
    const int vectors = y_channels / VECTOR, pixel = i / vectors, c = i % vectors * VECTOR;
    Vector<Number> values = {};
    if (groups == 1) {
        const int from = first + c;
        if (from >= 0 && from < x_channels)
            values = load_vector(x, (pixel * x_channels + from) / VECTOR);
    } else {
        for (int k = 0; k < VECTOR; ++k) {
            const int own = c + k;
            const int from = first + own % groups * (y_channels / groups) + own / groups;
            if (from >= 0 && from < x_channels) values.at[k] = x[pixel * x_channels + from];
        }
    }
    Floats sums;
    if (ADD_GRADIENT) {
        for (int k = 0; k < VECTOR; ++k) sums.at[k] = to_float(values.at[k]);
        store_or_add(y, i, sums);
    } else {
        reinterpret_cast<Vector<Number>*>(y)[i] = values;
    }
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

// The larger of two elements and its pixel. NaN is larger than all numbers; of equal elements, the
// one at the first pixel is larger.
struct Largest {
    float value;
    int pixel;

    __device__ void take(const Largest& other) {
        const bool is_nan = value != value, other_is_nan = other.value != other.value;
        const bool is_equal = value == other.value || (is_nan && other_is_nan);
        const bool is_larger = other_is_nan ? !is_nan : other.value > value;
        if (is_equal ? other.pixel < pixel : is_larger) *this = other;
    }
};

// y[n, c] and argmax[n, c] (int32) = maximum of x[n, :, c] and its pixel. Shapes and launch as for
// global_average_pool_forward.
extern "C" __global__ void __launch_bounds__(CHANNEL_THREADS)
    global_max_pool_forward(const Number* __restrict__ x, Number* y, int* argmax, int pixels,
                            int channels) {
    wait_for_previous_kernel();
    __shared__ Largest rows[BLOCK_ROWS][BLOCK_CHANNELS];
    const ChannelThread thread(channels);
    const int row = threadIdx.x / CHANNEL_VECTORS, last = min(pixels, BLOCK_ROWS);
    if (thread.has_channels() && row < last) {
        const int start = blockIdx.x * pixels;
        const Floats first = load(x, thread.at(start + row));
        Largest own[VECTOR];
        for (int k = 0; k < VECTOR; ++k) own[k] = {first.at[k], row};
        for (int pixel = row + BLOCK_ROWS; pixel < pixels; pixel += BLOCK_ROWS) {
            const Floats values = load(x, thread.at(start + pixel));
            for (int k = 0; k < VECTOR; ++k) own[k].take({values.at[k], pixel});
        }
        for (int k = 0; k < VECTOR; ++k)
            rows[row][threadIdx.x % CHANNEL_VECTORS * VECTOR + k] = own[k];
    }
    __syncthreads();
    const int c = blockIdx.y * BLOCK_CHANNELS + threadIdx.x;
    if (threadIdx.x >= BLOCK_CHANNELS || c >= channels) return;
    Largest largest = rows[0][threadIdx.x];
    for (int other = 1; other < last; ++other) largest.take(rows[other][threadIdx.x]);
    y[blockIdx.x * channels + c] = from_float<Number>(largest.value);
    argmax[blockIdx.x * channels + c] = largest.pixel;
}

// dx[n, pixel, c] = dy[n, c] if pixel is argmax[n, c], else 0; count = samples · pixels · C.
extern "C" __global__ void global_max_pool_backward(const Number* dy, const int* argmax, Number* dx,
                                                    int pixels, int channels, int count) {
    wait_for_previous_kernel();
    int i;
    if (!vector_index(count, i)) return;
    const int vectors = channels / VECTOR, pixel = i / vectors;
    const int from = pixel / pixels * vectors + i % vectors;
    Floats gradient = load(dy, from);
    const Vector<int> chosen = load_vector(argmax, from);
    for (int k = 0; k < VECTOR; ++k)
        gradient.at[k] = chosen.at[k] == pixel % pixels ? gradient.at[k] : 0.0f;
    store_or_add(dx, i, gradient);
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
    store_or_add(dx, i, gradient);
}
