// What time it is on the device.

#include "clock.cuh"
#include "dependent_launch.cuh"

extern "C" __global__ void record_time(long long* times, int place) {
    wait_for_previous_kernel();
    times[place] = (long long)nanoseconds();
}
