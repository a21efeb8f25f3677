// Large fully connected layers on Hopper by TMA and wgmma (wgmma_gemm.cuh):
//
//     forward          y  = epilogue(x w + b)
//     backward         dz, the gradient before ReLU, and parts of db
//     backward_weight  dw = xᵀ dz,  db = Σ over samples of dz
//     backward_input   dx = dz wᵀ
//
//     x, dx (N, inputs)   w, dw (inputs, outputs)   b, db (outputs,)   y, dy, dz (N, outputs)
//
// wgmma reads its operands from shared memory as TMA stores them there, so they must be in memory
// in the operand type: bf16 rounds the weights once per step
// (wgmma_operands.cu), and `backward` writes
// dz. For tf32, TMA rounds, but B must have adjacent terms: forward computes yᵀ = wᵀ xᵀ, and
// `backward` also writes dzᵀ.
//
// Numbers of inputs and outputs are multiples of 16 bytes.
//
// Launch: products with grid (ceil(rows / TILE_M), ceil(columns / TILE_N), splits) and THREADS +
// PRODUCER_THREADS threads; dynamic shared memory as computed by
// wgmma_gemm_tiles.py.

#include "wgmma_gemm.cuh"

// Samples and outputs of a block of `dense_backward`, which has 256 threads.
constexpr int GRADIENT_SAMPLES = 32, GRADIENT_OUTPUTS = 64;

#if PRECISION == 1
#define FORWARD_OPERANDS                                                              \
    TiledMatrix<false>{MAP(1), w, outputs, outputs}, TiledMatrix<true> {              \
        MAP(0), x, samples, inputs                                                    \
    }
#else
#define FORWARD_OPERANDS                                                              \
    TiledMatrix<true>{MAP(0), x, samples, inputs}, TiledMatrix<false> {               \
        MAP(1), w, outputs, outputs                                                   \
    }
#endif

// Tensor maps: x, w. x (samples, inputs), w (inputs, outputs), b (outputs,), y (samples, outputs).
extern "C" __global__ void __launch_bounds__(ALL_THREADS, MIN_BLOCKS)
    dense_forward(TENSOR_MAPS_PARAMETER const Number* x, const Number* w, const float* b,
                  Number* y, int samples, int inputs, int outputs EPILOGUE_PARAMETERS) {
    wgmma_gemm<PRECISION == 1>(FORWARD_OPERANDS, 0, inputs,
                               StoreOutput{y, nullptr, b, samples, outputs, 1, EPILOGUE_ARGUMENTS});
}

// Split-K: split z = blockIdx.z sums the inputs [z · split_terms, (z + 1) · split_terms). partial
// (splits, samples, outputs) float32.
extern "C" __global__ void __launch_bounds__(ALL_THREADS, MIN_BLOCKS)
    dense_forward_split_k(TENSOR_MAPS_PARAMETER const Number* x, const Number* w, float* partial,
                          int samples, int inputs, int outputs, int split_terms) {
    const int first = blockIdx.z * split_terms, stop = min(first + split_terms, inputs);
    wgmma_gemm<PRECISION == 1>(
        FORWARD_OPERANDS, first, stop,
        StorePlain<float, OUT_VECTOR>{partial + blockIdx.z * samples * outputs, samples, outputs});
}

