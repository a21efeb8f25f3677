// Convolutions with many channels on Hopper by TMA and wgmma (wgmma_gemm.cuh), any strides:
//
//     forward          y = epilogue(z + b),  z[position, k] = Σ patch[position, (r, s, c)] w[r, s, c, k]
//     backward_weight  dw[(r, s, c), k] = Σ over positions of patch[position, (r, s, c)] dz[position, k]
//     backward_input   dx[pixel, c] = Σ over (r, s, k) of dz[pixel − (r, s), k] w[r, s, c, k]
//
//     x, dx (N, H, W, C)   y, dz (N, Ho, Wo, K)   w, dw (R, S, C, K)   b (K,)
//
// Algorithm: implicit GEMM. In its im2col mode, TMA copies one tap of the patches of consecutive
// positions, with strides and zeros in the padding, as rows of 128 bytes of channels, from which
// wgmma reads them. Unlike a halo tile, a pixel is copied once for each tap, from the L2 cache; in
// return tiles have any positions of any samples, so small maps and strides leave no gaps.
//
// With strides, the pixels of dx form stride_h · stride_w classes, whose sums have different taps
// (blockIdx.z). Each class is a convolution of stride 1. If a batch normalisation has written x, the
// kernel also masks and sums dx for its backward pass (gradient_sums.cuh).
//
// Operands are in memory in the operand type, or float32 that TMA rounds to tf32. B must have
// adjacent terms in tf32, so forward reads transposed weights (R, S, K, C) there. C and K are
// multiples of TILE_K. For the same reason, the weight gradient reads the transposed dz in tf32, and
// patches are read from shared memory into registers.
//
// Launch: as in dense_wgmma.cu; wgmma_convolution.py.
//
// Source: PTX ISA, "Tensor im2col mode"; the implicit GEMM of CUTLASS
// (cutlass/conv/kernel/sm90_implicit_gemm_tma_warpspecialized.hpp).

#include "wgmma_gemm.cuh"
#include "conv2d.cuh"

// Terms of a part of the sums of `forward` and `backward_input` that blocks with another z compute
// (split-K); 0 if the sums are not divided. The parts, in float32, take the place of the result, and
// `conv2d_wgmma_reduce` adds them.
#ifndef SPLIT_TERMS
#define SPLIT_TERMS 0
#endif
#if SPLIT_TERMS
using Result = float;
#else
using Result = Number;
#endif

// Patches of a map (N, height, width, channels): down × across positions of each sample. The patch
// of position (0, 0) begins at pixel (top, left), and patches have rows × columns taps.
struct Patches {
    int height, width, channels;
    int down, across, stride_h, stride_w, top, left;
    int rows, columns;

    __device__ int positions(int samples) const { return samples * down * across; }
    __device__ int terms() const { return rows * columns * channels; }

    // First pixel of the patch of a position, counted over all samples.
    __device__ Pixel first(int position) const {
        const int sample = position / (down * across), within = position % (down * across);
        return {sample, within / across * stride_h + top, within % across * stride_w + left};
    }
};

__device__ inline Patches forward_patches(const Geometry& g) {
    return {g.height,     g.width,       g.channels,    g.out_height, g.out_width, g.stride_h,
            g.stride_w,   -g.pad_top,    -g.pad_left,   g.r,          g.s};
}

#if TENSOR_MAPS
// Channels of one tap of patches, for consecutive slices of terms.
struct TapChannels {
    int channel = 0, across = 0, down = 0;

    TapChannels() = default;
    __device__ TapChannels(const Patches& patches, int term)
        : channel(term % patches.channels),
          across(term / patches.channels % max(patches.columns, 1)),
          down(term / patches.channels / max(patches.columns, 1)) {}
    __device__ void next(const Patches& patches) {
        channel += TILE_K;
        if (channel < patches.channels) return;
        channel = 0;
        if (++across < patches.columns) return;
        across = 0;
        ++down;
    }
};

// A position of patches, for consecutive slices of positions.
struct PatchPosition {
    int sample, row, column;
    int samples, rows, columns;  // Of a step to the next slice.

    __device__ PatchPosition(const Patches& patches, int position) {
        set(patches, position, sample, row, column);
        set(patches, TILE_K, samples, rows, columns);
    }
    static __device__ void set(const Patches& patches, int positions, int& sample, int& row,
                               int& column) {
        column = positions % patches.across;
        row = positions / patches.across % patches.down;
        sample = positions / patches.across / patches.down;
    }
    __device__ void next(const Patches& patches) {
        column += columns;
        row += rows;
        sample += samples;
        if (column >= patches.across) column -= patches.across, ++row;
        if (row >= patches.down) row -= patches.down, ++sample;
    }
    // First pixel of the patch.
    __device__ Pixel pixel(const Patches& patches) const {
        return {sample, row * patches.stride_h + patches.top,
                column * patches.stride_w + patches.left};
    }
};
#endif

