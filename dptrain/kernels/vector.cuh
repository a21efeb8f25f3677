// Elements that lie side by side and are read and written by one access.
#pragma once

#include "precision.cuh"

// How many: as many numbers as 16 bytes hold (4 floats, 8 bfloat16) where rows (of channels, or of
// all there is) are a multiple of that long, so that every access is aligned, else 1. Kernels are
// launched with one thread for each vector; their counts and sizes are of elements all the same.
#ifndef VECTOR
#define VECTOR 1
#endif

// In memory.
template <class T> struct alignas(sizeof(T) * VECTOR) Vector {
    T at[VECTOR];
};

// In registers.
struct Floats {
    float at[VECTOR];
};

// Vector i of x.
template <class T> __device__ inline Vector<T> load_vector(const T* x, int i) {
    return reinterpret_cast<const Vector<T>*>(x)[i];
}

__device__ inline Floats load(const float* x, int i) {
    const Vector<float> values = load_vector(x, i);
    Floats result;
    for (int k = 0; k < VECTOR; ++k) result.at[k] = values.at[k];
    return result;
}

// The same of what is not read again soon: it is the first to leave the caches.
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
// Vectors of bfloat16 go by pairs: an instruction or two for each number.
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

// Which vector this thread takes; false behind the last of `count` elements.
__device__ inline bool vector_index(int count, int& i) {
    i = blockIdx.x * blockDim.x + threadIdx.x;
    return i < count / VECTOR;
}
