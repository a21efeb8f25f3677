// A message to the device (dptrain/backends/cuda/replica.py) becomes what the stages of a step
// read. It may lie in memory of the host, from where words take as long to come as a kernel, and 28
// ns each if many threads ask: so they ask for little, and for all of it before they wait for any.

#include "precision.cuh"
#include "dependent_launch.cuh"

// What the kernels here take besides the batch: targets, sample numbers and the step's numbers.
//
// Unless `always`, nothing is taken where the step before left a loss in `sums` that is not finite:
// its batch stays, so that it can be looked at.
#define MESSAGE_PARAMETERS                                                                \
    const unsigned *targets, unsigned *target, int target_words, const unsigned *samples, \
        unsigned *sample_ids, int sample_words, const unsigned *staged_hyperparameters,   \
        unsigned *hyperparameters, const float *loss_sums, int always
#define COPY_MESSAGE                                                                 \
    const bool accepted = always || is_finite(loss_sums[0]);                         \
    copy_words({targets, target, target_words}, {samples, sample_ids, sample_words}, \
               {staged_hyperparameters, hyperparameters, 4}, accepted)

// Words of 4 bytes and where they go.
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

// A step's shared sums to memory of the host.
extern "C" __global__ void copy_loss_sums(const float* loss_sums, float* host_sums, int count) {
    wait_for_previous_kernel();
    if (threadIdx.x < count) host_sums[threadIdx.x] = loss_sums[threadIdx.x];
}

// x (n, C, H·W) as it came into input (n, H·W, C). Neighbouring threads read from few places, since
// images have few channels.
extern "C" __global__ void unpack_batch(const float* x, Number* input, int n, int channels,
                                        int pixels, MESSAGE_PARAMETERS) {
    wait_for_previous_kernel();
    COPY_MESSAGE;
    const int i = thread_index();
    if (!accepted || i >= n * channels * pixels) return;
    const int channel = i % channels, pixel = i / channels % pixels, sample = i / channels / pixels;
    input[i] = from_float<Number>(x[(sample * channels + channel) * pixels + pixel]);
}

// A part of a picture: where it begins, and whether it is mirrored.
struct alignas(16) CropWindow {
    int image, row, column, mirrored;
};

// Parts of pictures (M, C, rows, columns) into input (n, H, W, C), a block each; 0 lies outside of a
// picture.
extern "C" __global__ void __launch_bounds__(1024)
    unpack_crop_windows(const float* images, const int* crop_windows, Number* input, int n,
                        int channels, int height, int width, int rows, int columns,
                        MESSAGE_PARAMETERS) {
    wait_for_previous_kernel();
    __shared__ CropWindow window;
    const int sample = blockIdx.x, size = channels * height * width;
    CropWindow own = {};
    if (threadIdx.x == 0 && sample < n)
        own = reinterpret_cast<const CropWindow*>(crop_windows)[sample];
    COPY_MESSAGE;
    if (threadIdx.x == 0) window = own;
    __syncthreads();
    if (!accepted || sample >= n) return;
    const auto pixel = [&](int i) {
        const int channel = i % channels, at = i / channels, along = at % width;
        const int row = window.row + at / width;
        const int column = window.column + (window.mirrored ? width - 1 - along : along);
        const bool inside = row >= 0 && row < rows && column >= 0 && column < columns;
        const long long line = (window.image * channels + channel) * rows + row;
        return inside ? images[line * columns + column] : 0.0f;
    };
    constexpr int BATCH = 4;  // Numbers of a thread that are on their way at a time.
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
