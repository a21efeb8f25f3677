// Vectorised access: a thread reads and writes VECTOR adjacent elements with one instruction.
#pragma once

#include "precision.cuh"

// VECTOR is 16 bytes' worth of elements (4 float or 8 bfloat16) if the row length is a multiple of
// that, so that every access is aligned; otherwise it is 1. Kernels are launched with one thread
// for each vector. Their counts and sizes are in elements.
#ifndef VECTOR
#define VECTOR 1
#endif

// A vector in memory.
template <class T> struct alignas(sizeof(T) * VECTOR) Vector {
    T at[VECTOR];
};

// A vector in registers, converted to float.
struct Floats {
    float at[VECTOR];
};

// Load vector i of x without conversion.
template <class T> __device__ inline Vector<T> load_vector(const T* x, int i) {
    return reinterpret_cast<const Vector<T>*>(x)[i];
}

__device__ inline Floats load(const float* x, int i) {
    const Vector<float> values = load_vector(x, i);
    Floats result;
    for (int k = 0; k < VECTOR; ++k) result.at[k] = values.at[k];
    return result;
}

// Load vector i of data that is not read again soon (ld.global.cs), so that the caches evict it
// first.
__device__ inline Floats load_streaming(const float* x, int i) {
#if VECTOR == 4 && defined(__CUDA_ARCH__)
    const float4 values = __ldcs(reinterpret_cast<const float4*>(x) + i);
    return {{values.x, values.y, values.z, values.w}};
#else
    return load(x, i);
#endif
}

__device__ inline void store(float* y, int i, const Floats& values) {
    Vector<float> result;
    for (int k = 0; k < VECTOR; ++k) result.at[k] = values.at[k];
    reinterpret_cast<Vector<float>*>(y)[i] = result;
}

#if VECTOR == 1
__device__ inline Floats load(const Bfloat16* x, int i) { return {{to_float(x[i])}}; }
__device__ inline void store(Bfloat16* y, int i, const Floats& values) {
    y[i] = to_bfloat16(values.at[0]);
}
#else
// Two bfloat16 are converted together, which takes one or two instructions per element.
struct alignas(2 * VECTOR) Pairs {
    unsigned at[VECTOR / 2];
};

__device__ inline Floats load(const Bfloat16* x, int i) {
    const Pairs pairs = reinterpret_cast<const Pairs*>(x)[i];
    Floats result;
    for (int k = 0; k < VECTOR / 2; ++k) {
        result.at[2 * k] = __uint_as_float(pairs.at[k] << 16);
        result.at[2 * k + 1] = __uint_as_float(pairs.at[k] & 0xFFFF0000u);
    }
    return result;
}

__device__ inline void store(Bfloat16* y, int i, const Floats& values) {
    Pairs pairs;
    for (int k = 0; k < VECTOR / 2; ++k)
        pairs.at[k] = pack_bfloat16x2(values.at[2 * k], values.at[2 * k + 1]);
    reinterpret_cast<Pairs*>(y)[i] = pairs;
}
#endif

// True if the result is added to what another kernel has stored: a part of a gradient.
#ifndef ADD_GRADIENT
#define ADD_GRADIENT 0
#endif

// Store vector i of a result, or add it with ADD_GRADIENT.
template <class T> __device__ inline void store_or_add(T* y, int i, Floats values) {
    if (ADD_GRADIENT) {
        const Floats stored = load(y, i);
        for (int k = 0; k < VECTOR; ++k) values.at[k] += stored.at[k];
    }
    store(y, i, values);
}

// Set i to the index of this thread's vector. Return false if it lies beyond the last of `count`
// elements.
__device__ inline bool vector_index(int count, int& i) {
    i = blockIdx.x * blockDim.x + threadIdx.x;
    return i < count / VECTOR;
}
