// Direct convolution of images (samples, C, H, W) to y (samples, K, Ho, Wo) with weights (K, C, R,
// S) and bias (K,). Launched with one thread per element of y, which adds the products of its
// window. There is no im2col matrix; both factors are read from global memory, two loads per
// multiply-add, and products with the padding are skipped.
extern "C" __global__ void direct(const float* images, const float* w, const float* bias, float* y,
                                  int samples, int channels, int height, int width, int filters,
                                  int r, int s, int stride, int padding, int out_height,
                                  int out_width) {
    const int at = blockIdx.x * blockDim.x + threadIdx.x, pixels = out_height * out_width;
    if (at >= samples * filters * pixels) return;
    const int pixel = at % pixels, filter = at / pixels % filters, sample = at / pixels / filters;
    const int top = pixel / out_width * stride - padding;
    const int left = pixel % out_width * stride - padding;
    float sum = bias[filter];
    for (int channel = 0; channel < channels; ++channel) {
        const float* map = images + (sample * channels + channel) * height * width;
        const float* window = w + (filter * channels + channel) * r * s;
        for (int i = 0; i < r; ++i) {
            if (top + i < 0 || top + i >= height) continue;
            for (int j = 0; j < s; ++j)
                if (left + j >= 0 && left + j < width)
                    sum += window[i * s + j] * map[(top + i) * width + left + j];
        }
    }
    y[at] = sum;
}
