// The product of shared_tiles.cu for all images at once, with a B that exists nowhere: an element of
// its tile is read from the image where it lies. No buffer, no second kernel, one launch.
#ifndef TILE
#define TILE 16
#endif

extern "C" __global__ void convolution(const float* images, const float* a, const float* bias,
                                       float* c, int samples, int channels, int height, int width,
                                       int filters, int r, int s, int stride, int padding,
                                       int out_height, int out_width) {
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
        bs[y][x] = inside ? images[((sample * channels + channel) * height + down) * width + across]
                          : 0;
        __syncthreads();
        for (int k = 0; k < TILE; ++k) sum += as[y][k] * bs[k][x];
        __syncthreads();
    }
    if (row < filters && sample < samples)
        c[(sample * filters + row) * pixels + pixel] = sum + bias[row];
}
