// Weights as the main loop of implicit_gemm_mainloop.cuh takes them, rounded: a lane's words of a step side by
// side, or, where they come to shared memory, eight rows' pieces of 16 bytes, as wgmma reads them.

#include "dependent_launch.cuh"
#include "implicit_gemm_mainloop.cuh"

// Output lines that are rows of A backward by the input.
#ifndef BACKWARD_LINES_IN_M
#define BACKWARD_LINES_IN_M 1
#define BACKWARD_PERSISTENT 0  // PERSISTENT there.
#endif

// Run i: sixty-four rows after the other, step by step. Of w (taps, channels, filters), r s taps,
// rows are filters and terms channels, or, BACKWARD, rows channels and terms filters, taps the
// other way around. Rows beyond the last are zeros. For the line below, the second of TALL_, taps
// lie a line lower.
template <bool BACKWARD, int LINES, bool PIECES, class Rows>
__device__ inline Pack<Number> packed_run(const float* w, int i, int r, int s, int channels,
                                          int filters) {
    constexpr int UNIT = PACK / 4;  // Numbers of a word.
    const int terms = BACKWARD ? filters : channels, rows = BACKWARD ? channels : filters;
    const int taps = (r + LINES - 1) * s, steps = terms / STEP_K * taps,
              step = i / WARP_GROUP_THREADS % steps;
    Pack<float> pack = {};
#pragma unroll
    for (int v = 0; v < PACK; ++v) {
        const FragmentIndex index = PIECES ? core_matrix_index(i % WARP_GROUP_THREADS, v / UNIT)
                                           : lane_fragment(i % WARP_GROUP_THREADS, v / UNIT);
        const int at = index.row;
        const int row = i / WARP_GROUP_THREADS / steps * Rows::FILTERS + Rows::filter(at);
        const int term = step / taps * STEP_K + index.word * UNIT + v % UNIT;
        const int down = step % taps / s - Rows::line(at), across = step % taps % s;
        if (row >= rows || unsigned(down) >= unsigned(r)) continue;
        const int tap = down * s + across;
        pack.at[v] = BACKWARD ? w[((r * s - 1 - tap) * channels + row) * filters + term]
                              : w[(tap * channels + term) * filters + row];
    }
    return round_operands(pack);
}

// Weights for `lanes` lanes forward and, behind them, for those backward, `all` together.
extern "C" __global__ void pack_weights(const float* w, Number* pack_bfloat16x2,
                                        Number* packed_back, int lanes, int all, int r, int s,
                                        int channels, int filters) {
    // Places where others write may be those of the kernel before; weights are not.
    if (!PREFETCH_WEIGHTS) wait_for_previous_kernel();
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    Pack<Number> words = {};
    if (i < lanes)
        words = packed_run<false, LINES_IN_M, PERSISTENT, TileRows>(w, i, r, s, channels, filters);
    else if (i < all)
        words = packed_run<true, BACKWARD_LINES_IN_M, BACKWARD_PERSISTENT,
                           Rows<BACKWARD_LINES_IN_M, false>>(w, i - lanes, r, s, channels, filters);
    if (PREFETCH_WEIGHTS) wait_for_previous_kernel();
    if (i < lanes)
        reinterpret_cast<Pack<Number>*>(pack_bfloat16x2)[i] = words;
    else if (i < all)
        reinterpret_cast<Pack<Number>*>(packed_back)[i - lanes] = words;
}
