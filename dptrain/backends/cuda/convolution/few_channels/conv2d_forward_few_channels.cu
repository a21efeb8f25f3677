// Convolution forward for inputs with few channels, such as the first layer, with bias and
// epilogue; tf32 and bf16 only:
//
//     y[n, p, q, k] = epilogue(b[k] + Σ over (r, s, c) of x[n, h, w, c] w[r, s, c, k])
//     with h = p · stride_h + r − pad_top and w = q · stride_w + s − pad_left
//
// Algorithm: implicit GEMM with rows of the input in shared memory. Rows of C are filters, columns
// are pixels. One row of a patch, S pixels of C channels, is contiguous both in the patch and in
// the map. Rows of the map are therefore stored in shared memory unchanged, with zero padding, and
// each lane reads its fragment of B (patches of eight pixels) directly from there: consecutive
// pixels are PIXEL_PITCH elements apart, and the words of a patch row are contiguous. A 32-bit word
// holds two bfloat16 and must be aligned, so bf16 may need a second copy of each row, shifted by
// one element.
//
// There are few weights, so each warp keeps the weights of its WARP_M filters in registers.
// Persistent kernel: blocks iterate over strips of STRIP_LINES output lines; the rows of the next
// strip are prefetched into registers while the current one is multiplied. Words of A that pad the
// sum are 0 but are multiplied with elements of other pixels. An infinite input element may
// therefore turn outputs that do not depend on it into NaN.
//
// Launch: grid (persistent blocks, ceil(K / TILE_M)), THREADS threads;
// few_channel_tiles.py chooses the configuration.
//
// Source: Chetlur et al., "cuDNN: efficient primitives for deep learning", 2014, section 3
// (implicit GEMM).

#ifndef STRIP_LINES
#define TILE_M 32  // Filters of a block; a warp has WARP_M of them.
#define WARP_M 32
#define TILE_N 64  // 16 for each warp with pixels of its own.
#define WARP_N 16
#define TILE_K_WORDS 16
#define STRIP_LINES 2  // Output lines of a strip.
// A unit is what a warp multiplies at a time: so many groups of eight pixels of one output line, or
// of two if the epilogue pools.
#define UNIT_OCTETS 1
#define UNITS_ACROSS 1      // Units per line.
#define K_STEPS 2           // MMA instructions along the sum.
#define PATCH_ROW_WORDS 3   // 32-bit words of a row of a patch.
#define STRIP_INPUT_ROWS 4  // Rows of the map that a strip needs.
#define ROW_PITCH 32        // Words between consecutive rows in shared memory.
#define PIXEL_PITCH 1       // Elements between consecutive pixels.
#define ROW_COPIES 2        // Copies of each row in shared memory.
#define MIN_BLOCKS 1
#endif

#ifndef PRECISION
#define PRECISION 2  // This kernel exists for tf32 and bf16 only.
#endif
#define ACCUMULATORS_INCLUDE_BIAS 1
#include "conv2d.cuh"

constexpr int WORD_NUMBERS = 4 / sizeof(Number);   // Elements of a 32-bit word.
constexpr int LANE_FILTERS = WARP_M / 8;           // Adjacent filters of a lane.
constexpr int M16_TILES = WARP_M / 16;             // MMA tiles along M of a warp.
constexpr int UNIT_LINES = EPILOGUE == 2 ? 2 : 1;  // Output lines of a unit.
constexpr int WARPS = THREADS / 32;

static_assert(STRIP_LINES % UNIT_LINES == 0, "a strip consists of whole pooling windows");
static_assert(ROW_COPIES <= WORD_NUMBERS, "at most one copy per element of a word");
static_assert(TILE_M % WARP_M == 0 && WARP_N == 16,
              "WARP_M must divide TILE_M, and WARP_N must be 16");

__device__ inline int lane_index() { return threadIdx.x % 32; }
__device__ inline int warp_index() { return threadIdx.x / 32; }

// Output lines of a sample, beginning with `line`.
struct Strip {
    int sample, line;
};

// Rows of the next strip in registers, between global and shared memory. A warp loads
// whole rows.
struct RowStaging {
    static constexpr int WARP_ROWS = (STRIP_INPUT_ROWS + WARPS - 1) / WARPS,
                         BATCHES = (ROW_PITCH + 31) / 32;

