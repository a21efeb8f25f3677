// Batch normalisation, with an optional addition and function f (activation.cuh):
//
//     y = f(weight · (x − mean) · invstd + bias [+ x2 if ADD]), with f(z) = z unless ACTIVATES
//
// x, x2 and y (pixels, C), activation type; weight and bias (C,) float32. In training, mean and
// deviation are moments[0] and moments[1] of the minibatch. In inference they are the running mean
// and the running variance, and `is_variance` is not 0.
//
// One pass: the constants of a channel stay in registers, because a thread keeps its channels
// (channel_sums.cuh). Time: that of reading x and x2 and writing y.

#include "batch_norm.cuh"

#ifndef ADD
#define ADD 0
#endif
#ifndef ACTIVATES
#define ACTIVATES 0
#endif

extern "C" __global__ void __launch_bounds__(CHANNEL_THREADS)
    batch_norm_forward(const Number* __restrict__ x, const Number* __restrict__ x2,
                       Number* __restrict__ y, const float* __restrict__ mean,
                       const float* __restrict__ deviation, const float* __restrict__ weight,
                       const float* __restrict__ bias, int pixels, int channels, float epsilon,
                       int is_variance) {
    wait_for_previous_kernel();
    const ChannelThread thread(channels);
    if (!thread.has_channels()) return;
    ChannelConstants constants(mean, deviation, weight, bias, thread.slot);
    if (is_variance) constants.use_variance(deviation, weight, thread.slot, epsilon);
    // Vectors of four and of eight channels are fastest so.
    constexpr int PIXELS = VECTOR > 4 ? 4 : 2;
#pragma unroll PIXELS
    for (int pixel = thread.first; pixel < pixels; pixel += thread.stride) {
        const int i = thread.at(pixel);
        Floats values = load(x, i), other = {};
        if (ADD) other = load(x2, i);
        for (int k = 0; k < VECTOR; ++k) {
            const float z = constants.normalized(values.at[k], k) + (ADD ? other.at[k] : 0.0f);
            values.at[k] = ACTIVATES ? activate(z) : z;
        }
        store(y, i, values);
    }
}
