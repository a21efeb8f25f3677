// Gradients of weight and bias of a batch normalisation, and the sums that the gradient of its
// input needs:
//
//     dbias = Σ dz,   dweight = Σ dz · (x − mean) · invstd,   over the pixels of this rank,
//
// where dz is dy, or 0 where a fused ReLU blocked it (RELU_MASK of batch_norm.cuh).
//
//     dy, y, x       (pixels, C)     activation type; y is read with RELU_MASK 2 only
//     dz             (pixels, C)     written if STORE_DZ: the gradient of the other addend, from
//                                    which batch_norm_backward_input.cu continues
//     partial        (blocks, 2, C)  float32
//     totals         (2, C)          float64: dbias and dweight, to be added over ranks
//     count          (1,)            float64: pixels of all ranks
//     backward_sums  (2, C)          float32: mean of dz, and invstd · mean of dz · x̂
//
// Launch: channel_sums.cuh. Time: that of reading dy, x and y.
//
// Source: Ioffe and Szegedy, "Batch normalization", 2015, section 3.

#include "batch_norm.cuh"

#ifndef STORE_DZ
#define STORE_DZ 0
#endif

__device__ inline void store_backward_sums(float* backward_sums, const float* moments, int channels,
                                           int c, double count, double dbias, double dweight) {
    const double factor = count > 0.0 ? 1.0 / count : 0.0;
    backward_sums[c] = float(dbias * factor);
    backward_sums[channels + c] = float(dweight * factor * double(moments[channels + c]));
}

// If `finish` is not 0, there is one rank, and the last blocks compute backward_sums at once. Without
// the number of blocks, the compiler spills registers so that more blocks fit.
extern "C" __global__ void __launch_bounds__(CHANNEL_THREADS, 2)
    batch_norm_backward_statistics(const Number* __restrict__ dy, const Number* __restrict__ y,
                                   const Number* __restrict__ x, Number* __restrict__ dz,
                                   const float* moments, const float* weight, const float* bias,
                                   float* partial, unsigned* tickets, double* totals,
                                   const double* count, float* backward_sums, float* dweight,
                                   float* dbias, int pixels, int channels, int finish) {
    wait_for_previous_kernel();
    const ChannelThread thread(channels);
    Floats sums[2] = {};
    if (thread.has_channels()) {
        const ChannelConstants constants(moments, moments + channels, weight, bias, thread.slot);
#pragma unroll 2
        for (int pixel = thread.first; pixel < pixels; pixel += thread.stride) {
            const int i = thread.at(pixel);
            const Floats values = load(x, i);
            Floats gradient = load(dy, i), saved = {};
            if (RELU_MASK == 2) saved = load(y, i);
            mask_gradient(gradient, values, saved, constants);
            if (STORE_DZ) store(dz, i, gradient);
            for (int k = 0; k < VECTOR; ++k) {
                sums[0].at[k] += gradient.at[k];
                sums[1].at[k] += gradient.at[k] * (values.at[k] - constants.mean.at[k]);
            }
        }
    }
    store_block_sums(sums, partial, 2, 0, channels);
    if (!is_last_block(tickets)) return;

    int c;
    Doubles<2> total;
    const bool has_result = sum_over_blocks(channels, c, total, [&](int block, int channel) {
        const float* row = partial + block * 2 * channels + channel;
        return Doubles<2>{{__ldcg(row), __ldcg(row + channels)}};
    });
    if (!has_result) return;
    total.at[1] *= double(moments[channels + c]);
    dbias[c] = float(total.at[0]);
    dweight[c] = float(total.at[1]);
    totals[c] = total.at[0];
    totals[channels + c] = total.at[1];
    if (finish)
        store_backward_sums(backward_sums, moments, channels, c, count[0], total.at[0],
                            total.at[1]);
}

// Compute backward_sums from the totals of all ranks; one thread for each channel.
extern "C" __global__ void batch_norm_backward_sums(const double* totals, const double* count,
                                                    const float* moments, float* backward_sums,
                                                    int channels) {
    wait_for_previous_kernel();
    const int c = blockIdx.x * blockDim.x + threadIdx.x;
    if (c < channels)
        store_backward_sums(backward_sums, moments, channels, c, count[0], totals[c],
                            totals[channels + c]);
}
