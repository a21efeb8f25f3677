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
constexpr unsigned GLANCES = 256;

struct alignas(16) Words {
    unsigned at[4];
};

// Other processors write here meanwhile: a word of the result is a number or EMPTY.
__device__ inline Words look(const Words* slot) {
    Words words;
#ifdef __CUDA_ARCH__
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words.at[0]), "=r"(words.at[1]), "=r"(words.at[2]), "=r"(words.at[3])
                 : "l"(slot)
                 : "memory");
#else
    for (int k = 0; k < 4; ++k) words.at[k] = const_cast<const volatile Words*>(slot)->at[k];
#endif
    return words;
}

// Other processors look here meanwhile.
__device__ inline void put(Words* slot, const Words& words) {
#ifdef __CUDA_ARCH__
    asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(slot),
                 "r"(words.at[0]), "r"(words.at[1]), "r"(words.at[2]), "r"(words.at[3])
                 : "memory");
#else
    for (int k = 0; k < 4; ++k) const_cast<volatile Words*>(slot)->at[k] = words.at[k];
#endif
}

__device__ inline bool arrived(const Words& words) {
    return words.at[0] != EMPTY && words.at[1] != EMPTY && words.at[2] != EMPTY &&
           words.at[3] != EMPTY;
}

// As it may be sent.
__device__ inline Words full(Words words) {
    for (int k = 0; k < 4; ++k)
        if (words.at[k] == EMPTY) words.at[k] = NOT_A_NUMBER;
    return words;
}

// A part of the inboxes, as one rank sees it.
struct Channel {
    const unsigned long long* inboxes;  // Where each rank's begins in this one's memory.
    long long start;                    // Of this channel's present half, in Words.
    int rank;
    unsigned* gave_up;
    unsigned long long patience_ns, since;
    unsigned looks;

    // Of `rank`'s, slot i of what comes from `from`, `each` slots a rank.
    __device__ Words* slot(int of, int from, long long each, int i) const {
        return reinterpret_cast<Words*>(inboxes[of]) + start + from * each + i;
    }

    __device__ bool has_given_up() const { return *const_cast<volatile unsigned*>(gave_up) != 0; }

    // Whether to look again.
    __device__ bool waits() {
        if (++looks % GLANCES) return true;
        const unsigned long long now = nanoseconds();
        if (since == 0) since = now;
        if (now - since > patience_ns) atomicExch(gave_up, 1u);
        return !has_given_up();
    }

    // What comes from ranks below `givers`, but this one, to slot i here.
    __device__ void take(Words (&got)[RANKS], int givers, long long each, int i) {
#pragma unroll
        for (int from = 0; from < RANKS; ++from)
            if (from != rank && from < givers) got[from] = look(slot(rank, from, each, i));
#pragma unroll
        for (int from = 0; from < RANKS; ++from)
            if (from != rank && from < givers) {
                Words* place = slot(rank, from, each, i);
                while (!arrived(got[from]) && waits()) got[from] = look(place);
                put(place, {EMPTY, EMPTY, EMPTY, EMPTY});
            }
    }

    // y = Σ_r x_r over ranks below `givers`, in their order, so that whoever adds gets the same
    // bits.
    __device__ Words sum(const Words& mine, int givers, long long each, int i) {
        Words got[RANKS], total;
        take(got, givers, each, i);
#pragma unroll
        for (int from = 0; from < RANKS; ++from) {
            if (from >= givers) continue;
            for (int k = 0; k < 4; ++k) {
                const float x = __uint_as_float(from == rank ? mine.at[k] : got[from].at[k]);
                total.at[k] = __float_as_uint(from ? __uint_as_float(total.at[k]) + x : x);
            }
        }
        return total;
    }
};

// `turns` counts a block's sums; a half has `slots` Words.
__device__ inline Channel enter(const unsigned long long* inboxes, long long start, long long slots,
                                int rank, const unsigned* turns, unsigned* gave_up,
                                unsigned long long patience_ns) {
    const long long half = start + (turns[blockIdx.x] & 1) * slots;
    return {inboxes, half, rank, gave_up, patience_ns, 0, 0};
}

// Behind all that a block does. A block that writes the shared sums either sees here that another
// gave up, or that one comes here later: so they are NaN in the end.
__device__ inline void leave(const Channel& channel, unsigned* turns, float* sums) {
    __syncthreads();
    if (threadIdx.x) return;
    ++turns[blockIdx.x];
    __threadfence();
    if (!channel.has_given_up()) return;
    for (int k = 0; k < 3; ++k) atomicExch(&sums[k], __uint_as_float(NOT_A_NUMBER));
}

#define COMMON                                                                                  \
    const unsigned long long *inboxes, long long start, int rank, unsigned *turns,              \
        unsigned *gave_up, float *sums, unsigned long long patience_ns

// x ← Σ_r x_r over ranks below `givers`, on ranks below `receivers`: each giver sends all that it
// has to each receiver. `count` Words.
extern "C" __global__ void one_shot_all_reduce(Words* x, int count, int givers, int receivers, COMMON) {
    wait_for_previous_kernel();
    Channel channel =
        enter(inboxes, start, (long long)givers * count, rank, turns, gave_up, patience_ns);
    const int first = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;
    if (rank < givers)
        for (int i = first; i < count; i += step) {
            const Words mine = full(x[i]);
#pragma unroll
            for (int k = 1; k < RANKS; ++k) {
                const int to = (rank + k) % RANKS;  // Not all at the same time to the same.
                if (to < receivers) put(channel.slot(to, rank, count, i), mine);
            }
        }
    if (rank < receivers)
        for (int i = first; i < count; i += step) x[i] = channel.sum(x[i], givers, count, i);
    leave(channel, turns, sums);
}

// x ← Σ_r x_r on every rank: rank r gets and sums share r of all, and sends the sum to everybody.
// `count` Words, `share` of them a rank, the last perhaps fewer.
extern "C" __global__ void two_shot_all_reduce(Words* x, int count, int share, COMMON) {
    wait_for_previous_kernel();
    Channel channel =
        enter(inboxes, start, 2LL * RANKS * share, rank, turns, gave_up, patience_ns);
    const int first = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;
    for (int i = first; i < share; i += step)
#pragma unroll
        for (int k = 1; k < RANKS; ++k) {
            const int to = (rank + k) % RANKS, at = to * share + i;
            if (at < count) put(channel.slot(to, rank, share, i), full(x[at]));
        }
    for (int i = first; i < share && rank * share + i < count; i += step) {
        const int at = rank * share + i;
        const Words total = channel.sum(x[at], RANKS, share, i);
        x[at] = total;
#pragma unroll
        for (int k = 1; k < RANKS; ++k)
            put(channel.slot((rank + k) % RANKS, RANKS + rank, share, i), full(total));
    }
    for (int i = first; i < share; i += step) {
        // Only the last shares may end before the others.
        const int givers = min(RANKS, (count - i + share - 1) / share);
        Words got[RANKS];
        channel.take(got, givers, share, RANKS * share + i);
#pragma unroll
        for (int from = 0; from < RANKS; ++from)
            if (from != rank && from < givers) x[from * share + i] = got[from];
    }
    leave(channel, turns, sums);
}
