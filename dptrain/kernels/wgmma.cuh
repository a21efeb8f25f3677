// Products of a warpgroup (four warps) on Hopper's tensor cores: wgmma, of sm_90a alone.
//
// The instruction is mma.sync's of four warps at once: each gives the words of its own 16 rows of A
// and holds their sums of C as for mma.sync (mma.cuh), while B, up to 64 columns here, is read from
// shared memory by the tensor cores themselves. It lies there in pieces of 16 bytes; eight pieces in
// a row, of neighbouring columns (of terms where B is transposed), are what the hardware calls a
// core matrix, and a descriptor says how far apart core matrices are.
//
// Products run on while the warps do something else. Until they are done nobody may touch the
// registers that they read and write: `start` orders what was done to registers before them, and
// `finish<N>` waits for all products but the last N groups of them.
//
// Source: PTX ISA, "Asynchronous warpgroup level matrix instructions", register fragments, and
// "Matrix descriptor format" without swizzling.

#pragma once

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) && PRECISION > 0
#define WGMMA 1

namespace wgmma {

__device__ inline void start() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> __device__ inline void finish() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// What this thread wrote to shared memory is seen by the tensor cores behind the next barrier.
__device__ inline void publish() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Of core matrices `along` bytes apart in the direction of a piece, `across` bytes in the other.
__device__ inline unsigned long long descriptor(const void* first, int along, int across) {
    const unsigned at = unsigned(__cvta_generic_to_shared(first));
    return (unsigned long long)(at >> 4) | (unsigned long long)(along >> 4) << 16 |
           (unsigned long long)(across >> 4) << 32;
}

#if PRECISION == 1
#define WGMMA_TERMS "k8.f32.tf32.tf32"
#define WGMMA_TRANSPOSED(number) ""
#define WGMMA_FLAG(transposed)  // There is no such thing for tf32.
#else
#define WGMMA_TERMS "k16.f32.bf16.bf16"
#define WGMMA_TRANSPOSED(number) ", " #number
#define WGMMA_FLAG(transposed) , "n"(int(transposed))
#endif

// C += A B for 8 COLUMNS columns: c[j] are the sums of columns 8 j to 8 j + 7.
template <bool TRANSPOSED, int COLUMNS>
__device__ inline void multiply_add(float (&c)[COLUMNS][4], const unsigned (&a)[4],
                                    unsigned long long b) {
    static_assert(COLUMNS == 4 || COLUMNS == 8, "32 or 64 columns");
    if constexpr (COLUMNS == 4) {
        asm volatile(
            "wgmma.mma_async.sync.aligned.m64n32" WGMMA_TERMS " "
            "{%0, %1, %2, %3, %4, %5, %6, %7, "
            " %8, %9, %10, %11, %12, %13, %14, %15}, "
            "{%16, %17, %18, %19}, %20, 1, 1, 1" WGMMA_TRANSPOSED(%21) ";"
            : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]),
              "+f"(c[1][0]), "+f"(c[1][1]), "+f"(c[1][2]), "+f"(c[1][3]),
              "+f"(c[2][0]), "+f"(c[2][1]), "+f"(c[2][2]), "+f"(c[2][3]),
              "+f"(c[3][0]), "+f"(c[3][1]), "+f"(c[3][2]), "+f"(c[3][3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b) WGMMA_FLAG(TRANSPOSED));
    }
    if constexpr (COLUMNS == 8) {
        asm volatile(
            "wgmma.mma_async.sync.aligned.m64n64" WGMMA_TERMS " "
            "{%0, %1, %2, %3, %4, %5, %6, %7, "
            " %8, %9, %10, %11, %12, %13, %14, %15, "
            " %16, %17, %18, %19, %20, %21, %22, %23, "
            " %24, %25, %26, %27, %28, %29, %30, %31}, "
            "{%32, %33, %34, %35}, %36, 1, 1, 1" WGMMA_TRANSPOSED(%37) ";"
            : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]),
              "+f"(c[1][0]), "+f"(c[1][1]), "+f"(c[1][2]), "+f"(c[1][3]),
              "+f"(c[2][0]), "+f"(c[2][1]), "+f"(c[2][2]), "+f"(c[2][3]),
              "+f"(c[3][0]), "+f"(c[3][1]), "+f"(c[3][2]), "+f"(c[3][3]),
              "+f"(c[4][0]), "+f"(c[4][1]), "+f"(c[4][2]), "+f"(c[4][3]),
              "+f"(c[5][0]), "+f"(c[5][1]), "+f"(c[5][2]), "+f"(c[5][3]),
              "+f"(c[6][0]), "+f"(c[6][1]), "+f"(c[6][2]), "+f"(c[6][3]),
              "+f"(c[7][0]), "+f"(c[7][1]), "+f"(c[7][2]), "+f"(c[7][3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b) WGMMA_FLAG(TRANSPOSED));
    }
}

}  // namespace wgmma

#endif
