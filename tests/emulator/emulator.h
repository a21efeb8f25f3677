// The CUDA language for g++: declarations that kernels use, implemented by runtime.cpp.
//
// Kernels are compiled with -fsanitize=thread, which inserts a call before each memory access. The
// runtime implements these calls itself and so observes all accesses.
#pragma once

#include <math.h>
#include <sched.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

// Only the kernel that is called is compiled; the other kernels of its source are unused inline
// functions.
#define __global__ inline
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __constant__ static const
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
// Shared memory is filled with 0xff bytes (NaN) before each block.
#define __shared__ static
// Marks functions of the emulator whose memory accesses are not checked.
#define EMULATOR_UNSEEN __attribute__((no_sanitize("thread")))
#define __syncthreads() emulator::block_barrier(__LINE__)
#define __syncthreads_or(predicate) emulator::block_or(__LINE__, predicate)

struct uint3 { unsigned x, y, z; };
struct dim3 { unsigned x, y, z; };
extern const uint3 threadIdx, blockIdx;
extern const dim3 blockDim, gridDim;
constexpr int warpSize = 32;

template <class T> struct alignas(2 * sizeof(T)) Pair { T x, y; };
template <class T> struct alignas(4 * sizeof(T)) Quad { T x, y, z, w; };
using float2 = Pair<float>;
using float4 = Quad<float>;
using int2 = Pair<int>;
using int4 = Quad<int>;
using uint2 = Pair<unsigned>;
using uint4 = Quad<unsigned>;
using uchar4 = Quad<unsigned char>;
using double2 = Pair<double>;
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

// A running counter, here in nanoseconds.
EMULATOR_UNSEEN inline long long clock64() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

namespace emulator {
// T, excluded from template argument deduction.
template <class T> struct Identity { using type = T; };
template <class T> using Same = typename Identity<T>::type;

void block_barrier(int line);
bool block_or(int line, bool predicate);
void warp_barrier(unsigned mask);
// Value of lane `source` of this warp. All lanes of the mask wait for each other.
uint64_t exchange(unsigned mask, uint64_t value, int source);
unsigned ballot(unsigned mask, bool predicate);
unsigned lane();
void* dynamic_shared();
void check_atomic(const void* address, size_t size);

template <class T> T shuffle(unsigned mask, T value, int source) {
    static_assert(sizeof(T) <= 8, "a lane gives at most eight bytes");
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof(T));
    bits = exchange(mask, bits, source);
    memcpy(&value, &bits, sizeof(T));
    return value;
}

// An atomic operation: no other thread runs between its read and its write.
template <class T, class F> EMULATOR_UNSEEN T atomic(T* address, F change) {
    check_atomic(address, sizeof(T));
    T old = *address;
    *address = change(old);
    return old;
}

// Address range of a library of kernels. The only data that it may write is __shared__.
struct Library { char *start, *shared, *stop; };
using Invoke = void (*)(void**);
const char* launch(Library library, Invoke invoke, void** args, const unsigned* extents, unsigned shared_bytes,
                   const uint64_t* regions, int num_regions, uint64_t seed);

// Type of a kernel parameter as a string for Python: f4, i4, u1 …, followed by * for a pointer. A
// pointer to a vector type (with elements x, y, … or an array `at`) counts as a pointer to the
// element type, and a pointer to a type with a member `bits` as a pointer to the type of `bits`.
template <class...> using Void = void;
template <class T> struct Pointee { using type = T; static constexpr bool exists = false; };
template <class T> struct Pointee<T*> { using type = T; static constexpr bool exists = true; };
template <class T> struct Item;
template <class T, size_t N> struct Item<T[N]> { using type = T; };
template <class T, class = void> struct Element { using type = T; };
template <class T> struct Element<T, Void<decltype(T::x)>> { using type = decltype(T::x); };
template <class T> struct Element<T, Void<decltype(T::bits)>> { using type = decltype(T::bits); };
template <class T> struct Element<T, Void<decltype(T::at)>> {
    using type = typename Item<decltype(T::at)>::type;
};
template <class T> void describe(char*& at) {
    using E = typename Element<typename Pointee<T>::type>::type;
    *at++ = E(0.5) != E(0) ? 'f' : E(-1) > E(0) ? 'u' : 'i';
    *at++ = char('0' + sizeof(E));
    if (Pointee<T>::exists) *at++ = '*';
    *at++ = ' ';
}
template <class... A> void signature(void (*)(A...), char* text) {
    (describe<A>(text), ...);
    *text = 0;
}
template <size_t...> struct Indices {};
template <class... A, size_t... I> EMULATOR_UNSEEN
void call(void (*kernel)(A...), void** args, Indices<I...>) {
    kernel(*static_cast<A*>(args[I])...);
}
template <class... A> EMULATOR_UNSEEN void call(void (*kernel)(A...), void** args) {
    call(kernel, args, Indices<__integer_pack(sizeof...(A))...>());
}
}  // namespace emulator

