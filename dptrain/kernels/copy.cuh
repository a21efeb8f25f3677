// Copies from global to shared memory that pass no register and go on by themselves (cp.async).

#pragma once

// BYTES, or zeros where `there` is false. `arrived` is for all that the thread has asked for.
template <int BYTES>
__device__ inline void bring(void* to, const void* from, bool there = true) {
#if __CUDA_ARCH__ >= 800
    if constexpr (BYTES >= 4) {
        const unsigned at = unsigned(__cvta_generic_to_shared(to));
        const int size = there ? BYTES : 0;
        if constexpr (BYTES == 16)
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(from),
                         "r"(size) : "memory");
        else
            asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(at), "l"(from),
                         "n"(BYTES), "r"(size) : "memory");
        return;
    }
#endif
    struct alignas(BYTES) Piece {
        char at[BYTES];
    };
    Piece piece = {};
    if (there) piece = *reinterpret_cast<const Piece*>(from);
    *reinterpret_cast<Piece*>(to) = piece;
}

__device__ inline void arrived() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}
