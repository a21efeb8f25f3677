// Gradient of a convolution with respect to its weights and bias, on halo tiles in shared memory;
// tf32, bf16, and fp32 by 3xTF32 (mma.cuh, on sm_90); an even number of filters:
//
//     dw[r, s, c, k] = Σ over (n, p, q) of x[n, h, w, c] dz[n, p, q, k]
//     db[k]          = Σ over (n, p, q) of dz[n, p, q, k]
//     with h = p · stride_h + r − pad_top and w = q · stride_w + s − pad_left
//
// With strides, it is computed as a convolution of stride 1 on the folded map (`StoredMap`).
//
// Algorithm: implicit GEMM whose sum runs over output pixels. Operand A: dz, with filters as rows;
// it is loaded into registers once for all taps of the block, and the epilogue of the forward pass
// is undone there. Operand B: x, with the channels of TAP_ROWS rows of taps as columns; tensor
// cores read it from shared memory. In bf16 a pack holds eight channels of a pixel, so B is read
// transposed. tf32 does not support transposed operands, so there a pack holds one channel of four
// pixels. These need not be adjacent: they are QUAD_COLUMNS_APART columns or QUAD_ROWS_APART rows
// apart, and the four form one *position*, which a tap shifts as if it were a pixel. Tiles are
// copied by cp.async with double buffering (wgrad_tile.cuh) and multiplied by wgmma on sm_90 or
// mma.sync from sm_80 on. With 3xTF32, x is split when it is stored to shared memory and dz in
// registers.
//
// Split-K over blockIdx.z: each block sums `split_strips` strips, and split_k_reduce.cu adds the
// splits in a fixed order. Within a block, K_GROUPS groups of warps divide the steps (intra-block
// split-K).
//
// Launch: grid (groups of tap rows × channel tiles, ceil(K / TILE_M), splits), block (THREADS,
// K_GROUPS); wgrad_tiles.py computes configuration and dynamic shared memory.
//
// Source: Chetlur et al., 2014, section 3 (implicit GEMM); PTX ISA (wgmma, cp.async).

#include "dependent_launch.cuh"
#include "micro_shards.cuh"
#include "wgrad_tile.cuh"

#ifndef SCHEDULING_BARRIER
// 1 keeps the compiler from moving instructions that write operands of wgmma.
#define SCHEDULING_BARRIER 0
#endif

// Operand A. Rows g and g + 8 of a warp's sixteen are mapped to adjacent filters, so that a lane
// loads both at once.
struct GradientRows {
    const Number* dy;
    const Saved* saved;
    float totals[2] = {};  // Sums of dz of the lane's two filters, for the gradient of the bias.

    static __device__ int filter(int row) { return row / 16 * 16 + row % 8 * 2 + row % 16 / 8; }
    // First filter of the lane.
    static __device__ int first() { return threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 * 2; }

    // Element of step `z` of a pair of steps.
    __device__ Number element(int pair, int z, int row, int k) const {
        const int own = filter(row), h = k / (STEP_K / 2), at = k % (STEP_K / 2);
        const Number zero = from_float<Number>(0.0f);
        if (own >= TILE_FILTERS) return zero;
        const int pooled = PIXEL_QUADS ? at : h * 4 + at / 2;
        const int i = pair * PAIR_DZ_ROWS + (EPILOGUE == 2 ? pooled : z * STEP_K + k);
#if EPILOGUE == 0
        const bool counts = true;
#elif EPILOGUE == 1
        const bool counts = to_float(saved[i * SAVED_PITCH + own]) > 0.0f;
#else
        const bool counts = saved[i * SAVED_PITCH + own] == z * 2 + (PIXEL_QUADS ? h : at % 2);
#endif
        return counts ? round_operand(to_float(dy[i * DZ_PITCH + own])) : zero;
    }

#if TENSOR_CORES
    // Loads of dz and of the saved tensor that a lane needs for a pair of steps.
    static constexpr int READS = EPILOGUE == 2 ? (PIXEL_QUADS ? 1 : 2) : PIXEL_QUADS ? 4 : 8;
    // The saved values of two filters; two bytes are separated only when they are used.
#if EPILOGUE == 2
    using Both = unsigned short;
#else
    using Both = Pack<Saved, 2>;
#endif
    struct Raw {
        Pack<Number, 2> dz[READS];
        Both saved[READS];
    };
    // Start the loads; their results are not used here.
    __device__ Raw load(int pair) const {
        Raw raw;
        // Warps without filters load those of other warps; their results are discarded.
        const int own = TILE_FILTERS < TILE_M ? first() % TILE_FILTERS : first();
        constexpr bool TWOS = EPILOGUE < 2 && !PIXEL_QUADS;
        const int row = pair * PAIR_DZ_ROWS + threadIdx.x % 4 * (TWOS ? 2 : 1);
#pragma unroll
        for (int i = 0; i < READS; ++i) {
            const int at = row + (TWOS ? i / 2 * 8 + i % 2 : i * 4);
            raw.dz[i] = *reinterpret_cast<const Pack<Number, 2>*>(dy + at * DZ_PITCH + own);
            if (EPILOGUE)
                raw.saved[i] = *reinterpret_cast<const Both*>(saved + at * SAVED_PITCH + own);
        }
        return raw;
    }

