// Epilogue of products: operations on the accumulators before they are stored, selected by
// EPILOGUE.
//
//     0   bias
//     1   bias and ReLU
//     2   bias, ReLU and max pooling with 2 × 2 windows and stride 2
//
// Dropout may follow (EPILOGUE_DROPOUT, forward only). A dropped output is 0, so backward needs
// only the scale of the kept outputs.
//
// With EPILOGUE 2 the unpooled map is never stored. Forward, one thread holds the four elements of
// a window and stores the maximum and its index (uint8): member 2 r + s of the window, the first
// among equal values, or NO_MAXIMUM if ReLU blocks the gradient. Backward, dz is computed while dy
// is loaded, from dy and the saved tensor: y for EPILOGUE 1, the argmax for EPILOGUE 2.

#pragma once

#include "gemm.cuh"
#include "philox.cuh"

#ifndef EPILOGUE
#define EPILOGUE 0
#endif
#ifndef EPILOGUE_DROPOUT
#define EPILOGUE_DROPOUT 0
#endif

// True if the accumulators were initialised with the bias.
#ifndef ACCUMULATORS_INCLUDE_BIAS
#define ACCUMULATORS_INCLUDE_BIAS 0
#endif

constexpr unsigned char NO_MAXIMUM = 255;

// Element type of the tensor that forward saves for backward: y, or the argmax of pooling. It is
// unused with EPILOGUE 0.
#if EPILOGUE == 2
using Saved = unsigned char;
#else
using Saved = Number;
#endif

#if EPILOGUE_DROPOUT
#define EPILOGUE_PARAMETERS , DROPOUT_PARAMETERS
#define EPILOGUE_ARGUMENTS DROPOUT_ARGUMENTS
#else
#define EPILOGUE_PARAMETERS
#define EPILOGUE_ARGUMENTS \
    {                      \
    }
#endif

// Return bit n = 1 if dropout keeps element `first` + n of a sample. `first` is a multiple of the
// smaller of N and OUT_VECTOR.
template <int N>
__device__ inline unsigned kept_in_outputs(const Dropout& d, int sample, int first) {
    constexpr int STEP = N < OUT_VECTOR ? N : OUT_VECTOR, APART = STEP < 4 ? STEP : 4;
    unsigned block = 0, kept = 0;
#pragma unroll
    for (int n = 0; n < N; ++n) {
        const int element = first + n;
        if (n == 0 || (n % APART == 0 && element % 4 == 0))
            block = kept_in_block(d, sample, element / 4);
        kept |= (block >> element % 4 & 1) << n;
    }
    return kept;
}

// Forward epilogue: add the bias, apply the epilogue and store y (rows, columns). A sample has
// `sample_rows` rows. If the epilogue pools, rows are pooled pixels.
struct StoreOutput {
    Number* y;
    Saved* saved;
    const float* bias;
    int rows, columns, sample_rows;
    Dropout dropout;

    // values[m][n] as in gemm.cuh. A pooling window has M = 4 members.
    template <int M, int N>
    __device__ void operator()(int row, int column, const float (&values)[M][N]) const {
#if EPILOGUE == 2
        if (window_of(row) < rows) pooling_window(window_of(row), column, values);
#else
#pragma unroll
        for (int m = 0; m < M; ++m) {
            const int i = row + m * MEMBER_STEP;
            if (i < rows) pixel(i, column, values[m]);
        }
#endif
    }

    // Store a pooled pixel. values[m] are the four members of its window.
    template <int N>
    __device__ void pooling_window(int i, int column, const float (&values)[4][N]) const {
        pooling_window(i, column, values, draw<N>(i, column));
    }
    // The same with dropout bits that the caller drew: bit n of `kept` is 1 if output `column` + n
    // is kept.
    template <int N>
    __device__ void pooling_window(int i, int column, const float (&values)[4][N],
                                   unsigned kept) const {
        float best[N];
        int which[N];
#pragma unroll
        for (int n = 0; n < N; ++n) {
            best[n] = values[0][n];
            which[n] = 0;
#pragma unroll
            for (int m = 1; m < 4; ++m) {
                const float value = values[m][n];
                // This comparison lets NaN win and stay.
                const bool more = value > best[n] || value != value;
                best[n] = more ? value : best[n];
                which[n] = more ? m : which[n];
            }
        }
        finish(i, column, best, which, kept);
    }

    // Store a pixel that is not pooled.
    template <int N> __device__ void pixel(int i, int column, const float (&values)[N]) const {
        int which[N];
        finish(i, column, values, which, draw<N>(i, column));
    }

    template <int N> __device__ unsigned draw(int i, int column) const {
        return EPILOGUE_DROPOUT ? kept_in_outputs<N>(dropout, i / sample_rows,
                                                     i % sample_rows * columns + column)
                                : 0;
    }

