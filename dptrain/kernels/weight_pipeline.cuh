// Weights in shared memory, for blocks that go from tile to tile: all of them, or, where there is
// no room, WEIGHT_STAGES stages of STAGE_STEPS steps, each of which makes way for the one WEIGHT_STAGES stages further when
// all groups of warps are done with it. Nobody waits to fill a stage: who is done last asks for
// what comes next. So groups may be WEIGHT_STAGES stages apart, and one multiplies while another writes its
// tile.

#pragma once

#include "implicit_gemm_mainloop.cuh"

#if PERSISTENT && WGMMA
struct WeightPipeline {
    static constexpr int STAGE_PACKS = STAGE_STEPS * WARP_GROUP_THREADS;  // Pieces of 16 bytes.
    static constexpr int STAGES = WEIGHT_STAGES ? WEIGHT_STAGES : 1;
    static constexpr int WARPS = ALL_THREADS / 32;

    // Of a block, behind what else it has in shared memory.
    struct Shared {
        MBarrier full[STAGES];
        unsigned released[STAGES];  // Warps that have been done with the stage, of all times.
    };

    const Number* memory;
    const Number* weights;
    Shared& shared;
    int all, total;  // Stages of the weights, and of all that the block's groups take.
    int stage = 0;   // The next one, of all that the group takes.

    // By one thread of the block, before a barrier.
    __device__ void init() const {
        for (int i = 0; i < STAGES; ++i) {
            shared.full[i].init();
            shared.released[i] = 0;
        }
    }
    // By the same behind it.
    __device__ void start() const {
        if (WEIGHT_STAGES == 0)
            copy_stage(0, all * STAGE_PACKS);
        else
            for (int i = 0; i < WEIGHT_STAGES && i < total; ++i) copy_stage(i, STAGE_PACKS);
    }
    __device__ void wait() const { shared.full[0].wait(0); }

    // sums[i] += A B_i over `count` stages, from step `first` of the window on.
    __device__ void multiply(PixelAccumulators (&acc)[PIXEL_TILES], const HaloTile& halo,
                             const int (&offsets)[PIXEL_TILES], int first, int count) {
        const ColumnDescriptors columns(halo);
        KIterator k_iter(halo.view, 0);
        // Eights of rows lie behind each other, each with its two pieces.
        const Number* const weights =
            memory + (WEIGHT_STAGES ? 0 : first * WARP_GROUP_THREADS * PACK);
        const unsigned long long rows = wgmma::descriptor(weights, 128, 256);
#pragma unroll 1
        for (int i = 0; i < count; ++i) {
            const int slot = stage % STAGES;
            if (WEIGHT_STAGES) shared.full[slot].wait(stage / STAGES);
            wgmma::fence();
#pragma unroll
            for (int d = 0; d < STAGE_STEPS; ++d, k_iter.next())
#pragma unroll
                for (int j = 0; j < PIXEL_TILES; ++j)
                    wgmma::mma(
                        acc[j].c,
                        rows + (WEIGHT_STAGES ? slot : i) * STAGE_PACKS + d * WARP_GROUP_THREADS,
                        columns.at(offsets[j] + k_iter.offset));
            wgmma::commit_group();
            if (WEIGHT_STAGES && i > 0) {
                wgmma::wait_group<1>();
                release(stage - 1);
            }
            if (WEIGHT_STAGES) ++stage;
        }
        wgmma::wait_group<0>();
        if (WEIGHT_STAGES) release(stage - 1);
        fence_accumulators(acc);
    }

   private:
    // Stage i of all that the block takes, or several, to where it has its place.
    __device__ void copy_stage(int i, int packs) const {
        MBarrier& barrier = shared.full[i % STAGES];
        barrier.arrive_expect_tx(packs * 16);
        tma_copy(const_cast<Number*>(memory) + i % STAGES * STAGE_PACKS * PACK,
                 weights + i % all * STAGE_PACKS * PACK, packs * 16, &barrier);
    }
    // This warp is done with stage i.
    __device__ void release(int i) const {
        if (threadIdx.x % 32) return;
        unsigned before;
        asm volatile("atom.acq_rel.cta.shared::cta.add.u32 %0, [%1], 1;"
                     : "=r"(before)
                     : "r"(unsigned(__cvta_generic_to_shared(&shared.released[i % STAGES])))
                     : "memory");
        if (before + 1 == (i / STAGES + 1) * WARPS && i + STAGES < total)
            copy_stage(i + STAGES, STAGE_PACKS);
    }
};
#endif