    // Compute the lane's fragments of A for both steps of a pair, for filters first() and first() +
    // 1.
    __device__ void words(unsigned (&words)[2][4], const Raw& raw) {
#if PRECISION < 2 && EPILOGUE == 2
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            const float rounded = round_operand(raw.dz[0].at[n]);
            const unsigned chosen = raw.saved[0] >> n * 8 & 0xFFu;
            totals[n] += chosen < 4 ? rounded : 0.0f;
#pragma unroll
            for (int m = 0; m < 4; ++m)
                words[m / 2][m % 2 * 2 + n] = chosen == m ? __float_as_uint(rounded) : 0u;
        }
#elif PRECISION < 2
#pragma unroll
        for (int h = 0; h < 4; ++h)
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                float rounded = round_operand(raw.dz[h].at[n]);
#if EPILOGUE
                if (!(raw.saved[h].at[n] > 0.0f)) rounded = 0.0f;
#endif
                words[h / 2][h % 2 * 2 + n] = __float_as_uint(rounded);
                totals[n] += rounded;
            }
#elif EPILOGUE == 2
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const unsigned both = as<unsigned>(raw.dz[h]);
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                const unsigned own = n ? both >> 16 : both & 0xFFFFu;
                const unsigned chosen = raw.saved[h] >> n * 8 & 0xFFu;
                totals[n] += chosen < 4 ? __uint_as_float(own << 16) : 0.0f;
                // Terms 0 and 1 belong to the first step, terms 2 and 3 to the second.
                words[0][h * 2 + n] = shifted(own, chosen * 16);
                words[1][h * 2 + n] = shifted(own, chosen * 16 - 32);
            }
        }
#else
#pragma unroll
        for (int h = 0; h < 4; ++h) {
            unsigned terms[2];
#pragma unroll
            for (int m = 0; m < 2; ++m) {
                terms[m] = as<unsigned>(raw.dz[h * 2 + m]);
#if EPILOGUE
                const Pack<Bfloat16, 2>& y = raw.saved[h * 2 + m];
                if (!(to_float(y.at[0]) > 0.0f)) terms[m] &= 0xFFFF0000u;
                if (!(to_float(y.at[1]) > 0.0f)) terms[m] &= 0xFFFFu;
#endif
                totals[0] += __uint_as_float(terms[m] << 16);
                totals[1] += __uint_as_float(terms[m] & 0xFFFF0000u);
            }
            words[h / 2][h % 2 * 2] = __byte_perm(terms[0], terms[1], 0x5410);
            words[h / 2][h % 2 * 2 + 1] = __byte_perm(terms[0], terms[1], 0x7632);
        }
#endif
    }
    // Shift left; the result is 0 if `bits` is 32 or more.
    static __device__ unsigned shifted(unsigned word, unsigned bits) {
        unsigned result;
        asm("shl.b32 %0, %1, %2;" : "=r"(result) : "r"(word), "r"(bits));
        return result;
    }
