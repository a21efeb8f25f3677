// Sums of batch statistics over the GPUs of a node, within the kernel that computes them: kernels of
// their own for the sum, and for what follows from it, would be launched in the middle of a step.
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

// The ranks of a sum, and what `constants` says of them (dptrain/comm/peer.py):
//
//     rank, begin of the array's part of an inbox in packets, time limit in nanoseconds; addresses of
//     call_counts (columns,) uint32, timed_out (1,) uint32 and loss_sums (3,) float32, and of each
//     rank's inbox
//
// Kernels with ACROSS_RANKS read them and add over all ranks. In others, there is one rank, or 0 if
// another kernel adds over the ranks.
//
// What is read from memory is read before the statistics are known, and nothing is waited for after
// they have been added: all of this would be time in which the device computes nothing.
struct RankSums {
    int ranks, rank;
    long long start;
    unsigned* call_counts;
    float* loss_sums;
    const unsigned long long* inboxes;
    unsigned long long own_inbox, next_inbox;
    unsigned call_count;
    bool has_failed;
    Wait wait;

    // This reads what no kernel writes, so it may be called before wait_for_previous_kernel.
    __device__ RankSums(int ranks, const unsigned long long* constants)
        : ranks(ranks), wait(nullptr, 0) {
        if (!ACROSS_RANKS) return;
        rank = int(constants[0]);
        start = (long long)constants[1];
        call_counts = reinterpret_cast<unsigned*>(constants[3]);
        loss_sums = reinterpret_cast<float*>(constants[5]);
        inboxes = constants + 6;
        own_inbox = inboxes[rank];
        next_inbox = inboxes[rank + 1 < ranks ? rank + 1 : 0];
        wait = Wait(reinterpret_cast<unsigned*>(constants[4]), constants[2]);
    }

    // Read the number of sums of a column before this one.
    __device__ void open(int column) {
        if (!ACROSS_RANKS) return;
        call_count = call_counts[column];
        has_failed = wait.has_timed_out();
    }

    // Add the sums of channel c of the open column over the ranks, which all receive the same bits.
    template <int SUMS>
    __device__ void add(int c, int channels, Doubles<SUMS>& sums) {
        if (!ACROSS_RANKS) return;
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
        if (has_failed || wait.has_ended) invalidate(loss_sums);
    }

    // Count the sum of the open column; one thread calls this when all have opened it.
    __device__ void close(int column) {
        if (ACROSS_RANKS) call_counts[column] = call_count + 1;
    }
};
