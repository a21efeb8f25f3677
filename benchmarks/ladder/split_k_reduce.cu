// Reduction of split-K: sums (size,) = Σ over splits of parts (count, size), in a fixed order.
extern "C" __global__ void split_k_reduce(const float* parts, float* sums, int count, int size) {
    const int at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= size) return;
    float sum = 0;
    for (int part = 0; part < count; ++part) sum += parts[part * size + at];
    sums[at] = sum;
}
