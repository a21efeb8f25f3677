// Asynchronous copies from global to shared memory without a detour through registers (cp.async,
// sm_80 and above). On older GPUs and on the emulator the copies are synchronous.
//
// Source: PTX ISA, "Data Movement and Conversion Instructions: cp.async".

#pragma once

// Start the copy of BYTES bytes. If `there` is false, write zeros. `cp_async_commit` closes a group
// of the copies that the thread started; `cp_async_wait<N>` waits for all groups except the last N;
// `cp_async_wait_all` waits for all copies of the thread.
template <int BYTES>
__device__ inline void cp_async(void* to, const void* from, bool there = true) {
#if __CUDA_ARCH__ >= 800
    if constexpr (BYTES >= 4) {
        const unsigned at = unsigned(__cvta_generic_to_shared(to));
        const int size = there ? BYTES : 0;
        if constexpr (BYTES == 16)
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(from),
                         "r"(size)
                         : "memory");
        else
            asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(at), "l"(from),
                         "n"(BYTES), "r"(size)
                         : "memory");
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

__device__ inline void cp_async_wait_all() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

__device__ inline void cp_async_commit() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
template <int N> __device__ inline void cp_async_wait() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
#endif
}
