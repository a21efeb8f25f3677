// GEMM inner loop on tensor cores (mma.sync): operands are float32 rounded to TF32, or bfloat16;
// accumulators are float32. gemm.cuh has the main loop.
//
// A slice consists of 32-bit words along the sum: one TF32 element or two bfloat16. The
// instructions m16n8k8 (tf32) and m16n8k16 (bf16) then have the same fragment layout. With g = lane
// / 4 and t = lane % 4, a lane provides words t and t + 4 of rows g and g + 8 of A and of column g
// of B, and holds columns 2t and 2t + 1 of rows g and g + 8 of C.
//
// TF32X3 (PRECISION 0, "3xTF32"): a float32 operand is the sum of two TF32 numbers, a = a1 + a2, up
// to 2^-24 of a. A product is a2 b1 + a1 b2 + a1 b1; the missing a2 b2 is below 2^-24 of it. Tensor
// cores align the terms of a sum and truncate them, so an instruction's results are promoted: the
// three products of 8 terms are summed from 0, and the result is added to float32 registers, rounded
// to nearest. Simulated with the alignment of sm_80, the RMS error of sums of 144 to 2304 normally
// distributed terms is 0.6 to 0.4 of that of a chain of fused multiply-adds; with truncated splits,
// or promotion after 64 terms, it is larger than that of the chain at 144 terms. Operands that are
// not finite, or that overflow when they are rounded, make a result that is not finite; gemm.cuh
// then recomputes the tile with scalar instructions. Low parts below 2^-126 can lose all bits, so an
// operand below 2^-102 can have an error of 2^-126 instead of 2^-24 of its size.
//
// Before sm_80 and on the emulator each thread computes its elements of C with scalar instructions,
// from operands that are rounded equally. The emulator emulates the instructions for TF32X3 and for
// kernels that define NEEDS_TENSOR_CORES.
//
// Source: PTX ISA, "Matrix fragments for mma.m16n8k8" and ".m16n8k16", and "ldmatrix"; Ootomo and
// Yokota, "Recovering single precision accuracy from Tensor Cores", 2022, for splitting and
// promotion.

#pragma once

// True if a sum can differ from that of float32 arithmetic because an operand is not finite, so that
// scalar instructions must compute it. With TF32X3, splits of such operands are NaN, and large
// operands can overflow; truncation can turn an overflow into the largest number instead of
// infinity. Otherwise the products of such operands with the zeros that complete a tile are NaN.
__device__ inline bool needs_scalar_sum(float sum) {
    return TF32X3 ? !(fabsf(sum) < 1.7e38f) : sum != sum;
}

// Each warp computes WARP_M × WARP_N elements of C.
#ifndef TILE_M
#define TILE_M 64
#define TILE_N 64
#define WARP_M 32
#define WARP_N 32
#define TILE_K_WORDS 16
#endif

// Terms per slice, from TILE_K_WORDS 32-bit words.
constexpr int TILE_K = TILE_K_WORDS * 4 / sizeof(Number);
constexpr int STEP_K = 8 * 4 / sizeof(Number);  // Terms of one MMA instruction.
constexpr int WARPS_N = TILE_N / WARP_N;
constexpr int THREADS = 32 * (TILE_M / WARP_M) * WARPS_N;

static_assert(WARP_M % 16 == 0 && WARP_N % 16 == 0, "warp tiles are multiples of 16 x 16");

// The four rows of a pooling window that one thread holds are g, g + 8, g + 16 and g + 24 of 32.
constexpr int MEMBER_STEP = 8;
__device__ inline int window_of(int row) { return row / 32 * 8 + row % 8; }
__device__ inline int member_of(int row) { return row % 32 / 8; }

// True if the instructions exist, or the emulator has equivalents, which it uses for 3xTF32 and for
// kernels without a scalar version.
#if __CUDA_ARCH__ >= 800 || (defined(EMULATED_TENSOR_CORES) && (TF32X3 || NEEDS_TENSOR_CORES))
#define TENSOR_CORES 1
#endif

