// Weights in shared memory for persistent blocks: either all weights of the block, or a ring buffer
// of WEIGHT_STAGES stages with STAGE_STEPS steps each. A stage is refilled by TMA as soon as all
// warps have released it. No thread waits for that: the last warp that releases a stage starts the
// copy of the next one. Groups of threads may therefore be up to WEIGHT_STAGES stages apart, so
// that one group multiplies while another stores its tile.
//
// Source: the multistage pipelines with full and empty barriers of CUTLASS
// (cutlass/pipeline/sm90_pipeline.hpp).

#pragma once

#include "implicit_gemm_mainloop.cuh"

#if PERSISTENT && WGMMA
struct WeightPipeline {
    // Packs of 16 bytes per stage.
    static constexpr int STAGE_PACKS = STAGE_STEPS * WARP_GROUP_THREADS;
    static constexpr int STAGES = WEIGHT_STAGES ? WEIGHT_STAGES : 1;
    static constexpr int WARPS = ALL_THREADS / 32;

    // State in shared memory.
    struct Shared {
        MBarrier full[STAGES];
        // Number of times that a warp released the stage, since the start of the kernel.
        unsigned released[STAGES];
    };

    const Number* memory;
    const Number* weights;
    Shared& shared;
    // Stages of the weights, and stages that all groups of the block consume together.
    int all, total;
    int stage = 0;  // Next stage of this group.

    // One thread initialises the barriers; the block must synchronise afterwards.
    __device__ void init() const {
        for (int i = 0; i < STAGES; ++i) {
            shared.full[i].init();
            shared.released[i] = 0;
        }
    }
    // The same thread starts the first copies.
    __device__ void start() const {
        if (WEIGHT_STAGES == 0)
            copy_stage(0, all * STAGE_PACKS);
        else
            for (int i = 0; i < WEIGHT_STAGES && i < total; ++i) copy_stage(i, STAGE_PACKS);
    }
    __device__ void wait() const { shared.full[0].wait(0); }

    // acc[i] += A B_i over `count` stages, beginning with step `first` of the halo tile.
    __device__ void multiply(PixelAccumulators (&acc)[PIXEL_TILES], const HaloTile& halo,
                             const int (&offsets)[PIXEL_TILES], int first, int count) {
        const ColumnDescriptors columns(halo);
        KIterator k_iter(halo.view, 0);
        // Core matrices of eight rows follow each other; each row group has two of them.
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
    // Start the copy of stage i, counted over the life of the block, or of all weights.
    __device__ void copy_stage(int i, int packs) const {
        MBarrier& barrier = shared.full[i % STAGES];
        barrier.arrive_expect_tx(packs * 16);
        tma_copy(const_cast<Number*>(memory) + i % STAGES * STAGE_PACKS * PACK,
                 weights + i % all * STAGE_PACKS * PACK, packs * 16, &barrier);
    }
    // This warp no longer reads stage i. The last warp starts the copy of a later stage into its
    // buffer.
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