// dz from dy and y (samples, outputs), and partial[i] (outputs,), the sum of block i's samples. For
// tf32 also transposed (outputs, pitch), which is 0 beyond the samples.
extern "C" __global__ void dense_backward(const Number* dy, const Number* y, float factor,
                                          Number* dz, Number* transposed, float* partial,
                                          int samples, int outputs, int pitch) {
    wait_for_previous_kernel();
    __shared__ float tile[GRADIENT_SAMPLES][GRADIENT_OUTPUTS + 1];
    constexpr int ROW_THREADS = GRADIENT_OUTPUTS / 4, ROWS = 256 / ROW_THREADS;
    const int sample = blockIdx.x * GRADIENT_SAMPLES, output = blockIdx.y * GRADIENT_OUTPUTS;
    const int own = threadIdx.x % ROW_THREADS * 4;
#pragma unroll
    for (int row = threadIdx.x / ROW_THREADS; row < GRADIENT_SAMPLES; row += ROWS) {
        Pack<Number, 4> values = {};
        if (sample + row < samples && output + own < outputs) {
            const int i = (sample + row) * outputs + output + own;
            read<4>(values, 0, dy + i);
#if EPILOGUE
            Pack<Number, 4> saved;
            read<4>(saved, 0, y + i);
#pragma unroll
            for (int v = 0; v < 4; ++v)
                values.at[v] = from_float<Number>(
                    to_float(saved.at[v]) > 0.0f ? to_float(values.at[v]) * factor : 0.0f);
#endif
            *reinterpret_cast<Pack<Number, 4>*>(dz + i) = values;
        }
#pragma unroll
        for (int v = 0; v < 4; ++v) tile[row][own + v] = to_float(values.at[v]);
    }
    __syncthreads();
    if (threadIdx.x < GRADIENT_OUTPUTS && output + int(threadIdx.x) < outputs) {
        float total = 0.0f;
#pragma unroll
        for (int row = 0; row < GRADIENT_SAMPLES; ++row) total += tile[row][threadIdx.x];
        partial[blockIdx.x * outputs + output + threadIdx.x] = total;
    }
#if PRECISION == 1
    constexpr int COLUMN_THREADS = GRADIENT_SAMPLES / 4, COLUMNS = 256 / COLUMN_THREADS;
    const int first = threadIdx.x % COLUMN_THREADS * 4;
#pragma unroll
    for (int column = threadIdx.x / COLUMN_THREADS; column < GRADIENT_OUTPUTS; column += COLUMNS) {
        Pack<float, 4> values;
#pragma unroll
        for (int v = 0; v < 4; ++v) values.at[v] = tile[first + v][column];
        if (output + column < outputs && sample + first < pitch)
            *reinterpret_cast<Pack<float, 4>*>(transposed + (output + column) * pitch + sample +
                                               first) = values;
    }
#endif
}

// Tensor maps: x, dz (bf16) or dzᵀ (tf32, `dz` here). dw (inputs, outputs), db (outputs,);
// partial (db_parts, outputs) of dense_backward.
extern "C" __global__ void __launch_bounds__(ALL_THREADS, MIN_BLOCKS)
    dense_backward_weight(TENSOR_MAPS_PARAMETER const Number* x, const Number* dz,
                          const float* partial, float* dw, float* db, int samples, int inputs,
                          int outputs, int pitch, int db_parts) {
    wgmma_gemm<false>(
        TiledMatrix<false>{MAP(0), x, inputs, inputs},
        TiledMatrix<PRECISION == 1>{MAP(1), dz, outputs, PRECISION == 1 ? pitch : outputs}, 0,
        samples, StorePlain<float, OUT_VECTOR>{dw, inputs, outputs});
    if (blockIdx.x > 0) return;
    for (int i = threadIdx.x; i < TILE_N; i += ALL_THREADS) {
        const int output = blockIdx.y * TILE_N + i;
        if (output >= outputs) return;
        float total = 0.0f;
#pragma unroll 8
        for (int part = 0; part < db_parts; ++part) total += partial[part * outputs + output];
        db[output] = total;
    }
}

// Tensor maps: dz, w. dz (samples, outputs), w (inputs, outputs), dx (samples, inputs).
extern "C" __global__ void __launch_bounds__(ALL_THREADS, MIN_BLOCKS)
    dense_backward_input(TENSOR_MAPS_PARAMETER const Number* dz, const Number* w, Number* dx,
                         int samples, int inputs, int outputs) {
    wgmma_gemm<false>(TiledMatrix<true>{MAP(0), dz, samples, outputs},
                      TiledMatrix<true>{MAP(1), w, inputs, outputs}, 0, outputs,
                      StorePlain<Number, IN_VECTOR>{dx, samples, inputs});
}
