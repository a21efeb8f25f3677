// Gradient with respect to the input as implicit GEMM over all images: dx (N, C, H, W) = (C, K R S)
// times (K R S, N H W), with elements read from w (K, C, R, S) and dy (N, K, Ho, Wo) by address
// computation. One launch, no buffer. With strides above 1, most products are with 0.
#ifndef TILE
#define TILE 16
#endif

extern "C" __global__ void conv2d_backward_input(const float* w, const float* dy, float* dx,
                                                 int samples, int channels, int height, int width,
                                                 int filters, int r, int s, int stride, int padding,
                                                 int out_height, int out_width) {
    __shared__ float as[TILE][TILE], bs[TILE][TILE];
    const int x = threadIdx.x, y = threadIdx.y, row = blockIdx.y * TILE + y;
    const int terms = filters * r * s, pixels = height * width;
    const int column = blockIdx.x * TILE + x, sample = column / pixels, pixel = column % pixels;
    const int top = pixel / width + padding, left = pixel % width + padding;
    float sum = 0;
    for (int first = 0; first < terms; first += TILE) {
        const int wanted = first + x, within = wanted % (r * s);
        as[y][x] = row < channels && wanted < terms
                       ? w[(wanted / (r * s) * channels + row) * r * s + within]
                       : 0;
        const int term = first + y, filter = term / (r * s);
        const int down = top - term / s % r, across = left - term % s;
        const bool inside = sample < samples && term < terms && down >= 0 && across >= 0 &&
                            down % stride == 0 && across % stride == 0 &&
                            down / stride < out_height && across / stride < out_width;
        bs[y][x] = inside
                       ? dy[((sample * filters + filter) * out_height + down / stride) * out_width +
                            across / stride]
                       : 0;
        __syncthreads();
        for (int k = 0; k < TILE; ++k) sum += as[y][k] * bs[k][x];
        __syncthreads();
    }
    if (row < channels && sample < samples) dx[(sample * channels + row) * pixels + pixel] = sum;
}