    unsigned words[WARP_ROWS][BATCHES][ROW_COPIES];

    __device__ void load(const Number* x, const Geometry& g, const Strip& strip) {
#pragma unroll
        for (int i = 0; i < WARP_ROWS; ++i) {
            const int row = warp_index() + i * WARPS, y = strip.line * g.stride_h - g.pad_top + row;
            const bool exists = row < STRIP_INPUT_ROWS && unsigned(y) < unsigned(g.height);
            const int width = g.width * g.channels;
            const Number* const from = x + (exists ? (strip.sample * g.height + y) * width : 0);
#pragma unroll
            for (int batch = 0; batch < BATCHES; ++batch) {
                Number numbers[WORD_NUMBERS + ROW_COPIES - 1] = {};
#pragma unroll
                for (int n = 0; n < WORD_NUMBERS + ROW_COPIES - 1; ++n) {
                    const int place = (batch * 32 + lane_index()) * WORD_NUMBERS + n,
                              channel = place % PIXEL_PITCH;
                    const int at =
                        place / PIXEL_PITCH * g.channels + channel - g.pad_left * g.channels;
                    if (exists && channel < g.channels && unsigned(at) < unsigned(width))
                        numbers[n] = from[at];
                }
#pragma unroll
                for (int n = 0; n < ROW_COPIES; ++n)
#if PRECISION == 1
                    words[i][batch][n] = __float_as_uint(numbers[n]);
#else
                    words[i][batch][n] = numbers[n].bits | unsigned(numbers[n + 1].bits) << 16;
#endif
            }
        }
    }

    __device__ void store_shared(unsigned (&rows)[ROW_COPIES][STRIP_INPUT_ROWS][ROW_PITCH]) const {
#pragma unroll
        for (int i = 0; i < WARP_ROWS; ++i)
#pragma unroll
            for (int batch = 0; batch < BATCHES; ++batch) {
                const int row = warp_index() + i * WARPS, at = batch * 32 + lane_index();
                if (row >= STRIP_INPUT_ROWS || at >= ROW_PITCH) continue;
#pragma unroll
                for (int n = 0; n < ROW_COPIES; ++n)
                    rows[n][row][at] = round_word(words[i][batch][n]);
            }
    }

    static __device__ unsigned round_word(unsigned word) {
#if PRECISION == 1
        return __float_as_uint(to_tf32(__uint_as_float(word)));
#else
        return word;
#endif
    }
};

// Weights and biases of a lane's filters, beginning with `first`.
struct Filters {
    const float *w, *b;
    Geometry g;
    int first;

    __device__ Pack<float, LANE_FILTERS> bias() const {
        return *reinterpret_cast<const Pack<float, LANE_FILTERS>*>(b + first);
    }

    // Word q of the sum.
    __device__ Pack<unsigned, LANE_FILTERS> word(int q) const {
        Pack<float, LANE_FILTERS> numbers[WORD_NUMBERS] = {};
#pragma unroll
        for (int n = 0; n < WORD_NUMBERS; ++n) {
            const int row = q / PATCH_ROW_WORDS, at = q % PATCH_ROW_WORDS * WORD_NUMBERS + n,
                      width = g.s * g.channels;
            if (row < g.r && at < width)
                numbers[n] = *reinterpret_cast<const Pack<float, LANE_FILTERS>*>(
                    w + (row * width + at) * g.filters + first);
        }
        Pack<unsigned, LANE_FILTERS> words;
#pragma unroll
        for (int f = 0; f < LANE_FILTERS; ++f)
#if PRECISION == 1
            words.at[f] = __float_as_uint(to_tf32(numbers[0].at[f]));
#else
            words.at[f] = pack_bfloat16x2(numbers[0].at[f], numbers[1].at[f]);
#endif
        return words;
    }
};

// Weights in the lane's registers. For tensor cores, these are words t and t + 4 of each step for
// rows g and g + 8 of each sixteen filters; the rows are mapped to filters that are adjacent in
// memory.
struct FilterRegisters {
    Pack<float, LANE_FILTERS> bias;
#if __CUDA_ARCH__ >= 800
    unsigned words[K_STEPS][M16_TILES][4];
#else
    Filters filters;
#endif

