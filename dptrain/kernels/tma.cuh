// Copies to shared memory by the engine for bulk copies of sm_90 (TMA), and barriers that tell when
// they have come. One thread asks for many of them; no register and no warp takes part.
//
// A box of a map is asked for by a *tensor map*, which the host makes
// (dptrain/backends/cuda/tensor_maps.py): it says how the map lies in memory, how large boxes are,
// and that runs of 16 bytes change places in shared memory (halo_tile.cuh). What a box has outside of
// the map comes as zeros. Maps of tf32 are rounded on their way, to the nearest, halves to even.
//
// Source: PTX ISA, "Asynchronous copy", "Tensor Swizzling modes", and "mbarrier".

#pragma once

#include "wgmma.cuh"

#ifndef TENSOR_MAPS
#define TENSOR_MAPS 0
#endif
#if TENSOR_MAPS && !WGMMA
#error "tensor maps are for what has wgmma"
#endif

// 128 bytes that the driver makes; kernels never look at them.
struct alignas(64) TensorMap {
    unsigned long long words[16];
};

#if TENSOR_MAPS
struct TensorMapList {
    TensorMap at[TENSOR_MAPS];
};
#define TENSOR_MAPS_PARAMETER const __grid_constant__ TensorMapList maps,
#define TENSOR_MAPS_ARGUMENT maps.at
#else
#define TENSOR_MAPS_PARAMETER
#define TENSOR_MAPS_ARGUMENT nullptr
#endif

// Has tensor maps at hand when they are used. They are part of a kernel's arguments, so this may
// stand in front of what waits for the kernel before.
__device__ inline void prefetch_tensor_maps(const TensorMap* maps) {
#if TENSOR_MAPS
    if (threadIdx.x > 0 || threadIdx.y > 0) return;
    for (int i = 0; i < TENSOR_MAPS; ++i)
        asm volatile("prefetch.tensormap [%0];" ::"l"(maps + i) : "memory");
#endif
}

// Of shared memory. Its *phase* is over when all have told so who were to, and all bytes that were
// to be expected have come. Phases are counted from 0.
struct MBarrier {
    unsigned long long state;

#if WGMMA
    __device__ unsigned at() const { return unsigned(__cvta_generic_to_shared(&state)); }

    // One thread tells, and says how many bytes are to come. Used behind a barrier of the block.
    __device__ void init() {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(at()) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __device__ void arrive_expect_tx(int bytes) {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at()),
                     "r"(bytes)
                     : "memory");
    }
    // Waits for the end of a phase, the first or the second of two.
    __device__ void wait(int phase) const {
        asm volatile(
            "{\n"
            ".reg .pred over;\n"
            "again:\n"
            "mbarrier.try_wait.parity.shared::cta.b64 over, [%0], %1;\n"
            "@!over bra again;\n"
            "}" ::"r"(at()),
            "r"(phase & 1)
            : "memory");
    }
#endif
};

#if WGMMA
// A multiple of 16 bytes as they lie in memory.
__device__ inline void tma_copy(void* to, const void* from, int bytes, MBarrier* barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(unsigned(__cvta_generic_to_shared(to))),
        "l"(from), "r"(bytes), "r"(barrier->at())
        : "memory");
}

// The box of a map (N, H, W, C) that begins with channel c of pixel x in row y of sample n.
__device__ inline void tma_copy_box(void* to, const TensorMap* map, int c, int x, int y, int n,
                                    MBarrier* barrier) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(unsigned(__cvta_generic_to_shared(to))),
        "l"(map), "r"(barrier->at()), "r"(c), "r"(x), "r"(y), "r"(n)
        : "memory");
}
#endif