// Symbols of the linker for the limits of this library and of its writable data.
#pragma GCC visibility push(hidden)
extern "C" char __ehdr_start[], __bss_start[], _end[];
#pragma GCC visibility pop

// Entry points that Python calls for a kernel.
#define EMULATED_KERNEL(name)                                                                    \
    extern "C" void signature_##name(char* text) { emulator::signature(name, text); }            \
    extern "C" const char* launch_##name(void** args, const unsigned* extents,                   \
                                         unsigned shared_bytes, const uint64_t* regions,         \
                                         int num_regions, uint64_t seed) {                       \
        emulator::Invoke invoke = [](void** a) EMULATOR_UNSEEN { emulator::call(name, a); };                     \
        emulator::Library library = {__ehdr_start, __bss_start, _end};                           \
        return emulator::launch(library, invoke, args, extents, shared_bytes, regions,           \
                                num_regions, seed);                                              \
    }

// Warps.

inline void __syncwarp(unsigned mask = 0xffffffffu) { emulator::warp_barrier(mask); }
template <class T> T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
    int lane = emulator::lane(), start = lane / width * width;
    return emulator::shuffle(mask, value, start + (source & (width - 1)));
}
template <class T> T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
    int lane = emulator::lane(), source = lane - int(delta);
    return emulator::shuffle(mask, value, source < lane / width * width ? lane : source);
}
template <class T> T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
    int lane = emulator::lane(), source = lane + int(delta);
    return emulator::shuffle(mask, value, source >= lane / width * width + width ? lane : source);
}
template <class T> T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32) {
    int lane = emulator::lane(), source = lane ^ bits;
    return emulator::shuffle(mask, value, source >= lane / width * width + width ? lane : source);
}
inline unsigned __ballot_sync(unsigned mask, int predicate) {
    return emulator::ballot(mask, predicate != 0);
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, !predicate) == 0; }

// Tensor cores. Kernels that can use these functions instead of the instructions test this macro.

#define EMULATED_TENSOR_CORES 1
namespace emulator {
// ldmatrix.x4: word q of lane l is word l % 4 of the row of 16 bytes that lane 8 q + l / 4 passes.
void ldmatrix_x4(unsigned (&words)[4], const void* row);
// ldmatrix.x4.trans: word q of lane l is column l / 4 of rows 2 (l % 4) and 2 (l % 4) + 1.
void ldmatrix_x4_transposed(unsigned (&words)[4], const void* row);
// prmt.b32: each byte of the result is byte `selector % 8` of x and y, of which a selector of 8 or
// more replicates the sign bit.
inline unsigned prmt(unsigned x, unsigned y, unsigned selectors) {
    const uint64_t bytes = uint64_t(y) << 32 | x;
    unsigned result = 0;
    for (int i = 0; i < 4; ++i) {
        const unsigned selector = selectors >> i * 4 & 15, byte = bytes >> selector % 8 * 8 & 0xFF;
        result |= (selector < 8 ? byte : byte >> 7 ? 0xFFu : 0u) << i * 8;
    }
    return result;
}
// mma.m16n8k8 of tf32 and mma.m16n8k16 of bf16, with the alignment and truncation of sm_80 (`runtime.cpp`).
void mma_tf32(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1);
void mma_bf16(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1);
// wgmma.m64n(8 · eights)k8 of tf32 with A in registers: c += A B, or c = A B without `adds`. A matrix
// descriptor describes B.
void wgmma_tf32(float (*c)[4], int eights, const unsigned (&a)[4], unsigned long long b, bool adds);
template <int N>
void wgmma_tf32(float (&c)[N][4], const unsigned (&a)[4], unsigned long long b, bool adds) {
    wgmma_tf32(c, N, a, b, adds);
}
}  // namespace emulator

