// Unpacking of a staged minibatch: converts the message that the host staged
// (dptrain/backends/cuda/replica.py) to the input that the stages of a step read.
//
// The message may lie in pinned host memory. A read from there takes about as long as a kernel, and
// 28 ns per read if many threads read (one H200). The threads therefore read few words, and start
// all reads before they wait for one.

#include "precision.cuh"
#include "clock.cuh"
#include "dependent_launch.cuh"

// Sizes of images and of crop windows, so that the compiler divides by constants; 0 if they are
// arguments only.
#ifndef CHANNELS
#define CHANNELS 0
#define HEIGHT 0
#define WIDTH 0
#define ROWS 0
#define COLUMNS 0
#endif

// 1 if windows may have maps, and recolourings matrices. Without them, the reads of several pixels are
// started before one of them is used.
#ifndef GENERAL
#define GENERAL 0
#endif

// 1 if each window is mixed with the next one.
#ifndef MIXES
#define MIXES 0
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

// Images that are stored in another size, STORED_ROWS x STORED_COLUMNS, are resized: ROW_TAPS rows and
// COLUMN_TAPS columns become a pixel. 0 if images keep their size.
#ifndef ROW_TAPS
#define ROW_TAPS 0
#define COLUMN_TAPS 0
#define STORED_ROWS 0
#define STORED_COLUMNS 0
#endif

// The product and the sum are rounded, as on the host (dptrain/backends/pixels.py).
__device__ inline float to_input(float pixel, float scale, float offset) {
    return BYTES ? __fadd_rn(__fmul_rn(pixel, scale), offset) : pixel;
}

// A pixel of a resized map. row_taps (H, 1 + ROW_TAPS) has the first row, as an integer's bits, and
// the weights of rows; column_taps likewise. Rows are combined first, every operation is rounded, and
// the order is that of the host (dptrain/backends/resizing.py).
__device__ inline float resized(const Pixel* map, int row, int column, const float* row_taps,
                                const float* column_taps) {
    const float *rows = row_taps + row * (1 + ROW_TAPS),
                *columns = column_taps + column * (1 + COLUMN_TAPS);
    const Pixel* corner = map + __float_as_int(rows[0]) * STORED_COLUMNS + __float_as_int(columns[0]);
    float sum = 0.0f;
    for (int j = 0; j < COLUMN_TAPS; ++j) {
        float combined = 0.0f;
        for (int i = 0; i < ROW_TAPS; ++i)
            combined = __fadd_rn(combined, __fmul_rn(float(corner[i * STORED_COLUMNS + j]), rows[1 + i]));
        sum = __fadd_rn(sum, __fmul_rn(combined, columns[1 + j]));
    }
    return sum;
}

// Further arguments: targets (target_words,), weights (weight_words,), sample indices (sample_words,)
// and hyperparameters (6,), each with its staged copy, in 32-bit words.
//
// Unless `always` is set, nothing is copied if an earlier step left a loss in loss_sums (3,) that is
// not finite, so that its minibatch stays available for inspection. This kernel may run during the
// previous step: it then checks the step before that one, which is the last to have read the same
// input buffer. If `always` is set, such a loss is forgotten.
#define MESSAGE_PARAMETERS                                                                \
    const unsigned *targets, unsigned *target, int target_words, const unsigned *weights, \
        unsigned *weight, int weight_words, const unsigned *samples, unsigned *sample_ids, \
        int sample_words, const unsigned *staged_hyperparameters, unsigned *hyperparameters, \
        float *loss_sums, int always
#define COPY_MESSAGE                                                                 \
    const bool accepted = always || is_finite(loss_sums[0]);                         \
    if (always && thread_index() == 0 && !is_finite(loss_sums[0])) loss_sums[0] = 0; \
    copy_words({targets, target, target_words}, {weights, weight, weight_words},     \
               {samples, sample_ids, sample_words},                                  \
               {staged_hyperparameters, hyperparameters, 6}, accepted)

// Source and target of a copy in 32-bit words.
struct WordCopy {
    const unsigned* from;
    unsigned* to;
    int count;
};

__device__ inline int thread_index() { return blockIdx.x * blockDim.x + threadIdx.x; }

