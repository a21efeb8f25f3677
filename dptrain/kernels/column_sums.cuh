// Sums of products whose columns are pixels of a window: what a lane has, and a step of them.
//
// Filters (backward by the input: channels) are rows of A, 64 of them, and come straight to
// registers: pack_weights.cu lays them out so that a lane reads the words of one instruction at
// once. Pixels are columns of B, which wgmma reads from the planes of a window by itself, a tap of
// the filter being one distance. So weights cost a load of 16 bytes a lane for up to 256 columns,
// and nothing in the main loop waits for other warps.
//
// Loads of weights from global memory wait behind the copies of windows that are asked for early,
// so then weights are held in shared memory where there is room.

#pragma once

#include "segments.cuh"

// Channels of two runs and one tap are a step of the sum: all taps of the first two runs, of the
// next two, and so on.
struct Steps {
    const View& view;

    __device__ int taps() const { return (view.r + TALL - 1) * view.s; }
    __device__ int count(int runs) const { return runs / 2 * taps(); }
};

// How far a step's pixels lie from those of the first, in pieces; one step after the other.
struct Walk {
    const View& view;
    int row, column, distance;

    __device__ Walk(const View& view, int step) : view(view) {
        const int taps = Steps{view}.taps(), tap = step % taps;
        row = tap / view.s, column = tap % view.s;
        distance = step / taps * 2 * PIXELS + row * view.across + column;
    }
    __device__ void next() {
        ++column, ++distance;
        if (column < view.s) return;
        column = 0, ++row, distance += view.across - view.s;
        if (row < view.r + TALL - 1) return;
        row = 0, distance += 2 * PIXELS - (view.r + TALL - 1) * view.across;
    }
};

// Pixels between eights of columns.
__device__ inline int eights_apart(const View& view) { return STRIP ? TALL * view.across : 8; }

#if __CUDA_ARCH__ >= 800
// A lane's words of DEPTH steps, as pack_weights.cu lays them out. Asked for where this stands:
// compilers would ask when it is too late.
__device__ inline void ask(Run<Number> (&words)[DEPTH], const Number* from) {
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) {
        Run<unsigned, 4> run;
        const Number* const at = from + d * TEAM * RUN;
#if HOLDERS
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(run.at[0]), "=r"(run.at[1]), "=r"(run.at[2]), "=r"(run.at[3])
                     : "r"(unsigned(__cvta_generic_to_shared(at))));
#else
        asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(run.at[0]), "=r"(run.at[1]), "=r"(run.at[2]), "=r"(run.at[3])
                     : "l"(at));
#endif
        words[d] = as<Run<Number>>(run);
    }
}
#endif

// A lane's sums of ROWS x COLUMNS: elements 0 and 1 are those of row g, 2 and 3 of row g + 8, of
// columns 2 t and 2 t + 1 of every eight.
struct ColumnSums {
    float c[EIGHTS][4] = {};

#if !WGMMA && __CUDA_ARCH__ >= 800
    // Of the step whose pixels begin at `b`.
    __device__ void add(const Run<Number>& a, const Number* b, int apart) {
        const Run<unsigned, 4> words = as<Run<unsigned, 4>>(a);
        const int lane = threadIdx.x % 32;
        b += lane / 8 % 2 * PIXELS * RUN + lane % 8 * RUN;
#pragma unroll
        for (int g = 0; g < EIGHTS; g += 2) {
            // An odd last eight is read twice.
            const int other = g + 1 < EIGHTS ? lane / 16 : 0;
            unsigned pixels[4];
            read_matrices(pixels, b + (g + other) * apart * RUN);
            multiply_add(c[g], words.at, pixels[0], pixels[1]);
            if (g + 1 < EIGHTS) multiply_add(c[g + 1], words.at, pixels[2], pixels[3]);
        }
    }
#elif !WGMMA
    // The same, number by number; `a` is where the lane's words lie, and those of its warp.
    __device__ void add(const Run<Number>* a, const Number* b, int apart) {
        constexpr int UNIT = RUN / 4;  // Numbers of a word.
        const int t = threadIdx.x % 4;
        for (int k = 0; k < STEP_K; ++k) {
            const Run<Number> words = a[k / UNIT % 4 - t];
            const Number* const pixels = b + k / RUN * PIXELS * RUN + k % RUN;
            for (int h = 0; h < 2; ++h) {
                const float weight = to_float(words.at[(k / RUN * 2 + h) * UNIT + k % UNIT]);
                for (int g = 0; g < EIGHTS; ++g)
                    for (int e = 0; e < 2; ++e)
                        c[g][h * 2 + e] +=
                            weight * to_float(pixels[(g * apart + t * 2 + e) * RUN]);
            }
        }
    }
#endif
};

// sums[i] += A B_i over `count` steps, from step `first` of the window on, B_i being the columns
// that begin at piece places[i].
__device__ inline void multiply_steps(ColumnSums (&sums)[SEGMENTS], const Number* weights,
                                      const Window& window, const int (&places)[SEGMENTS],
                                      int first, int count) {
    Walk walk(window.view, first);
    const int apart = eights_apart(window.view);
#if WGMMA
    // Descriptors of all columns differ in where they begin alone, and that in their lower half.
    const unsigned long long columns = wgmma::descriptor(window.numbers, PIXELS * 16, apart * 16);
    const unsigned upper = columns >> 32, lower = columns;
#endif
#if __CUDA_ARCH__ >= 800
    Run<Number> words[2][DEPTH];
    ask(words[0], weights);
    // Multiplies by `now` while words for the next steps come to `next`. Behind the last ones nobody
    // uses what comes: from global memory whatever lies there; held, where windows that others write
    // would be next, the same words again.
    const auto multiply = [&](const Run<Number>(&now)[DEPTH], Run<Number>(&next)[DEPTH],
                              bool last) {
#if WGMMA
        wgmma::start();
#endif
#pragma unroll
        for (int d = 0; d < DEPTH; ++d, walk.next())
#pragma unroll
            for (int i = 0; i < SEGMENTS; ++i) {
#if WGMMA
                const unsigned begin = lower + places[i] + walk.distance;
                wgmma::multiply_add<false>(sums[i].c, as<Run<unsigned, 4>>(now[d]).at,
                                           (unsigned long long)upper << 32 | begin);
#else
                sums[i].add(now[d], window.numbers + (places[i] + walk.distance) * RUN, apart);
#endif
            }
#if WGMMA
        wgmma::commit();
        // Those before are done, and their words free.
        wgmma::finish<1>();
#endif
        if (!HOLDERS || !last) weights += DEPTH * TEAM * RUN;
        ask(next, weights);
        return last;
    };
    // Not unrolled: compilers would take minutes.
#pragma unroll 1
    for (int step = 2 * DEPTH;; step += 2 * DEPTH) {
        if (multiply(words[0], words[1], step - DEPTH == count)) break;
        if (multiply(words[1], words[0], step == count)) break;
    }
#else
    for (int step = 0; step < count; ++step, walk.next(), weights += TEAM * RUN)
        for (int i = 0; i < SEGMENTS; ++i)
            sums[i].add(reinterpret_cast<const Run<Number>*>(weights),
                        window.numbers + (places[i] + walk.distance) * RUN, apart);
#endif
#if WGMMA
    wgmma::finish<0>();
    // The compiler must not read sums earlier.
#pragma unroll
    for (int i = 0; i < SEGMENTS; ++i)
#pragma unroll
        for (int g = 0; g < EIGHTS; ++g)
#pragma unroll
            for (int e = 0; e < 4; ++e) asm volatile("" : "+f"(sums[i].c[g][e])::"memory");
#endif
}
