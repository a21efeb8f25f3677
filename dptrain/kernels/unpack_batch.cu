// A message to the device (dptrain/backends/cuda/replica.py) becomes what the stages of a step
// read. It may lie in memory of the host, from where words take as long to come as a kernel, and 28
// ns each if many threads ask: so they ask for little, and for all of it before they wait for any.

#include "precision.cuh"
#include "dependent_launch.cuh"

// What the kernels here take besides the batch: targets, sample numbers and the step's numbers.
//
// Unless `always`, nothing is taken where the step before left a loss in `sums` that is not finite:
// its batch stays, so that it can be looked at.
#define MESSAGE                                                                                \
    const unsigned *targets, unsigned *target, int target_words, const unsigned *samples,      \
        unsigned *kept_samples, int sample_words, const unsigned *numbers,                     \
        unsigned *kept_numbers, const float *sums, int always
#define TAKE_MESSAGE                                                                           \
    const bool taken = always || is_finite(sums[0]);                                           \
    take_words({targets, target, target_words}, {samples, kept_samples, sample_words},         \
               {numbers, kept_numbers, 4}, taken)

// Words of 4 bytes and where they go.
struct Words {
    const unsigned* from;
    unsigned* to;
    int count;
};

__device__ inline int own_index() { return blockIdx.x * blockDim.x + threadIdx.x; }

__device__ inline void take_words(const Words& one, const Words& other, const Words& third,
                                  bool taken) {
    const int most = max(max(one.count, other.count), third.count);
    for (int i = own_index(); i < most; i += gridDim.x * blockDim.x) {
        const unsigned a = i < one.count ? one.from[i] : 0;
        const unsigned b = i < other.count ? other.from[i] : 0;
        const unsigned c = i < third.count ? third.from[i] : 0;
        if (!taken) continue;
        if (i < one.count) one.to[i] = a;
        if (i < other.count) other.to[i] = b;
        if (i < third.count) third.to[i] = c;
    }
}

// A step's shared sums to memory of the host.
extern "C" __global__ void copy_loss_sums(const float* sums, float* told, int count) {
    wait_for_previous_kernel();
    if (threadIdx.x < count) told[threadIdx.x] = sums[threadIdx.x];
}

// x (n, C, H·W) as it came into input (n, H·W, C). Neighbouring threads read from few places, since
// images have few channels.
extern "C" __global__ void unpack_batch(const float* x, Number* input, int n, int channels,
                                      int pixels, MESSAGE) {
    wait_for_previous_kernel();
    TAKE_MESSAGE;
    const int i = own_index();
    if (!taken || i >= n * channels * pixels) return;
    const int channel = i % channels, pixel = i / channels % pixels, sample = i / channels / pixels;
    input[i] = from_float<Number>(x[(sample * channels + channel) * pixels + pixel]);
}

// A part of a picture: where it begins, and whether it is mirrored.
struct alignas(16) Place {
    int picture, row, column, mirrored;
};

// Parts of pictures (M, C, rows, columns) into input (n, H, W, C), a block each; 0 lies outside of a
// picture.
extern "C" __global__ void __launch_bounds__(1024)
    unpack_crop_windows(const float* pictures, const int* places, Number* input, int n, int channels,
                int height, int width, int rows, int columns, MESSAGE) {
    wait_for_previous_kernel();
    __shared__ Place place;
    const int sample = blockIdx.x, size = channels * height * width;
    Place own = {};
    if (threadIdx.x == 0 && sample < n) own = reinterpret_cast<const Place*>(places)[sample];
    TAKE_MESSAGE;
    if (threadIdx.x == 0) place = own;
    __syncthreads();
    if (!taken || sample >= n) return;
    const auto pixel = [&](int i) {
        const int channel = i % channels, at = i / channels, along = at % width;
        const int row = place.row + at / width;
        const int column = place.column + (place.mirrored ? width - 1 - along : along);
        const bool inside = row >= 0 && row < rows && column >= 0 && column < columns;
        const long long line = (place.picture * channels + channel) * rows + row;
        return inside ? pictures[line * columns + column] : 0.0f;
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