__device__ inline void copy_words(const WordCopy& first, const WordCopy& second,
                                  const WordCopy& third, const WordCopy& fourth, bool accepted) {
    const int most = max(max(first.count, second.count), max(third.count, fourth.count));
    for (int i = thread_index(); i < most; i += gridDim.x * blockDim.x) {
        const unsigned a = i < first.count ? first.from[i] : 0;
        const unsigned b = i < second.count ? second.from[i] : 0;
        const unsigned c = i < third.count ? third.from[i] : 0;
        const unsigned d = i < fourth.count ? fourth.from[i] : 0;
        if (!accepted) continue;
        if (i < first.count) first.to[i] = a;
        if (i < second.count) second.to[i] = b;
        if (i < third.count) third.to[i] = c;
        if (i < fourth.count) fourth.to[i] = d;
    }
}

// Copy the loss sums (count,) of a step to host memory (host_sums), and store the device clock in
// nanoseconds in *time. Launched with one block.
extern "C" __global__ void copy_loss_sums(const float* loss_sums, float* host_sums, int count,
                                          long long* time) {
    wait_for_previous_kernel();
    if (threadIdx.x < count) host_sums[threadIdx.x] = loss_sums[threadIdx.x];
    if (threadIdx.x == 0) *time = (long long)nanoseconds();
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

// A part of a window whose inputs become 0: its first row and column, and those after its last ones.
struct alignas(16) Cutout {
    int top, left, bottom, right;
};

// The position of a pixel in the image, row_down * y + row_right * x + row and likewise its column,
// and the half widths of the triangles that weight pixels around it, all in units of 1/65536 pixel
// (dptrain/data/loading/geometry.py).
struct alignas(16) Map {
    int row_down, row_right, row, column_down, column_right, column, high, wide;
};
constexpr int PIXEL_BITS = 16, HALF_PIXEL = 1 << 15;

// A crop window and the changes of its inputs.
struct Source {
    CropWindow window;
    Cutout cutout;
    Map map;
    Recolouring recolouring;
    float matrix[9];
};
constexpr int SOURCES = 1 + MIXES;  // Of an input: a window, and the one with which it is mixed.
constexpr int UNROLLED = 4 / SOURCES;  // Pixels of a thread whose reads are started at once.

// How an input is mixed: the weight of the second window in a box. Around the box it is 1 - weight.
struct Mixing {
    float weight, top, left, bottom, right;
};

// First and last pixel of an axis that a triangle around a position weights, and a pixel's weight.
__device__ inline int first_pixel(int position, int width) {
    return max(((position - width - HALF_PIXEL) >> PIXEL_BITS) + 1, 0);
}
__device__ inline int last_pixel(int position, int width, int length) {
    return min((position + width - HALF_PIXEL - 1) >> PIXEL_BITS, length - 1);
}
__device__ inline int pixel_weight(int pixel, int position, int width) {
    const int distance = (pixel << PIXEL_BITS) + HALF_PIXEL - position;
    return width - max(distance, -distance);
}

// The weighted mean of the pixels of a map, which pixel(row, column) returns, around a position, as
// on the host (dptrain/native/shifts.py).
template <typename Read>
__device__ inline float mean_around(int row, int column, int rows, int columns, const Map& map,
                                    Read pixel) {
    const int top = first_pixel(row, map.high), bottom = last_pixel(row, map.high, rows);
    const int left = first_pixel(column, map.wide), right = last_pixel(column, map.wide, columns);
    float sum = 0.0f, down = 0.0f, across = 0.0f;
    for (int i = top; i <= bottom; ++i) {
        float line = 0.0f;
        across = 0.0f;
        for (int j = left; j <= right; ++j) {
            const float weight = pixel_weight(j, column, map.wide);
            line += weight * pixel(i, j);
            across += weight;
        }
        const float weight = pixel_weight(i, row, map.high);
        sum += weight * line;
        down += weight;
    }
    return sum / (down * across);
}

// Sums of a channel are exact for 8-bit pixels: their inputs are multiples of 2^-24 and are added as
// integers, which all GPUs do fast. This holds for resized pixels, too, because 1 is subtracted from
// them. For other inputs they are sums of doubles.
#if BYTES
typedef long long Sum;
__device__ inline Sum term(float input) { return Sum(input * 16777216.0f); }
__device__ inline double total(Sum sum) { return double(sum) * (1.0 / 16777216.0); }
#else
typedef double Sum;
__device__ inline Sum term(float input) { return input; }
__device__ inline double total(Sum sum) { return sum; }
#endif

constexpr int GROUP = CHANNELS == 0 || CHANNELS > 4 ? 4 : CHANNELS;  // Channels read at a time.

// Replace the sums of threads by those of the block. The order of additions is fixed.
__device__ inline void block_sums(Sum (&sums)[GROUP]) {
    __shared__ Sum warps[32][GROUP];
    for (int half = 16; half > 0; half /= 2)
        for (int c = 0; c < GROUP; ++c) sums[c] += __shfl_down_sync(~0u, sums[c], half);
    __syncthreads();  // The sums of other channels have been read.
    if (threadIdx.x % 32 == 0)
        for (int c = 0; c < GROUP; ++c) warps[threadIdx.x / 32][c] = sums[c];
    __syncthreads();
    for (int c = 0; c < GROUP; ++c) {
        sums[c] = warps[0][c];
        for (int warp = 1; warp < blockDim.x / 32; ++warp) sums[c] += warps[warp][c];
    }
}

// Crop windows of the dataset cache images (M, C, rows, columns) to input (n, H, W, C); inputs
// outside an image are 0. crop_windows int32 (n, 4). If window_words is at least 8, cutouts int32 (n, 4)
// follow: the inputs that become 0 in the end; if it is 16, maps int32 (n, 8) follow, which replace
// rows, columns and mirrors of windows. If colour_words is not 0, the colours of each window are changed
// as recolourings float32 (n, 2) describes; the mean includes the pixels outside, and every operation is
// rounded, as on the host (dptrain/data/loading/augmentation.py). If it is 11, matrices float32 (n, 3, 3)
// follow, which multiply the channels of each pixel afterwards. With MIXES, all of these have n + 1 rows,
// and mixings float32 (n, mixing_words) describe how the inputs of window i are averaged with those of
// window i + 1: 1 number is the weight of the latter, 5 are a Mixing
// (dptrain/data/loading/mixup.py). Launched with one block per sample. If images are resized,
// (rows, columns) are those of resized images.
//
// The time of a block is mostly latency: all channels are read at once, and read again, from the
// L1 cache, when their means are known.
extern "C" __global__ void __launch_bounds__(1024)
    unpack_crop_windows(const Pixel* __restrict__ images, const int* crop_windows,
                        const float* recolourings, const float* mixings, Number* __restrict__ input,
                        int n, int num_channels, int window_height, int window_width, int image_rows,
                        int image_columns, const float* __restrict__ row_taps,
                        const float* __restrict__ column_taps, float scale, float offset,
                        int window_words, int colour_words, int mixing_words,
                        MESSAGE_PARAMETERS) {
    wait_for_previous_kernel();
    const bool cuts = window_words > 4, warps = GENERAL && window_words > 8;
    const bool recolours = colour_words > 0, blends = GENERAL && colour_words > 2;
    __shared__ Source sources[SOURCES];
    __shared__ float mixing_numbers[5];
    const int channels = CHANNELS ? CHANNELS : num_channels;
    const int height = CHANNELS ? HEIGHT : window_height, width = CHANNELS ? WIDTH : window_width;
    const int rows = CHANNELS ? ROWS : image_rows, columns = CHANNELS ? COLUMNS : image_columns;
    const int sample = blockIdx.x, pixels = height * width, described = n + MIXES;
    CropWindow own = {};
    Cutout own_cutout = {};
    Map own_map = {};
    Recolouring own_recolouring = {};
    float own_element = 0.0f, own_number = 0.0f;
    if (threadIdx.x < SOURCES && sample < n) {
        const int row = sample + threadIdx.x;
        own = reinterpret_cast<const CropWindow*>(crop_windows)[row];
        if (cuts) own_cutout = reinterpret_cast<const Cutout*>(crop_windows + 4 * described)[row];
        if (warps) own_map = reinterpret_cast<const Map*>(crop_windows + 8 * described)[row];
        if (recolours) own_recolouring = reinterpret_cast<const Recolouring*>(recolourings)[row];
    }
    if (blends && threadIdx.x < 9 * SOURCES && sample < n)
        own_element = recolourings[2 * described + 9 * sample + threadIdx.x];
    if (MIXES && threadIdx.x < mixing_words && sample < n)
        own_number = mixings[mixing_words * sample + threadIdx.x];
    COPY_MESSAGE;
    if (threadIdx.x < 9 * SOURCES) sources[threadIdx.x / 9].matrix[threadIdx.x % 9] = own_element;
    if (MIXES && threadIdx.x < 5) mixing_numbers[threadIdx.x] = own_number;
    if (threadIdx.x < SOURCES) {
        Source& source = sources[threadIdx.x];
        source.window = own;
        source.map = own_map;
        source.cutout = own_cutout;
        source.recolouring = own_recolouring;
    }
    __syncthreads();
    if (!accepted || sample >= n) return;
    const int stored = ROW_TAPS ? STORED_ROWS * STORED_COLUMNS : rows * columns;
    Number* inputs = input + (long long)sample * pixels * channels;
    // The pixels of a group of channels, as inputs.
    const auto read = [&](const Source& source, int first, int at, float(&values)[GROUP]) {
        const CropWindow& window = source.window;
        const Map& map = source.map;
        const Pixel* image = images + (long long)window.image * channels * stored;
        const int down = at / width, along = at % width;
        int row = window.row + down, bits = 0;
        int column = window.column + (window.mirrored ? width - 1 - along : along);
        if (warps) {
            bits = PIXEL_BITS;
            row = map.row_down * down + map.row_right * along + map.row;
            column = map.column_down * down + map.column_right * along + map.column;
        }
        const bool inside = row >= 0 && row < rows << bits && column >= 0 && column < columns << bits;
#pragma unroll
        for (int c = 0; c < GROUP; ++c) {
            const Pixel* channel = image + (first + c) * stored;
            values[c] = 0.0f;
            if (!inside || first + c >= channels) continue;
            const auto pixel = [&](int i, int j) {
                return ROW_TAPS ? resized(channel, i, j, row_taps, column_taps)
                                : float(channel[i * columns + j]);
            };
            const float found = warps ? mean_around(row, column, rows, columns, map, pixel)
                                      : pixel(row, column);
            values[c] = to_input(found, scale, offset);
        }
    };
    // The inputs of a group of channels at a pixel, before they are mixed.
    const auto change = [&](const Source& source, const float(&means)[GROUP], int first, int at,
                            float(&values)[GROUP]) {
        read(source, first, at, values);
        const int y = at / width, x = at % width;
        const Cutout& cutout = source.cutout;
        const bool is_cut = cuts && y >= cutout.top && y < cutout.bottom && x >= cutout.left &&
                            x < cutout.right;
#pragma unroll
        for (int c = 0; c < GROUP && recolours; ++c) {
            const float distance = __fadd_rn(values[c], -means[c]);
            const float added = __fadd_rn(means[c], source.recolouring.added);
            values[c] = __fadd_rn(__fmul_rn(distance, source.recolouring.factor), added);
        }
        if (GROUP >= 3 && blends) {
            const float red = values[0], green = values[1], blue = values[GROUP >= 3 ? 2 : 0];
            const float* matrix = source.matrix;
#pragma unroll
            for (int c = 0; c < min(GROUP, 3); ++c)
                values[c] = matrix[3 * c] * red + matrix[3 * c + 1] * green + matrix[3 * c + 2] * blue;
        }
#pragma unroll
        for (int c = 0; c < GROUP; ++c)
            if (is_cut) values[c] = 0.0f;
    };
    Mixing mixing = {mixing_numbers[0], 0.0f, 0.0f, float(height), float(width)};
    if (mixing_words > 1)
        mixing = {mixing_numbers[0], mixing_numbers[1], mixing_numbers[2], mixing_numbers[3],
                  mixing_numbers[4]};
    for (int first = 0; first < channels; first += GROUP) {
        float means[SOURCES][GROUP], values[GROUP];
#pragma unroll
        for (int i = 0; i < SOURCES && recolours; ++i) {
            Sum sums[GROUP] = {};
#pragma unroll 4
            for (int at = threadIdx.x; at < pixels; at += blockDim.x) {
                read(sources[i], first, at, values);
                for (int c = 0; c < GROUP; ++c) sums[c] += term(values[c]);
            }
            block_sums(sums);
            for (int c = 0; c < GROUP; ++c) means[i][c] = float(total(sums[c]) / pixels);
        }
#pragma unroll UNROLLED
        for (int at = threadIdx.x; at < pixels; at += blockDim.x) {
            change(sources[0], means[0], first, at, values);
            if (MIXES) {
                float partner[GROUP];
                change(sources[SOURCES - 1], means[SOURCES - 1], first, at, partner);
                const int y = at / width, x = at % width;
                const bool inside = y >= mixing.top && y < mixing.bottom && x >= mixing.left &&
                                    x < mixing.right;
                const float weight = inside ? mixing.weight : __fadd_rn(1.0f, -mixing.weight);
                const float rest = __fadd_rn(1.0f, -weight);
#pragma unroll
                for (int c = 0; c < GROUP; ++c)
                    values[c] = __fadd_rn(__fmul_rn(values[c], rest), __fmul_rn(partner[c], weight));
            }
#pragma unroll
            for (int c = 0; c < GROUP; ++c)
                if (first + c < channels)
                    inputs[at * channels + first + c] = from_float<Number>(values[c]);
        }
    }
}