#if TF32X3
__device__ inline float round_operand(float value) { return value; }
__device__ inline Pack<float> round_operands(const Pack<float>& pack) { return pack; }
#elif PRECISION == 1
// Round to TF32, which has 11 significant bits, to nearest. Ties go to even, as in TMA copies,
// except from sm_80 to below sm_90, whose conversion instruction rounds ties away from zero.
__device__ inline float to_tf32(float value) {
#if __CUDA_ARCH__ >= 900
    unsigned bits;
    asm("cvt.rn.tf32.f32 %0, %1;" : "=r"(bits) : "f"(value));
    return __uint_as_float(bits);
#elif __CUDA_ARCH__ >= 800
    unsigned bits;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(value));
    return __uint_as_float(bits);
#else
    const unsigned bits = __float_as_uint(value);
    const bool finite = (bits & 0x7F800000u) != 0x7F800000u;
    return finite ? __uint_as_float((bits + 0xFFFu + (bits >> 13 & 1u)) & 0xFFFFE000u) : value;
#endif
}

__device__ inline float round_operand(float value) { return to_tf32(value); }
__device__ inline Pack<float> round_operands(const Pack<float>& pack) {
    Pack<float> result;
#pragma unroll
    for (int v = 0; v < PACK; ++v) result.at[v] = to_tf32(pack.at[v]);
    return result;
}
#else
__device__ inline Bfloat16 round_operand(float value) { return to_bfloat16(value); }
__device__ inline Pack<Bfloat16> round_operands(const Pack<Bfloat16>& pack) { return pack; }

__device__ inline Pack<Bfloat16> round_operands(const Pack<float>& pack) {
    Pack<unsigned, PACK / 2> pairs;
#pragma unroll
    for (int v = 0; v < PACK; v += 2) pairs.at[v / 2] = pack_bfloat16x2(pack.at[v], pack.at[v + 1]);
    return as<Pack<Bfloat16> >(pairs);
}
#endif

// Tile of A or B in shared memory. Rows are padded so that the addresses that a warp reads together
// lie in 32 different banks.
template <int WIDTH, bool K_MAJOR>
struct Slice {  // The words of a row of A (column of B) are adjacent.
    Number at[WIDTH][TILE_K + PACK];

    __device__ Number element(int i, int k) const { return at[i][k]; }
    __device__ void store_shared(int i, int k, const Pack<Number>& pack) {
        *reinterpret_cast<Pack<Number>*>(&at[i][k]) = pack;
    }
};
template <int WIDTH>
struct Slice<WIDTH, false> {  // The rows of A (columns of B) of one term are adjacent.
    Number at[TILE_K][WIDTH + 8];

    __device__ Number element(int i, int k) const { return at[k][i]; }
    __device__ void store_shared(int i, int k, const Pack<Number>& pack) {
        *reinterpret_cast<Pack<Number>*>(&at[k][i]) = pack;
    }
};

#if TENSOR_CORES
// Load four matrices of 8 rows × 4 words; lanes 8q to 8q + 7 provide the row addresses of matrix q.
__device__ inline void ldmatrix_x4(unsigned (&words)[4], const Number* row) {
#ifndef __CUDA_ARCH__
    emulator::ldmatrix_x4(words, row);
#else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(unsigned(__cvta_generic_to_shared(row))));
#endif
}

// Load four transposed matrices of 8 × 8 bfloat16.
__device__ inline void ldmatrix_x4_transposed(unsigned (&words)[4], const Number* row) {
#ifndef __CUDA_ARCH__
    emulator::ldmatrix_x4_transposed(words, row);
#else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(unsigned(__cvta_generic_to_shared(row))));
#endif
}

// Load the fragment of 16 rows (columns of B) from i on, for the terms of one instruction from k
// on: words t of rows g, words t of rows g + 8, then words t + 4 of both.
template <int WIDTH>
__device__ inline void load_fragment(unsigned (&words)[4], const Slice<WIDTH, true>& slice, int i,
                                     int k) {
    const int lane = threadIdx.x % 32;
    ldmatrix_x4(words, &slice.at[i + lane % 16][k + lane / 16 * PACK]);
}

