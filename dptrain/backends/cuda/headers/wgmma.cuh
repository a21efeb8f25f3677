// Warpgroup MMA (wgmma, sm_90a): asynchronous matrix products of four warps on Hopper's tensor
// cores.
//
// The fragments of A and C are those of mma.sync (mma.cuh), 16 rows per warp. B, with up to 256
// columns, is read from shared memory by the tensor cores, and A may be read there as well.
// Operands in shared memory consist of packs of 16 bytes. Eight consecutive packs of adjacent
// columns (of adjacent terms, if B is transposed) form a core matrix. A descriptor states the
// distances between core matrices, or the swizzle.
//
// The instructions run asynchronously. Until they have finished, their registers must not be
// accessed: `fence` orders earlier register accesses before the instructions, `commit_group` closes
// a group, and `wait_group<N>` waits for all groups except the last N.
//
// Source: PTX ISA, "Asynchronous warpgroup level matrix instructions" and "Matrix descriptor
// format".

#pragma once

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) && (PRECISION > 0 || TF32X3_WGMMA)
#define WGMMA 1
#elif defined(EMULATED_TENSOR_CORES) && TF32X3_WGMMA
#define WGMMA 1
#endif

#if WGMMA
namespace wgmma {

#ifdef __CUDA_ARCH__
__device__ inline void fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void commit_group() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int N> __device__ inline void wait_group() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// Make this thread's writes to shared memory visible to the tensor cores after the next barrier.
__device__ inline void fence_async_proxy() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Keep the compiler from reading an accumulator before wgmma has finished.
__device__ inline void fence_accumulator(float& c) { asm volatile("" : "+f"(c)::"memory"); }
#else
// On the emulator, instructions finish at once.
inline void fence() {}
inline void commit_group() {}
template <int N> void wait_group() {}
inline void fence_async_proxy() {}
inline void fence_accumulator(float&) {}
#endif

// Descriptor of an operand without swizzle. Core matrices are `along` bytes apart in the direction
// of a pack and `across` bytes apart in the other direction.
__device__ inline unsigned long long descriptor(const void* first, int along, int across) {
    const unsigned at = unsigned(__cvta_generic_to_shared(first));
    return (unsigned long long)(at >> 4) | (unsigned long long)(along >> 4) << 16 |
           (unsigned long long)(across >> 4) << 32;
}

// Descriptor of an operand with rows of 8, 4 or 2 swizzled packs; groups of eight rows are `across`
// bytes apart. The hardware derives the swizzle from address bits, so the operand may begin at any
// row and at any even pack.
template <int PIECES>
__device__ inline unsigned long long swizzled_descriptor(const void* first, int across) {
    constexpr unsigned long long MODE = PIECES == 8 ? 1 : PIECES == 4 ? 2 : 3;
    return descriptor(first, 16, across) | MODE << 62;
}

#ifndef __CUDA_ARCH__
template <bool TRANSPOSED, int N>
void mma(float (&c)[N][4], const unsigned (&a)[4], unsigned long long b) {
    emulator::wgmma_tf32(c, a, b, true);
}
template <int N>
void mma_overwriting(float (&c)[N][4], const unsigned (&a)[4], unsigned long long b) {
    emulator::wgmma_tf32(c, a, b, false);
}
#else
#if PRECISION < 2
#define WGMMA_TERMS "k8.f32.tf32.tf32"
#define WGMMA_TRANSPOSED(number) ""
#define WGMMA_FLAG(transposed)  // tf32 operands cannot be transposed.
#define WGMMA_BOTH_TRANSPOSED(a, b) ""
#define WGMMA_FLAGS(a, b)
#define WGMMA_B_NOT_TRANSPOSED ""
#else
#define WGMMA_TERMS "k16.f32.bf16.bf16"
#define WGMMA_TRANSPOSED(number) ", " #number
#define WGMMA_FLAG(transposed) , "n"(int(transposed))
#define WGMMA_BOTH_TRANSPOSED(a, b) ", %" #a ", %" #b
#define WGMMA_FLAGS(a, b) , "n"(int(a)), "n"(int(b))
#define WGMMA_B_NOT_TRANSPOSED ", 0"
#endif

// Operand lists for c[0] to c[N8_TILES − 1]: their names in the assembly text and their
// constraints. Each list extends the previous one, because the preprocessor has no loops.
#define WGMMA_SUMS(j) "+f"(c[j][0]), "+f"(c[j][1]), "+f"(c[j][2]), "+f"(c[j][3])
#define WGMMA_NAMES_1 "%0, %1, %2, %3"
#define WGMMA_SUMS_1 WGMMA_SUMS(0)
#define WGMMA_NAMES_2 WGMMA_NAMES_1 ", %4, %5, %6, %7"
#define WGMMA_SUMS_2 WGMMA_SUMS_1, WGMMA_SUMS(1)
#define WGMMA_NAMES_3 WGMMA_NAMES_2 ", %8, %9, %10, %11"
#define WGMMA_SUMS_3 WGMMA_SUMS_2, WGMMA_SUMS(2)
#define WGMMA_NAMES_4 WGMMA_NAMES_3 ", %12, %13, %14, %15"
#define WGMMA_SUMS_4 WGMMA_SUMS_3, WGMMA_SUMS(3)
#define WGMMA_NAMES_5 WGMMA_NAMES_4 ", %16, %17, %18, %19"
#define WGMMA_SUMS_5 WGMMA_SUMS_4, WGMMA_SUMS(4)
#define WGMMA_NAMES_6 WGMMA_NAMES_5 ", %20, %21, %22, %23"
#define WGMMA_SUMS_6 WGMMA_SUMS_5, WGMMA_SUMS(5)
#define WGMMA_NAMES_7 WGMMA_NAMES_6 ", %24, %25, %26, %27"
#define WGMMA_SUMS_7 WGMMA_SUMS_6, WGMMA_SUMS(6)
#define WGMMA_NAMES_8 WGMMA_NAMES_7 ", %28, %29, %30, %31"
#define WGMMA_SUMS_8 WGMMA_SUMS_7, WGMMA_SUMS(7)
#define WGMMA_NAMES_9 WGMMA_NAMES_8 ", %32, %33, %34, %35"
#define WGMMA_SUMS_9 WGMMA_SUMS_8, WGMMA_SUMS(8)
#define WGMMA_NAMES_10 WGMMA_NAMES_9 ", %36, %37, %38, %39"
#define WGMMA_SUMS_10 WGMMA_SUMS_9, WGMMA_SUMS(9)
#define WGMMA_NAMES_11 WGMMA_NAMES_10 ", %40, %41, %42, %43"
#define WGMMA_SUMS_11 WGMMA_SUMS_10, WGMMA_SUMS(10)
#define WGMMA_NAMES_12 WGMMA_NAMES_11 ", %44, %45, %46, %47"
#define WGMMA_SUMS_12 WGMMA_SUMS_11, WGMMA_SUMS(11)
#define WGMMA_NAMES_13 WGMMA_NAMES_12 ", %48, %49, %50, %51"
#define WGMMA_SUMS_13 WGMMA_SUMS_12, WGMMA_SUMS(12)
#define WGMMA_NAMES_14 WGMMA_NAMES_13 ", %52, %53, %54, %55"
#define WGMMA_SUMS_14 WGMMA_SUMS_13, WGMMA_SUMS(13)
#define WGMMA_NAMES_15 WGMMA_NAMES_14 ", %56, %57, %58, %59"
#define WGMMA_SUMS_15 WGMMA_SUMS_14, WGMMA_SUMS(14)
#define WGMMA_NAMES_16 WGMMA_NAMES_15 ", %60, %61, %62, %63"
#define WGMMA_SUMS_16 WGMMA_SUMS_15, WGMMA_SUMS(15)
#define WGMMA_NAMES_17 WGMMA_NAMES_16 ", %64, %65, %66, %67"
#define WGMMA_SUMS_17 WGMMA_SUMS_16, WGMMA_SUMS(16)
#define WGMMA_NAMES_18 WGMMA_NAMES_17 ", %68, %69, %70, %71"
#define WGMMA_SUMS_18 WGMMA_SUMS_17, WGMMA_SUMS(17)
#define WGMMA_NAMES_19 WGMMA_NAMES_18 ", %72, %73, %74, %75"
#define WGMMA_SUMS_19 WGMMA_SUMS_18, WGMMA_SUMS(18)
#define WGMMA_NAMES_20 WGMMA_NAMES_19 ", %76, %77, %78, %79"
#define WGMMA_SUMS_20 WGMMA_SUMS_19, WGMMA_SUMS(19)
#define WGMMA_NAMES_21 WGMMA_NAMES_20 ", %80, %81, %82, %83"
#define WGMMA_SUMS_21 WGMMA_SUMS_20, WGMMA_SUMS(20)
#define WGMMA_NAMES_22 WGMMA_NAMES_21 ", %84, %85, %86, %87"
#define WGMMA_SUMS_22 WGMMA_SUMS_21, WGMMA_SUMS(21)
#define WGMMA_NAMES_23 WGMMA_NAMES_22 ", %88, %89, %90, %91"
#define WGMMA_SUMS_23 WGMMA_SUMS_22, WGMMA_SUMS(22)
#define WGMMA_NAMES_24 WGMMA_NAMES_23 ", %92, %93, %94, %95"
#define WGMMA_SUMS_24 WGMMA_SUMS_23, WGMMA_SUMS(23)
#define WGMMA_NAMES_25 WGMMA_NAMES_24 ", %96, %97, %98, %99"
#define WGMMA_SUMS_25 WGMMA_SUMS_24, WGMMA_SUMS(24)
#define WGMMA_NAMES_26 WGMMA_NAMES_25 ", %100, %101, %102, %103"
#define WGMMA_SUMS_26 WGMMA_SUMS_25, WGMMA_SUMS(25)
#define WGMMA_NAMES_27 WGMMA_NAMES_26 ", %104, %105, %106, %107"
#define WGMMA_SUMS_27 WGMMA_SUMS_26, WGMMA_SUMS(26)
#define WGMMA_NAMES_28 WGMMA_NAMES_27 ", %108, %109, %110, %111"
#define WGMMA_SUMS_28 WGMMA_SUMS_27, WGMMA_SUMS(27)
#define WGMMA_NAMES_29 WGMMA_NAMES_28 ", %112, %113, %114, %115"
#define WGMMA_SUMS_29 WGMMA_SUMS_28, WGMMA_SUMS(28)
#define WGMMA_NAMES_30 WGMMA_NAMES_29 ", %116, %117, %118, %119"
#define WGMMA_SUMS_30 WGMMA_SUMS_29, WGMMA_SUMS(29)
#define WGMMA_NAMES_31 WGMMA_NAMES_30 ", %120, %121, %122, %123"
#define WGMMA_SUMS_31 WGMMA_SUMS_30, WGMMA_SUMS(30)
#define WGMMA_NAMES_32 WGMMA_NAMES_31 ", %124, %125, %126, %127"
#define WGMMA_SUMS_32 WGMMA_SUMS_31, WGMMA_SUMS(31)

// C += A B, or C = A B (`mma_overwriting`), for 8 · N8_TILES columns; c[j] holds columns 8 j to
// 8 j + 7. A is in registers or in shared memory. Reading A from shared memory saved about 27 cycles
// per instruction in the main loop (one H200).
#define WGMMA_WIDTH(N8_TILES, COLUMNS, A0, A1, A2, A3, B, T)                                      \
    template <bool TRANSPOSED>                                                                    \
    __device__ inline void mma(float (&c)[N8_TILES][4], const unsigned (&a)[4],                   \
                               unsigned long long b) {                                            \
        asm volatile("wgmma.mma_async.sync.aligned.m64n" #COLUMNS WGMMA_TERMS                     \
                     " {" WGMMA_NAMES_##N8_TILES "}, {%" #A0 ", %" #A1 ", %" #A2 ", %" #A3        \
                     "}, %" #B ", 1, 1, 1" WGMMA_TRANSPOSED(%T) ";"                               \
                     : WGMMA_SUMS_##N8_TILES                                                      \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]),                                \
                       "l"(b) WGMMA_FLAG(TRANSPOSED));                                            \
    }                                                                                             \
    __device__ inline void mma_overwriting(float (&c)[N8_TILES][4], const unsigned (&a)[4],       \
                                           unsigned long long b) {                                \
        asm volatile("wgmma.mma_async.sync.aligned.m64n" #COLUMNS WGMMA_TERMS                     \
                     " {" WGMMA_NAMES_##N8_TILES "}, {%" #A0 ", %" #A1 ", %" #A2 ", %" #A3        \
                     "}, %" #B ", 0, 1, 1" WGMMA_B_NOT_TRANSPOSED ";"                             \
                     : WGMMA_SUMS_##N8_TILES                                                      \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                       \
    }                                                                                             \
    template <bool A_TRANSPOSED = false, bool B_TRANSPOSED = false>                               \
    __device__ inline void mma(float (&c)[N8_TILES][4], unsigned long long a,                     \
                               unsigned long long b) {                                            \
        asm volatile("wgmma.mma_async.sync.aligned.m64n" #COLUMNS WGMMA_TERMS                     \
                     " {" WGMMA_NAMES_##N8_TILES "}, %" #A0 ", %" #A1                             \
                     ", 1, 1, 1" WGMMA_BOTH_TRANSPOSED(A2, A3) ";"                                \
                     : WGMMA_SUMS_##N8_TILES                                                      \
                     : "l"(a), "l"(b)WGMMA_FLAGS(A_TRANSPOSED, B_TRANSPOSED));                    \
    }
WGMMA_WIDTH(1, 8, 4, 5, 6, 7, 8, 9)
WGMMA_WIDTH(2, 16, 8, 9, 10, 11, 12, 13)
WGMMA_WIDTH(3, 24, 12, 13, 14, 15, 16, 17)
WGMMA_WIDTH(4, 32, 16, 17, 18, 19, 20, 21)
WGMMA_WIDTH(5, 40, 20, 21, 22, 23, 24, 25)
WGMMA_WIDTH(6, 48, 24, 25, 26, 27, 28, 29)
WGMMA_WIDTH(7, 56, 28, 29, 30, 31, 32, 33)
WGMMA_WIDTH(8, 64, 32, 33, 34, 35, 36, 37)
WGMMA_WIDTH(9, 72, 36, 37, 38, 39, 40, 41)
WGMMA_WIDTH(10, 80, 40, 41, 42, 43, 44, 45)
WGMMA_WIDTH(11, 88, 44, 45, 46, 47, 48, 49)
WGMMA_WIDTH(12, 96, 48, 49, 50, 51, 52, 53)
WGMMA_WIDTH(13, 104, 52, 53, 54, 55, 56, 57)
WGMMA_WIDTH(14, 112, 56, 57, 58, 59, 60, 61)
WGMMA_WIDTH(15, 120, 60, 61, 62, 63, 64, 65)
WGMMA_WIDTH(16, 128, 64, 65, 66, 67, 68, 69)
WGMMA_WIDTH(18, 144, 72, 73, 74, 75, 76, 77)
WGMMA_WIDTH(20, 160, 80, 81, 82, 83, 84, 85)
WGMMA_WIDTH(21, 168, 84, 85, 86, 87, 88, 89)
WGMMA_WIDTH(22, 176, 88, 89, 90, 91, 92, 93)
WGMMA_WIDTH(24, 192, 96, 97, 98, 99, 100, 101)
WGMMA_WIDTH(26, 208, 104, 105, 106, 107, 108, 109)
WGMMA_WIDTH(28, 224, 112, 113, 114, 115, 116, 117)
WGMMA_WIDTH(30, 240, 120, 121, 122, 123, 124, 125)
WGMMA_WIDTH(32, 256, 128, 129, 130, 131, 132, 133)
#endif

}  // namespace wgmma

#endif
