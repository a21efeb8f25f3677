// Elements that lie side by side and are read and written by one access.
#pragma once

// How many: 4 where all rows are a multiple of 4 long and so every access is aligned, else 1.
#ifndef VECTOR
#define VECTOR 1
#endif

template <class T> struct alignas(sizeof(T) * VECTOR) Vector {
    T at[VECTOR];
};
using Floats = Vector<float>;
using Ints = Vector<int>;

// This thread's place among `count` threads; false behind the last.
__device__ inline bool mine(int count, int& i) {
    i = blockIdx.x * blockDim.x + threadIdx.x;
    return i < count;
}
