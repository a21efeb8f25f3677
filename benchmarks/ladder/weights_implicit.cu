// The same for all images at once: the sum runs over the pixels of every image, and what U would hold
// is read from the image where it lies. C has few elements and the sum is long, so few blocks would
// work; blockIdx.z names one of gridDim.z parts of the sum, which split_k_reduce.cu adds up.
#ifndef TILE
#define TILE 16
#endif

extern "C" __global__ void product(const float* images, const float* dy, float* parts, int samples,
                                   int channels, int height, int width, int filters, int r, int s,
                                   int stride, int padding, int out_height, int out_width) {
    __shared__ float as[TILE][TILE], bs[TILE][TILE + 1];
    const int x = threadIdx.x, y = threadIdx.y;
    const int column = blockIdx.x * TILE + x, row = blockIdx.y * TILE + y;
    const int terms = channels * r * s, pixels = out_height * out_width;
    const int term = blockIdx.x * TILE + y, channel = term / (r * s);
    const int down = term / s % r - padding, across = term % s - padding;
    const int positions = samples * pixels;
    const int share = (positions + gridDim.z - 1) / gridDim.z;
    const int begin = blockIdx.z * share, end = min(begin + share, positions);
    float sum = 0;
    for (int first = begin; first < end; first += TILE) {
        const int at = first + x, sample = at / pixels, pixel = at % pixels;
        const int image_row = pixel / out_width * stride + down;
        const int image_column = pixel % out_width * stride + across;
        const bool inside = at < end && term < terms && image_row >= 0 && image_row < height &&
                            image_column >= 0 && image_column < width;
        as[y][x] = at < end && row < filters ? dy[(sample * filters + row) * pixels + pixel] : 0;
        bs[y][x] = inside ? images[((sample * channels + channel) * height + image_row) * width +
                                   image_column]
                          : 0;
        __syncthreads();
        for (int k = 0; k < TILE; ++k) sum += as[y][k] * bs[x][k];
        __syncthreads();
    }
    if (row < filters && column < terms)
        parts[(blockIdx.z * filters + row) * terms + column] = sum;
}
