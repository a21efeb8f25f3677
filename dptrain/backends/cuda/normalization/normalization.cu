// Local response normalisation (LRN) over the channels of x (N, H, W, C):
//
//     y = x s^−beta  with  s = bias + alpha Σ x² over the channels at most RADIUS away
//
// alone, or fused with a preceding ReLU and a following max pooling. A thread computes a vector of
// channels and also reads the neighbouring vectors, which are in the L1 cache. Launched with one
// thread per vector in blocks of 256; lrn_max_pool2d_forward is launched with one block per band of
// rows.
//
// Source: Krizhevsky et al., "ImageNet classification with deep convolutional neural networks",
// 2012, section 3.3.

#include "dependent_launch.cuh"
#include "pooling.cuh"

#ifndef RADIUS
#define RADIUS 4
#endif

// 1 if beta is ¾, as published: the powers then consist of square roots, which takes a tenth of the
// time.
#ifndef BETA_THREE_QUARTERS
#define BETA_THREE_QUARTERS 0
#endif

constexpr int THREADS = 256;
// Vectors on either side that contain neighbours.
constexpr int SIDE = (RADIUS + VECTOR - 1) / VECTOR;
// Channels of a vector and of the neighbouring vectors.
constexpr int SPAN = (2 * SIDE + 1) * VECTOR;

#ifdef FIXED_CHANNELS
#define NUM_CHANNELS FIXED_CHANNELS
#else
#define NUM_CHANNELS channels
#endif

struct Norm {
    int vectors;  // Vectors of a pixel.
    float bias, alpha, beta;
};

// For each channel of the middle vector, sum over the RADIUS channels on either side. The channels
// that all windows share are added once. Nothing is subtracted, so there is no cancellation.
__device__ inline Floats sum_neighbours(const float* values) {
    const float* middle = values + SIDE * VECTOR;
    Floats sums = {};
    if (2 * RADIUS < VECTOR) {
        for (int k = 0; k < VECTOR; ++k)
            for (int d = -RADIUS; d <= RADIUS; ++d) sums.at[k] += middle[k + d];
        return sums;
    }
    float common = 0.0f, before = 0.0f, after = 0.0f;
    for (int j = VECTOR - 1 - RADIUS; j <= RADIUS; ++j) common += middle[j];
    for (int k = VECTOR - 1; k >= 0; --k) {
        sums.at[k] = common + before;
        if (k > 0) before += middle[k - 1 - RADIUS];
    }
    for (int k = 1; k < VECTOR; ++k) {
        after += middle[k + RADIUS];
        sums.at[k] += after;
    }
    return sums;
}

// Return s of vector i of x, which is vector v of its pixel, and store the vector in `own`.
__device__ inline Floats scales(const Number* x, int i, int v, const Norm& norm, Floats& own) {
    float squares[SPAN];
#pragma unroll
    for (int side = -SIDE; side <= SIDE; ++side) {
        Floats values = {};
        if (unsigned(v + side) < unsigned(norm.vectors)) values = load(x, i + side);
        if (side == 0) own = values;
        for (int k = 0; k < VECTOR; ++k)
            squares[(side + SIDE) * VECTOR + k] = values.at[k] * values.at[k];
    }
    Floats s = sum_neighbours(squares);
    for (float& value : s.at) value = norm.bias + norm.alpha * value;
    return s;
}

struct Powers {
    float own, next;  // s^−beta and s^(−beta−1).
};

__device__ inline Powers powers(float s, float beta) {
#if BETA_THREE_QUARTERS
    const float root = rsqrtf(s), power = root * rsqrtf(s * root);
    return {power, power * root * root};
#else
    const float power = powf(s, -beta);
    return {power, power / s};
#endif
}

