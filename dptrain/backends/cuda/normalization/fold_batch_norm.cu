// Folds a batch normalisation with fixed statistics into the convolution before it, for inference:
//
//     weight' = weight · s,   bias' = beta + (bias − mean) · s,   s = gamma / sqrt(variance + epsilon)
//
// weight and folded_weight (size,) = (R · S · C, filters); all other arrays (filters,), float32.
// bias is read if has_bias is not 0. Launched with one thread for each weight, in blocks of 256.

#include "dependent_launch.cuh"

extern "C" __global__ void fold_batch_norm(const float* weight, const float* bias,
                                           const float* gamma, const float* beta, const float* mean,
                                           const float* variance, float* folded_weight,
                                           float* folded_bias, float epsilon, int has_bias,
                                           int filters, int size) {
    wait_for_previous_kernel();
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= size) return;
    const int k = i % filters;
    const float scale = gamma[k] / sqrtf(variance[k] + epsilon);
    folded_weight[i] = weight[i] * scale;
    if (i < filters) folded_bias[i] = beta[k] + ((has_bias ? bias[k] : 0.0f) - mean[k]) * scale;
}
