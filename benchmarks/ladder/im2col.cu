// im2col: unroll an image (C, H, W) to U (C R S, Ho Wo), whose column p holds the patch of output
// pixel p. The convolution is then a matrix product. One buffer is reused for all images. Launched
// with one thread per element of U.
//
// Source: Chellapilla et al., "High performance convolutional neural networks for document
// processing", 2006.
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
