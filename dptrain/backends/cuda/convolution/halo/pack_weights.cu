// Packing of convolution weights into the layout of implicit_gemm_mainloop.cuh, rounded to the
// operand type.
//
//     w                (R, S, C, K)                                            float32
//     packed_forward   (K / FILTERS, steps, 128, PACK)      rows are filters, terms are channels
//     packed_backward  (C / FILTERS, steps, 128, PACK)      rows are channels, terms are filters
//
// A step has 64 rows × STEP_K terms, which are 128 packs of 16 bytes: in fragment order for weights
// that are loaded into registers, or in core-matrix order for weights in shared memory
// (PERSISTENT). Launched with one thread per pack of both arrays, in blocks of 256.

#include "dependent_launch.cuh"
#include "implicit_gemm_mainloop.cuh"

// LINES_IN_M of the gradient with respect to the input.
#ifndef BACKWARD_LINES_IN_M
#define BACKWARD_LINES_IN_M 1
#define BACKWARD_PERSISTENT 0  // PERSISTENT of the gradient with respect to the input.
#endif
// 1 if a step of one of the arrays has terms that do not exist, or if the map is folded.
#ifndef PADDED_WEIGHTS
#define PADDED_WEIGHTS 0
#endif

// Pack i of the packed weights: 64 rows at a time, step by step. Forward, rows are filters and
// terms are channels. BACKWARD, rows are channels, terms are filters and the taps are rotated by
// 180 degrees. Rows beyond the last are zero. If a work tile has several output lines, the taps of
// each are shifted down by one line compared with the previous one.
template <bool BACKWARD, int LINES, bool CORE_MATRICES, class Rows>
__device__ inline Pack<Number> packed_weights(const float* w, int i, const FoldedFilter& f) {
    constexpr int UNIT = PACK / 4;  // Elements of a 32-bit word.
    const int channels = f.all_channels();
    const int terms = BACKWARD ? f.filters : channels, rows = BACKWARD ? channels : f.filters;
    const int r = f.r(), s = f.s(), taps = (r + LINES - 1) * s,
              steps = (PADDED_WEIGHTS ? whole_steps(terms) : terms) / STEP_K * taps,
              step = i / WARP_GROUP_THREADS % steps;
    Pack<float> pack = {};
#pragma unroll
    for (int v = 0; v < PACK; ++v) {
        const FragmentIndex index = CORE_MATRICES
                                        ? core_matrix_index(i % WARP_GROUP_THREADS, v / UNIT)
                                        : lane_fragment(i % WARP_GROUP_THREADS, v / UNIT);
        const int at = index.row;
        const int row = i / WARP_GROUP_THREADS / steps * Rows::FILTERS + Rows::filter(at);
        const int term = step / taps * STEP_K + index.word * UNIT + v % UNIT;
        const int down = step % taps / s - Rows::line(at), across = step % taps % s;
        if (row >= rows || unsigned(down) >= unsigned(r)) continue;
        if (PADDED_WEIGHTS && term >= terms) continue;
        const int own = BACKWARD ? f.index(r - 1 - down, s - 1 - across, row)
                                 : f.index(down, across, term);
        if (own >= 0) pack.at[v] = w[own * f.filters + (BACKWARD ? term : row)];
    }
    return round_operands(pack);
}

// w (height, width, channels, filters); packed_forward has `forward_packs` packs; packed_backward has the
// others of `all_packs`.
extern "C" __global__ void pack_weights(const float* w, Number* packed_forward,
                                        Number* packed_backward, int forward_packs, int all_packs,
                                        int height, int width, int channels, int filters,
                                        int fold_h, int fold_w) {
    // The previous kernel may still read or write the target arrays; it does not write the weights.
    if (!PREFETCH_WEIGHTS) wait_for_previous_kernel();
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    const FoldedFilter filter{height, width, channels, filters, fold_h, fold_w};
    Pack<Number> packed = {};
    if (i < forward_packs)
        packed = packed_weights<false, LINES_IN_M, PERSISTENT, TileRows>(w, i, filter);
    else if (i < all_packs)
        packed =
            packed_weights<true, BACKWARD_LINES_IN_M, BACKWARD_PERSISTENT,
                           Rows<BACKWARD_LINES_IN_M, false>>(w, i - forward_packs, filter);
    if (PREFETCH_WEIGHTS) wait_for_previous_kernel();
    if (i < forward_packs)
        reinterpret_cast<Pack<Number>*>(packed_forward)[i] = packed;
    else if (i < all_packs)
        reinterpret_cast<Pack<Number>*>(packed_backward)[i - forward_packs] = packed;
}
