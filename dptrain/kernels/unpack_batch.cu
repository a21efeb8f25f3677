// Unpacking of a staged minibatch: converts the message that the host staged
// (dptrain/backends/cuda/replica.py) to the input that the stages of a step read.
//
// The message may lie in pinned host memory. A read from there takes about as long as a kernel, and
// 28 ns per read if many threads read (one H200). The threads therefore read few words, and start
// all reads before they wait for one.

#include "precision.cuh"
#include "dependent_launch.cuh"

#ifndef RECOLOURS
#define RECOLOURS 0
#endif

// 1 if cached images are 8-bit pixels: pixel v is the input v * scale + offset.
#ifndef BYTES
#define BYTES 0
#endif
#if BYTES
typedef unsigned char Pixel;
#else
typedef float Pixel;
#endif

// The product and the sum are rounded, as on the host (dptrain/backends/pixels.py).
__device__ inline float to_input(Pixel pixel, float scale, float offset) {
    return BYTES ? __fadd_rn(__fmul_rn(float(pixel), scale), offset) : float(pixel);
}

// Further arguments: targets (target_words,), sample indices (sample_words,) and
// hyperparameters (4,), each with its staged copy, in 32-bit words.
//
// Unless `always` is set, nothing is copied if the previous step left a loss in loss_sums (3,) that
// is not finite, so that its minibatch stays available for inspection.
#define MESSAGE_PARAMETERS                                                                \
    const unsigned *targets, unsigned *target, int target_words, const unsigned *samples, \
        unsigned *sample_ids, int sample_words, const unsigned *staged_hyperparameters,   \
        unsigned *hyperparameters, const float *loss_sums, int always
#define COPY_MESSAGE                                                                 \
    const bool accepted = always || is_finite(loss_sums[0]);                         \
    copy_words({targets, target, target_words}, {samples, sample_ids, sample_words}, \
               {staged_hyperparameters, hyperparameters, 4}, accepted)

// Source and target of a copy in 32-bit words.
struct WordCopy {
    const unsigned* from;
    unsigned* to;
    int count;
};

__device__ inline int thread_index() { return blockIdx.x * blockDim.x + threadIdx.x; }

__device__ inline void copy_words(const WordCopy& first, const WordCopy& second,
                                  const WordCopy& third, bool accepted) {
    const int most = max(max(first.count, second.count), third.count);
    for (int i = thread_index(); i < most; i += gridDim.x * blockDim.x) {
        const unsigned a = i < first.count ? first.from[i] : 0;
        const unsigned b = i < second.count ? second.from[i] : 0;
        const unsigned c = i < third.count ? third.from[i] : 0;
        if (!accepted) continue;
        if (i < first.count) first.to[i] = a;
        if (i < second.count) second.to[i] = b;
        if (i < third.count) third.to[i] = c;
    }
}

// Copy the loss sums (count,) of a step to host memory (host_sums). Launched with one block.
extern "C" __global__ void copy_loss_sums(const float* loss_sums, float* host_sums, int count) {
    wait_for_previous_kernel();
    if (threadIdx.x < count) host_sums[threadIdx.x] = loss_sums[threadIdx.x];
}

// Transpose x (n, C, H·W) float32 to input (n, H·W, C) and copy the rest of the message. Launched
// with one thread per element. Adjacent threads read from few addresses, because images have few
// channels.
extern "C" __global__ void unpack_batch(const float* x, Number* input, int n, int channels,
                                        int pixels, MESSAGE_PARAMETERS) {
    wait_for_previous_kernel();
    COPY_MESSAGE;
    const int i = thread_index();
    if (!accepted || i >= n * channels * pixels) return;
    const int channel = i % channels, pixel = i / channels % pixels, sample = i / channels / pixels;
    input[i] = from_float<Number>(x[(sample * channels + channel) * pixels + pixel]);
}

// A crop window: the image, its first row and column, and whether it is mirrored horizontally.
struct alignas(16) CropWindow {
    int image, row, column, mirrored;
};

