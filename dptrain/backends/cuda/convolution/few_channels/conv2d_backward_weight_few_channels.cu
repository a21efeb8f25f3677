// Gradient of the weights of a first layer: few input channels, 16 or 32 filters, stride 1, ReLU
// and max pooling with 2 × 2 windows (implicit GEMM with mma.sync).
//
//     dw[r, s, c, k] = Σ over windows w, members m of dz[w, m, k] x[w, m_r + r, m_s + s, c]
//     db[k]          = Σ over windows w, members m of dz[w, m, k]
//
// dz[w, m, k] is dy[w, k] if the argmax is m, otherwise 0. The sum runs over windows, so a fragment
// of dy is loaded once and masked for each of the four members.
//
// Rows of the product are filters. Columns are the elements of a *patch line*: (S + 1) · C adjacent
// numbers of an input line, which the window and the taps of one filter row cover, padded to
// PATCH_ELEMENTS. Members (m_r, m_s) use lines m_r + r, so members with equal m_s share the
// accumulators of filter row r, and the two values of m_s are added at the end with a shift of C
// elements. The last element of a patch line is 1 and yields the gradient of the bias.
//
// A block iterates over strips of STRIP_LINES lines of windows of a sample. Input lines, dy and
// argmax are copied asynchronously, one strip ahead; then the input lines are expanded to patch
// lines, which are aligned to 16 bytes. Warps divide the windows of a strip; their accumulators are
// added at the end in a fixed order.
//
// Launch: grid (1, 1, splits), WARPS · 32 threads; dynamic shared memory as computed by
// few_channel_wgrad_tiles.py.

#ifndef PRECISION
#define PRECISION 2  // This kernel exists for tf32 and bf16 only.
#endif
#ifndef PATCH_ELEMENTS
#define EPILOGUE 2
#define TILE_M 16
#define TILE_N 16
#define WARP_M 16
#define WARP_N 16
#define TILE_K_WORDS 16
#define WARPS 8
#define MIN_BLOCKS 2
#define TAP_ROWS 3
#define TAP_COLUMNS 3
#define CHANNELS 3
#define PAD_LEFT 1
#define LINE_WINDOWS 16
#define STRIP_LINES 4
#define PATCH_ELEMENTS 16
#define INPUT_PITCH 224
#define COPY_BYTES 16
#endif

#define NEEDS_TENSOR_CORES 1

#include "epilogue.cuh"
#include "cp_async.cuh"
#include "geometry.cuh"
#include "micro_shards.cuh"

#if TENSOR_CORES

static_assert(EPILOGUE == 2, "the layer is pooled");

constexpr int FILTERS = TILE_M, M_TILES = FILTERS / 16, ALL_THREADS = WARPS * 32;
constexpr int LINE_ELEMENTS = (TAP_COLUMNS + 1) * CHANNELS, N8_TILES = PATCH_ELEMENTS / 8;
static_assert(LINE_ELEMENTS < PATCH_ELEMENTS && PATCH_ELEMENTS % 8 == 0,
              "one more element yields the gradient of the bias");
// Lines of a strip's input, windows of a strip, and windows of an MMA instruction.
constexpr int INPUT_LINES = 2 * STRIP_LINES + TAP_ROWS - 1,
              STRIP_WINDOWS = STRIP_LINES * LINE_WINDOWS,
              STEPS = (STRIP_WINDOWS + STEP_K - 1) / STEP_K;
constexpr int MARGIN = 16;  // Bytes before an input line, which contain its padding.
constexpr int SIZE = sizeof(Number);

// Rows of PACKS packs of 16 bytes, swizzled such that a warp's reads of a fragment use all banks.
template <int PACKS> __device__ inline int swizzled(int row, int pack) {
    if (PRECISION == 2 && PACKS == 2) pack ^= row >> 2 & 1;
    if (PRECISION == 2 && PACKS == 4) pack ^= row >> 1 & 3;
    if (PRECISION == 1 && PACKS == 4) pack ^= (row >> 1 & 1) << 1;
    if (PRECISION == 1 && PACKS == 8) pack ^= (row & 3) << 1;
    return (row * PACKS + pack) * PACK;
}
constexpr int PATCH_PACKS = PATCH_ELEMENTS / PACK, FILTER_PACKS = FILTERS / PACK;

template <int PACKS> __device__ inline int element_at(int row, int i) {
    return swizzled<PACKS>(row, i / PACK) + i % PACK;
}

// Shared memory of a strip that is copied.
struct Buffers {
    char* input;            // (INPUT_LINES, INPUT_PITCH bytes)
    Number* dy;             // (windows, FILTERS), swizzled
    unsigned char* argmax;  // (windows, FILTERS)

