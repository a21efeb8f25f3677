// Main loop of implicit GEMM on halo tiles: accumulators and MMA steps.
//
// Operand A: 64 filters (for the gradient with respect to the input: channels). Operand B: pixels
// of the halo tile. wgmma reads them from the swizzled slabs in shared memory; a tap of the filter
// is an address offset. pack_weights.cu provides the weights in one of two layouts. In a
// non-persistent block, weights are loaded from global memory into registers in fragment order, so
// that the main loop needs no synchronisation between warps. In a persistent block, weights lie in
// shared memory and wgmma reads both operands there (weight_pipeline.cuh).
//
// Source: PTX ISA, "Asynchronous warpgroup level matrix instructions" and "Matrix fragments for
// mma.m16n8k16".

#pragma once

#include "implicit_gemm_tile.cuh"

// A step of the sum covers one tap and the channels of two packs. All taps of the first two packs
// come first, then those of the next two, and so on.
struct KSteps {
    const View& view;

    __device__ int taps() const { return (view.r + LINES_IN_M - 1) * view.s; }
    __device__ int count(int packs) const { return packs / 2 * taps(); }
};

// Offset of a step's pixels relative to the first step, in packs; advances step by step.
struct KIterator {
    const View& view;
    int pack, row, column, offset;

    __device__ KIterator(const View& view, int step) : view(view) {
        const int taps = KSteps{view}.taps(), tap = step % taps;
        pack = step / taps * 2, row = tap / view.s, column = tap % view.s;
        offset = pack / SLAB_PACKS * (SLAB_PIXELS * SLAB_PACKS) + pack % SLAB_PACKS +
                 (row * view.row_pitch + column * ROW_SAMPLES) * SLAB_PACKS;
    }
    __device__ void next() {
        ++column, offset += ROW_SAMPLES * SLAB_PACKS;
        if (column < view.s) return;
        column = 0, ++row, offset += (view.row_pitch - view.s * ROW_SAMPLES) * SLAB_PACKS;
        if (row < view.r + LINES_IN_M - 1) return;
        row = 0, pack += 2, offset += 2 - (view.r + LINES_IN_M - 1) * view.row_pitch * SLAB_PACKS;
        if (pack % SLAB_PACKS == 0) offset += (SLAB_PIXELS - 1) * SLAB_PACKS;
    }
};

// Pixels between groups of eight columns.
__device__ inline int n8_pixel_stride(const View& view) {
    return PIXEL_TILE_STRIP ? LINES_IN_M * view.row_pitch : 8;
}

// Row within the warp group's rows and 32-bit word of a row. `lane_fragment` returns it for the
// words 0 to 3 that a lane holds of an MMA instruction: words 1 and 3 are eight rows further down,
// words 2 and 3 four words to the right.
struct FragmentIndex {
    int row, word;
};
__device__ inline FragmentIndex lane_fragment(int lane, int word) {
    return {lane / 32 * 16 + lane % 32 / 4 + word % 2 * 8, lane % 4 + word / 2 * 4};
}
// The inverse: index of a word in fragment order.
__device__ inline int lane_word(const FragmentIndex& p) {
    const int lane = p.row / 16 * 32 + p.row % 8 * 4 + p.word % 4;
    return lane * 4 + p.word / 4 * 2 + p.row % 16 / 8;
}
// Row and word of an element of a pack in core-matrix order: the first packs of eight rows are
// adjacent, followed by their second packs.
__device__ inline FragmentIndex core_matrix_index(int pack_number, int word) {
    return {pack_number / 16 * 8 + pack_number % 8, pack_number / 8 % 2 * 4 + word};
}
// Index of the pack that contains a word, in core-matrix order.
__device__ inline int pack_index(const FragmentIndex& p) {
    return p.row / 8 * 16 + p.word / 4 * 8 + p.row % 8;
}

