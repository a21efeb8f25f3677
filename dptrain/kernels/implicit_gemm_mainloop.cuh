// Sums of products whose columns are pixels of a window: what a lane has, and a step of them.
//
// Filters (backward by the input: channels) are rows of A, 64 of them. Pixels are columns of B,
// which wgmma reads from the slabs of a window by itself, a tap of the filter being one distance.
// pack_weights.cu lays weights out in one of two orders. Where a block has one tile, they come
// straight to registers: a lane reads the words of one instruction at once, and nothing in the main
// loop waits for other warps. Where it goes from tile to tile, they lie in shared memory, and wgmma
// reads them there, too.

#pragma once

#include "implicit_gemm_tile.cuh"

// Channels of two runs and one tap are a step of the sum: all taps of the first two runs, of the
// next two, and so on.
struct KSteps {
    const View& view;

    __device__ int taps() const { return (view.r + LINES_IN_M - 1) * view.s; }
    __device__ int count(int packs) const { return packs / 2 * taps(); }
};

// How far a step's pixels lie from those of the first, in pieces; one step after the other.
struct KIterator {
    const View& view;
    int pack, row, column, offset;

    __device__ KIterator(const View& view, int step) : view(view) {
        const int taps = KSteps{view}.taps(), tap = step % taps;
        pack = step / taps * 2, row = tap / view.s, column = tap % view.s;
        offset = pack / SLAB_PACKS * (SLAB_PIXELS * SLAB_PACKS) + pack % SLAB_PACKS +
                 (row * view.row_pitch + column) * SLAB_PACKS;
    }
    __device__ void next() {
        ++column, offset += SLAB_PACKS;
        if (column < view.s) return;
        column = 0, ++row, offset += (view.row_pitch - view.s) * SLAB_PACKS;
        if (row < view.r + LINES_IN_M - 1) return;
        row = 0, pack += 2, offset += 2 - (view.r + LINES_IN_M - 1) * view.row_pitch * SLAB_PACKS;
        if (pack % SLAB_PACKS == 0) offset += (SLAB_PIXELS - 1) * SLAB_PACKS;
    }
};

// Pixels between eights of columns.
__device__ inline int n8_pixel_stride(const View& view) {
    return PIXEL_TILE_STRIP ? LINES_IN_M * view.row_pitch : 8;
}

// A lane's row of its warp's sixteen and word of a row: those of word 0 of an instruction's four.
// Words 1 and 3 are eight rows below, words 2 and 3 four words further.
struct FragmentIndex {
    int row, word;
};
__device__ inline FragmentIndex lane_fragment(int lane, int word) {
    return {lane / 32 * 16 + lane % 32 / 4 + word % 2 * 8, lane % 4 + word / 2 * 4};
}
// Of a word of a piece: eight rows' first pieces lie side by side, then their second ones.
__device__ inline FragmentIndex core_matrix_index(int piece, int word) {
    return {piece / 16 * 8 + piece % 8, piece / 8 % 2 * 4 + word};
}
// Which piece has a word.
__device__ inline int piece_index(const FragmentIndex& p) {
    return p.row / 8 * 16 + p.word / 4 * 8 + p.row % 8;
}

#if __CUDA_ARCH__ >= 800 && !(WGMMA && PERSISTENT)
// A lane's words of STAGE_STEPS steps, asked for where this stands: compilers would ask when it is too
// late.
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
        ldmatrix_x4(pack.at, at + piece_index(index) * PACK);
#elif PERSISTENT
#pragma unroll
        for (int q = 0; q < 4; ++q) {
            const FragmentIndex index = lane_fragment(threadIdx.x % WARP_GROUP_THREADS, q);
            pack.at[q] =
                reinterpret_cast<const unsigned*>(at)[piece_index(index) * 4 + index.word % 4];
        }
#else
        asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(pack.at[0]), "=r"(pack.at[1]), "=r"(pack.at[2]), "=r"(pack.at[3])
                     : "l"(at + threadIdx.x % WARP_GROUP_THREADS * PACK));
#endif
        words[d] = as<Pack<Number>>(pack);
    }
}
#endif

