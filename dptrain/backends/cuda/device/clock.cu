// Time stamps on the device, which the recorder reads as the begin and end of stages.
//
// times int64 (count,): `record_time` stores the device clock in nanoseconds in times[index].
// Launched with one thread.

#include "clock.cuh"
#include "dependent_launch.cuh"

extern "C" __global__ void record_time(long long* times, int index) {
    wait_for_previous_kernel();
    times[index] = (long long)nanoseconds();
}
