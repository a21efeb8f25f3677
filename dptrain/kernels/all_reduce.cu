// Sums over GPUs that write into each other's memory.
//
// Every rank has an inbox that the others write into. A word of it is EMPTY until a number comes,
// so each number is its own flag and needs no fence behind it; whoever takes it leaves EMPTY
// behind. Sums of one channel take turns with two halves of their part of the inbox. A half is
// never written too early: who sends into it has taken all of the sum before, so the receiver has
// begun that sum, and has taken, and emptied, all of the one before that. (Where numbers go one way
// only, another channel's that come back see to the same.)
//
// Block b takes the same numbers on all ranks and waits for blocks b alone; RANKS is how many there
// are. A wait has an end: behind `patience_ns` of it `gave_up` is set, nobody waits any more, and
// the shared sums, which decide about the update and are what the host looks at, become NaN.

#include "clock.cuh"
#include "dependent_launch.cuh"

#ifndef RANKS
#define RANKS 2
#endif

// A NaN, which no arithmetic makes; numbers that are NaN are sent as another.
constexpr unsigned EMPTY = 0xFFFFFFFFu, NOT_A_NUMBER = 0x7FFFFFFFu;

// How often to look before looking at the clock too.
constexpr unsigned POLLS_PER_CLOCK_READ = 256;

struct alignas(16) Packet {
    unsigned at[4];
};

// Other processors write here meanwhile: a word of the result is a number or EMPTY.
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

// Other processors look here meanwhile.
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

// As it may be sent.
__device__ inline Packet without_empty(Packet packet) {
    for (int k = 0; k < 4; ++k)
        if (packet.at[k] == EMPTY) packet.at[k] = NOT_A_NUMBER;
    return packet;
}

// A part of the inboxes, as one rank sees it.
struct Channel {
    const unsigned long long* inboxes;  // Where each rank's begins in this one's memory.
    long long start;                    // Of this channel's present half, in Words.
    int rank;
    unsigned* timed_out;
    unsigned long long timeout_ns, stalled_since;
    unsigned polls;

    // Of `rank`'s, slot i of what comes from `from`, `each` slots a rank.
    __device__ Packet* slot(int of, int from, long long each, int i) const {
        return reinterpret_cast<Packet*>(inboxes[of]) + start + from * each + i;
    }

    __device__ bool has_timed_out() const {
        return *const_cast<volatile unsigned*>(timed_out) != 0;
    }

    // Whether to look again.
    __device__ bool keep_polling() {
        if (++polls % POLLS_PER_CLOCK_READ) return true;
        const unsigned long long now = nanoseconds();
        if (stalled_since == 0) stalled_since = now;
        if (now - stalled_since > timeout_ns) atomicExch(timed_out, 1u);
        return !has_timed_out();
    }

    // What comes from ranks below `givers`, but this one, to slot i here.
    __device__ void receive(Packet (&received)[RANKS], int senders, long long each, int i) {
#pragma unroll
        for (int from = 0; from < RANKS; ++from)
            if (from != rank && from < senders)
                received[from] = load_packet(slot(rank, from, each, i));
#pragma unroll
        for (int from = 0; from < RANKS; ++from)
            if (from != rank && from < senders) {
                Packet* packet_slot = slot(rank, from, each, i);
                while (!is_complete(received[from]) && keep_polling())
                    received[from] = load_packet(packet_slot);
                store_packet(packet_slot, {EMPTY, EMPTY, EMPTY, EMPTY});
            }
    }

    // y = Σ_r x_r over ranks below `givers`, in their order, so that whoever adds gets the same
    // bits.
    __device__ Packet sum(const Packet& own, int senders, long long each, int i) {
        Packet received[RANKS], total;
        receive(received, senders, each, i);
#pragma unroll
        for (int from = 0; from < RANKS; ++from) {
            if (from >= senders) continue;
            for (int k = 0; k < 4; ++k) {
                const float x = __uint_as_float(from == rank ? own.at[k] : received[from].at[k]);
                total.at[k] = __float_as_uint(from ? __uint_as_float(total.at[k]) + x : x);
            }
        }
        return total;
    }
};