    // Bias, ReLU, dropout and store, after the maximum of a window has been selected.
    template <int N>
    __device__ void finish(int i, int column, const float (&values)[N], int (&which)[N],
                           unsigned kept) const {
        float z[N];
#pragma unroll
        for (int n = 0; n < N; ++n) {
            z[n] = values[n];
            if (!ACCUMULATORS_INCLUDE_BIAS)
                z[n] += column + n < columns ? __ldg(bias + column + n) : 0.0f;
            if (!(z[n] > 0.0f)) which[n] = NO_MAXIMUM;
            // This comparison lets NaN pass.
            if (EPILOGUE && z[n] <= 0.0f) z[n] = 0.0f;
            if (!EPILOGUE_DROPOUT) continue;
            // Dropped outputs are multiplied by 0, so that NaN stays NaN.
            const bool keep = kept >> n & 1;
            z[n] *= keep ? dropout.factor : 0.0f;
            if (!keep) which[n] = NO_MAXIMUM;
        }
        write<OUT_VECTOR>(y + i * columns, column, columns, z);
#if EPILOGUE == 2
        write<OUT_VECTOR>(saved + i * columns, column, columns, which);
#endif
    }
};

// dz, computed from dy while it is loaded, in vectors of OUT_VECTOR outputs.
struct Gradient {
    const Number* dy;
    const Saved* saved;  // y (EPILOGUE 1) or the argmax (EPILOGUE 2), in the shape of dy.
    float factor;        // Scale of outputs that dropout keeps.

    struct Raw {
        Pack<Number> dy;
#if EPILOGUE
        Pack<Saved> saved;
#endif
#if EPILOGUE == 2
        unsigned char members[PACK / OUT_VECTOR];
#endif
    };

    // Load outputs [i, i + OUT_VECTOR) into the pack from element v on. With pooling, `member` is
    // the pixel's index within its window.
    __device__ void piece(Raw& raw, int v, int i, int member) const {
        read<OUT_VECTOR>(raw.dy, v, dy + i);
#if EPILOGUE
        read<OUT_VECTOR>(raw.saved, v, saved + i);
#endif
#if EPILOGUE == 2
        raw.members[v / OUT_VECTOR] = (unsigned char)member;
#endif
    }

    // Output i alone, as in `value`.
    __device__ float element(int i, int member) const {
#if EPILOGUE == 0
        return to_float(round_operand(to_float(dy[i])));
#elif EPILOGUE == 1
        return to_float(saved[i]) > 0.0f ? to_float(round_operand(to_float(dy[i]) * factor)) : 0.0f;
#else
        return saved[i] == member ? to_float(round_operand(to_float(dy[i]) * factor)) : 0.0f;
#endif
    }

    __device__ Pack<Number> value(const Raw& raw) const {
#if EPILOGUE == 0
        return round_operands(raw.dy);
#elif EPILOGUE == 1
        Pack<float> dz;
#pragma unroll
        for (int v = 0; v < PACK; ++v)
            dz.at[v] = to_float(raw.saved.at[v]) > 0.0f ? to_float(raw.dy.at[v]) * factor : 0.0f;
        return round_operands(dz);
#else
        const Pack<Number> dz = chosen(raw);
        if (factor == 1.0f) return round_operands(dz);
        Pack<float> scaled;
#pragma unroll
        for (int v = 0; v < PACK; ++v) scaled.at[v] = to_float(dz.at[v]) * factor;
        return round_operands(scaled);
#endif
    }

#if EPILOGUE == 2
    // dy where the member is the maximum of its window, else 0.
    __device__ static Pack<Number> chosen(const Raw& raw) {
#if PRECISION == 2 && OUT_VECTOR >= 4
        // Compares four bytes at a time with bit operations, which takes a third of the
        // instructions.
        const Pack<unsigned, 2> saved = as<Pack<unsigned, 2>>(raw.saved);
        Pack<unsigned, 4> dz = as<Pack<unsigned, 4>>(raw.dy);
#pragma unroll
        for (int q = 0; q < 2; ++q) {
            const unsigned member = raw.members[q * 4 / OUT_VECTOR] * 0x01010101u;
            const unsigned other = saved.at[q] ^ member;
            // Sets the highest bit of each byte that is 0, then all bits of that byte.
            const unsigned zero = ~(((other & 0x7F7F7F7Fu) + 0x7F7F7F7Fu) | other) & 0x80808080u;
            const unsigned bytes = (zero >> 7) * 255u;
            dz.at[q * 2] &= widened(bytes & 0xFFFFu);
            dz.at[q * 2 + 1] &= widened(bytes >> 16);
        }
        return as<Pack<Number>>(dz);
    }

    // Widen two byte masks to two masks of 16 bits.
    __device__ static unsigned widened(unsigned bytes) {
        return (bytes & 0xFFu) * 0x0101u | (bytes >> 8) * 0x01010000u;
    }
#else
        Pack<Number> dz;
#pragma unroll
        for (int v = 0; v < PACK; ++v) {
            const bool same = raw.saved.at[v] == raw.members[v / OUT_VECTOR];
            dz.at[v] = same ? raw.dy.at[v] : from_float<Number>(0.0f);
        }
        return dz;
    }
#endif
#endif
};
