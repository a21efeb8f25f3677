// Elements that lie side by side and are read and written by one access.
#pragma once

// How many: 4 where rows (of channels, or of all there is) are a multiple of 4 long, so that every
// access is aligned, else 1. Kernels are launched with one thread for each vector; their counts and
// sizes are of elements all the same.
#ifndef VECTOR
#define VECTOR 1
#endif

template <class T> struct alignas(sizeof(T) * VECTOR) Vector {
    T at[VECTOR];
};
using Floats = Vector<float>;
using Ints = Vector<int>;

// Which vector this thread takes; false behind the last of `count` elements.
__device__ inline bool mine(int count, int& i) {
    i = blockIdx.x * blockDim.x + threadIdx.x;
    return i < count / VECTOR;
}