// A lane's sums of ROWS x MMA_N: elements 0 and 1 are those of row g, 2 and 3 of row g + 8, of
// columns 2 t and 2 t + 1 of every eight.
struct PixelAccumulators {
    float c[N8_TILES][4] = {};

#if !WGMMA && __CUDA_ARCH__ >= 800
    // Of the step whose pixels begin at piece `b` of a window.
    __device__ void add(const Pack<Number>& a, const Number* numbers, int b, int n8_stride) {
        const Pack<unsigned, 4> words = as<Pack<unsigned, 4>>(a);
        const int lane = threadIdx.x % 32;
        b += lane / 8 % 2 + lane % 8 * SLAB_PACKS;
#pragma unroll
        for (int g = 0; g < N8_TILES; g += 2) {
            // An odd last eight is read twice.
            const int other = g + 1 < N8_TILES ? lane / 16 : 0;
            unsigned pixels[4];
            ldmatrix_x4(pixels,
                        numbers + swizzled(b + (g + other) * n8_stride * SLAB_PACKS) * PACK);
            mma(c[g], words.at, pixels[0], pixels[1]);
            if (g + 1 < N8_TILES) mma(c[g + 1], words.at, pixels[2], pixels[3]);
        }
    }
#elif !WGMMA
    // The same, number by number, of a step's pieces of weights.
    __device__ void add(const Pack<Number>* a, const Number* numbers, int b, int n8_stride) {
        constexpr int UNIT = PACK / 4;  // Numbers of a word.
        const int lane = threadIdx.x % WARP_GROUP_THREADS, t = lane % 4;
        for (int k = 0; k < STEP_K; ++k)
            for (int h = 0; h < 2; ++h) {
                const FragmentIndex index = {lane_fragment(lane, h).row, k / UNIT};
                const Pack<Number> words =
                    a[PERSISTENT ? piece_index(index) : lane - t + index.word % 4];
                const int word = PERSISTENT ? index.word % 4 : index.word / 4 * 2 + h;
                const float weight = to_float(words.at[word * UNIT + k % UNIT]);
                for (int g = 0; g < N8_TILES; ++g)
                    for (int e = 0; e < 2; ++e) {
                        const int pixel = g * n8_stride + t * 2 + e;
                        const int piece = swizzled(b + k / PACK + pixel * SLAB_PACKS);
                        c[g][h * 2 + e] += weight * to_float(numbers[piece * PACK + k % PACK]);
                    }
            }
    }
#endif
};

// The compiler must not read sums earlier than products are done.
__device__ inline void fence_accumulators(PixelAccumulators (&acc)[PIXEL_TILES]) {
#if WGMMA
#pragma unroll
    for (int i = 0; i < PIXEL_TILES; ++i)
#pragma unroll
        for (int g = 0; g < N8_TILES; ++g)
#pragma unroll
            for (int e = 0; e < 4; ++e) asm volatile("" : "+f"(acc[i].c[g][e])::"memory");
#endif
}

#if WGMMA
// Descriptors of a window's columns differ in where they begin alone, and that in their lower half.
struct ColumnDescriptors {
    unsigned lower, upper;

    __device__ explicit ColumnDescriptors(const HaloTile& halo) {
        const int across = n8_pixel_stride(halo.view) * SLAB_PACKS * 16;
        const auto all = wgmma::swizzled_descriptor<SLAB_PACKS>(halo.numbers, across);
        lower = unsigned(all), upper = unsigned(all >> 32);
    }
    __device__ unsigned long long at(int piece) const {
        return (unsigned long long)upper << 32 | (lower + piece);
    }
};
#endif

// sums[i] += A B_i over `count` steps, from step `first` of the window on, B_i being the columns
// that begin at piece places[i]; `weights` those of the first.
#if !(WGMMA && PERSISTENT)
__device__ inline void multiply_steps(PixelAccumulators (&acc)[PIXEL_TILES], const Number* weights,
                                      const HaloTile& halo, const int (&offsets)[PIXEL_TILES],
                                      int first, int count) {
    KIterator k_iter(halo.view, first);
#if WGMMA
    const ColumnDescriptors columns(halo);
#else
    const int n8_stride = n8_pixel_stride(halo.view);
#endif
#if __CUDA_ARCH__ >= 800
    Pack<Number> words[2][STAGE_STEPS];
    load_weight_fragments(words[0], weights);
    // Multiplies by `now` while words for the next steps come to `next`. Behind the last ones
    // nobody uses what comes: from global memory whatever lies there; held, where windows that
    // others write would be next, the same words again.
    const auto multiply = [&](const Pack<Number>(&now)[STAGE_STEPS],
                              Pack<Number>(&next)[STAGE_STEPS], bool last) {
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
        // Those before are done, and their words free.
        wgmma::wait_group<1>();
#endif
        if (!PERSISTENT_GROUPS || !last) weights += STAGE_STEPS * WARP_GROUP_THREADS * PACK;
        load_weight_fragments(next, weights);
        return last;
    };
    // Not unrolled: compilers would take minutes.
#pragma unroll 1
    for (int step = 2 * STAGE_STEPS;; step += 2 * STAGE_STEPS) {
        if (multiply(words[0], words[1], step - STAGE_STEPS == count)) break;
        if (multiply(words[1], words[0], step == count)) break;
    }
#else
    for (int step = 0; step < count; ++step, k_iter.next(), weights += WARP_GROUP_THREADS * PACK)
        for (int i = 0; i < PIXEL_TILES; ++i)
            acc[i].add(reinterpret_cast<const Pack<Number>*>(weights), halo.numbers,
                       offsets[i] + k_iter.offset, n8_stride);
#endif
#if WGMMA
    wgmma::wait_group<0>();
#endif
    fence_accumulators(acc);
}
#endif
