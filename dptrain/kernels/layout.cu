// A message to the device (dptrain/backends/cuda/replica.py) becomes what the stages of a step
// read.

#include "number.cuh"
#include "order.cuh"

// Copies of `count` 4-byte words.
__device__ inline void copy_words(const unsigned* from, unsigned* to, int count, int i,
                                  int threads) {
    for (; i < count; i += threads) to[i] = from[i];
}

// What the kernels here take besides the batch: targets, sample numbers and the step's numbers.
//
// Unless `always`, nothing is taken where the step before left a loss in `sums` that is not finite:
// its batch stays, so that it can be looked at.
#define MESSAGE                                                                                \
    const unsigned *targets, unsigned *target, int target_words, const unsigned *samples,      \
        unsigned *kept_samples, int sample_words, const unsigned *numbers,                     \
        unsigned *kept_numbers, const float *sums, int always
#define TAKE_MESSAGE                                                                           \
    const int i = blockIdx.x * blockDim.x + threadIdx.x;                                       \
    if (!always && !is_finite(sums[0])) return;                                                \
    copy_words(targets, target, target_words, i, gridDim.x * blockDim.x);                      \
    copy_words(samples, kept_samples, sample_words, i, gridDim.x * blockDim.x);                \
    copy_words(numbers, kept_numbers, 4, i, gridDim.x * blockDim.x)

// x (n, C, H·W) as it came into input (n, H·W, C). Neighbouring threads read from few places, since
// images have few channels.
extern "C" __global__ void take_batch(const float* x, Number* input, int n, int channels,
                                      int pixels, MESSAGE) {
    in_order();
    TAKE_MESSAGE;
    if (i >= n * channels * pixels) return;
    const int channel = i % channels, pixel = i / channels % pixels, sample = i / channels / pixels;
    input[i] = from_float<Number>(x[(sample * channels + channel) * pixels + pixel]);
}

// Parts of pictures (M, C, rows, columns) into input (n, H, W, C): places (n, 4) have the picture,
// the row and the column where its part begins, and whether that is mirrored; 0 lies outside.
extern "C" __global__ void take_places(const float* pictures, const int* places, Number* input,
                                       int n, int channels, int height, int width, int rows,
                                       int columns, MESSAGE) {
    in_order();
    TAKE_MESSAGE;
    if (i >= n * channels * height * width) return;
    const int channel = i % channels, pixel = i / channels, line = pixel / width;
    const int* place = places + line / height * 4;
    const int along = pixel % width;
    const int row = place[1] + line % height;
    const int column = place[2] + (place[3] ? width - 1 - along : along);
    const bool inside = row >= 0 && row < rows && column >= 0 && column < columns;
    const int line_of_picture = (place[0] * channels + channel) * rows + row;
    input[i] = from_float<Number>(inside ? pictures[(long long)line_of_picture * columns + column]
                                         : 0.0f);
}
