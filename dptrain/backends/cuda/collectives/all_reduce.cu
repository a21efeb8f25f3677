// All-reduce over GPUs of one node that write into each other's memory (peer-to-peer over NVLink or
// PCIe):
//
//     x[i] ← Σ over ranks r of x_r[i], added in rank order, or as RANKS_SUM says
//
// x is float32 and is processed in packets of four elements (16 bytes): x (count,) packets.
//
// Algorithms: one-shot (every rank sends its whole array to every receiver, which adds them; lowest
// latency) and two-shot (reduce-scatter followed by all-gather; least traffic).
//
// Protocol: every rank has an inbox to which the other ranks write. A 32-bit word of it is EMPTY
// until an element arrives, so that each element is its own flag and no memory fence is needed
// (compare NCCL's LL protocol). The receiver writes EMPTY back. Consecutive sums of a channel
// alternate between two halves of its part of the inbox. A half is never overwritten too early: the
// sender has received all of the previous sum, so the receiver has started that sum and has emptied
// all of the sum before it. (If data flows in one direction only, the sums of another channel in
// the opposite direction guarantee the same.)
//
// Block b processes the same packets on all ranks and waits for blocks b only, so the kernels of
// the ranks need not be co-scheduled beyond that. If a wait makes no progress for `timeout_ns`,
// `timed_out` is set, all waits end, and the loss sums become NaN. They decide about the update of
// parameters and are checked by the host.
//
// Statistics of a minibatch are float64, two elements in a packet, of which each half is a flag of
// its own (rank_sums.cuh).
//
// Launch: the same grid on all ranks, one-dimensional blocks (dptrain/comm/sums/peer.py); RANKS is the
// number of ranks. RANKS_SUM is the sum over all ranks as an expression of at(r), the element of rank
// r; with micro-shards it follows their tree.
//
// Source: NCCL documentation and source (LL protocol); NVIDIA TensorRT-LLM, custom all-reduce
// kernels (one-shot and two-shot).

#include "dependent_launch.cuh"
#include "packets.cuh"

#ifndef RANKS
#define RANKS 2
#endif

// A channel's part of the inboxes, as one rank sees it.
struct Channel {
    // Address of each rank's inbox in this rank's address space.
    const unsigned long long* inboxes;
    long long start;  // Begin of the current half, in packets.
    int rank;
    Wait wait;

    // Slot i of the packets that rank `of` receives from rank `from`, with `each` slots per sender.
    __device__ Packet* slot(int of, int from, long long each, int i) const {
        return reinterpret_cast<Packet*>(inboxes[of]) + start + from * each + i;
    }

    // Receive slot i from every rank below `senders`, except this rank.
    __device__ void receive(Packet (&received)[RANKS], int senders, long long each, int i) {
#pragma unroll
        for (int from = 0; from < RANKS; ++from)
            if (from != rank && from < senders)
                received[from] = load_packet(slot(rank, from, each, i));
#pragma unroll
        for (int from = 0; from < RANKS; ++from)
            if (from != rank && from < senders)
                received[from] = wait.for_packet(slot(rank, from, each, i), received[from]);
    }

    // Return Σ_r x_r over the ranks below `senders` in one order, so that every rank computes the
    // same bits.
    __device__ Packet sum(const Packet& own, int senders, long long each, int i) {
        Packet received[RANKS], total;
        receive(received, senders, each, i);
#ifdef RANKS_SUM
        for (int k = 0; k < 4 && senders == RANKS; ++k) {
            const auto at = [&](int from) {
                return __uint_as_float(from == rank ? own.at[k] : received[from].at[k]);
            };
            total.at[k] = __float_as_uint(RANKS_SUM);
        }
        if (senders == RANKS) return total;
#endif
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

// `call_counts` counts the sums of each block; a half has `slots` packets.
__device__ inline Channel open_channel(const unsigned long long* inboxes, long long start,
                                       long long slots, int rank, const unsigned* call_counts,
                                       unsigned* timed_out, unsigned long long timeout_ns) {
    const long long half = start + (call_counts[blockIdx.x] & 1) * slots;
    return {inboxes, half, rank, {timed_out, timeout_ns}};
}

// Called by all threads at the end of each block. If any block timed out, the loss sums become NaN:
// the block that writes them either sees the flag here, or the block that sets it arrives here later.
__device__ inline void close_channel(const Channel& channel, unsigned* call_counts,
                                     float* loss_sums) {
    __syncthreads();
    if (threadIdx.x) return;
    ++call_counts[blockIdx.x];
    __threadfence();
    if (channel.wait.has_timed_out()) invalidate_loss_sums(loss_sums);
}

#define COMMON_PARAMETERS                                                                \
    const unsigned long long *inboxes, long long start, int rank, unsigned *call_counts, \
        unsigned *timed_out, float *loss_sums, unsigned long long timeout_ns

// One-shot all-reduce: each of the ranks below `senders` sends all of x to each of the ranks below
// `receivers`, which add them. x (count,) packets; inboxes (RANKS,) addresses; call_counts
// (gridDim.x,); timed_out (1,); loss_sums (3,) float32.
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
                // Ranks send in different orders, so that they do not all write to the same GPU at
                // once.
                const int to = (rank + k) % RANKS;
                if (to < receivers) store_packet(channel.slot(to, rank, count, i), own);
            }
        }
    if (rank < receivers)
        for (int i = first; i < count; i += step) x[i] = channel.sum(x[i], senders, count, i);
    close_channel(channel, call_counts, loss_sums);
}

// Two-shot all-reduce: rank r receives and adds shard r (reduce-scatter), then sends the sum to all
// ranks (all-gather). x (count,) packets, `shard` packets per rank; the last shards may be shorter.
// The other arguments are as above.
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
        // Only the last shards may be shorter than the others.
        const int senders = min(RANKS, (count - i + shard - 1) / shard);
        Packet received[RANKS];
        channel.receive(received, senders, shard, RANKS * shard + i);
#pragma unroll
        for (int from = 0; from < RANKS; ++from)
            if (from != rank && from < senders) x[from * shard + i] = received[from];
    }
    close_channel(channel, call_counts, loss_sums);
}