#if TENSOR_CORES && !(WGMMA && PERSISTENT)
// Load a lane's fragments of weights for STAGE_STEPS steps. The assembly statement keeps the load
// at this point; compilers would move it to its use.
__device__ inline void load_weight_fragments(Pack<Number> (&words)[STAGE_STEPS],
                                             const Number* from) {
#pragma unroll
    for (int d = 0; d < STAGE_STEPS; ++d) {
        Pack<unsigned, 4> pack;
        const Number* const at = from + d * WARP_GROUP_THREADS * PACK;
#if PERSISTENT && WEIGHT_STAGES == 0
        const int lane = threadIdx.x % 32;
        const FragmentIndex index = {
            int(threadIdx.x) % WARP_GROUP_THREADS / 32 * 16 + lane / 8 % 2 * 8 + lane % 8,
            lane / 16 * 4};
        ldmatrix_x4(pack.at, at + pack_index(index) * PACK);
#elif PERSISTENT
#pragma unroll
        for (int q = 0; q < 4; ++q) {
            const FragmentIndex index = lane_fragment(threadIdx.x % WARP_GROUP_THREADS, q);
            pack.at[q] =
                reinterpret_cast<const unsigned*>(at)[pack_index(index) * 4 + index.word % 4];
        }
#elif !defined(__CUDA_ARCH__)
        pack = reinterpret_cast<const Pack<unsigned, 4>*>(at)[threadIdx.x % WARP_GROUP_THREADS];
#else
        asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(pack.at[0]), "=r"(pack.at[1]), "=r"(pack.at[2]), "=r"(pack.at[3])
                     : "l"(at + threadIdx.x % WARP_GROUP_THREADS * PACK));
#endif
        words[d] = as<Pack<Number>>(pack);
    }
}
#endif

// A lane's accumulators of MMA_M × MMA_N elements: c[j][0] and c[j][1] belong to row g, c[j][2] and
// c[j][3] to row g + 8, columns 2 t and 2 t + 1 of the j-th group of eight.
struct PixelAccumulators {
    float c[N8_TILES][4] = {};

#if TF32X3 && TENSOR_CORES && !WGMMA
    // Multiply one step, whose pixels begin at pack `b` of the halo tile.
    __device__ void add(const Pack<Number>& a, const Number* numbers, int b, int n8_stride) {
        constexpr int WIDTH = N8_TILES < 4 ? N8_TILES : 4, REST = N8_TILES % WIDTH;
        SplitFragment rows;
        rows.split(as<Pack<unsigned, 4>>(a).at);
#pragma unroll
        for (int g = 0; g + WIDTH <= N8_TILES; g += WIDTH)
            add_columns<WIDTH>(rows, numbers, b, n8_stride, g);
        if constexpr (REST > 0) add_columns<REST>(rows, numbers, b, n8_stride, N8_TILES - REST);
    }

    // The same for COUNT groups of eight columns from group `first` on.
    template <int COUNT>
    __device__ void add_columns(const SplitFragment& rows, const Number* numbers, int b,
                                int n8_stride, int first) {
        const int lane = threadIdx.x % 32;
        SplitFragment pixels[(COUNT + 1) / 2];
        b += lane / 16 + lane % 8 * SLAB_PACKS;
#pragma unroll
        for (int j = 0; j < COUNT; j += 2) {
            // If the number of groups is odd, the last one is loaded twice.
            const int group = first + j + (j + 1 < COUNT ? lane / 8 % 2 : 0);
            unsigned words[4];
            ldmatrix_x4(words, numbers + swizzled(b + group * n8_stride * SLAB_PACKS) * PACK);
            pixels[j / 2].split(words);
        }
        multiply_split(reinterpret_cast<float (&)[COUNT][4]>(c[first]), rows, pixels);
    }
#elif !WGMMA && TENSOR_CORES
    // Multiply one step (mma.sync), whose pixels begin at pack `b` of the halo tile.
    __device__ void add(const Pack<Number>& a, const Number* numbers, int b, int n8_stride) {
        const Pack<unsigned, 4> words = as<Pack<unsigned, 4>>(a);
        const int lane = threadIdx.x % 32;
        b += lane / 8 % 2 + lane % 8 * SLAB_PACKS;
#pragma unroll
        for (int g = 0; g < N8_TILES; g += 2) {
            // If the number of groups is odd, the last one is loaded twice.
            const int other = g + 1 < N8_TILES ? lane / 16 : 0;
            unsigned pixels[4];
            ldmatrix_x4(pixels,
                        numbers + swizzled(b + (g + other) * n8_stride * SLAB_PACKS) * PACK);
            mma(c[g], words.at, pixels[0], pixels[1]);
            if (g + 1 < N8_TILES) mma(c[g + 1], words.at, pixels[2], pixels[3]);
        }
    }
#endif
#if !TENSOR_CORES
    // Scalar version of a step for GPUs before sm_80 and for the emulator.
    __device__ void add(const Pack<Number>* a, const Number* numbers, int b, int n8_stride) {
        constexpr int UNIT = PACK / 4;  // Elements of a 32-bit word.
        const int lane = threadIdx.x % WARP_GROUP_THREADS, t = lane % 4;
#pragma unroll 1
        for (int k = 0; k < STEP_K; ++k)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const FragmentIndex index = {lane_fragment(lane, h).row, k / UNIT};
                const Pack<Number> words =
                    a[PERSISTENT ? pack_index(index) : lane - t + index.word % 4];
                const int word = PERSISTENT ? index.word % 4 : index.word / 4 * 2 + h;
                const float weight = to_float(words.at[word * UNIT + k % UNIT]);
#pragma unroll
                for (int g = 0; g < N8_TILES; ++g)
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        const int pixel = g * n8_stride + t * 2 + e;
                        const int pack_number = swizzled(b + k / PACK + pixel * SLAB_PACKS);
                        c[g][h * 2 + e] +=
                            weight * to_float(numbers[pack_number * PACK + k % PACK]);
                    }
            }
    }
