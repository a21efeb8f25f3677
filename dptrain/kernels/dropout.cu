// Dropout. A mask (N, ceil(size / 8)) holds a bit for each of eight elements of a sample, the
// lowest for the first: 1 where the element is kept. A thread takes a byte of it.

#include "dependent_launch.cuh"
#include "philox.cuh"

// Eight elements of a sample, from `first` on, or as many as it has.
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

    // y = x · factor where kept, else x · 0.
    __device__ void apply(const Number* x, Number* y, unsigned kept, float factor) const {
        for (int k = 0; k < 8 && first + k < size; k += VECTOR) {
            const int i = (sample * size + first + k) / VECTOR;
            Floats values = load(x, i);
            drop(values, kept >> k, factor);
            store(y, i, values);
        }
    }
};

// y = x · factor where kept, else x · 0, and the mask.
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

// dx = dy · factor where kept, else dy · 0. To read the mask costs an eighth of a byte an element;
// to draw it again would take about as long as reading and writing bfloat16.
extern "C" __global__ void dropout_backward(const Number* dy, const unsigned char* mask, Number* dx,
                                            int n, int size, float factor) {
    wait_for_previous_kernel();
    const MaskByte mask_byte(size);
    if (mask_byte.sample < n) mask_byte.apply(dy, dx, mask[mask_byte.byte], factor);
}