// The pixels stride · i + first of one dimension of dx, and the taps that reach them, which are
// `tap`, `tap` + stride and so on. Pixel i reads dz from position begin + i on, the last tap first.
struct PixelClass {
    int stride, first, count, tap, taps, begin;

    __device__ PixelClass(int index, int stride, int pad, int size, int window)
        : stride(stride),
          first(index),
          count((size - index + stride - 1) / stride),
          tap((index + pad) % stride),
          taps(window > tap ? (window - tap + stride - 1) / stride : 0),
          begin((index + pad) / stride - (taps - 1)) {}
    __device__ int last_tap() const { return tap + (taps - 1) * stride; }
};

// The patches of all positions as a matrix: rows are positions and terms are the channels of all taps
// (K_MAJOR), or rows are the channels of all taps and terms are positions.
template <bool K_MAJOR_> struct PatchMatrix {
    static constexpr bool K_MAJOR = K_MAJOR_;

    const TensorMap* map;
    const Number* data;
    const Patches& patches;
    int samples;

    __device__ float element(int i, int k) const {
        const int position = K_MAJOR ? i : k, term = K_MAJOR ? k : i;
        if (position >= patches.positions(samples) || term >= patches.terms()) return 0.0f;
        const Pixel p = patches.first(position);
        const int tap = term / patches.channels;
        const int row = p.row + tap / patches.columns, column = p.column + tap % patches.columns;
        if (unsigned(row) >= unsigned(patches.height) ||
            unsigned(column) >= unsigned(patches.width))
            return 0.0f;
        const int pixel = (p.sample * patches.height + row) * patches.width + column;
        return to_float(
            round_operand(to_float(data[pixel * patches.channels + term % patches.channels])));
    }
#if TENSOR_MAPS
    // Slices of terms have a tap and channels of it, which change with K_MAJOR.
    template <int EXTENT> struct Slices {
        static constexpr int PARTS = K_MAJOR ? 1 : EXTENT / TILE_K;

        const TensorMap* map;
        const Patches& patches;
        PatchPosition position;
        TapChannels terms[PARTS];

        __device__ Slices(const TensorMap* map, const Patches& patches, int first, int k)
            : map(map), patches(patches), position(patches, K_MAJOR ? first : k) {
#pragma unroll
            for (int i = 0; i < PARTS; ++i)
                terms[i] = TapChannels(patches, K_MAJOR ? k : first + i * TILE_K);
        }
        __device__ void copy(char* to, MBarrier* barrier) const {
            const Pixel p = position.pixel(patches);
#pragma unroll
            for (int i = 0; i < PARTS; ++i)
                tma_copy_patches(to + i * TILE_K * ROW_BYTES, map, terms[i].channel, p.column, p.row,
                                 p.sample, terms[i].across, terms[i].down, barrier);
        }
        __device__ void next() {
            if (K_MAJOR) {
                terms[0].next(patches);
            } else {
                position.next(patches);
            }
        }
    };
    template <int EXTENT> __device__ Slices<EXTENT> slices(int first, int k) const {
        return {map, patches, first, k};
    }
#endif
};

// Weights (taps, count, terms) as operand B, whose terms are those of some taps: rows × columns
// taps of the filter, in steps of (step_r, step_s) from (first_r, first_s) on.
struct TapWeights {
    static constexpr bool K_MAJOR = true;

    const TensorMap* map;
    const Number* data;
    int count, terms, s;
    int columns, first_r, first_s, step_r, step_s;

    // Row of the matrix (taps · count, terms) where the tap of term k begins.
    __device__ int row(int k) const {
        const int tap = k / terms;
        return ((first_r + tap / columns * step_r) * s + first_s + tap % columns * step_s) * count;
    }
    __device__ float element(int j, int k) const {
        if (j >= count) return 0.0f;
        return to_float(round_operand(to_float(data[(row(k) + j) * terms + k % terms])));
    }
#if TENSOR_MAPS
    template <int EXTENT> struct Slices {
        const TensorMap* map;
        int term, row, tap, terms, columns, next_column, next_row;

        __device__ void copy(char* to, MBarrier* barrier) const {
            tma_copy_box(to, map, term, row, barrier);
        }
        __device__ void next() {
            term += TILE_K;
            if (term < terms) return;
            term = 0;
            row += next_column;
            if (++tap < columns) return;
            tap = 0;
            row += next_row;
        }
    };
    template <int EXTENT> __device__ Slices<EXTENT> slices(int first, int k) const {
        return {map,     k % terms, row(k) + first, k / terms % columns,
                terms,   columns,   step_s * count, (step_r * s - columns * step_s) * count};
    }
#endif
};

