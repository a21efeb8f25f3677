// Convolutions from maps of few channels, such as first ones, forward.
//
// A row of a patch, S pixels of C channels, is S C numbers side by side, and so it is in a row of
// the map. So rows of the map lie in shared memory as they are, zeros beside them included, and a
// lane reads its words of B, the patches of eight pixels, right there: C numbers lie between a
// pixel and the next, words of a row follow each other. A word of bfloat16 is two of them and must
// begin with an even one; so rows have a second copy, a number further on.
//
// Filters are rows of A. There are few weights: a warp keeps those of its WARP_M filters in
// registers for good. Blocks take strips of STRIP_LINES lines of outputs in turns; the next one's rows
// are on their way to registers while one is multiplied. Words of A that are no weights are 0, and
// meet numbers of other pixels: an infinite one makes outputs NaN that it has no part in.

#ifndef STRIP_LINES
#define TILE_M 32  // Filters of a block; of WARP_M of them a warp.
#define WARP_M 32
#define TILE_N 64  // 16 a warp that has pixels of its own.
#define WARP_N 16
#define TILE_K_WORDS 16
#define STRIP_LINES 2       // Of outputs, of a strip.
#define UNIT_OCTETS 1       // Of pixels of a line, or of two, that a warp has at a time: its unit.
#define UNITS_ACROSS 1      // Units side by side.
#define K_STEPS 2           // Instructions of tensor cores that the sum is.
#define PATCH_ROW_WORDS 3   // Of a row of a patch.
#define STRIP_INPUT_ROWS 4  // Of the map, that patches of a strip are of,
#define ROW_PITCH 32        // and words from one to the next.
#define PIXEL_PITCH 1       // Numbers from a pixel to the next, and
#define ROW_COPIES 2        // how often rows lie there.
#define MIN_BLOCKS 1
#endif

#ifndef PRECISION
#define PRECISION 2  // There are none in float32.
#endif
#define ACCUMULATORS_INCLUDE_BIAS 1
#include "conv2d.cuh"

constexpr int WORD_NUMBERS = 4 / sizeof(Number);   // Numbers of a word.
constexpr int LANE_FILTERS = WARP_M / 8;           // Filters of a lane, side by side.
constexpr int M16_TILES = WARP_M / 16;             // Of a warp.
constexpr int UNIT_LINES = EPILOGUE == 2 ? 2 : 1;  // Lines of a unit.
constexpr int WARPS = THREADS / 32;

static_assert(STRIP_LINES % UNIT_LINES == 0, "a strip has whole windows");
static_assert(ROW_COPIES <= WORD_NUMBERS, "a copy for each place in a word");
static_assert(TILE_M % WARP_M == 0 && WARP_N == 16, "warps share filters and pixels");

__device__ inline int lane_index() { return threadIdx.x % 32; }
__device__ inline int warp_index() { return threadIdx.x / 32; }

// Lines of outputs of a sample, from `line` on.
struct Strip {
    int sample, line;
};

// Words on their way to shared memory. A warp brings whole rows.
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

// Weights and biases of a lane's filters, from `first` on.
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

// What a lane keeps of them. For tensor cores words t and t + 4 of each step: of rows g and g + 8
// of each sixteen filters, which are neighbours in memory.
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

// Where word q of the sum lies behind the first of a patch. Words behind the last are not used.
__device__ inline int word_offset(const Geometry& g, int q) {
    const int number = q % PATCH_ROW_WORDS * WORD_NUMBERS;
    const int place = number / g.channels * PIXEL_PITCH + number % g.channels;
    return q < g.r * PATCH_ROW_WORDS ? q / PATCH_ROW_WORDS * ROW_PITCH + place / WORD_NUMBERS : 0;
}

// Where the patch of a pixel of the first eight of a line begins.
__device__ inline int patch_offset(const Geometry& g, int column) {
    const int number = column * g.stride_w * PIXEL_PITCH;
    return number % ROW_COPIES * (STRIP_INPUT_ROWS * ROW_PITCH) + number / WORD_NUMBERS;
}

// A lane's sums of a unit: of each sixteen filters rows g and g + 8, of eight pixels 2 t and 2 t +
// 1.
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

    // Words from one line, and from eight pixels, to the next.
    static __device__ int down(const Geometry& g) { return g.stride_h * ROW_PITCH; }
    static __device__ int across(const Geometry& g) {
        return 8 * g.stride_w * PIXEL_PITCH / WORD_NUMBERS;
    }

#if __CUDA_ARCH__ >= 800
    // Of patches that begin at `from`.
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
    // The same, number by number.
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

    // Gives `store` the outputs of lines from `line` and of columns from `column` on, of filters
    // from `filter` on.
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

// y = convolution + bias and what follows, for `samples` samples.
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
