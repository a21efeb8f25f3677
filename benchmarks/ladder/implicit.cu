// Convolution forward as implicit GEMM over all images: y (N, K, Ho, Wo) from images (N, C, H, W),
// a (K, C R S) and bias (K,). The tiled product of shared_tiles.cu, but elements of B are read from
// the images by address computation instead of from an im2col buffer. One launch computes all
// images.
//
// Source: Chetlur et al., "cuDNN: efficient primitives for deep learning", 2014, section 3.
#ifndef TILE
#define TILE 16
#endif

extern "C" __global__ void conv2d_forward(const float* images, const float* a, const float* bias,
                                          float* c, int samples, int channels, int height,
                                          int width, int filters, int r, int s, int stride,
                                          int padding, int out_height, int out_width) {
    __shared__ float as[TILE][TILE], bs[TILE][TILE];
    const int x = threadIdx.x, y = threadIdx.y, row = blockIdx.y * TILE + y;
    const int terms = channels * r * s, pixels = out_height * out_width;
    const int column = blockIdx.x * TILE + x, sample = column / pixels, pixel = column % pixels;
    const int top = pixel / out_width * stride - padding;
    const int left = pixel % out_width * stride - padding;
    float sum = 0;
    for (int first = 0; first < terms; first += TILE) {
        const int term = first + y, channel = term / (r * s);
        const int down = top + term / s % r, across = left + term % s;
        const bool inside = sample < samples && term < terms && down >= 0 && down < height &&
                            across >= 0 && across < width;
        as[y][x] = row < filters && first + x < terms ? a[row * terms + first + x] : 0;
        bs[y][x] =
            inside ? images[((sample * channels + channel) * height + down) * width + across] : 0;
        __syncthreads();
        for (int k = 0; k < TILE; ++k) sum += as[y][k] * bs[k][x];
        __syncthreads();
    }
    if (row < filters && sample < samples)
        c[(sample * filters + row) * pixels + pixel] = sum + bias[row];
}
