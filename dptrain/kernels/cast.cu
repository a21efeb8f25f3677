// Between float and bfloat16: master parameters to what tensor cores multiply, and gradients back.

#include "order.cuh"
#include "vector.cuh"

// y = x, rounded to the nearest.
extern "C" __global__ void narrow(const float* x, Bfloat16* y, int count) {
    in_order();
    int i;
    if (mine(count, i)) store(y, i, load(x, i));
}

// y = x.
extern "C" __global__ void widen(const Bfloat16* x, float* y, int count) {
    in_order();
    int i;
    if (mine(count, i)) store(y, i, load(x, i));
}
