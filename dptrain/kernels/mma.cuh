// Products on tensor cores, by mma.sync: of float32 rounded to tf32, or of bfloat16; see gemm.cuh.
//
// A slice is made of words of 32 bits: a word is one tf32 number, or two bfloat16 that are
// neighbours along the sum. The instructions m16n8k8 (tf32) and m16n8k16 (bf16) then take the same
// words from the same lanes. With g = lane / 4 and t = lane % 4, a lane gives rows g and g + 8 and
// words t and t + 4 of A, column g and words t and t + 4 of B, and holds columns 2t and 2t + 1 of
// rows g and g + 8 of C.
//
// Sources: PTX ISA, "Matrix fragments for mma.m16n8k8" and ".m16n8k16", and "ldmatrix", which fills
// a register of every lane with the words of an 8 x 4 matrix whose rows begin at given addresses.
//
// Where the instructions do not exist (before sm_80, and on the emulator of the tests) each thread
// adds the products of its elements of C one by one, of inputs rounded to the nearest as well.

#pragma once

// A block's warps compute WARP_M x WARP_N elements each.
#ifndef TILE_M
#define TILE_M 64
#define TILE_N 64
#define WARP_M 32
#define WARP_N 32
#define TILE_K_WORDS 16
#endif

// Of TILE_K_WORDS words of a slice along the sum.
constexpr int TILE_K = TILE_K_WORDS * 4 / sizeof(Number);
constexpr int STEP_K = 8 * 4 / sizeof(Number);  // Terms of one instruction.
constexpr int WARPS_N = TILE_N / WARP_N;
constexpr int THREADS = 32 * (TILE_M / WARP_M) * WARPS_N;

static_assert(WARP_M % 16 == 0 && WARP_N % 16 == 0, "B's words are read for two instructions");

// Where the four elements of a pooling window lie that one thread is to have: in rows g, g + 8,
// g + 16 and g + 24 of 32.
constexpr int MEMBER_STEP = 8;
__device__ inline int window_of(int row) { return row / 32 * 8 + row % 8; }
__device__ inline int member_of(int row) { return row % 32 / 8; }

#if PRECISION == 1
// To 11 significant bits, to the nearest. Halves go to even, as bulk copies round, but from sm_80 to
// before sm_90, whose one conversion takes them away from zero.
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

__device__ inline Pack<float> round_operands(const Pack<float>& pack) {
    Pack<float> result;
#pragma unroll
    for (int v = 0; v < PACK; ++v) result.at[v] = to_tf32(pack.at[v]);
    return result;
}
#else
__device__ inline Pack<Bfloat16> round_operands(const Pack<Bfloat16>& pack) { return pack; }

__device__ inline Pack<Bfloat16> round_operands(const Pack<float>& pack) {
    Pack<unsigned, PACK / 2> pairs;
#pragma unroll
    for (int v = 0; v < PACK; v += 2) pairs.at[v / 2] = pack_bfloat16x2(pack.at[v], pack.at[v + 1]);
    return as<Pack<Bfloat16> >(pairs);
}
#endif

// Rows are padded so that what a warp reads at once lies in 32 different banks.
template <int WIDTH, bool K_MAJOR>
struct Slice {  // Words of a row (of A, column of B) side by side.
    Number at[WIDTH][TILE_K + PACK];

    __device__ Number element(int i, int k) const { return at[i][k]; }
    __device__ void store_shared(int i, int k, const Pack<Number>& pack) {
        *reinterpret_cast<Pack<Number>*>(&at[i][k]) = pack;
    }
};
template <int WIDTH>
struct Slice<WIDTH, false> {  // Elements of a position of the sum side by side.
    Number at[TILE_K][WIDTH + 8];

    __device__ Number element(int i, int k) const { return at[k][i]; }
    __device__ void store_shared(int i, int k, const Pack<Number>& pack) {
        *reinterpret_cast<Pack<Number>*>(&at[k][i]) = pack;
    }
};

#if __CUDA_ARCH__ >= 800
// Four 8 x 4 matrices of words; lanes 8q to 8q + 7 give the addresses of the rows of the q-th.
__device__ inline void ldmatrix_x4(unsigned (&words)[4], const Number* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(unsigned(__cvta_generic_to_shared(row))));
}

// The same of matrices of 8 x 8 bfloat16, each transposed.
__device__ inline void ldmatrix_x4_transposed(unsigned (&words)[4], const Number* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(unsigned(__cvta_generic_to_shared(row))));
}

// Sixteen rows (columns of B) from i on, and the terms of one instruction from k on: words t of
// rows g, of rows g + 8, and words t + 4 of both.
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
#if PRECISION == 1
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int q = 0; q < 4; ++q)
        words[q] = __float_as_uint(slice.at[k + t + q / 2 * 4][i + g + q % 2 * 8]);
#else
    ldmatrix_x4_transposed(words, &slice.at[k + lane % 8 + lane / 16 * 8][i + lane / 8 % 2 * 8]);
#endif
}

__device__ inline void mma(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
#if PRECISION == 1
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
#endif
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#endif

// A lane's share of its warp's WARP_M x WARP_N sums.
struct Accumulators {
    static constexpr int M_MMAS = WARP_M / 16, N_MMAS = WARP_N / 8;

    float c[M_MMAS][N_MMAS][4] = {};

    // Where the warp's elements begin in the tile.
    static __device__ int top() { return threadIdx.x / 32 / WARPS_N * WARP_M; }
    static __device__ int left() { return threadIdx.x / 32 % WARPS_N * WARP_N; }

    template <class SliceA, class SliceB> __device__ void add(const SliceA& as, const SliceB& bs) {
#if __CUDA_ARCH__ >= 800
#pragma unroll
        for (int k = 0; k < TILE_K; k += STEP_K) {
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
        }
#else
        add_each(as, bs, TILE_K);
#endif
    }

    // Element by element: a.element(row of the tile, k) b.element(column, k) for all k < terms.
    template <class A, class B> __device__ void add_each(const A& as, const B& bs, int terms) {
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        for (int k = 0; k < terms; ++k) {
            float a[M_MMAS * 2], b[N_MMAS * 2];
            for (int i = 0; i < M_MMAS * 2; ++i) a[i] = to_float(as.element(top() + i * 8 + g, k));
            for (int j = 0; j < N_MMAS * 2; ++j)
                b[j] = to_float(bs.element(left() + j / 2 * 8 + t * 2 + j % 2, k));
            for (int i = 0; i < M_MMAS * 2; ++i)
                for (int j = 0; j < N_MMAS * 2; ++j)
                    c[i / 2][j / 2][i % 2 * 2 + j % 2] += a[i] * b[j];
        }
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
