// Dropout with masks from the counter-based generator Philox (philox.cuh):
//
//     forward   y  = x · factor where the element is kept, else x · 0
//     backward  dx = dy · factor where the element is kept, else dy · 0
//
// x, y, dx, dy (n, size). mask uint8 (n, ceil(size / 8)): bit k of a byte is 1 if element k of its
// eight elements is kept. Launched with one thread per byte of the mask, in blocks of 256.

#include "dependent_launch.cuh"
#include "philox.cuh"

// The eight elements of a sample, or fewer at its end, that begin with `first`.
struct MaskByte {
    int sample, first, size, byte;

    __device__ MaskByte(int size) : size(size) {
        const int bytes = (size + 7) / 8;
        byte = blockIdx.x * blockDim.x + threadIdx.x;
        sample = byte / bytes;
        first = byte % bytes * 8;
    }

    __device__ unsigned draw(const Dropout& d) const {
        return kept_in_block(d, sample, first / 4) | kept_in_block(d, sample, first / 4 + 1) << 4;
    }

    // y = x · factor for kept elements, else x · 0, so that NaN stays NaN.
    __device__ void apply(const Number* x, Number* y, unsigned kept, float factor) const {
        for (int k = 0; k < 8 && first + k < size; k += VECTOR) {
            const int i = (sample * size + first + k) / VECTOR;
            Floats values = load(x, i);
            drop(values, kept >> k, factor);
            store(y, i, values);
        }
    }
};

// x, y (n, size); mask (n, ceil(size / 8)) is written.
extern "C" __global__ void dropout_forward(const Number* x, Number* y, unsigned char* mask, int n,
                                           int size, DROPOUT_PARAMETERS) {
    wait_for_previous_kernel();
    const MaskByte mask_byte(size);
    if (mask_byte.sample >= n) return;
    const Dropout d = DROPOUT_ARGUMENTS;
    const unsigned kept = mask_byte.draw(d);
    mask[mask_byte.byte] = (unsigned char)kept;
    mask_byte.apply(x, y, kept, d.factor);
}

// Stochastic depth: the first random word of a sample decides about all of its elements. x, y (n,
// size), which may be dy and dx; count = n · size. Launched with one thread per vector.
extern "C" __global__ void drop_samples(const Number* x, Number* y, int size, int count,
                                        DROPOUT_PARAMETERS) {
    wait_for_previous_kernel();
    int i;
    if (!vector_index(count, i)) return;
    const Dropout d = DROPOUT_ARGUMENTS;
    Floats values = load(x, i);
    drop(values, kept_in_block(d, i / (size / VECTOR), 0) & 1 ? ~0u : 0u, d.factor);
    store(y, i, values);
}

// dy, dx (n, size); mask (n, ceil(size / 8)). Reading the mask costs one bit per element. Drawing
// it again would take about as long as reading and writing bfloat16 activations.
extern "C" __global__ void dropout_backward(const Number* dy, const unsigned char* mask, Number* dx,
                                            int n, int size, float factor) {
    wait_for_previous_kernel();
    const MaskByte mask_byte(size);
    if (mask_byte.sample < n) mask_byte.apply(dy, dx, mask[mask_byte.byte], factor);
}
