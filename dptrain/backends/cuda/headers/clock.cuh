// Clock of the device.

#pragma once

// Return %globaltimer in nanoseconds. All multiprocessors of the GPU share this clock.
__device__ inline unsigned long long nanoseconds() {
    unsigned long long now;
#ifdef __CUDA_ARCH__
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
#else
    now = host_nanoseconds();
#endif
    return now;
}