#else
    // Add the lane's part of a step to the totals.
    __device__ void add(int pair, int z) {
        const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
        for (int k = 0; k < STEP_K; ++k)
            if (k / (PIXEL_QUADS ? 1 : 2) % 4 == threadIdx.x % 4)
                for (int n = 0; n < 2; ++n) totals[n] += to_float(element(pair, z, row + n * 8, k));
    }
#endif
};

// Offset of a step's first half in the halo tile, in packs, and in the upper 16 bits the distance
// to its second half. The order of halves keeps this distance non-negative.
__device__ inline unsigned step_offsets(int pair, int z) {
    int at[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        int half = pair * 4 + z * 2 + h;
        const bool exists = EPILOGUE == 2 ? pair * 4 + h * 2 < STRIP_HALVES : half < STRIP_HALVES;
        int down, column;
        if (EPILOGUE == 2 && PIXEL_QUADS) {
            down = pair / (LINE_POSITIONS / 2) * 2 + z,
            column = pair % (LINE_POSITIONS / 2) * 2 + h;
        } else if (EPILOGUE == 2) {
            half = pair * 2 + h;
            down = half / LINE_HALVES * 2 + z, column = half % LINE_HALVES * HALF_POSITIONS;
        } else if (PIXEL_QUADS) {
            down = half % STRIP_LINES, column = half / STRIP_LINES;
        } else {
            down = half / LINE_HALVES * CONTIGUOUS_LINES,
            column = half % LINE_HALVES * HALF_POSITIONS;
        }
        at[h] = exists ? down * LINE_STRIDE + column * POSITION_STRIDE : h ? at[0] : 0;
    }
    return unsigned(at[0]) | unsigned(at[1] - at[0]) << 16;
}

// Operand B: columns are (s, r, c), terms are the positions of two halves.
struct HaloColumns {
    const Number* numbers;
    unsigned offset;  // Offset of the step.

    __device__ int at(int h) const { return (offset & 0xFFFFu) + (h ? offset >> 16 : 0u); }
    static __device__ constexpr int tap(int r, int s) {
        return r * LINE_STRIDE + s * LINE_SAMPLES * POSITION_STRIDE;
    }

    __device__ Number element(int column, int k) const {
        const int c = column % TILE_CHANNELS, r = column / TILE_CHANNELS % TAP_ROWS;
        const int half = at(k / (STEP_K / 2)) + tap(r, column / TILE_CHANNELS / TAP_ROWS);
        const int own = k % (STEP_K / 2);
        if (PIXEL_QUADS) return numbers[(half + c) * PACK + own];
        return numbers[(half + own + c / PACK * PLANE_STRIDE) * PACK + c % PACK];
    }
#if WGMMA
    // Descriptors differ only in their lower 32 bits. `plane` 1 has the low parts (3xTF32).
    __device__ unsigned long long descriptor(int tap, int plane = 0) const {
        const auto all = wgmma::descriptor(numbers, 0, PIXEL_QUADS ? 8 * 16 : PLANE_STRIDE * 16);
        return all >> 32 << 32 | (unsigned(all) + offset + tap + plane * HALO_PACKS);
    }
#elif TENSOR_CORES
    // Fragments of channels [c, c + 16) of a tap, in the order of `load_fragment`.
    __device__ void words(unsigned (&words)[4], int tap, int c) const {
        const int lane = threadIdx.x % 32, piece = at(lane / 16) + tap;
        if (PIXEL_QUADS)
            ldmatrix_x4(words, numbers + (piece + c + lane % 16) * PACK);
        else
            ldmatrix_x4_transposed(
                words,
                numbers + (piece + lane % 8 + (c / PACK + lane / 8 % 2) * PLANE_STRIDE) * PACK);
    }
#endif
};

