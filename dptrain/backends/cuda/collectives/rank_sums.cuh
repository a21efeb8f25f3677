// Sums of batch statistics over the GPUs of a node, within the kernel that computes the statistics.
// Separate kernels for the sum and for the moments would add two launches to each sum.
//
// A thread that has the statistics of a channel sends them to the other ranks as packets, receives
// theirs, and adds all in the order of ranks. Each array of statistics has a part of the inboxes of its
// own, and each column of channels a count of its sums. Protocol: all_reduce.cu.

#pragma once

#include "channel_sums.cuh"
#include "packets.cuh"

#ifndef ACROSS_RANKS
#define ACROSS_RANKS 0
#endif

// The last parameters of a kernel that adds statistics. They are the number of ranks, or 0 if another
// kernel adds over the ranks; and with ACROSS_RANKS, for several ranks,
//
//     rank         number of this rank
//     inboxes      (ranks,) addresses of the inboxes
//     own_inbox    that of this rank; next_inbox: that of the next rank
//     start        begin of the statistics' part of an inbox, in packets
//     call_counts  (columns,) number of sums of each column of channels
//     timed_out    (1,) not 0 after a timeout
//     loss_sums    (3,) float32, set to NaN after a timeout of timeout_ns
//
// (dptrain/comm/sums/peer.py). Reading them from memory would lengthen the kernel.
#if ACROSS_RANKS
#define RANKS_PARAMETERS                                                                    \
    int ranks, int rank, const unsigned long long *inboxes, unsigned long long own_inbox,  \
        unsigned long long next_inbox, long long start, unsigned *call_counts,             \
        unsigned *timed_out, float *loss_sums, unsigned long long timeout_ns
#define RANKS_ARGUMENTS                                                                     \
    ranks, rank, inboxes, own_inbox, next_inbox, start, call_counts, loss_sums,            \
        Wait(timed_out, timeout_ns)
#else
#define RANKS_PARAMETERS int ranks
#define RANKS_ARGUMENTS ranks
#endif

// Adds the statistics of channels over the ranks. No thread waits for anything after it has added them.
struct RankSums {
    int ranks;
#if ACROSS_RANKS
    int rank;
    const unsigned long long* inboxes;
    unsigned long long own_inbox, next_inbox;
    long long start;
    unsigned* call_counts;
    float* loss_sums;
    Wait wait;
    unsigned call_count = 0;
    bool has_failed = false;

    // Read how many sums a column has made. Called early, because the reads take time.
    __device__ void open(int column) {
        call_count = call_counts[column];
        has_failed = wait.has_timed_out();
    }

    // Add the sums of channel c of the open column over the ranks, which all receive the same bits.
    template <int SUMS>
    __device__ void add(int c, int channels, Doubles<SUMS>& sums) {
        constexpr int PACKETS = (SUMS + 1) / 2;
        const long long size = (long long)PACKETS * channels;
        const long long half = start + (call_count & 1) * ranks * size + c;
        // Packet p of the channel that a rank receives from rank `from`.
        const auto slot = [&](unsigned long long inbox, int from, int p) {
            return reinterpret_cast<Packet*>(inbox) + half + from * size + p * channels;
        };
        Packet own[PACKETS], found[PACKETS];
        for (int p = 0; p < PACKETS; ++p)
            own[p] = packet_of(sums.at[2 * p], 2 * p + 1 < SUMS ? sums.at[2 * p + 1] : 0.0);
        for (int k = 1, to = rank + 1; k < ranks; ++k, ++to) {
            if (to == ranks) to = 0;
            const unsigned long long inbox = k == 1 ? next_inbox : inboxes[to];
            for (int p = 0; p < PACKETS; ++p) store_packet(slot(inbox, rank, p), own[p]);
        }
        for (int from = 0; from < ranks; ++from) {
            for (int p = 0; p < PACKETS; ++p)
                found[p] = from == rank ? own[p] : load_packet(slot(own_inbox, from, p));
            for (int p = 0; p < PACKETS; ++p)
                if (from != rank) found[p] = wait.for_packet(slot(own_inbox, from, p), found[p]);
            for (int s = 0; s < SUMS; ++s) {
                const double value = element_float64(found[s / 2], s % 2);
                sums.at[s] = from ? sums.at[s] + value : value;
            }
        }
        if (has_failed || wait.ended_by_timeout) invalidate_loss_sums(loss_sums);
    }

    // Count the sum of the open column; one thread calls this when all have opened it.
    __device__ void close(int column) { call_counts[column] = call_count + 1; }
#else
    __device__ void open(int) {}
    template <int SUMS> __device__ void add(int, int, Doubles<SUMS>&) {}
    __device__ void close(int) {}
#endif
};