// A change of colours: the distance of each pixel from the mean of its channel is multiplied, and a
// number is added.
struct alignas(8) Recolouring {
    float factor, added;
};

// Sum over the block, valid in all threads. The order of additions is fixed.
__device__ inline double block_sum(double own) {
    __shared__ double warps[32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int half = 16; half > 0; half /= 2) own += __shfl_down_sync(~0u, own, half);
    __syncthreads();  // The sum of another channel has been read.
    if (lane == 0) warps[warp] = own;
    __syncthreads();
    if (warp == 0) {
        own = lane < blockDim.x / 32 ? warps[lane] : 0.0;
        for (int half = 16; half > 0; half /= 2) own += __shfl_down_sync(~0u, own, half);
        if (lane == 0) warps[0] = own;
    }
    __syncthreads();
    return warps[0];
}

// Crop windows of the dataset cache images (M, C, rows, columns) to input (n, H, W, C); inputs
// outside an image are 0. crop_windows int32 (n, 4). With RECOLOURS, the colours of each window are
// changed as recolourings float32 (n, 2) describes; the mean includes the pixels outside, and every
// operation is rounded, as on the host (dptrain/data/augmentation.py). Launched with one block per
// sample.
extern "C" __global__ void __launch_bounds__(1024)
    unpack_crop_windows(const Pixel* images, const int* crop_windows, const float* recolourings,
                        Number* input, int n, int channels, int height, int width, int rows,
                        int columns, float scale, float offset, MESSAGE_PARAMETERS) {
    wait_for_previous_kernel();
    __shared__ CropWindow window;
    __shared__ Recolouring recolouring;
    const int sample = blockIdx.x, size = channels * height * width;
    CropWindow own = {};
    Recolouring own_recolouring = {};
    if (threadIdx.x == 0 && sample < n) {
        own = reinterpret_cast<const CropWindow*>(crop_windows)[sample];
        if (RECOLOURS)
            own_recolouring = reinterpret_cast<const Recolouring*>(recolourings)[sample];
    }
    COPY_MESSAGE;
    if (threadIdx.x == 0) {
        window = own;
        recolouring = own_recolouring;
    }
    __syncthreads();
    if (!accepted || sample >= n) return;
    const auto pixel = [&](int i) {
        const int channel = i % channels, at = i / channels, along = at % width;
        const int row = window.row + at / width;
        const int column = window.column + (window.mirrored ? width - 1 - along : along);
        const bool inside = row >= 0 && row < rows && column >= 0 && column < columns;
        const long long line = ((long long)window.image * channels + channel) * rows + row;
        return inside ? to_input(images[line * columns + column], scale, offset) : 0.0f;
    };
    if (RECOLOURS) {
        for (int channel = 0; channel < channels; ++channel) {
            double sum = 0.0;
            for (int i = channel + threadIdx.x * channels; i < size; i += blockDim.x * channels)
                sum += pixel(i);
            const float mean = float(block_sum(sum) / (height * width));
            const float added = __fadd_rn(mean, recolouring.added);
            for (int i = channel + threadIdx.x * channels; i < size; i += blockDim.x * channels) {
                const float distance = __fmul_rn(__fadd_rn(pixel(i), -mean), recolouring.factor);
                input[sample * size + i] = from_float<Number>(__fadd_rn(distance, added));
            }
        }
        return;
    }
    constexpr int BATCH = 4;  // Loads of a thread in flight at a time.
    for (int begin = threadIdx.x; begin < size; begin += BATCH * blockDim.x) {
        float values[BATCH];
#pragma unroll
        for (int q = 0; q < BATCH; ++q) {
            const int i = begin + q * blockDim.x;
            values[q] = i < size ? pixel(i) : 0.0f;
        }
#pragma unroll
        for (int q = 0; q < BATCH; ++q) {
            const int i = begin + q * blockDim.x;
            if (i < size) input[sample * size + i] = from_float<Number>(values[q]);
        }
    }
}
