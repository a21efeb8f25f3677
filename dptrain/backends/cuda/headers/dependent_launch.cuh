// Programmatic dependent launch: the blocks of a kernel may become resident while the previous
// kernel of the same stream still runs, which hides launch latency.
// dptrain/backends/cuda/device/dependent_launch.py launches such kernels on GPUs of compute capability
// 9.0 and above.
//
// Source: CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization"; PTX ISA,
// "griddepcontrol".

#pragma once

// Wait until all work enqueued before this kernel has finished and its writes are visible, then
// allow the blocks of the next kernel to launch.
//
// Every kernel calls this before it accesses global memory; `multiply` of gemm.cuh calls it for
// matrix products. The next kernel becomes resident only after this call, so at that time all
// kernels except the previous one have finished. A kernel may therefore read data that the previous
// kernel does not write, such as weights, before this call.
//
// All threads must call this function, including threads without work. Otherwise the end of a
// kernel would not imply that its predecessors have ended.
__device__ inline void wait_for_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
