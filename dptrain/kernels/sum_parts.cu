// Second pass of gradients of weights: the parts that blocks have summed over their own pixels,
// added in order, so that the result is the same in every run.

// dw, then db, from `parts` parts of weights + biases elements each.
extern "C" __global__ void sum_parts(const float* partial, int parts, float* dw, int weights,
                                     float* db, int biases) {
    const int size = weights + biases;
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= size) return;
    float total = 0.0f;
#pragma unroll 8
    for (int part = 0; part < parts; ++part) total += partial[part * size + i];
    if (i < weights)
        dw[i] = total;
    else
        db[i - weights] = total;
}