#endif
};

// Keep the compiler from reading accumulators before wgmma has finished.
__device__ inline void fence_accumulators(float (&c)[N8_TILES][4]) {
#if WGMMA
#pragma unroll
    for (int g = 0; g < N8_TILES; ++g)
#pragma unroll
        for (int e = 0; e < 4; ++e) wgmma::fence_accumulator(c[g][e]);
#endif
}
__device__ inline void fence_accumulators(PixelAccumulators (&acc)[PIXEL_TILES]) {
#pragma unroll
    for (int i = 0; i < PIXEL_TILES; ++i) fence_accumulators(acc[i].c);
}

#if WGMMA
// Descriptors of operand B, which differ only in their lower 32 bits: the start address.
struct ColumnDescriptors {
    unsigned lower, upper;

    __device__ explicit ColumnDescriptors(const HaloTile& halo) {
        const int across = n8_pixel_stride(halo.view) * SLAB_PACKS * 16;
        const auto all = wgmma::swizzled_descriptor<SLAB_PACKS>(halo.numbers, across);
        lower = unsigned(all), upper = unsigned(all >> 32);
    }
    __device__ unsigned long long at(int pack_number) const {
        return (unsigned long long)upper << 32 | (lower + pack_number);
    }
};
#endif

#if TF32X3_WGMMA
// acc[i] += A B_i for the steps of a stage by 3xTF32. The halo tile has two planes of TF32 numbers,
// the high and the low parts, and weights are split in registers. The products of a stage are
// summed from 0 and promoted, one pixel tile while the others are multiplied.
__device__ inline void multiply_stage(PixelAccumulators (&acc)[PIXEL_TILES],
                                      float (&sums)[PIXEL_TILES][N8_TILES][4],
                                      const Pack<Number> (&weights)[STAGE_STEPS],
                                      const ColumnDescriptors& columns,
                                      const int (&offsets)[PIXEL_TILES], KIterator& k_iter,
                                      int plane) {
    SplitFragment rows[STAGE_STEPS];
    int steps[STAGE_STEPS];  // Offsets of the steps.
#pragma unroll
    for (int d = 0; d < STAGE_STEPS; ++d, k_iter.next()) {
        rows[d].split(as<Pack<unsigned, 4>>(weights[d]).at);
        steps[d] = k_iter.offset;
    }
    wgmma::fence();
#pragma unroll
    for (int i = 0; i < PIXEL_TILES; ++i) {
        wgmma::mma_overwriting(sums[i], rows[0].low, columns.at(offsets[i] + steps[0]));
#pragma unroll
        for (int d = 1; d < STAGE_STEPS; ++d)
            wgmma::mma<false>(sums[i], rows[d].low, columns.at(offsets[i] + steps[d]));
#pragma unroll
        for (int d = 0; d < STAGE_STEPS; ++d)
            wgmma::mma<false>(sums[i], rows[d].high, columns.at(offsets[i] + steps[d] + plane));
#pragma unroll
        for (int d = 0; d < STAGE_STEPS; ++d)
            wgmma::mma<false>(sums[i], rows[d].high, columns.at(offsets[i] + steps[d]));
        wgmma::commit_group();
    }
#pragma unroll
    for (int i = 0; i < PIXEL_TILES; ++i) {
        if (i + 1 < PIXEL_TILES)
            wgmma::wait_group<(PIXEL_TILES > 1 ? 1 : 0)>();
        else
            wgmma::wait_group<0>();
        fence_accumulators(sums[i]);
#pragma unroll
        for (int g = 0; g < N8_TILES; ++g)
#pragma unroll
            for (int e = 0; e < 4; ++e) acc[i].c[g][e] += sums[i][g][e];
    }
}
#endif