template <int WIDTH>
__device__ inline void load_fragment(unsigned (&words)[4], const Slice<WIDTH, false>& slice, int i,
                                     int k) {
    const int lane = threadIdx.x % 32;
#if PRECISION < 2
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int q = 0; q < 4; ++q)
        words[q] = __float_as_uint(slice.at[k + t + q / 2 * 4][i + g + q % 2 * 8]);
#else
    ldmatrix_x4_transposed(words, &slice.at[k + lane % 8 + lane / 16 * 8][i + lane / 8 % 2 * 8]);
#endif
}

__device__ inline void mma(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
#ifndef __CUDA_ARCH__
    (PRECISION < 2 ? emulator::mma_tf32 : emulator::mma_bf16)(c, a, b0, b1);
#else
#if PRECISION < 2
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
#endif
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}
#endif

#if TF32X3 && TENSOR_CORES
// A fragment of float32 as the sum of two fragments of TF32. `high` is rounded to nearest, ties away
// from zero. `low` has at most 12 significant bits and a sign, of which tensor cores truncate one.
struct SplitFragment {
    unsigned high[4], low[4];

    __device__ void split(const unsigned (&words)[4]) {
#pragma unroll
        for (int q = 0; q < 4; ++q) {
            high[q] = (words[q] + 0x1000u) & 0xFFFFE000u;
            low[q] = __float_as_uint(__uint_as_float(words[q]) - __uint_as_float(high[q]));
        }
    }
};

// c[j] += A B for N columns of C with eight elements each; column j of B consists of words j % 2 and
// j % 2 + 2 of fragment j / 2. The three products of different columns are independent, so that
// tensor cores need not wait for their results.
template <int N>
__device__ inline void multiply_split(float (&c)[N][4], const SplitFragment& a,
                                      const SplitFragment (&b)[(N + 1) / 2]) {
    float sums[N][4] = {};
#pragma unroll
    for (int j = 0; j < N; ++j) mma(sums[j], a.low, b[j / 2].high[j % 2], b[j / 2].high[j % 2 + 2]);
#pragma unroll
    for (int j = 0; j < N; ++j) mma(sums[j], a.high, b[j / 2].low[j % 2], b[j / 2].low[j % 2 + 2]);
#pragma unroll
    for (int j = 0; j < N; ++j)
        mma(sums[j], a.high, b[j / 2].high[j % 2], b[j / 2].high[j % 2 + 2]);
#pragma unroll
    for (int j = 0; j < N; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) c[j][e] += sums[j][e];
}
#endif

// A lane's accumulators of its warp's WARP_M × WARP_N tile.
struct Accumulators {
    static constexpr int M_MMAS = WARP_M / 16, N_MMAS = WARP_N / 8;

    float c[M_MMAS][N_MMAS][4] = {};

    // Position of the warp's elements within the block's tile.
    static __device__ int top() { return threadIdx.x / 32 / WARPS_N * WARP_M; }
    static __device__ int left() { return threadIdx.x / 32 % WARPS_N * WARP_N; }

#if TENSOR_CORES
    // Multiply the terms of one instruction, from k on.
    template <class A, class B> __device__ void add_step(const A& as, const B& bs, int k) {
#if TF32X3
        SplitFragment a, b[N_MMAS / 2];
        unsigned words[4];
#pragma unroll
        for (int j = 0; j < N_MMAS / 2; ++j) {
            load_fragment(words, bs, left() + j * 16, k);
            b[j].split(words);
        }
#pragma unroll
        for (int i = 0; i < M_MMAS; ++i) {
            load_fragment(words, as, top() + i * 16, k);
            a.split(words);
            multiply_split(c[i], a, b);
        }
#else
        unsigned a[M_MMAS][4], b[N_MMAS / 2][4];
#pragma unroll
        for (int i = 0; i < M_MMAS; ++i) load_fragment(a[i], as, top() + i * 16, k);
#pragma unroll
        for (int j = 0; j < N_MMAS / 2; ++j) load_fragment(b[j], bs, left() + j * 16, k);
#pragma unroll
        for (int i = 0; i < M_MMAS; ++i)
#pragma unroll
            for (int j = 0; j < N_MMAS; ++j)
                mma(c[i][j], a[i], b[j / 2][j % 2], b[j / 2][j % 2 + 2]);
#endif
    }
#endif