    static constexpr int WINDOWS = STEPS * STEP_K, INPUT = INPUT_LINES * INPUT_PITCH,
                         DY = WINDOWS * FILTERS * SIZE, BYTES = INPUT + DY + WINDOWS * FILTERS;
    __device__ static Buffers at(char* memory) {
        return {memory, reinterpret_cast<Number*>(memory + INPUT),
                reinterpret_cast<unsigned char*>(memory + INPUT + DY)};
    }
};

// Start the copies of strip `strip` of a sample.
__device__ inline void start_copies(const Geometry& g, const Number* x, const Number* dy,
                                    const Saved* argmax, int sample, int strip,
                                    const Buffers& to) {
    const int line_bytes = g.width * CHANNELS * SIZE;
    const int pieces = line_bytes / COPY_BYTES, first = strip * 2 * STRIP_LINES - g.pad_top;
    const char* const image =
        reinterpret_cast<const char*>(x + sample * g.height * g.width * CHANNELS);
    for (int i = threadIdx.x; i < INPUT_LINES * pieces; i += ALL_THREADS) {
        const int line = i / pieces, at = i % pieces * COPY_BYTES;
        const bool there = unsigned(first + line) < unsigned(g.height);
        cp_async<COPY_BYTES>(to.input + line * INPUT_PITCH + MARGIN + at,
                             image + (there ? (first + line) * line_bytes + at : 0), there);
    }
    const int all = g.out_height / 2 * LINE_WINDOWS, begin = strip * STRIP_WINDOWS;
    const int base = (sample * all + begin) * FILTERS, inside = all - begin;
    for (int i = threadIdx.x; i < STRIP_WINDOWS * FILTER_PACKS; i += ALL_THREADS) {
        const int window = i / FILTER_PACKS;
        const bool there = window < inside;
        cp_async<16>(to.dy + swizzled<FILTER_PACKS>(window, i % FILTER_PACKS),
                     dy + (there ? base + i * PACK : 0), there);
    }
    for (int i = threadIdx.x; i < STRIP_WINDOWS * FILTERS / 16; i += ALL_THREADS) {
        const bool there = i * 16 / FILTERS < inside;
        cp_async<16>(to.argmax + i * 16, argmax + (there ? base + i * 16 : 0), there);
    }
    cp_async_commit();
}

// Expand the input lines to patch lines: row (line, window column) of `patches`.
__device__ inline void expand(const Geometry& g, const char* input, Number* patches) {
    for (int row = threadIdx.x; row < INPUT_LINES * LINE_WINDOWS; row += ALL_THREADS) {
        const int line = row / LINE_WINDOWS, window = row % LINE_WINDOWS;
        const char* const from =
            input + line * INPUT_PITCH + MARGIN + (2 * window - PAD_LEFT) * CHANNELS * SIZE;
        Number values[PATCH_ELEMENTS];
#if PRECISION == 2
        // Pairs of elements begin at words, or half a word later.
        constexpr int SHIFT = PAD_LEFT * CHANNELS % 2, WORDS = (LINE_ELEMENTS + 1) / 2 + SHIFT;
        unsigned words[WORDS];
#pragma unroll
        for (int q = 0; q < WORDS; ++q)
            words[q] = reinterpret_cast<const unsigned*>(from - 2 * SHIFT)[q];
#pragma unroll
        for (int e = 0; e < PATCH_ELEMENTS; ++e) {
            const int half = e + SHIFT;
            values[e].bits = e < LINE_ELEMENTS
                                 ? (unsigned short)(words[half / 2] >> half % 2 * 16)
                                 : (unsigned short)(e == PATCH_ELEMENTS - 1 ? 0x3F80 : 0);
        }
#else
#pragma unroll
        for (int e = 0; e < PATCH_ELEMENTS; ++e)
            values[e] = e < LINE_ELEMENTS ? reinterpret_cast<const float*>(from)[e]
                                          : float(e == PATCH_ELEMENTS - 1);
#endif
#pragma unroll
        for (int q = 0; q < PATCH_PACKS; ++q) {
            Pack<Number> pack;
#pragma unroll
            for (int v = 0; v < PACK; ++v) pack.at[v] = values[q * PACK + v];
            *reinterpret_cast<Pack<Number>*>(patches + swizzled<PATCH_PACKS>(row, q)) =
                round_operands(pack);
        }
    }
}

// First row of patch lines of a window of the strip.
__device__ inline int first_row(int window) {
    const int inside = min(window, STRIP_WINDOWS - 1);
    return inside / LINE_WINDOWS * 2 * LINE_WINDOWS + inside % LINE_WINDOWS;
}

// Accumulators of a warp: filters × elements of patch lines, for each m_s and filter row.
struct Sums {
    float c[2][TAP_ROWS][M_TILES][N8_TILES][4] = {};