#if !TENSOR_CORES
// Scalar version of `multiply_steps`.
__device__ inline void multiply_steps_scalar(PixelAccumulators (&acc)[PIXEL_TILES],
                                             const Number* weights, const HaloTile& halo,
                                             const int (&offsets)[PIXEL_TILES], int first,
                                             int count) {
    KIterator k_iter(halo.view, first);
    const int n8_stride = n8_pixel_stride(halo.view);
#pragma unroll 1
    for (int step = 0; step < count; ++step, k_iter.next(), weights += WARP_GROUP_THREADS * PACK)
#pragma unroll
        for (int i = 0; i < PIXEL_TILES; ++i)
            acc[i].add(reinterpret_cast<const Pack<Number>*>(weights), halo.numbers,
                       offsets[i] + k_iter.offset, n8_stride);
}
#endif

// acc[i] += A B_i over `count` steps, beginning with step `first` of the halo tile. B_i are the
// columns that begin at pack offsets[i]; `weights` points to the weights of the first step.
#if !(WGMMA && PERSISTENT)
__device__ inline void multiply_steps(PixelAccumulators (&acc)[PIXEL_TILES], const Number* weights,
                                      const HaloTile& halo, const int (&offsets)[PIXEL_TILES],
                                      int first, int count) {
    KIterator k_iter(halo.view, first);
#if WGMMA
    const ColumnDescriptors columns(halo);
#if TF32X3
    float sums[PIXEL_TILES][N8_TILES][4] = {};
#endif
#else
    const int n8_stride = n8_pixel_stride(halo.view);
#endif
#if TENSOR_CORES
    Pack<Number> words[2][STAGE_STEPS];
    load_weight_fragments(words[0], weights);
    // Double buffering in registers: multiply `now` while the weights of the next steps are loaded
    // into `next`. The load after the last step is not used: from global memory it reads whatever
    // follows; from shared memory, where the next data may be a halo tile that other threads write,
    // it reads the same weights again.
    const auto load_next = [&](Pack<Number>(&next)[STAGE_STEPS], bool last) {
        if (!PERSISTENT_GROUPS || !last) weights += STAGE_STEPS * WARP_GROUP_THREADS * PACK;
        load_weight_fragments(next, weights);
    };
    const auto multiply = [&](const Pack<Number>(&now)[STAGE_STEPS],
                              Pack<Number>(&next)[STAGE_STEPS], bool last) {
#if TF32X3_WGMMA
        load_next(next, last);
        multiply_stage(acc, sums, now, columns, offsets, k_iter, halo.each * SLAB_PIXELS);
#else
#if WGMMA
        wgmma::fence();
#endif
#pragma unroll
        for (int d = 0; d < STAGE_STEPS; ++d, k_iter.next())
#pragma unroll
            for (int i = 0; i < PIXEL_TILES; ++i) {
#if WGMMA
                wgmma::mma<false>(acc[i].c, as<Pack<unsigned, 4>>(now[d]).at,
                                  columns.at(offsets[i] + k_iter.offset));
#else
                acc[i].add(now[d], halo.numbers, offsets[i] + k_iter.offset, n8_stride);
#endif
            }
#if WGMMA
        wgmma::commit_group();
        // The previous group has finished, so its registers can be overwritten.
        wgmma::wait_group<1>();
#endif
        load_next(next, last);
#endif
        return last;
    };
    // Not unrolled, because compilation would take minutes.
#pragma unroll 1
    for (int step = 2 * STAGE_STEPS;; step += 2 * STAGE_STEPS) {
        if (multiply(words[0], words[1], step - STAGE_STEPS == count)) break;
        if (multiply(words[1], words[0], step == count)) break;
    }
#else
    multiply_steps_scalar(acc, weights, halo, offsets, first, count);
#endif
#if WGMMA
    wgmma::wait_group<0>();
#endif
    fence_accumulators(acc);
}
#endif
