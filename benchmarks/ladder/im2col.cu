// An image (C, H, W) unrolled to (C R S, Ho Wo): column p holds all that output pixel p sees, so that
// the convolution is a product of matrices. One buffer serves one image after another.
extern "C" __global__ void im2col(const float* image, float* unrolled, int channels, int height,
                                  int width, int r, int s, int stride, int padding, int out_height,
                                  int out_width) {
    const int pixels = out_height * out_width, at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= channels * r * s * pixels) return;
    const int term = at / pixels, pixel = at % pixels;
    const int channel = term / (r * s), down = term / s % r, across = term % s;
    const int row = pixel / out_width * stride + down - padding;
    const int column = pixel % out_width * stride + across - padding;
    const bool inside = row >= 0 && row < height && column >= 0 && column < width;
    unrolled[at] = inside ? image[(channel * height + row) * width + column] : 0;
}