    __device__ void read(const Filters& filters) {
        bias = filters.bias();
#if __CUDA_ARCH__ >= 800
#pragma unroll
        for (int i = 0; i < K_STEPS * 2; ++i) {
            const Pack<unsigned, LANE_FILTERS> word = filters.word(i * 4 + lane_index() % 4);
#pragma unroll
            for (int f = 0; f < LANE_FILTERS; ++f)
                words[i / 2][f / 2][i % 2 * 2 + f % 2] = word.at[f];
        }
#else
        this->filters = filters;
#endif
    }
};

// Offset of word q of the sum from the first word of a patch. Words beyond the last term are
// multiplied by zero weights.
__device__ inline int word_offset(const Geometry& g, int q) {
    const int number = q % PATCH_ROW_WORDS * WORD_NUMBERS;
    const int place = number / g.channels * PIXEL_PITCH + number % g.channels;
    return q < g.r * PATCH_ROW_WORDS ? q / PATCH_ROW_WORDS * ROW_PITCH + place / WORD_NUMBERS : 0;
}

// Offset of the patch of a pixel among the first eight of a line.
__device__ inline int patch_offset(const Geometry& g, int column) {
    const int number = column * g.stride_w * PIXEL_PITCH;
    return number % ROW_COPIES * (STRIP_INPUT_ROWS * ROW_PITCH) + number / WORD_NUMBERS;
}

// Accumulators of a unit: for each sixteen filters rows g and g + 8, for each eight pixels columns
// 2 t and 2 t + 1.
struct UnitAccumulators {
    float c[UNIT_LINES][UNIT_OCTETS][M16_TILES][4];

    __device__ float& at(int line, int octet, int filter, int pixel) {
        return c[line][octet][filter / 2][filter % 2 * 2 + pixel];
    }

    __device__ explicit UnitAccumulators(const Pack<float, LANE_FILTERS>& bias) {
#pragma unroll
        for (int i = 0; i < UNIT_LINES * UNIT_OCTETS * 2; ++i)
#pragma unroll
            for (int f = 0; f < LANE_FILTERS; ++f)
                at(i / 2 / UNIT_OCTETS, i / 2 % UNIT_OCTETS, f, i % 2) = bias.at[f];
    }

    // Words between consecutive lines, and between groups of eight pixels.
    static __device__ int down(const Geometry& g) { return g.stride_h * ROW_PITCH; }
    static __device__ int across(const Geometry& g) {
        return 8 * g.stride_w * PIXEL_PITCH / WORD_NUMBERS;
    }

#if __CUDA_ARCH__ >= 800
    // Multiply the patches that begin at `from`.
    __device__ void add(const FilterRegisters& weights, const unsigned* from, const Geometry& g) {
        const int lane = lane_index();
        from += patch_offset(g, lane / 4);
#pragma unroll
        for (int step = 0; step < K_STEPS; ++step) {
            const int first = word_offset(g, step * 8 + lane % 4);
            const int second = word_offset(g, step * 8 + 4 + lane % 4);
#pragma unroll
            for (int i = 0; i < UNIT_LINES * UNIT_OCTETS; ++i) {
                const unsigned* const own =
                    from + i / UNIT_OCTETS * down(g) + i % UNIT_OCTETS * across(g);
                const unsigned pixels[2] = {own[first], own[second]};
#pragma unroll
                for (int m = 0; m < M16_TILES; ++m)
                    mma(c[i / UNIT_OCTETS][i % UNIT_OCTETS][m], weights.words[step][m], pixels[0],
                        pixels[1]);
            }
        }
    }
#else
    // Scalar version for GPUs before sm_80 and for the emulator.
    __device__ void add(const FilterRegisters& weights, const unsigned* from, const Geometry& g) {
        for (int q = 0; q < K_STEPS * 8; ++q) {
            const Pack<unsigned, LANE_FILTERS> word = weights.filters.word(q);
            for (int i = 0; i < UNIT_LINES * UNIT_OCTETS * 2; ++i) {
                const int line = i / 2 / UNIT_OCTETS, octet = i / 2 % UNIT_OCTETS;
                const unsigned pixel = from[line * down(g) + octet * across(g) + word_offset(g, q) +
                                            patch_offset(g, lane_index() % 4 * 2 + i % 2)];
                for (int f = 0; f < LANE_FILTERS; ++f)
                    at(line, octet, f, i % 2) += product(word.at[f], pixel);
            }
        }
    }

