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
template <bool BACKWARD, int TALL_, bool PIECES, class Rows>
__device__ inline Run<Number> packed_run(const float* w, int i, int r, int s, int channels,
                                            int filters) {
    constexpr int UNIT = RUN / 4;  // Numbers of a word.
    const int terms = BACKWARD ? filters : channels, rows = BACKWARD ? channels : filters;
    const int taps = (r + TALL_ - 1) * s, steps = terms / STEP_K * taps, step = i / TEAM % steps;
    Run<float> run = {};
#pragma unroll
    for (int v = 0; v < RUN; ++v) {
        const Place place = PIECES ? place_in_piece(i % TEAM, v / UNIT)
                                   : place_of_lane(i % TEAM, v / UNIT);
        const int at = place.row;
        const int row = i / TEAM / steps * Rows::FILTERS + Rows::filter(at);
        const int term = step / taps * STEP_K + place.word * UNIT + v % UNIT;
        const int down = step % taps / s - Rows::line(at), across = step % taps % s;
        if (row >= rows || unsigned(down) >= unsigned(r)) continue;
        const int tap = down * s + across;
        run.at[v] = BACKWARD ? w[((r * s - 1 - tap) * channels + row) * filters + term]
                             : w[(tap * channels + term) * filters + row];
    }
    return as_factors(run);
}

// Weights for `lanes` lanes forward and, behind them, for those backward, `all` together.
extern "C" __global__ void pack_weights(const float* w, Number* packed, Number* packed_back,
                                        int lanes, int all, int r, int s, int channels,
                                        int filters) {
    // Places where others write may be those of the kernel before; weights are not.
    if (!PREFETCH_WEIGHTS) wait_for_previous_kernel();
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    Run<Number> words = {};
    if (i < lanes)
        words = packed_run<false, LINES_IN_M, PERSISTENT, OwnRows>(w, i, r, s, channels, filters);
    else if (i < all)
        words = packed_run<true, BACKWARD_LINES_IN_M, BACKWARD_PERSISTENT, Rows<BACKWARD_LINES_IN_M, false>>(
            w, i - lanes, r, s, channels, filters);
    if (PREFETCH_WEIGHTS) wait_for_previous_kernel();
    if (i < lanes)
        reinterpret_cast<Run<Number>*>(packed)[i] = words;
    else if (i < all)
        reinterpret_cast<Run<Number>*>(packed_back)[i - lanes] = words;
}
