// What time it is on the device.

#include "clock.cuh"
#include "order.cuh"

extern "C" __global__ void stamp(long long* times, int place) {
    in_order();
    times[place] = (long long)nanoseconds();
}
