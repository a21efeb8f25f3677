// Fully connected layers: x (N, inputs), w (inputs, outputs), y (N, outputs), all float32.

#include "gemm.cuh"

// A of backward_weight: a row is an input, and one more is all ones, which gives the bias its
// gradient; the sum runs over samples.
struct InputsTransposed {
    static constexpr bool SUM_FIRST = false;
    using Outer = int;
    using Inner = int;

    const float* x;
    int inputs;

    __device__ Outer outer(int i) const { return i; }
    __device__ Inner inner(int n) const { return n; }
    __device__ float at(Outer i, Inner n) const {
        if (i >= inputs) return i == inputs ? 1.0f : 0.0f;
        return x[n * inputs + i];
    }
};

// y = x w + b, rectified if `relu`.
extern "C" __global__ void __launch_bounds__(THREADS)
    dense_forward(const float* x, const float* w, const float* b, float* y, int samples,
                  int inputs, int outputs, int relu) {
    multiply(Matrix<true>{x, samples, inputs}, Matrix<false>{w, outputs, outputs}, samples,
             outputs, 0, inputs, StoreActivation{y, b, outputs, relu != 0});
}

// Part z = blockIdx.z of x w: the sum over inputs [z part, (z + 1) part).
extern "C" __global__ void __launch_bounds__(THREADS)
    dense_forward_part(const float* x, const float* w, float* partial, int samples, int inputs,
                       int outputs, int part) {
    const int first = blockIdx.z * part, stop = min(first + part, inputs);
    multiply(Matrix<true>{x, samples, inputs}, Matrix<false>{w, outputs, outputs}, samples,
             outputs, first, stop, StorePlain{partial + blockIdx.z * samples * outputs, outputs});
}

// y = the sum of the parts + b, rectified if `relu`.
extern "C" __global__ void dense_forward_sum(const float* partial, int parts, const float* b,
                                             float* y, int outputs, int relu, int size) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= size) return;
    float total = 0.0f;
    for (int part = 0; part < parts; ++part) total += partial[part * size + i];
    StoreActivation{y, b, outputs, relu != 0}(i / outputs, i % outputs, total);
}

// dw and db of the samples [z part, (z + 1) part), z = blockIdx.z, into part z of the sums.
extern "C" __global__ void __launch_bounds__(THREADS)
    dense_backward_weight(const float* x, const float* dy, float* dw, float* db, int samples,
                          int inputs, int outputs, int part) {
    const int first = blockIdx.z * part, stop = min(first + part, samples);
    multiply(InputsTransposed{x, inputs}, Matrix<false>{dy, outputs, outputs}, inputs + 1, outputs,
             first, stop, StoreGradient{dw, db, inputs, outputs});
}

// dx = dy w^T.
extern "C" __global__ void __launch_bounds__(THREADS)
    dense_backward_input(const float* dy, const float* w, float* dx, int samples, int inputs,
                         int outputs) {
    multiply(Matrix<true>{dy, samples, outputs}, Matrix<true>{w, inputs, outputs}, samples, inputs,
             0, outputs, StorePlain{dx, inputs});
}
