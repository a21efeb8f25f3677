// Storage type of activations and of gradients with respect to activations: float or bfloat16.
// Parameters, their gradients, optimizer state and all accumulation use float.

#pragma once

// 0 (fp32): all products in float32. 1 (tf32): the operands of products are float32 rounded to
// TF32, which has 11 significant bits. 2 (bf16): activations and operands are bfloat16.
// Accumulation uses float32 in all three.
#ifndef PRECISION
#define PRECISION 0
#endif

struct Bfloat16 {
    unsigned short bits;
};

#if PRECISION == 2
using Number = Bfloat16;
#else
using Number = float;
#endif

__device__ inline float to_float(float value) { return value; }

__device__ inline float to_float(Bfloat16 value) {
    return __uint_as_float(unsigned(value.bits) << 16);
}

// Round to nearest, ties to even. NaN stays NaN.
__device__ inline Bfloat16 to_bfloat16(float value) {
#if __CUDA_ARCH__ >= 800
    Bfloat16 result;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
    return result;
#else
    const unsigned bits = __float_as_uint(value);
    const unsigned rounded = (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16;
    return {(unsigned short)(value != value ? 0x7FFFu : rounded)};
#endif
}

// Round two values to bfloat16 and pack them into 32 bits, `low` in the lower half.
__device__ inline unsigned pack_bfloat16x2(float low, float high) {
#if __CUDA_ARCH__ >= 800
    unsigned pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
#else
    return to_bfloat16(low).bits | unsigned(to_bfloat16(high).bits) << 16;
#endif
}

template <class T> __device__ T from_float(float value);
template <> __device__ inline float from_float<float>(float value) { return value; }
template <> __device__ inline Bfloat16 from_float<Bfloat16>(float value) {
    return to_bfloat16(value);
}

__device__ inline bool is_finite(float value) { return fabsf(value) <= 3.402823466e38f; }