#if TF32X3_WGMMA
// acc += A B for a pair of steps by 3xTF32. The products with a column of taps are summed from 0
// and promoted.
__device__ inline void multiply_pair(Accumulators& acc, float (&sums)[N8_TILES][4],
                                     const SplitFragment (&rows)[2],
                                     const HaloColumns (&columns)[2]) {
#pragma unroll
    for (int s = 0; s < TAP_COLUMNS; ++s)
#pragma unroll
        for (int r = 0; r < TAP_ROWS; r += TAP_ROWS_PER_MMA) {
            const int tap = HaloColumns::tap(r, s);
            wgmma::fence();
            wgmma::mma_overwriting(sums, rows[0].low, columns[0].descriptor(tap));
            wgmma::mma<false>(sums, rows[1].low, columns[1].descriptor(tap));
#pragma unroll
            for (int z = 0; z < 2; ++z)
                wgmma::mma<false>(sums, rows[z].high, columns[z].descriptor(tap, 1));
#pragma unroll
            for (int z = 0; z < 2; ++z)
                wgmma::mma<false>(sums, rows[z].high, columns[z].descriptor(tap));
            wgmma::commit_group();
            wgmma::wait_group<0>();
#pragma unroll
            for (int j = 0; j < N8_TILES; ++j)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    wgmma::fence_accumulator(sums[j][e]);
                    acc.c[0][(s * TAP_ROWS + r) * TILE_CHANNELS / 8 + j][e] += sums[j][e];
                }
        }
}
#elif TENSOR_CORES
// acc += A B for one step.
__device__ inline void multiply_step(Accumulators& acc, const unsigned (&words)[4],
                                     const HaloColumns& columns) {
#if WGMMA
#pragma unroll
    for (int s = 0; s < TAP_COLUMNS; ++s)
#pragma unroll
        for (int r = 0; r < TAP_ROWS; r += TAP_ROWS_PER_MMA)
            wgmma::mma<!PIXEL_QUADS>(reinterpret_cast<float (&)[N8_TILES][4]>(
                                         acc.c[0][(s * TAP_ROWS + r) * TILE_CHANNELS / 8]),
                                     words, columns.descriptor(HaloColumns::tap(r, s)));
#else
#pragma unroll
    for (int j = 0; j < TILE_N; j += 16) {
        const int tap = j / TILE_CHANNELS;
        unsigned fragment[4];
        columns.words(fragment, HaloColumns::tap(tap % TAP_ROWS, tap / TAP_ROWS),
                      j % TILE_CHANNELS);
        mma(acc.c[0][j / 8], words, fragment[0], fragment[2]);
        mma(acc.c[0][j / 8 + 1], words, fragment[1], fragment[3]);
    }
#endif
}
#else
struct StepRows {
    const GradientRows& rows;
    int pair, z;
    __device__ Number element(int row, int k) const { return rows.element(pair, z, row, k); }
};
#endif

// Processes the pairs of steps of a strip.
struct StepPairs {
    Accumulators& acc;
    GradientRows& rows;
    const Number* halo;
    const unsigned* offsets;
#if TENSOR_CORES
    // Prefetch the operands of the next pair while the current one is multiplied. With few channels
    // in bf16 this was slower, because each product needs twice as many loads.
    static constexpr bool READS_AHEAD = !FEW_CHANNELS || PIXEL_QUADS;
    GradientRows::Raw raw;
    Pack<unsigned, 2> offset;  // Offsets of both steps.
    // Fragments of two pairs, because wgmma may still read those of the previous pair.
    unsigned words[2][2][4];
#if TF32X3_WGMMA
    // Overwritten by the first product of each tap. One array for all taps, because the compiler
    // keeps registers for each that it sees.
    float sums[N8_TILES][4] = {};
#endif

    __device__ void begin(int pair) {
        if (READS_AHEAD) load(pair);
    }
    // Multiply a pair of steps. wgmma may still run when this returns. `parity` alternates between
    // consecutive pairs.
    __device__ void multiply(int pair, int parity) {
        if (!READS_AHEAD) load(pair);
        const unsigned begins[2] = {warp_uniform(offset.at[0]), warp_uniform(offset.at[1])};
#if WGMMA
        wgmma::wait_group<1>();
#endif
        unsigned (&own)[2][4] = words[parity];
        rows.words(own, raw);
        // After the last pair its own data is loaded again and not used.
        if (READS_AHEAD) load(min(pair + K_GROUPS, STEP_PAIRS - 1));
#if WGMMA
        if (SCHEDULING_BARRIER) scheduling_barrier(own);
        wgmma::fence();
#endif
#if TF32X3_WGMMA
        SplitFragment split[2];
        split[0].split(own[0]), split[1].split(own[1]);
        multiply_pair(acc, sums, split, {{halo, begins[0]}, {halo, begins[1]}});
#else
#pragma unroll
        for (int z = 0; z < 2; ++z) multiply_step(acc, own[z], {halo, begins[z]});
#if WGMMA
        wgmma::commit_group();
#endif
#endif
    }