    // Multiply the windows of a step.
    __device__ void add(const Buffers& strip, const Number* patches, int step) {
        unsigned a[4][M_TILES][4];
#pragma unroll
        for (int i = 0; i < M_TILES; ++i) load_members(a, strip, step, i);
        const int lane = threadIdx.x % 32;
#if PRECISION == 2
        const int row = first_row(step * STEP_K + lane % 16);
#else
        const int rows[2] = {first_row(step * STEP_K + lane % 4),
                             first_row(step * STEP_K + lane % 4 + 4)};
#endif
#pragma unroll
        for (int line = 0; line <= TAP_ROWS; ++line) {
            unsigned b[(N8_TILES + 1) / 2 * 2][2];
#if PRECISION == 2
#pragma unroll
            for (int j = 0; j < N8_TILES; j += 2) {
                unsigned words[4];
                const int pack = min(j + lane / 16, N8_TILES - 1);
                ldmatrix_x4_transposed(
                    words, patches + swizzled<PATCH_PACKS>(row + line * LINE_WINDOWS, pack));
#pragma unroll
                for (int q = 0; q < 4; ++q) b[j + q / 2][q % 2] = words[q];
            }
#else
#pragma unroll
            for (int j = 0; j < N8_TILES; ++j)
#pragma unroll
                for (int q = 0; q < 2; ++q)
                    b[j][q] = __float_as_uint(patches[element_at<PATCH_PACKS>(
                        rows[q] + line * LINE_WINDOWS, j * 8 + lane / 4)]);
#endif
#pragma unroll
            for (int m = 0; m < 4; ++m) {
                const int r = line - m / 2;
                if (r < 0 || r >= TAP_ROWS) continue;
#pragma unroll
                for (int i = 0; i < M_TILES; ++i)
#pragma unroll
                    for (int j = 0; j < N8_TILES; ++j)
                        mma(c[m % 2][r][i][j], a[m][i], b[j][0], b[j][1]);
            }
        }
    }

   private:
    // Load 16 filters of dy, masked for each member.
    static __device__ void load_members(unsigned (&a)[4][M_TILES][4], const Buffers& strip,
                                        int step, int i) {
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, first = step * STEP_K;
#if PRECISION == 2
        unsigned words[4];
        ldmatrix_x4_transposed(
            words, strip.dy + swizzled<FILTER_PACKS>(first + lane % 8 + lane / 16 * 8,
                                                     i * 2 + lane / 8 % 2));
#pragma unroll
        for (int q = 0; q < 4; ++q) {
            const unsigned char* const marks =
                strip.argmax + (first + q / 2 * 8 + 2 * t) * FILTERS + i * 16 + q % 2 * 8 + g;
            // Bit m of each half is set if its maximum is member m.
            const unsigned members =
                shifted(1u, marks[0]) | shifted(0x10000u, marks[FILTERS]);
#pragma unroll
            for (int m = 0; m < 4; ++m)
                a[m][i][q] = words[q] & half_masks(members << 7 - m);
        }
#else
#pragma unroll
        for (int q = 0; q < 4; ++q) {
            const int window = first + q / 2 * 4 + t, filter = i * 16 + q % 2 * 8 + g;
            const unsigned word =
                __float_as_uint(to_tf32(strip.dy[element_at<FILTER_PACKS>(window, filter)]));
            const int member = strip.argmax[window * FILTERS + filter];
#pragma unroll
            for (int m = 0; m < 4; ++m) a[m][i][q] = member == m ? word : 0u;
        }
#endif
    }
    // Replicate bit 7 of bytes 0 and 2 over the halves. __byte_perm cannot replicate signs.
    static __device__ unsigned half_masks(unsigned word) {
#ifdef __CUDA_ARCH__
        unsigned result;
        asm("prmt.b32 %0, %1, 0, 0xAA88;" : "=r"(result) : "r"(word));
        return result;
#else
        return emulator::prmt(word, 0, 0xAA88);
#endif
    }
    // Shift left; the result is 0 if `bits` is 32 or more.
    static __device__ unsigned shifted(unsigned word, unsigned bits) {
#ifdef __CUDA_ARCH__
        unsigned result;
        asm("shl.b32 %0, %1, %2;" : "=r"(result) : "r"(word), "r"(bits));
        return result;
#else
        return bits < 32 ? word << bits : 0;
#endif
    }
};

