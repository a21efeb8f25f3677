// Conversion between float32 and bfloat16: master weights for tensor cores, and weight gradients
// back to float32.
//
// x and y have `count` elements in any shape. Launched with one thread for each vector of VECTOR
// elements.

#include "dependent_launch.cuh"
#include "vector.cuh"

// y (count,) = bfloat16(x (count,)), rounded to nearest, ties to even.
extern "C" __global__ void float_to_bfloat16(const float* x, Bfloat16* y, int count) {
    wait_for_previous_kernel();
    int i;
    if (vector_index(count, i)) store(y, i, load(x, i));
}

// y (count,) = float(x (count,)), which is exact.
extern "C" __global__ void bfloat16_to_float(const Bfloat16* x, float* y, int count) {
    wait_for_previous_kernel();
    int i;
    if (vector_index(count, i)) store(y, i, load(x, i));
}