__device__ inline Floats normalized(const Number* x, int i, int v, const Norm& norm) {
    Floats own;
    const Floats s = scales(x, i, v, norm, own);
    for (int k = 0; k < VECTOR; ++k) own.at[k] *= powers(s.at[k], norm.beta).own;
    return own;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    lrn_forward(const Number* x, Number* y, int count, int channels, float bias, float alpha,
                float beta) {
    wait_for_previous_kernel();
    const Norm norm = {NUM_CHANNELS / VECTOR, bias, alpha, beta};
    int i;
    if (vector_index(count, i)) store(y, i, normalized(x, i, i % norm.vectors, norm));
}

// dx = dy s^−β − 2αβ x Σ dy x s^(−β−1), where the sum runs over neighbouring channels. If
// `rectified`, x is the output of a ReLU and dx is 0 where x is 0. s is recomputed from x, which is
// cheaper than storing it. gradient(i) returns vector i of dy. x and dx (count,) elements.
template <class Gradient>
__device__ inline void lrn_gradient(const Number* x, Number* dx, int count, bool rectified,
                                    const Norm& norm, Gradient gradient) {
    // Terms of the sum for the block's vectors and for the vectors next to its first and last.
    __shared__ __align__(32) float terms[(THREADS + 2 * SIDE) * VECTOR];
    const int i = blockIdx.x * THREADS + threadIdx.x, last = count / VECTOR;
    const float slope = 2.0f * norm.alpha * norm.beta;

    auto term = [&](int vector, int slot, Floats& own, Floats& direct) {
        if (unsigned(vector) >= unsigned(last)) return;
        const Floats s = scales(x, vector, vector % norm.vectors, norm, own), dy = gradient(vector);
        Floats products;
        for (int k = 0; k < VECTOR; ++k) {
            const Powers power = powers(s.at[k], norm.beta);
            direct.at[k] = dy.at[k] * power.own;
            products.at[k] = dy.at[k] * own.at[k] * power.next;
        }
        store(terms, slot, products);
    };
    Floats own, direct, unused, unused_direct;
    term(i, SIDE + threadIdx.x, own, direct);
    // If blocks hold whole pixels, no other block has neighbouring channels.
    if (THREADS % norm.vectors != 0 && threadIdx.x < 2 * SIDE) {
        const int slot = threadIdx.x < SIDE ? threadIdx.x : THREADS + threadIdx.x;
        term(i - int(threadIdx.x) + slot - SIDE, slot, unused, unused_direct);
    }
    __syncthreads();
    if (i >= last) return;
    const int v = i % norm.vectors;
    float neighbours[SPAN];
#pragma unroll
    for (int side = -SIDE; side <= SIDE; ++side) {
        Floats products = {};
        if (unsigned(v + side) < unsigned(norm.vectors))
            products = load(terms, int(threadIdx.x) + SIDE + side);
        for (int k = 0; k < VECTOR; ++k) neighbours[(side + SIDE) * VECTOR + k] = products.at[k];
    }
    const Floats sums = sum_neighbours(neighbours);
    for (int k = 0; k < VECTOR; ++k) {
        const float value = direct.at[k] - slope * own.at[k] * sums.at[k];
        direct.at[k] = rectified && !(own.at[k] > 0.0f) ? 0.0f : value;
    }
    store(dx, i, direct);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    lrn_backward(const Number* x, const Number* dy, Number* dx, int rectified, int count,
                 int channels, float bias, float alpha, float beta) {
    wait_for_previous_kernel();
    const Norm norm = {NUM_CHANNELS / VECTOR, bias, alpha, beta};
    lrn_gradient(x, dx, count, rectified, norm, [&](int i) { return load(dy, i); });
}

// ReLU, LRN and max pooling: x (N, H, W, C), y and argmax (N, Ho, Wo, C). A block computes `band`
// rows of y of one sample. It normalises the rows that these need into shared memory, 4 bytes per
// element.
extern "C" __global__ void __launch_bounds__(THREADS)
    lrn_max_pool2d_forward(const Number* x, Number* y, ArgmaxIndex* argmax, int band, float bias,
                           float alpha, float beta, GEOMETRY_PARAMETERS) {
    wait_for_previous_kernel();
    extern __shared__ __align__(32) float rows[];
    const Geometry g = GEOMETRY_ARGUMENTS;
    const Norm norm = {g.channels / VECTOR, bias, alpha, beta};
    const int bands = (g.out_height + band - 1) / band, sample = blockIdx.x / bands;
    const int first = blockIdx.x % bands * band, stop = min(first + band, g.out_height);
    const int line = g.width * norm.vectors;
    const int begin = max(first * g.stride_h - g.pad_top, 0);
    const int end = min((stop - 1) * g.stride_h - g.pad_top + g.r, g.height);
    for (int j = threadIdx.x; j < (end - begin) * line; j += THREADS) {
        const int i = (sample * g.height + begin) * line + j;
        store(rows, j, normalized(x, i, j % norm.vectors, norm));
    }
    __syncthreads();
    for (int j = threadIdx.x; j < (stop - first) * g.out_width * norm.vectors; j += THREADS) {
        const MapIndex to = map_index(j, g.out_height, g.out_width, norm.vectors);
        auto at = [&](int row, int column) {
            return load(rows, (row - begin) * line + column * norm.vectors + to.channel);
        };
        const Maximum best = relu_window_maximum<false>(g, first + to.row, to.column, at);
        const int i = (sample * g.out_height + first) * g.out_width * norm.vectors + j;
        store(y, argmax, i, best);
    }
}

// Gradient of ReLU, LRN and max pooling: dy and argmax (samples, Ho, Wo, C); x and dx (samples, H,
// W, C).
extern "C" __global__ void __launch_bounds__(THREADS)
    lrn_max_pool2d_backward(const Number* __restrict__ x, const Number* __restrict__ dy,
                            const ArgmaxIndex* __restrict__ argmax, Number* __restrict__ dx,
                            int samples, float bias, float alpha, float beta, GEOMETRY_PARAMETERS) {
    wait_for_previous_kernel();
    const Geometry g = GEOMETRY_ARGUMENTS;
    const Norm norm = {g.channels / VECTOR, bias, alpha, beta};
    const int count = samples * g.height * g.width * g.channels;
    lrn_gradient(x, dx, count, true, norm, [&](int i) {
        const MapIndex at = map_index(i, g.height, g.width, norm.vectors);
        const int row = at.row + g.pad_top, column = at.column + g.pad_left;
        const MapIndex cell = {at.sample, row / g.stride_h, column / g.stride_w, at.channel};
        return gather_gradient(dy, argmax, g, norm.vectors, cell, row % g.stride_h,
                               column % g.stride_w);
    });
}
