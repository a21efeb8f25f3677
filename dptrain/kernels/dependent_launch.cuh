// The order of kernels. Those of one stream may be launched so that the next one's blocks take
// their places while the one before still runs (dptrain/backends/cuda/early.py): starting them then
// costs no time of its own.

#pragma once

// The first statement of every kernel (`multiply` of gemm.cuh has it for products): memory is
// touched behind it only. It waits until all that was enqueued before is done and seen, and lets
// the next kernel's blocks come. When they come, all kernels but the last one before are done: so
// what that one does not write, such as weights, may be read in front of this.
//
// Every thread passes here, those with nothing to do included: only so does the end of this kernel
// mean that those before it have ended, too.
__device__ inline void wait_for_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
