// Weights as the main loop of window.cuh takes them: rounded, in slices that lie in memory as they
// are to lie in shared memory.

#include "order.cuh"
#include "window.cuh"

#ifndef BACKWARD
#define BACKWARD 0
#endif

// w (taps, channels, filters) as B: columns are filters and terms channels, or, BACKWARD, columns
// channels and terms filters, taps the other way around. Column tile by column tile and tap by tap,
// plane by plane of RUN terms; one thread a piece, zeros in columns beyond the last.
extern "C" __global__ void pack_weights(const float* w, Number* packed, int taps, int channels,
                                        int filters) {
    in_order();
    const int terms = BACKWARD ? filters : channels, columns = BACKWARD ? channels : filters;
    const int tiles = (columns + TILE_N - 1) / TILE_N;
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= tiles * taps * (terms / RUN) * TILE_N) return;
    const int plane = i / TILE_N, k = plane % (terms / RUN) * RUN, tap = plane / (terms / RUN) % taps;
    const int column = plane / (terms / RUN) / taps * TILE_N + i % TILE_N;
    Run<float> run = {};
    if (column < columns) {
#pragma unroll
        for (int v = 0; v < RUN; ++v)
            run.at[v] = BACKWARD ? w[((taps - 1 - tap) * channels + column) * filters + k + v]
                                 : w[(tap * channels + k + v) * filters + column];
    }
    reinterpret_cast<Run<Number>*>(packed)[i] = as_factors(run);
}
