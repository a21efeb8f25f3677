// Gradient of a batch normalisation with respect to its input:
//
//     dx = weight · invstd · (dz − mean(dz) − x̂ · mean(dz · x̂)),   x̂ = (x − mean) · invstd
//
// The means over the minibatch come from batch_norm_backward_statistics.cu (backward_sums). dz is
// the gradient before a fused function (ACTIVATION_FROM of activation.cuh).
//
// With frozen parameters, y follows from the running mean and variance, which do not depend on x:
//
//     dx = weight / sqrt(variance + epsilon) · dz
//
// dy, y, x and dx (pixels, C), activation type; y is read with ACTIVATION_FROM 2 only. Launch:
// channel_sums.cuh. Time: that of reading dy and x and writing dx.

#include "batch_norm.cuh"

extern "C" __global__ void __launch_bounds__(CHANNEL_THREADS)
    batch_norm_backward_input(const Number* __restrict__ dy, const Number* __restrict__ y,
                              const Number* __restrict__ x, Number* __restrict__ dx,
                              const float* moments, const float* weight, const float* bias,
                              const float* backward_sums, int pixels, int channels) {
    wait_for_previous_kernel();
    const ChannelThread thread(channels);
    if (!thread.has_channels()) return;
    const ChannelConstants constants(moments, moments + channels, weight, bias, thread.slot);
    const Floats mean_dz = load(backward_sums, thread.slot);
    const Floats slope = load(backward_sums + channels, thread.slot);
#pragma unroll 2
    for (int pixel = thread.first; pixel < pixels; pixel += thread.stride) {
        const int i = thread.at(pixel);
        const Floats values = load(x, i);
        Floats gradient = load(dy, i), saved = {};
        if (ACTIVATION_FROM == 2) saved = load(y, i);
        undo_activation(gradient, values, saved, constants);
        for (int k = 0; k < VECTOR; ++k) {
            const float along = (values.at[k] - constants.mean.at[k]) * slope.at[k];
            gradient.at[k] = constants.scale.at[k] * (gradient.at[k] - mean_dz.at[k] - along);
        }
        store_or_add(dx, i, gradient);
    }
}

extern "C" __global__ void __launch_bounds__(CHANNEL_THREADS)
    frozen_batch_norm_backward_input(const Number* dy, const Number* __restrict__ x, Number* dx,
                                     const float* mean, const float* variance,
                                     const float* weight, const float* bias, int pixels,
                                     int channels, float epsilon) {
    wait_for_previous_kernel();
    const ChannelThread thread(channels);
    if (!thread.has_channels()) return;
    ChannelConstants constants(mean, variance, weight, bias, thread.slot);
    constants.use_variance(variance, weight, thread.slot, epsilon);
#pragma unroll 2
    for (int pixel = thread.first; pixel < pixels; pixel += thread.stride) {
        const int i = thread.at(pixel);
        Floats gradient = load(dy, i), values = {};
        if (ACTIVATION_FROM) values = load(x, i);
        undo_activation(gradient, values, values, constants);
        for (int k = 0; k < VECTOR; ++k) gradient.at[k] *= constants.scale.at[k];
        store_or_add(dx, i, gradient);
    }
}
