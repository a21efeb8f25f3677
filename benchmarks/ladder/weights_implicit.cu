// Gradient with respect to the weights as implicit GEMM over all images: dW (K, C R S) from images
// (N, C, H, W) and dy (N, K, Ho, Wo). The sum runs over the pixels of all images, and elements of U
// are read from the images by address computation. C has few elements and the sum is long, so there
// would be few blocks; split-K divides the sum over blockIdx.z, and split_k_reduce.cu adds parts
// (gridDim.z, K, C R S).
#ifndef TILE
#define TILE 16
#endif

extern "C" __global__ void conv2d_backward_weight(const float* images, const float* dy,
                                                  float* parts, int samples, int channels,
                                                  int height, int width, int filters, int r, int s,
                                                  int stride, int padding, int out_height,
                                                  int out_width) {
    __shared__ float as[TILE][TILE], bs[TILE][TILE + 1];
    const int x = threadIdx.x, y = threadIdx.y;
    const int column = blockIdx.x * TILE + x, row = blockIdx.y * TILE + y;
    const int terms = channels * r * s, pixels = out_height * out_width;
    const int term = blockIdx.x * TILE + y, channel = term / (r * s);
    const int down = term / s % r - padding, across = term % s - padding;
    const int positions = samples * pixels;
    const int split = (positions + gridDim.z - 1) / gridDim.z;
    const int begin = blockIdx.z * split, end = min(begin + split, positions);
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
    if (row < filters && column < terms) parts[(blockIdx.z * filters + row) * terms + column] = sum;
}
