// Weights as the main loop of column_sums.cuh takes them: rounded, a lane's words of a step side by
// side.

#include "order.cuh"
#include "column_sums.cuh"

// Output lines that are rows of A backward by the input.
#ifndef BACK_TALL
#define BACK_TALL 1
#endif

// A lane's words, i lanes behind the first: sixty-four rows after the other, step by step. Of w
// (taps, channels, filters), r s taps, rows are filters and terms channels, or, BACKWARD, rows
// channels and terms filters, taps the other way around. Rows beyond the last are zeros. For the
// line below, the second of TALL_, taps lie a line lower.
template <bool BACKWARD, int TALL_, class Rows>
__device__ inline Run<Number> words_of_lane(const float* w, int i, int r, int s, int channels,
                                            int filters) {
    constexpr int UNIT = RUN / 4;  // Numbers of a word.
    const int terms = BACKWARD ? filters : channels, rows = BACKWARD ? channels : filters;
    const int taps = (r + TALL_ - 1) * s, steps = terms / STEP_K * taps, step = i / TEAM % steps;
    const int lane = i % 32, warp = i / 32 % (TEAM / 32);
    Run<float> run = {};
#pragma unroll
    for (int v = 0; v < RUN; ++v) {
        const int word = v / UNIT, at = warp * 16 + lane / 4 + word % 2 * 8;
        const int row = i / TEAM / steps * Rows::FILTERS + Rows::filter(at);
        const int term = step / taps * STEP_K + (lane % 4 + word / 2 * 4) * UNIT + v % UNIT;
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
    if (!EARLY) in_order();
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    Run<Number> words = {};
    if (i < lanes)
        words = words_of_lane<false, TALL, OwnRows>(w, i, r, s, channels, filters);
    else if (i < all)
        words = words_of_lane<true, BACK_TALL, Rows<BACK_TALL, false>>(w, i - lanes, r, s, channels,
                                                                       filters);
    if (EARLY) in_order();
    if (i < lanes)
        reinterpret_cast<Run<Number>*>(packed)[i] = words;
    else if (i < all)
        reinterpret_cast<Run<Number>*>(packed_back)[i - lanes] = words;
}