   private:
    __device__ void load(int pair) {
        raw = rows.load(pair);
        offset = *reinterpret_cast<const Pack<unsigned, 2>*>(offsets + pair * 2);
    }
    // The value is equal in all lanes. A shuffle lets the compiler keep it in one uniform register.
    // With few channels the value is used directly.
    static __device__ unsigned warp_uniform(unsigned same) {
        return FEW_CHANNELS ? same : __shfl_sync(~0u, same, 0);
    }
#if WGMMA
    // If the compiler moves the computation of fragments past `wgmma::fence`, it serializes all
    // wgmma instructions. It does not move instructions on which a branch before the fence depends.
    // This branch is practically never taken, because it requires all bits of all words to be 1.
    static __device__ void scheduling_barrier(const unsigned (&words)[2][4]) {
        unsigned all = ~0u;
#pragma unroll
        for (int q = 0; q < 8; ++q) all &= words[q / 4][q % 4];
        if (all == ~0u) asm volatile("nanosleep.u32 0;");
        __syncwarp();
    }
#endif
#else
    __device__ void begin(int) {}
    __device__ void multiply(int pair, int) {
        for (int z = 0; z < 2; ++z) {
            rows.add(pair, z);
            acc.add_each(StepRows{rows, pair, z}, HaloColumns{halo, offsets[pair * 2 + z]}, STEP_K);
        }
    }
#endif
};

// Wait until all wgmma instructions have finished.
__device__ inline void wait_for_mma(Accumulators& acc) {
#if WGMMA
    wgmma::wait_group<0>();
    // Keep the compiler from reading the accumulators earlier.
#pragma unroll
    for (int j = 0; j < Accumulators::N_MMAS; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) wgmma::fence_accumulator(acc.c[0][j][e]);
#endif
}

// Return the sums of a column for the lane's two filters over the strips [begin, end), computed
// with scalar instructions from global memory.
__device__ inline Pack<float, 2> scalar_sums(int column, const Strip& block, const Number* x,
                                                   const Gradient& dz, int strips, int begin,
                                                   int end) {
    const Geometry& g = block.g;
    const int height = g.out_height / POOL, width = g.out_width / POOL;
    const int tap = column / TILE_CHANNELS, c = column % TILE_CHANNELS;
    const int r = block.tap_row + tap % TAP_ROWS;
    const int s = FEW_CHANNELS ? c / g.channels : tap / TAP_ROWS;
    const int channel = block.channel + (FEW_CHANNELS ? c % g.channels : c);
    const int filter = block.filter + GradientRows::first();
    Pack<float, 2> sums = {};
#pragma unroll 1
    for (int i = begin; i < end; ++i)
#pragma unroll 1
        for (int at = 0; at < STRIP_HEIGHT * width * POOL * SAMPLES_ACROSS; ++at) {
            const int sample = i / strips * SAMPLES_ACROSS + at % SAMPLES_ACROSS;
            const int along = at / SAMPLES_ACROSS, q = along % (width * POOL);
            const int p = i % strips * STRIP_HEIGHT + along / (width * POOL);
            if (p >= height * POOL || sample >= block.samples) continue;
            // Padding counts, because zero times infinity is NaN.
            const int source = block.stored.offset(sample, p + r - g.pad_top, q + s - g.pad_left,
                                                   channel);
            const float value = source < 0 ? 0.0f : to_float(round_operand(to_float(x[source])));
            const int pixel = (sample * height + p / POOL) * width + q / POOL;
            for (int n = 0; n < 2; ++n)
                sums.at[n] +=
                    value * dz.element(pixel * g.filters + filter + n, p % 2 * 2 + q % 2);
        }
    return sums;
}