    template <class SliceA, class SliceB> __device__ void add(const SliceA& as, const SliceB& bs) {
#if TF32X3 && TENSOR_CORES
        // Not unrolled, because the fragments of several steps would not fit into registers.
#pragma unroll 1
        for (int k = 0; k < TILE_K; k += STEP_K) add_step(as, bs, k);
#elif TENSOR_CORES
#pragma unroll
        for (int k = 0; k < TILE_K; k += STEP_K) add_step(as, bs, k);
#else
        add_each(as, bs, TILE_K);
#endif
    }

    // Scalar version: multiply a.element(row of the tile, k) and b.element(column, k) for all k <
    // terms.
    template <class A, class B> __device__ void add_each(const A& as, const B& bs, int terms) {
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll 1
        for (int k = 0; k < terms; ++k) {
            float a[M_MMAS * 2], b[N_MMAS * 2];
#pragma unroll
            for (int i = 0; i < M_MMAS * 2; ++i) a[i] = to_float(as.element(top() + i * 8 + g, k));
#pragma unroll
            for (int j = 0; j < N_MMAS * 2; ++j)
                b[j] = to_float(bs.element(left() + j / 2 * 8 + t * 2 + j % 2, k));
#pragma unroll
            for (int i = 0; i < M_MMAS * 2; ++i)
#pragma unroll
                for (int j = 0; j < N_MMAS * 2; ++j)
                    c[i / 2][j / 2][i % 2 * 2 + j % 2] += a[i] * b[j];
        }
    }

    __device__ bool any_needs_scalar_sum() const {
        bool any = false;
#pragma unroll
        for (int i = 0; i < M_MMAS * N_MMAS * 4; ++i)
            any |= needs_scalar_sum(c[i / 4 / N_MMAS][i / 4 % N_MMAS][i % 4]);
        return any;
    }

    // Begin the sums with what is stored. All loads are started before the first is used.
    template <class Store>
    __device__ void load_tile(int first_row, int first_column, const Store& store) {
        const int row = first_row + top() + threadIdx.x % 32 / 4;
        const int column = first_column + left() + threadIdx.x % 4 * 2;
        Pack<Number, 2> pairs[M_MMAS][N_MMAS][2];
#pragma unroll
        for (int i = 0; i < M_MMAS * N_MMAS * 2; ++i)
            pairs[i / 2 / N_MMAS][i / 2 % N_MMAS][i % 2] = store.template stored<2>(
                row + i / 2 / N_MMAS * 16 + i % 2 * 8, column + i / 2 % N_MMAS * 8);
#pragma unroll
        for (int i = 0; i < M_MMAS * N_MMAS * 4; ++i)
            c[i / 4 / N_MMAS][i / 4 % N_MMAS][i % 4] =
                to_float(pairs[i / 4 / N_MMAS][i / 4 % N_MMAS][i % 4 / 2].at[i % 2]);
    }

    template <class Store>
    __device__ void store_tile(int first_row, int first_column, const Store& store) const {
        constexpr int PAIR = M_MMAS % 2 ? 1 : 2;
        const int row = first_row + top() + threadIdx.x % 32 / 4;
        const int column = first_column + left() + threadIdx.x % 4 * 2;
#pragma unroll
        for (int i = 0; i < M_MMAS; i += PAIR)
#pragma unroll
            for (int j = 0; j < N_MMAS; ++j) {
                float values[2 * PAIR][2];
#pragma unroll
                for (int e = 0; e < 4 * PAIR; ++e) values[e / 2][e % 2] = c[i + e / 4][j][e % 4];
                store(row + i * 16, column + j * 8, values);
            }
    }
};
