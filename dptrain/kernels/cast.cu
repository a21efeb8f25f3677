// Between float and bfloat16: master parameters to what tensor cores multiply, and gradients back.

#include "dependent_launch.cuh"
#include "vector.cuh"

// y = x, rounded to the nearest.
extern "C" __global__ void float_to_bfloat16(const float* x, Bfloat16* y, int count) {
    wait_for_previous_kernel();
    int i;
    if (vector_index(count, i)) store(y, i, load(x, i));
}

// y = x.
extern "C" __global__ void bfloat16_to_float(const Bfloat16* x, float* y, int count) {
    wait_for_previous_kernel();
    int i;
    if (vector_index(count, i)) store(y, i, load(x, i));
}