    static __device__ float product(unsigned a, unsigned b) {
#if PRECISION == 1
        return __uint_as_float(a) * __uint_as_float(b);
#else
        return __uint_as_float(a << 16) * __uint_as_float(b << 16) +
               __uint_as_float(a & 0xFFFF0000u) * __uint_as_float(b & 0xFFFF0000u);
#endif
    }
#endif

    // Epilogue of a unit that begins at output (line, column), for the lane's filters from `filter`
    // on.
    __device__ void store_tile(const Geometry& g, int sample, int line, int column, int filter,
                               const StoreOutput& store) {
#pragma unroll
        for (int octet = 0; octet < UNIT_OCTETS; ++octet) {
            const int x = column + octet * 8 + lane_index() % 4 * 2;
            float values[UNIT_LINES * 2][LANE_FILTERS];
#pragma unroll
            for (int i = 0; i < UNIT_LINES * 2; ++i)
#pragma unroll
                for (int f = 0; f < LANE_FILTERS; ++f) values[i][f] = at(i / 2, octet, f, i % 2);
#if EPILOGUE == 2
            const int height = g.out_height / 2, width = g.out_width / 2;
            if (line / 2 < height && x / 2 < width)
                store.pooling_window((sample * height + line / 2) * width + x / 2, filter, values);
#else
#pragma unroll
            for (int i = 0; i < 2; ++i)
                if (line < g.out_height && x + i < g.out_width)
                    store.pixel((sample * g.out_height + line) * g.out_width + x + i, filter,
                                values[i]);
#endif
        }
    }
};

// x (samples, H, W, C); w (R, S, C, K) float32; b (K,) float32; y (samples, Ho, Wo, K), or
// (samples, Ho / 2, Wo / 2, K) if the epilogue pools; saved uint8 in the shape of y: the argmax if
// the epilogue pools, else unused.
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    conv2d_forward_few_channels(const Number* x, const float* w, const float* b, Number* y,
                                Saved* saved, int samples,
                                GEOMETRY_PARAMETERS EPILOGUE_PARAMETERS) {
    const Geometry g = GEOMETRY_ARGUMENTS;
    const int each = (g.out_height / UNIT_LINES * UNIT_LINES + STRIP_LINES - 1) / STRIP_LINES,
              strips = samples * each;
    const auto strip = [&](int i) { return Strip{i / each, i % each * STRIP_LINES}; };
    const int filter =
        blockIdx.y * TILE_M + warp_index() / WARPS_N * WARP_M + lane_index() / 4 * LANE_FILTERS;
    const StoreOutput store{
        y, saved, b, output_rows(g, samples), g.filters, output_rows(g, 1), EPILOGUE_ARGUMENTS};
    __shared__ unsigned rows[ROW_COPIES][STRIP_INPUT_ROWS][ROW_PITCH];
    FilterRegisters weights;
    if (PREFETCH_WEIGHTS) weights.read({w, b, g, filter});
    wait_for_previous_kernel();
    RowStaging next;
    next.load(x, g, strip(blockIdx.x));
    if (!PREFETCH_WEIGHTS) weights.read({w, b, g, filter});
    for (int i = blockIdx.x; i < strips; i += gridDim.x) {
        __syncthreads();
        next.store_shared(rows);
        __syncthreads();
        if (i + gridDim.x < strips) next.load(x, g, strip(i + gridDim.x));
        const Strip own = strip(i);
#pragma unroll 1
        for (int unit = warp_index() % WARPS_N; unit < STRIP_LINES / UNIT_LINES * UNITS_ACROSS;
             unit += WARPS_N) {
            const int line = unit / UNITS_ACROSS * UNIT_LINES,
                      octets = unit % UNITS_ACROSS * UNIT_OCTETS;
            UnitAccumulators acc(weights.bias);
            acc.add(weights, rows[0][line * g.stride_h] + octets * UnitAccumulators::across(g), g);
            acc.store_tile(g, own.sample, own.line + line, octets * 8, filter, store);
        }
    }
}
