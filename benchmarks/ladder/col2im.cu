// Inverse of im2col.cu: each pixel of the gradient dx (C, H, W) of one image gathers its
// contributions from dU (C R S, Ho Wo). Launched with one thread per pixel, so no atomics are
// needed.
extern "C" __global__ void col2im(const float* unrolled, float* image, int channels, int height,
                                  int width, int r, int s, int stride, int padding, int out_height,
                                  int out_width) {
    const int at = blockIdx.x * blockDim.x + threadIdx.x, pixels = out_height * out_width;
    if (at >= channels * height * width) return;
    const int channel = at / (height * width);
    const int row = at / width % height + padding, column = at % width + padding;
    float sum = 0;
    for (int i = 0; i < r; ++i)
        for (int j = 0; j < s; ++j) {
            const int down = row - i, across = column - j;
            if (down < 0 || across < 0 || down % stride || across % stride) continue;
            const int out_row = down / stride, out_column = across / stride;
            if (out_row >= out_height || out_column >= out_width) continue;
            const int term = (channel * r + i) * s + j;
            sum += unrolled[term * pixels + out_row * out_width + out_column];
        }
    image[at] = sum;
}
