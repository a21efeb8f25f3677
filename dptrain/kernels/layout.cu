// Images as they come, (N, C, H·W), into activations, (N, H·W, C).

// A thread for each element of y. Neighbouring threads read from few places, since images have few
// channels.
extern "C" __global__ void channels_last(
    const float* x, float* y, int n, int channels, int pixels) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n * channels * pixels) return;
    const int channel = i % channels, pixel = i / channels % pixels, sample = i / channels / pixels;
    y[i] = x[(sample * channels + channel) * pixels + pixel];
}
