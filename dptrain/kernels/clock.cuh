// The time on a device.

#pragma once

// In nanoseconds, of a clock that all of its multiprocessors share.
__device__ inline unsigned long long nanoseconds() {
    unsigned long long now;
#ifdef __CUDA_ARCH__
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
#else
    now = host_nanoseconds();
#endif
    return now;
}