// The terms of this block's part of the sums, and where it is stored.
struct Part {
    int first, stop;

    __device__ explicit Part(int terms)
        : first(blockIdx.z * SPLIT_TERMS), stop(min(first + SPLIT_TERMS, terms)) {}
    __device__ StorePlain<float, 4> store(float* parts, int rows, int columns) const {
        return {parts + blockIdx.z * rows * columns, rows, columns};
    }
};

// Tensor maps: x, weights. The weights are rounded (bf16), or transposed (tf32).
extern "C" __global__ void __launch_bounds__(ALL_THREADS, MIN_BLOCKS)
    conv2d_forward_wgmma(TENSOR_MAPS_PARAMETER const Number* x, const Number* w, const float* b,
                         Result* y, int samples,
                         GEOMETRY_PARAMETERS EPILOGUE_PARAMETERS SUMS_PARAMETER) {
    prefetch_tensor_maps(TENSOR_MAPS_ARGUMENT);
    const Geometry g = GEOMETRY_ARGUMENTS;
    const Patches patches = forward_patches(g);
    const PatchMatrix<true> a{MAP(0), x, patches, samples};
#if PRECISION == 1
    const TapWeights weights{MAP(1), w, g.filters, g.channels, g.s, g.s, 0, 0, 1, 1};
#else
    const TiledMatrix<false> weights{MAP(1), w, g.filters, g.filters};
#endif
    const int rows = patches.positions(samples);
#if SPLIT_TERMS
    const Part part(patches.terms());
    wgmma_gemm<false>(a, weights, part.first, part.stop, part.store(y, rows, g.filters));
#else
    wgmma_gemm<false, SUMS ? OUTPUT_SUMS : NO_SUMS>(
        a, weights, 0, patches.terms(),
        StoreOutput{y, nullptr, b, rows, g.filters, 1, EPILOGUE_ARGUMENTS} SUMS_ARGUMENT);
#endif
}

// Tensor maps: x, dz (bf16), or the transposed dz (tf32), whose rows are padded to 16 bytes; with
// MICRO_SHARDS two for each micro-shard, and only in bf16. Split z =
// blockIdx.z sums the positions [z · split_positions, (z + 1) · split_positions). The gradients of
// the splits are (R · S · C + 1) · K elements apart.
extern "C" __global__ void __launch_bounds__(ALL_THREADS, MIN_BLOCKS)
    conv2d_backward_weight_wgmma(TENSOR_MAPS_PARAMETER const Number* x, const Number* dz, float* dw,
                                 float* db, int samples, int split_positions,
                                 GEOMETRY_PARAMETERS PARTS_PARAMETERS) {
    prefetch_tensor_maps(TENSOR_MAPS_ARGUMENT);
    const Geometry g = GEOMETRY_ARGUMENTS;
    const SplitPart part = split_part(samples PARTS_ARGUMENTS);
    const int map = 2 * part.shard;
    move_to(part, x, g.height * g.width * g.channels);
    move_to(part, dz, g.out_height * g.out_width * g.filters);
    samples = part.range.count;
    const Patches patches = forward_patches(g);
    const int first = part.index * split_positions, rows = patches.terms(),
              positions = patches.positions(samples);
    const int stop = min(first + split_positions, positions);
#if PRECISION == 1
    const TiledMatrix<true> b{MAP(map + 1), dz, g.filters, (positions + 3) / 4 * 4};
#else
    const TiledMatrix<false> b{MAP(map + 1), dz, g.filters, g.filters};
#endif
    wgmma_gemm<false>(PatchMatrix<false>{MAP(map), x, patches, samples}, b, first, stop,
                      StorePlain<float, OUT_VECTOR>{dw + blockIdx.z * (rows + 1) * g.filters, rows,
                                                    g.filters});
}

// With several classes of pixels.
#ifndef STRIDED
#define STRIDED 0
#endif

// Store pixels of a class, counted over all samples. If ADD_GRADIENT, add to what is stored.
struct StoreClass {
    static constexpr bool DIVIDES = STRIDED;  // To find the place of a row.

    Number* y;
    int height, width;
    PixelClass vertical, horizontal;
    int rows, columns;
    Normalization normalization;  // Of dx, if it is summed.