// Address in shared memory.
inline size_t __cvta_generic_to_shared(const void* at) {
    return static_cast<const char*>(at) - static_cast<const char*>(emulator::dynamic_shared());
}

// Atomics.

template <class T> T atomicAdd(T* p, emulator::Same<T> v) {
    return emulator::atomic(p, [v](T old) { return T(old + v); });
}
template <class T> T atomicMax(T* p, emulator::Same<T> v) {
    return emulator::atomic(p, [v](T old) { return old < v ? v : old; });
}
template <class T> T atomicMin(T* p, emulator::Same<T> v) {
    return emulator::atomic(p, [v](T old) { return v < old ? v : old; });
}
template <class T> T atomicOr(T* p, emulator::Same<T> v) {
    return emulator::atomic(p, [v](T old) { return T(old | v); });
}
template <class T> T atomicExch(T* p, emulator::Same<T> v) {
    return emulator::atomic(p, [v](T) { return v; });
}
template <class T> T atomicCAS(T* p, emulator::Same<T> expected, emulator::Same<T> v) {
    return emulator::atomic(p, [=](T old) { return old == expected ? v : old; });
}

// Arithmetic.

inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a < b ? b : a; }
inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
inline unsigned max(unsigned a, unsigned b) { return a < b ? b : a; }
inline long long min(long long a, long long b) { return a < b ? a : b; }
inline long long max(long long a, long long b) { return a < b ? b : a; }
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }
template <class T> T __ldg(const T* p) { return *p; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
#ifndef EMULATOR_RUNTIME
// CUDA overloads these functions for float. The runtime gets overloads from the standard library.
inline float exp(float x) { return expf(x); }
inline float fabs(float x) { return fabsf(x); }
inline float log(float x) { return logf(x); }
inline float sqrt(float x) { return sqrtf(x); }
inline float tanh(float x) { return tanhf(x); }
#endif
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned(uint64_t(a) * b >> 32); }
// Unlike prmt.b32, the function ignores the highest bit of each selector.
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selectors) {
    return emulator::prmt(x, y, selectors & 0x7777);
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
// Loads and stores through the L2 cache, by which blocks exchange data in addition to atomics: they
// are not checked for races.
template <class T> EMULATOR_UNSEEN T __ldcg(const T* address) {
    emulator::check_atomic(address, sizeof(T));
    return *address;
}
template <class T> EMULATOR_UNSEEN void __stcg(T* address, emulator::Same<T> value) {
    emulator::check_atomic(address, sizeof(T));
    *address = value;
}
inline void __threadfence() {}
// Clock for kernels, which use a special instruction on the GPU. The caller is waiting, so other
// processes may use the core.
inline unsigned long long host_nanoseconds() {
    sched_yield();
    return clock64();
}
inline void __threadfence_block() {}
template <class To, class From> To emulated_bits(From value) {
    static_assert(sizeof(To) == sizeof(From), "of the same size");
    To result;
    memcpy(&result, &value, sizeof(To));
    return result;
}
inline int __float_as_int(float x) { return emulated_bits<int>(x); }
inline unsigned __float_as_uint(float x) { return emulated_bits<unsigned>(x); }
inline float __int_as_float(int x) { return emulated_bits<float>(x); }
inline float __uint_as_float(unsigned x) { return emulated_bits<float>(x); }
inline int __double2loint(double x) { return (int)emulated_bits<unsigned long long>(x); }
inline int __double2hiint(double x) { return (int)(emulated_bits<unsigned long long>(x) >> 32); }
inline double __hiloint2double(int high, int low) {
    return emulated_bits<double>((unsigned long long)(unsigned)high << 32 | (unsigned)low);
}
