// Tensor Memory Accelerator (TMA, sm_90): asynchronous bulk copies from global to shared memory,
// and the mbarriers that signal their completion. One thread starts a copy of many bytes; no
// registers are used.
//
// A *tensor map*, which the host encodes (dptrain/backends/cuda/device/tensor_maps.py), describes the
// layout of a tensor in global memory, the size of the box that one instruction copies, and the
// swizzle of the box in shared memory (halo_tile.cuh). Elements of a box that lie outside the
// tensor are filled with zeros. For tf32 the copy rounds its elements to nearest, ties to even.
//
// Source: PTX ISA, "Asynchronous copy", "Tensor Swizzling modes" and "mbarrier".

#pragma once

#include "wgmma.cuh"

#ifndef TENSOR_MAPS
#define TENSOR_MAPS 0
#endif
#if TENSOR_MAPS && !WGMMA
#error "tensor maps require wgmma"
#endif

// Opaque 128 bytes (CUtensorMap) that the CUDA driver encodes.
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

// Prefetch the tensor maps into the cache. They are kernel arguments, so this may precede
// `wait_for_previous_kernel`.
__device__ inline void prefetch_tensor_maps(const TensorMap* maps) {
#if TENSOR_MAPS
    if (threadIdx.x > 0 || threadIdx.y > 0) return;
    for (int i = 0; i < TENSOR_MAPS; ++i)
        asm volatile("prefetch.tensormap [%0];" ::"l"(maps + i) : "memory");
#endif
}

// Barrier in shared memory. A phase completes when the expected arrivals have happened and the
// expected bytes have been copied. Phases are counted from 0.
struct MBarrier {
    unsigned long long state;

#if WGMMA
    __device__ unsigned at() const { return unsigned(__cvta_generic_to_shared(&state)); }

    // Initialise the barrier for so many arriving threads; one of them may also state the number of
    // bytes to expect. The block must synchronise before the barrier is used.
    __device__ void init(int arrivals = 1) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at()), "r"(arrivals)
                     : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __device__ void arrive_expect_tx(int bytes) {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at()),
                     "r"(bytes)
                     : "memory");
    }
    __device__ void arrive() {
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at()) : "memory");
    }
    // Wait until the phase completes. Only its parity matters, because at most one phase is
    // outstanding.
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
// Start the copy of `bytes` contiguous bytes, a multiple of 16.
__device__ inline void tma_copy(void* to, const void* from, int bytes, MBarrier* barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(unsigned(__cvta_generic_to_shared(to))),
        "l"(from), "r"(bytes), "r"(barrier->at())
        : "memory");
}

// Start the copy of a box of a tensor (N, H, W, C). The box begins at channel c of pixel x in row y
// of sample n.
__device__ inline void tma_copy_box(void* to, const TensorMap* map, int c, int x, int y, int n,
                                    MBarrier* barrier) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(unsigned(__cvta_generic_to_shared(to))),
        "l"(map), "r"(barrier->at()), "r"(c), "r"(x), "r"(y), "r"(n)
        : "memory");
}

// Start the copy of one tap of the patches of consecutive positions (im2col mode): the channels from
// c on. The patch of the first position begins at pixel x in row y of sample n, and the tap lies
// `down` rows and `across` pixels further. The tensor map has the numbers of positions and channels.
__device__ inline void tma_copy_patches(void* to, const TensorMap* map, int c, int x, int y, int n,
                                        int across, int down, MBarrier* barrier) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5, %6}], [%2], {%7, %8};" ::"r"(
            unsigned(__cvta_generic_to_shared(to))),
        "l"(map), "r"(barrier->at()), "r"(c), "r"(x), "r"(y), "r"(n), "h"((unsigned short)across),
        "h"((unsigned short)down)
        : "memory");
}

// Start the copy of a box of a matrix. The box begins at a column of a row.
__device__ inline void tma_copy_box(void* to, const TensorMap* map, int column, int row,
                                    MBarrier* barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4}], [%2];" ::"r"(unsigned(__cvta_generic_to_shared(to))),
        "l"(map), "r"(barrier->at()), "r"(column), "r"(row)
        : "memory");
}
#endif