    // First element of pixel i.
    __device__ int offset(int i) const {
        if (!STRIDED) return i * columns;
        const int each = vertical.count * horizontal.count, within = i % each;
        const int row = within / horizontal.count * vertical.stride + vertical.first,
                  x = within % horizontal.count * horizontal.stride + horizontal.first;
        return ((i / each * height + row) * width + x) * columns;
    }
    template <int N>
    static __device__ void add(float (&values)[N], const Pack<Number, N>& stored) {
#pragma unroll
        for (int v = 0; v < N; ++v) values[v] += to_float(stored.at[v]);
    }
    template <int N> __device__ void pixel(int offset, int column, float (&values)[N]) const {
        Number* const to = y + offset + column;
        if (ADD_GRADIENT) add(values, *reinterpret_cast<const Pack<Number, N>*>(to));
        write<IN_VECTOR>(to, 0, N, values);
    }
    template <int N> __device__ void load(GradientPixel<N>& pixel, int offset, int column) const {
        const int at = offset + column;
        pixel.load(normalization, at);
        if (ADD_GRADIENT) pixel.stored = *reinterpret_cast<const Pack<Number, N>*>(y + at);
    }
    template <int N>
    __device__ void pixel(const GradientPixel<N>& loaded, float (&values)[N],
                          GradientSums<N>& sums) const {
        if (ADD_GRADIENT) add(values, loaded.stored);
        sums.add(values, loaded);
        write<IN_VECTOR>(y + loaded.at, 0, N, values);
    }
};

__device__ inline int row_place(const StoreClass& store, int row) { return store.offset(row); }

// Tensor maps: weights, then dz for each class. The weights are rounded in bf16.
extern "C" __global__ void __launch_bounds__(ALL_THREADS, MIN_BLOCKS)
    conv2d_backward_input_wgmma(TENSOR_MAPS_PARAMETER const Number* dz, const Number* w, Result* dx,
                                int samples, GEOMETRY_PARAMETERS GRADIENT_SUMS_PARAMETERS) {
    prefetch_tensor_maps(TENSOR_MAPS_ARGUMENT);
    const Geometry g = GEOMETRY_ARGUMENTS;
    const int index = SPLIT_TERMS ? 0 : blockIdx.z;
    const PixelClass vertical(index / g.stride_w, g.stride_h, g.pad_top, g.height, g.r);
    const PixelClass horizontal(index % g.stride_w, g.stride_w, g.pad_left, g.width, g.s);
    const Patches patches = {g.out_height,     g.out_width,    g.filters,        vertical.count,
                             horizontal.count, 1,              1,                vertical.begin,
                             horizontal.begin, vertical.taps,  horizontal.taps};
    const TapWeights weights{MAP(0),
                             w,
                             g.channels,
                             g.filters,
                             g.s,
                             max(horizontal.taps, 1),
                             vertical.last_tap(),
                             horizontal.last_tap(),
                             -g.stride_h,
                             -g.stride_w};
    const PatchMatrix<true> a{MAP(1 + index), dz, patches, samples};
    const int rows = patches.positions(samples);
#if SPLIT_TERMS
    const Part part(patches.terms());
    wgmma_gemm<false>(a, weights, part.first, part.stop, part.store(dx, rows, g.channels));
#else
    wgmma_gemm<false, SUMS ? GRADIENT_SUMS : NO_SUMS>(
        a, weights, 0, patches.terms(),
        StoreClass{dx, g.height, g.width, vertical, horizontal, rows, g.channels,
                   NORMALIZATION_ARGUMENTS} GRADIENT_SUMS_ARGUMENT);
#endif
}

// y (size,) = epilogue(Σ over parts of partial (parts, size) + b), or added to y if ADD_GRADIENT. b
// (columns,) is read if has_bias is not 0. One thread for four elements, in blocks of 256.
extern "C" __global__ void conv2d_wgmma_reduce(const float* partial, const float* b, Number* y,
                                               int parts, int has_bias, int columns, int size) {
    wait_for_previous_kernel();
    const int i = (blockIdx.x * blockDim.x + threadIdx.x) * 4;
    if (i >= size) return;
    float values[4] = {};
    for (int part = 0; part < parts; ++part) {
        const Pack<float, 4> more =
            *reinterpret_cast<const Pack<float, 4>*>(partial + part * size + i);
#pragma unroll
        for (int v = 0; v < 4; ++v) values[v] += more.at[v];
    }
    if (ADD_GRADIENT) {
        const Pack<Number, 4> stored = *reinterpret_cast<const Pack<Number, 4>*>(y + i);
#pragma unroll
        for (int v = 0; v < 4; ++v) values[v] += to_float(stored.at[v]);
    }
#pragma unroll
    for (int v = 0; v < 4; ++v) {
        if (has_bias) values[v] += __ldg(b + (i + v) % columns);
        // This comparison lets NaN pass.
        if (EPILOGUE && values[v] <= 0.0f) values[v] = 0.0f;
    }
    write<4>(y, i, size, values);
}
