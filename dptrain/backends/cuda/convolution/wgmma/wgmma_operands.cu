// Operands of products by TMA and wgmma (wgmma_gemm.cuh) in the type and the order that they need.

#ifndef PRECISION
#define PRECISION 2  // These kernels exist for tf32 and bf16 only.
#endif
#define TILE_M 64
#define TILE_N 16
#define WARP_M 16
#define WARP_N 16
#define TILE_K_WORDS 16

#include "dependent_launch.cuh"
#include "gemm.cuh"

// Rows of a block of `transpose`, a multiple of 32: more of them store longer runs, fewer leave more
// blocks.
#ifndef TRANSPOSED_ROWS
#define TRANSPOSED_ROWS 128
#endif

// rounded = w; `packs` packs of 16 bytes. One thread for each pack, in blocks of 256.
extern "C" __global__ void round_weights(const float* w, Number* rounded, int packs) {
    // The previous kernel may still read `rounded`; it does not write the weights.
    if (!PREFETCH_WEIGHTS) wait_for_previous_kernel();
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    Pack<Number> pack = {};
    if (i < packs) {
        Pack<float> values;
#pragma unroll
        for (int v = 0; v < PACK; v += 4) read<4>(values, v, w + i * PACK + v);
        pack = round_operands(values);
    }
    if (PREFETCH_WEIGHTS) wait_for_previous_kernel();
    if (i < packs) reinterpret_cast<Pack<Number>*>(rounded)[i] = pack;
}

// to (batch, columns, pitch) = the transposed matrices `from` (batch, rows, columns), 0 from `rows` to
// `pitch`. Launch: grid (columns / 32, ceil(pitch / TRANSPOSED_ROWS), batch), 256 threads; columns are a multiple
// of 32.
extern "C" __global__ void transpose(const float* from, float* to, int rows, int columns,
                                     int pitch) {
    constexpr int ROWS = TRANSPOSED_ROWS, COLUMNS = 32, LINES = 256 / 32;
    __shared__ float tile[ROWS][COLUMNS + 1];
    const int lane = threadIdx.x % 32, line = threadIdx.x / 32;
    const int column = blockIdx.x * COLUMNS, row = blockIdx.y * ROWS;
    from += blockIdx.z * rows * columns, to += blockIdx.z * columns * pitch;
    if (!PREFETCH_WEIGHTS) wait_for_previous_kernel();
#pragma unroll
    for (int i = line; i < ROWS; i += LINES)
        tile[i][lane] = row + i < rows ? from[(row + i) * columns + column + lane] : 0.0f;
    if (PREFETCH_WEIGHTS) wait_for_previous_kernel();
    __syncthreads();
#pragma unroll
    for (int i = line; i < COLUMNS; i += LINES)
#pragma unroll
        for (int j = 0; j < ROWS; j += 32)
            if (row + j + lane < pitch) to[(column + i) * pitch + row + j + lane] = tile[j + lane][i];
}