// Add the sums of all warps in a fixed order; warp 0 receives the totals.
__device__ inline void reduce_warps(Sums& sums, float* memory) {
    constexpr int COUNT = sizeof(sums.c) / sizeof(float);
    float* const own = reinterpret_cast<float*>(sums.c);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int half = WARPS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (warp >= half && warp < 2 * half) {
#pragma unroll
            for (int i = 0; i < COUNT; ++i)
                memory[((warp - half) * COUNT + i) * 32 + lane] = own[i];
        }
        __syncthreads();
        if (warp < half) {
#pragma unroll
            for (int i = 0; i < COUNT; ++i) own[i] += memory[(warp * COUNT + i) * 32 + lane];
        }
    }
}

// Split z = blockIdx.z sums the strips [z · split_strips, (z + 1) · split_strips). x (samples, H,
// W, C); dy and argmax (samples, Ho / 2, Wo / 2, K); factor: scale of the kept outputs of dropout;
// dw (splits, R, S, C, K) and db (splits, K) float32, interleaved as (splits, (R · S · C + 1) · K).
extern "C" __global__ void __launch_bounds__(ALL_THREADS, MIN_BLOCKS)
    conv2d_backward_weight_few_channels(const Number* x, const Number* dy, const Saved* argmax,
                                        float factor, float* dw, float* db, int samples,
                                        int split_strips, GEOMETRY_PARAMETERS PARTS_PARAMETERS) {
    const Geometry g = GEOMETRY_ARGUMENTS;
    const SplitPart part = split_part(samples PARTS_ARGUMENTS);
    const int pooled = (g.out_height / 2) * (g.out_width / 2) * g.filters;
    move_to(part, x, g.height * g.width * g.channels);
    move_to(part, dy, pooled);
    move_to(part, argmax, pooled);
    samples = part.range.count;
    extern __shared__ __align__(16) char memory[];
    Number* const patches = reinterpret_cast<Number*>(memory + 2 * Buffers::BYTES);
    const int strips = (g.out_height / 2 + STRIP_LINES - 1) / STRIP_LINES;
    const int begin = part.index * split_strips, end = min(begin + split_strips, samples * strips);
    // Margins of input lines, and windows beyond the strip, stay zero.
    for (int i = threadIdx.x; i < 2 * Buffers::BYTES / 16; i += ALL_THREADS)
        reinterpret_cast<Pack<unsigned, 4>*>(memory)[i] = {};
    __syncthreads();
    wait_for_previous_kernel();
    const auto copy = [&](int i) {
        if (i < end)
            start_copies(g, x, dy, argmax, i / strips, i % strips,
                         Buffers::at(memory + i % 2 * Buffers::BYTES));
    };
    copy(begin);
    Sums sums;
    for (int i = begin; i < end; ++i) {
        const Buffers strip = Buffers::at(memory + i % 2 * Buffers::BYTES);
        cp_async_wait_all();
        __syncthreads();
        copy(i + 1);
        expand(g, strip.input, patches);
        __syncthreads();
        for (int step = threadIdx.x / 32; step < STEPS; step += WARPS)
            sums.add(strip, patches, step);
    }
    float* const floats = reinterpret_cast<float*>(memory);
    reduce_warps(sums, floats);
    __syncthreads();
    // totals (m_s, R, PATCH_ELEMENTS, FILTERS)
    const int lane = threadIdx.x % 32, rows = g.r * g.s * CHANNELS;
    if (threadIdx.x < 32) {
#pragma unroll
        for (int i = 0; i < 2 * TAP_ROWS * M_TILES * N8_TILES * 4; ++i) {
            const int e = i % 4, j = i / 4 % N8_TILES, m = i / 4 / N8_TILES % M_TILES,
                      r = i / 4 / N8_TILES / M_TILES;
            floats[(r * PATCH_ELEMENTS + j * 8 + lane % 4 * 2 + e % 2) * FILTERS + m * 16 +
                   e / 2 * 8 + lane / 4] =
                sums.c[r / TAP_ROWS][r % TAP_ROWS][m][j][e];
        }
    }
    __syncthreads();
    const int split = blockIdx.z * (rows + 1) * FILTERS;
    constexpr int ROW_TERMS = TAP_COLUMNS * CHANNELS;
    for (int i = threadIdx.x; i < (rows + 1) * FILTERS; i += ALL_THREADS) {
        const int row = i / FILTERS, filter = i % FILTERS;
        const bool bias = row == rows;
        const int r = bias ? 0 : row / ROW_TERMS, e = bias ? PATCH_ELEMENTS - 1 : row % ROW_TERMS;
        const float first = floats[(r * PATCH_ELEMENTS + e) * FILTERS + filter];
        const float second = floats[((TAP_ROWS + r) * PATCH_ELEMENTS + e + (bias ? 0 : CHANNELS)) *
                                        FILTERS + filter];
        (bias ? db + split + filter : dw + split + i)[0] = (first + second) * factor;
    }
}
#endif