// Add the totals of the other groups to those of the first group, in a fixed order.
__device__ inline void reduce_bias_totals(float (&totals)[2], float* memory) {
    __syncthreads();
    for (int n = 0; n < 2; ++n) memory[(threadIdx.y * 2 + n) * THREADS + threadIdx.x] = totals[n];
    __syncthreads();
    for (int n = 0; n < 2; ++n)
        for (int group = 1; group < K_GROUPS; ++group)
            totals[n] += memory[(group * 2 + n) * THREADS + threadIdx.x];
}

// Split z = blockIdx.z sums the strips [z · split_strips, (z + 1) · split_strips). x (samples, H,
// W, C); dy (samples, Ho, Wo, K), or pooled (samples, Ho / 2, Wo / 2, K); saved in the shape of dy:
// y for a ReLU epilogue, the argmax (uint8) for a pooling epilogue; factor: scale of the kept
// outputs of dropout; dw (splits, R, S, C, K) and db (splits, K) float32, interleaved as (splits,
// (R · S · C + 1) · K).
extern "C" __global__ void __launch_bounds__(ALL_THREADS, MIN_BLOCKS)
    conv2d_backward_weight_halo(const Number* x, const Number* dy, const Saved* saved, float factor,
                                float* dw, float* db, int samples, int split_strips,
                                GEOMETRY_PARAMETERS PARTS_PARAMETERS) {
    const Geometry layer = GEOMETRY_ARGUMENTS, g = folded(layer);
    const SplitPart part = split_part(samples PARTS_ARGUMENTS);
    move_to(part, x, layer.height * layer.width * layer.channels);
    move_to(part, dy, output_rows(layer, 1) * layer.filters);
    move_to(part, saved, output_rows(layer, 1) * layer.filters);
    samples = part.range.count;
    const StoredMap stored = stored_input(layer);
    const int lines = EPILOGUE == 2 ? g.out_height / 2 * 2 : g.out_height;
    const int strips = (lines + STRIP_HEIGHT - 1) / STRIP_HEIGHT;
    const int all_strips = (samples + SAMPLES_ACROSS - 1) / SAMPLES_ACROSS * strips;
    const int begin = part.index * split_strips, end = min(begin + split_strips, all_strips);
    // Channel tiles.
    const int tiles = FEW_CHANNELS ? 1 : (g.channels + TILE_CHANNELS - 1) / TILE_CHANNELS;
    const int tap_row = blockIdx.x / tiles * TAP_ROWS, channel = blockIdx.x % tiles * TILE_CHANNELS;
    const int filter = blockIdx.y * TILE_M;

    extern __shared__ __align__(16) char memory[];
    // Bytes of the table of step offsets.
    constexpr int STEP_OFFSETS_BYTES = (STEP_PAIRS * 2 * 4 + 15) / 16 * 16;
    unsigned* const steps = reinterpret_cast<unsigned*>(memory);
    const auto buffers = [&](int i) {
        Number* const halo = reinterpret_cast<Number*>(memory + STEP_OFFSETS_BYTES);
        char* const dz =
            reinterpret_cast<char*>(halo + (ALL_HALO_PACKS + STAGING_PACKS) * PACK) +
            i % BUFFERS * DZ_BUFFER;
        return Buffers{halo + i % HALO_BUFFERS * PLANES * HALO_PACKS * PACK,
                       halo + PLANES * HALO_PACKS * PACK,
                       reinterpret_cast<Number*>(dz), reinterpret_cast<Saved*>(dz + DZ)};
    };
    const auto strip = [&](int i) {
        return Strip{g,       stored,
                     samples, i / strips * SAMPLES_ACROSS, i % strips * STRIP_HEIGHT,
                     tap_row, channel, filter};
    };
    // Load the units of strip i from `unit` on, divided among `warps` warps.
    const auto load_strip = [&](int i, int unit, int warps) {
        for (; unit < Strip::UNITS; unit += warps)
            strip(i).load_unit(unit, x, dy, saved, buffers(i));
        cp_async_commit();
        if (Strip::DIRECT_QUADS) strip(i).load_quads(x, unit % warps, warps, buffers(i));
    };

    for (int i = thread_index(); i < STEP_PAIRS * 2; i += ALL_THREADS)
        steps[i] = step_offsets(i / 2, i % 2);
    for (int i = 0; i < BUFFERS; ++i) strip(0).clear(buffers(i));
    __syncthreads();
    wait_for_previous_kernel();
    if (begin < end) load_strip(begin, warp_index(), BLOCK_WARPS);
    Accumulators acc;
    GradientRows rows{};
    for (int i = begin; i < end; ++i) {
        const Buffers at = buffers(i);
        if (STAGED_TRANSPOSE) {
            cp_async_wait<0>();
            __syncthreads();
            Strip::transpose_staging(at);
        }
        cp_async_wait<0>();
        fence_async_proxy();
        __syncthreads();
        const bool more = BUFFERS > 1 && i + 1 < end;
        int unit = warp_index();
        const auto load_next_unit = [&]() {
            if (!more || unit >= Strip::UNITS) return;
            strip(i + 1).load_unit(unit, x, dy, saved, buffers(i + 1));
            unit += BLOCK_WARPS;
        };
        rows.dy = at.dz, rows.saved = at.saved;
        StepPairs pairs{acc, rows, at.halo, steps};
        pairs.begin(min(int(threadIdx.y), STEP_PAIRS - 1));
        for (int pair = threadIdx.y; pair < STEP_PAIRS; pair += 2 * K_GROUPS) {
            pairs.multiply(pair, 0);
            load_next_unit();
            if (pair + K_GROUPS >= STEP_PAIRS) break;
            pairs.multiply(pair + K_GROUPS, 1);
            load_next_unit();
        }
        if (more) load_strip(i + 1, unit, BLOCK_WARPS);
        wait_for_mma(acc);
        if (BUFFERS == 1 && i + 1 < end) {
            __syncthreads();
            load_strip(i + 1, warp_index(), BLOCK_WARPS);
        }
    }
    const bool needs_scalar_sums = __syncthreads_or(acc.any_needs_scalar_sum());
    if (K_GROUPS > 1) {
        reduce_k_groups(acc, reinterpret_cast<float*>(memory));
        reduce_bias_totals(rows.totals, reinterpret_cast<float*>(memory));
        if (threadIdx.y > 0) return;
    }

    const int all = layer.r * layer.s * layer.channels, own = filter + GradientRows::first();
    const int size = blockIdx.z * (all + 1) * g.filters;
    const auto store_pair = [&](float* to, float one, float other) {
        *reinterpret_cast<Pack<float, 2>*>(to + own) = {one * factor, other * factor};
    };
#pragma unroll
    for (int n = 0; n < 2; ++n) {
        rows.totals[n] += __shfl_xor_sync(0xFFFFFFFFu, rows.totals[n], 1);
        rows.totals[n] += __shfl_xor_sync(0xFFFFFFFFu, rows.totals[n], 2);
    }
    if (own >= g.filters || GradientRows::first() >= TILE_FILTERS) return;
    if (blockIdx.x == 0 && threadIdx.x % 4 == 0)
        store_pair(db + size, rows.totals[0], rows.totals[1]);
    // Row of dw of a column, or -1 if it has none.
    const auto row_of = [&](int column) {
        const int tap = column / TILE_CHANNELS, c = column % TILE_CHANNELS;
        const int r = tap_row + tap % TAP_ROWS, s = tap / TAP_ROWS;
        if (r >= g.r || FEW_CHANNELS && c >= g.s * g.channels) return -1;
        if (FEW_CHANNELS) return r * g.s * g.channels + c;
        return folded_filter(layer).index(r, s, channel + c);
    };
    if (needs_scalar_sums) {
#pragma unroll 1
        for (int i = 0; i < TILE_N / 4; ++i) {
            const int column = i / 2 * 8 + threadIdx.x % 4 * 2 + i % 2, row = row_of(column);
            if (row < 0) continue;
            const Pack<float, 2> sums =
                scalar_sums(column, strip(begin), x, {dy, saved, 1.0f}, strips, begin, end);
            store_pair(dw + size + row * g.filters, sums.at[0], sums.at[1]);
        }
        return;
    }
#pragma unroll
    for (int j = 0; j < Accumulators::N_MMAS; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int row = row_of(j * 8 + threadIdx.x % 4 * 2 + e);
            if (row >= 0)
                store_pair(dw + size + row * g.filters, acc.c[0][j][e], acc.c[0][j][e + 2]);
        }
}