// `turns` counts a block's sums; a half has `slots` Words.
__device__ inline Channel open_channel(const unsigned long long* inboxes, long long start,
                                       long long slots, int rank, const unsigned* call_counts,
                                       unsigned* timed_out, unsigned long long timeout_ns) {
    const long long half = start + (call_counts[blockIdx.x] & 1) * slots;
    return {inboxes, half, rank, timed_out, timeout_ns, 0, 0};
}

// Behind all that a block does. A block that writes the shared sums either sees here that another
// gave up, or that one comes here later: so they are NaN in the end.
__device__ inline void close_channel(const Channel& channel, unsigned* call_counts,
                                     float* loss_sums) {
    __syncthreads();
    if (threadIdx.x) return;
    ++call_counts[blockIdx.x];
    __threadfence();
    if (!channel.has_timed_out()) return;
    for (int k = 0; k < 3; ++k) atomicExch(&loss_sums[k], __uint_as_float(NOT_A_NUMBER));
}

#define COMMON_PARAMETERS                                                                \
    const unsigned long long *inboxes, long long start, int rank, unsigned *call_counts, \
        unsigned *timed_out, float *loss_sums, unsigned long long timeout_ns

// x ← Σ_r x_r over ranks below `givers`, on ranks below `receivers`: each giver sends all that it
// has to each receiver. `count` Words.
extern "C" __global__ void one_shot_all_reduce(Packet* x, int count, int senders, int receivers,
                                               COMMON_PARAMETERS) {
    wait_for_previous_kernel();
    Channel channel = open_channel(inboxes, start, (long long)senders * count, rank, call_counts,
                                   timed_out, timeout_ns);
    const int first = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;
    if (rank < senders)
        for (int i = first; i < count; i += step) {
            const Packet own = without_empty(x[i]);
#pragma unroll
            for (int k = 1; k < RANKS; ++k) {
                const int to = (rank + k) % RANKS;  // Not all at the same time to the same.
                if (to < receivers) store_packet(channel.slot(to, rank, count, i), own);
            }
        }
    if (rank < receivers)
        for (int i = first; i < count; i += step) x[i] = channel.sum(x[i], senders, count, i);
    close_channel(channel, call_counts, loss_sums);
}

// x ← Σ_r x_r on every rank: rank r gets and sums share r of all, and sends the sum to everybody.
// `count` Words, `share` of them a rank, the last perhaps fewer.
extern "C" __global__ void two_shot_all_reduce(Packet* x, int count, int shard, COMMON_PARAMETERS) {
    wait_for_previous_kernel();
    Channel channel =
        open_channel(inboxes, start, 2LL * RANKS * shard, rank, call_counts, timed_out, timeout_ns);
    const int first = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;
    for (int i = first; i < shard; i += step)
#pragma unroll
        for (int k = 1; k < RANKS; ++k) {
            const int to = (rank + k) % RANKS, at = to * shard + i;
            if (at < count) store_packet(channel.slot(to, rank, shard, i), without_empty(x[at]));
        }
    for (int i = first; i < shard && rank * shard + i < count; i += step) {
        const int at = rank * shard + i;
        const Packet total = channel.sum(x[at], RANKS, shard, i);
        x[at] = total;
#pragma unroll
        for (int k = 1; k < RANKS; ++k)
            store_packet(channel.slot((rank + k) % RANKS, RANKS + rank, shard, i),
                         without_empty(total));
    }
    for (int i = first; i < shard; i += step) {
        // Only the last shares may end before the others.
        const int senders = min(RANKS, (count - i + shard - 1) / shard);
        Packet received[RANKS];
        channel.receive(received, senders, shard, RANKS * shard + i);
#pragma unroll
        for (int from = 0; from < RANKS; ++from)
            if (from != rank && from < senders) x[from * shard + i] = received[from];
    }
    close_channel(channel, call_counts, loss_sums);
}
