// A message to the device (dptrain/backends/cuda/replica.py) becomes what the stages of a step read.

#include "number.cuh"

// Copies of `count` 4-byte words.
__device__ inline void copy_words(const unsigned* from, unsigned* to, int count, int i, int threads) {
    for (; i < count; i += threads) to[i] = from[i];
}

// x (n, C, H·W) as it came into input (n, H·W, C), targets, sample numbers and the step's numbers.
// Neighbouring threads read x from few places, since images have few channels.
//
// Unless `always`, nothing is taken where the step before left a loss in `sums` that is not finite:
// its batch stays, so that it can be looked at.
extern "C" __global__ void take_batch(
    const float* x, Number* input, int n, int channels, int pixels, const unsigned* targets,
    unsigned* target, int target_words, const unsigned* samples, unsigned* kept_samples,
    int sample_words, const unsigned* numbers, unsigned* kept_numbers, const float* sums,
    int always) {
    if (!always && !is_finite(sums[0])) return;
    const int i = blockIdx.x * blockDim.x + threadIdx.x, threads = gridDim.x * blockDim.x;
    if (i < n * channels * pixels) {
        const int channel = i % channels, pixel = i / channels % pixels;
        const int sample = i / channels / pixels;
        input[i] = from_float<Number>(x[(sample * channels + channel) * pixels + pixel]);
    }
    copy_words(targets, target, target_words, i, threads);
    copy_words(samples, kept_samples, sample_words, i, threads);
    copy_words(numbers, kept_numbers, 4, i, threads);
}
