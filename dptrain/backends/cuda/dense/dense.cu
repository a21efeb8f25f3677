// Fully connected layers:
//
//     forward          y  = epilogue(x w + b)
//     backward_weight  dw = xᵀ dz,  db = Σ over samples of dz
//     backward_input   dx = dz wᵀ
//
//     x, dx (N, inputs)   w, dw (inputs, outputs)   b, db (outputs,)   y, dy (N, outputs)
//
// Activations have the activation type, weights are float32. dz is computed from dy and y on the
// fly (`Gradient` of epilogue.cuh); without an epilogue it is dy.
//
// Algorithm: tiled GEMM (gemm.cuh), with split-K for forward and for the gradient of weights, whose
// reduction is a second kernel with a fixed order of additions.
//
// Launch: grid (ceil(rows / TILE_M), ceil(columns / TILE_N), splits), block (THREADS, K_GROUPS);
// dynamic shared memory as computed by gemm_tiles.py.

#include "epilogue.cuh"
#include "dependent_launch.cuh"
#include "micro_shards.cuh"
#include "split_k.cuh"

// Operand A of backward_weight: row i is an input, and the sum runs over samples. One further row
// consists of ones and yields the gradient of the bias.
struct InputsTransposed {
    static constexpr bool K_MAJOR = false;
    using Outer = int;
    using Inner = int;
    using Raw = Pack<Number>;

    const Number* x;
    int inputs;

    __device__ Outer outer(int i) const { return i; }
    __device__ Inner inner(int n) const { return n; }
    __device__ void advance(Inner& n) const { n += STRIDE_K; }
    __device__ Raw at(Outer i, Inner n) const {
        Raw pack = {};
#pragma unroll
        for (int v = 0; v < PACK; v += IN_VECTOR) {
            if (i + v < inputs) read<IN_VECTOR>(pack, v, x + n * inputs + i + v);
            if (i + v == inputs) pack.at[v] = from_float<Number>(1.0f);
        }
        return pack;
    }
    __device__ Pack<Number> value(const Raw& raw) const { return round_operands(raw); }
};

// dz as operand A, whose rows are samples and whose sum runs over outputs (K_MAJOR), or as operand
// B, whose columns are outputs and whose sum runs over samples.
template <bool K_MAJOR_> struct Gradients {
    static constexpr bool K_MAJOR = K_MAJOR_;
    using Outer = int;
    using Inner = int;
    using Raw = Gradient::Raw;

    Gradient dz;
    int samples, outputs;

    __device__ Outer outer(int i) const { return i; }
    __device__ Inner inner(int k) const { return k; }
    __device__ void advance(Inner& k) const { k += STRIDE_K; }
    __device__ Raw at(Outer i, Inner k) const {
        const int sample = K_MAJOR ? i : k, output = K_MAJOR ? k : i;
        Raw raw = {};
#pragma unroll
        for (int v = 0; v < PACK; v += OUT_VECTOR)
            if (sample < samples && output + v < outputs)
                dz.piece(raw, v, sample * outputs + output + v, 0);
        return raw;
    }
    __device__ Pack<Number> value(const Raw& raw) const { return dz.value(raw); }
};

using Inputs = Matrix<Number, true, IN_VECTOR>;
using Weights = Matrix<float, false, OUT_VECTOR>;
using WeightsTransposed = Matrix<float, true, OUT_VECTOR>;

// x (samples, inputs), w (inputs, outputs), b (outputs,), y (samples, outputs).
extern "C" __global__ void __launch_bounds__(THREADS * K_GROUPS, GEMM_MIN_BLOCKS)
    dense_forward(const Number* x, const float* w, const float* b, Number* y, int samples,
                  int inputs, int outputs EPILOGUE_PARAMETERS) {
    multiply(Inputs{x, samples, inputs, inputs}, Weights{w, outputs, inputs, outputs}, 0, inputs,
             StoreOutput{y, nullptr, b, samples, outputs, 1, EPILOGUE_ARGUMENTS});
}

// Split-K: split z = blockIdx.z sums the inputs [z · split_terms, (z + 1) · split_terms). x
// (samples, inputs), w (inputs, outputs), partial (splits, samples, outputs) float32.
extern "C" __global__ void __launch_bounds__(THREADS * K_GROUPS, GEMM_MIN_BLOCKS)
    dense_forward_split_k(const Number* x, const float* w, float* partial, int samples, int inputs,
                          int outputs, int split_terms) {
    const int first = blockIdx.z * split_terms, stop = min(first + split_terms, inputs);
    multiply(
        Inputs{x, samples, inputs, inputs}, Weights{w, outputs, inputs, outputs}, first, stop,
        StorePlain<float, OUT_VECTOR>{partial + blockIdx.z * samples * outputs, samples, outputs});
}

// Reduction of split-K, bias and epilogue. partial (num_splits, size) float32 with size = samples ·
// outputs; b (outputs,); y (size,). Launched with blocks of (32, 8) threads (split_k.cuh).
extern "C" __global__ void dense_forward_reduce(const float* partial, int num_splits,
                                                const float* b, Number* y, int outputs,
                                                int size EPILOGUE_PARAMETERS) {
    wait_for_previous_kernel();
    Floats total;
    const int i = blockIdx.x * BLOCK_VECTORS + threadIdx.x;
    if (!split_k_sum(partial, num_splits, size, i, total)) return;
    const float values[1] = {total.at[0]};
    StoreOutput{y, nullptr, b, size / outputs, outputs, 1, EPILOGUE_ARGUMENTS}.pixel(
        i / outputs, i % outputs, values);
}

// Split z = blockIdx.z sums the samples [z · split_terms, (z + 1) · split_terms). x (samples,
// inputs), dy and y (samples, outputs), dw (splits, inputs, outputs) and db (splits, outputs)
// float32, interleaved as (splits, (inputs + 1) · outputs).
extern "C" __global__ void __launch_bounds__(THREADS * K_GROUPS, GEMM_MIN_BLOCKS)
    dense_backward_weight(const Number* x, const Number* dy, const Number* y, float factor,
                          float* dw, float* db, int samples, int inputs, int outputs,
                          int split_terms PARTS_PARAMETERS) {
    const SplitPart part = split_part(samples PARTS_ARGUMENTS);
    move_to(part, x, inputs);
    move_to(part, dy, outputs);
    move_to(part, y, outputs);
    samples = part.range.count;
    const int first = part.index * split_terms, stop = min(first + split_terms, samples);
    multiply(InputsTransposed{x, inputs}, Gradients<false>{{dy, y, factor}, samples, outputs},
             first, stop, StoreGradient{dw, db, inputs, outputs});
}

// dy and y (samples, outputs), w (inputs, outputs), dx (samples, inputs).
extern "C" __global__ void __launch_bounds__(THREADS * K_GROUPS, GEMM_MIN_BLOCKS)
    dense_backward_input(const Number* dy, const Number* y, float factor, const float* w,
                         Number* dx, int samples, int inputs, int outputs) {
    multiply(Gradients<true>{{dy, y, factor}, samples, outputs},
             WeightsTransposed{w, inputs, outputs, outputs}, 0, outputs,
             StorePlain<Number, IN_VECTOR>{dx, samples, inputs});
}
