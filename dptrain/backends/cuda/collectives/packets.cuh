// Packets of 16 bytes that GPUs write into each other's memory, each word its own flag: a word is EMPTY
// until an element arrives, so that no memory fence is needed. all_reduce.cu describes the protocol
// and names its source.

#pragma once

#include "clock.cuh"

// EMPTY is a NaN that arithmetic does not produce. NaN elements with these bits are sent as another
// NaN.
constexpr unsigned EMPTY = 0xFFFFFFFFu, NOT_A_NUMBER = 0x7FFFFFFFu;

// Polls between two reads of the clock.
constexpr unsigned POLLS_PER_CLOCK_READ = 256;

struct alignas(16) Packet {
    unsigned at[4];
};

// Load a packet that another GPU may be writing. Each word is either an element or EMPTY.
__device__ inline Packet load_packet(const Packet* slot) {
    Packet packet;
#ifdef __CUDA_ARCH__
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(packet.at[0]), "=r"(packet.at[1]), "=r"(packet.at[2]), "=r"(packet.at[3])
                 : "l"(slot)
                 : "memory");
#else
    for (int k = 0; k < 4; ++k) packet.at[k] = const_cast<const volatile Packet*>(slot)->at[k];
#endif
    return packet;
}

// Store a packet that another GPU may be reading.
__device__ inline void store_packet(Packet* slot, const Packet& packet) {
#ifdef __CUDA_ARCH__
    asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(slot),
                 "r"(packet.at[0]), "r"(packet.at[1]), "r"(packet.at[2]), "r"(packet.at[3])
                 : "memory");
#else
    for (int k = 0; k < 4; ++k) const_cast<volatile Packet*>(slot)->at[k] = packet.at[k];
#endif
}

__device__ inline bool is_complete(const Packet& packet) {
    return packet.at[0] != EMPTY && packet.at[1] != EMPTY && packet.at[2] != EMPTY &&
           packet.at[3] != EMPTY;
}

// Replace the bits of EMPTY by another NaN before sending.
__device__ inline Packet without_empty(Packet packet) {
    for (int k = 0; k < 4; ++k)
        if (packet.at[k] == EMPTY) packet.at[k] = NOT_A_NUMBER;
    return packet;
}

// The same for two elements of float64, whose low words may have any bits: 0xFFFFFFFF is sent as
// 0xFFFFFFFE, a change of one unit in the last place, which the sender applies to its own element.
__device__ inline Packet without_empty_float64(Packet packet) {
    for (int k = 0; k < 4; k += 2) {
        if (packet.at[k] == EMPTY) packet.at[k] = EMPTY - 1;
        if (packet.at[k + 1] == EMPTY) packet.at[k + 1] = NOT_A_NUMBER;
    }
    return packet;
}

__device__ inline Packet packet_of(double first, double second) {
    return without_empty_float64({{(unsigned)__double2loint(first), (unsigned)__double2hiint(first),
                                   (unsigned)__double2loint(second),
                                   (unsigned)__double2hiint(second)}});
}

__device__ inline double element_float64(const Packet& packet, int k) {
    return __hiloint2double((int)packet.at[2 * k + 1], (int)packet.at[2 * k]);
}

// How long a thread waits for packets.
struct Wait {
    unsigned* timed_out;
    unsigned long long timeout_ns, stalled_since = 0;
    unsigned polls = 0;
    bool ended_by_timeout = false;

    __device__ Wait(unsigned* timed_out, unsigned long long timeout_ns)
        : timed_out(timed_out), timeout_ns(timeout_ns) {}

    __device__ bool has_timed_out() const {
        return *const_cast<volatile unsigned*>(timed_out) != 0;
    }

    // Return true if the thread should poll again, false after a timeout. The timeout counts from
    // the last progress of this thread.
    __device__ bool keep_polling() {
        if (++polls % POLLS_PER_CLOCK_READ) return true;
        const unsigned long long now = nanoseconds();
        if (stalled_since == 0) stalled_since = now;
        if (now - stalled_since > timeout_ns) atomicExch(timed_out, 1u);
        return !has_timed_out();
    }

    // Return the packet of a slot, from which `found` has been loaded, and empty the slot.
    __device__ Packet for_packet(Packet* slot, Packet found) {
        while (!is_complete(found) && !ended_by_timeout) {
            found = load_packet(slot);
            ended_by_timeout = !keep_polling();
        }
        stalled_since = 0;
        store_packet(slot, {EMPTY, EMPTY, EMPTY, EMPTY});
        return found;
    }
};

// Set the loss sums to NaN, so that the step updates no parameters.
__device__ inline void invalidate_loss_sums(float* loss_sums) {
    for (int k = 0; k < 3; ++k) atomicExch(&loss_sums[k], __uint_as_float(NOT_A_NUMBER));
}
