// Gradient of the weights and the bias of a fully connected layer for small batches, tf32 and bf16
// only:
//
//     dw = xᵀ dz,  db = Σ over samples of dz
//
//     x (N, inputs)   dy, y (N, outputs)   dw (inputs, outputs), db (outputs,) float32
//
// dz is computed from dy and y on the fly (`Gradient` of epilogue.cuh). The time is determined by
// writing dw. All samples fit into one slice (mma.cuh), so the kernel loads once and multiplies
// once. The accumulators are transposed through shared memory, so that dw is written in full rows,
// 16 bytes per thread.
//
// Launch: grid (ceil(inputs / TILE_M), ceil(outputs / TILE_N)), THREADS threads;
// skinny_gemm.py chooses the configuration and the dynamic shared memory.

#ifndef PRECISION
#define PRECISION 2  // This kernel exists for tf32 and bf16 only.
#endif
#ifndef TILE_M
#define TILE_M 64
#define TILE_N 128
#define WARP_M 32
#define WARP_N 32
#define TILE_K_WORDS 16
#endif

#include "epilogue.cuh"
#include "dependent_launch.cuh"
#include "micro_shards.cuh"

// Elements of dw that a thread writes at once.
constexpr int PIECE = OUT_VECTOR < 4 ? OUT_VECTOR : 4;

struct OutputTile {
    static constexpr int STRIDE = TILE_N + 8;  // Eight rows of a fragment lie in different banks.

    float* acc;

    __device__ void operator()(int row, int column, const float (&values)[4][2]) const {
#pragma unroll
        for (int m = 0; m < 4; ++m)
            *reinterpret_cast<Pack<float, 2>*>(acc + (row + m * MEMBER_STEP) * STRIDE + column) = {
                values[m][0], values[m][1]};
    }
};

// Fill a slice: load all packs of the thread with get(term, index), then store them in shared
// memory.
template <int WIDTH, class Get>
__device__ inline void fill_slice(Slice<WIDTH, false>& slice, const Get& get) {
    constexpr int PACKS_ACROSS = WIDTH / PACK, ALL_PACKS = TILE_K * PACKS_ACROSS,
                  THREAD_PACKS = ALL_PACKS / THREADS;
    static_assert(ALL_PACKS % THREADS == 0, "all threads load the same number of packs");
    Pack<Number> packs[THREAD_PACKS];
#pragma unroll
    for (int q = 0; q < THREAD_PACKS; ++q) {
        const int i = threadIdx.x + q * THREADS;
        packs[q] = get(i / PACKS_ACROSS, i % PACKS_ACROSS * PACK);
    }
#pragma unroll
    for (int q = 0; q < THREAD_PACKS; ++q) {
        const int i = threadIdx.x + q * THREADS;
        slice.store_shared(i % PACKS_ACROSS * PACK, i / PACKS_ACROSS, packs[q]);
    }
}

// x (samples, inputs), dy and y (samples, outputs), dw (inputs, outputs), db (outputs,).
extern "C" __global__ void __launch_bounds__(THREADS)
    dense_backward_weight(const Number* x, const Number* dy, const Number* y, float factor,
                          float* dw, float* db, int samples, int inputs, int outputs,
                          int PARTS_PARAMETERS) {
    wait_for_previous_kernel();
    const SplitPart part = split_part(samples PARTS_ARGUMENTS);
    move_to(part, x, inputs);
    move_to(part, dy, outputs);
    move_to(part, y, outputs);
    samples = part.range.count;
    dw += (long long)part.shard * (inputs + 1) * outputs;
    db += (long long)part.shard * (inputs + 1) * outputs;
    extern __shared__ __align__(16) char memory[];
    struct Slices {
        Slice<TILE_M, false> x;
        Slice<TILE_N, false> dz;
    };
    Slices& slices = *reinterpret_cast<Slices*>(memory);
    const int top = blockIdx.x * TILE_M, left = blockIdx.y * TILE_N;
    const Gradient gradient{dy, y, factor};

    fill_slice(slices.x, [&](int sample, int i) {
        Pack<Number> pack = {};
#pragma unroll
        for (int v = 0; v < PACK; v += IN_VECTOR)
            if (sample < samples && top + i + v < inputs)
                read<IN_VECTOR>(pack, v, x + sample * inputs + top + i + v);
        return round_operands(pack);
    });
    fill_slice(slices.dz, [&](int sample, int j) {
        Gradient::Raw raw = {};
#pragma unroll
        for (int v = 0; v < PACK; v += OUT_VECTOR)
            if (sample < samples && left + j + v < outputs)
                gradient.piece(raw, v, sample * outputs + left + j + v, 0);
        return gradient.value(raw);
    });
    __syncthreads();
    Accumulators acc;
    acc.add(slices.x, slices.dz);
    const int own = threadIdx.x;
    if (blockIdx.x == 0 && own < TILE_N && left + own < outputs) {
        float bias = 0.0f;
        for (int sample = 0; sample < samples; ++sample)
            bias += to_float(slices.dz.element(own, sample));
        db[left + own] = bias;
    }
    __syncthreads();
    const OutputTile tile{reinterpret_cast<float*>(memory)};
    acc.store_tile(0, 0, tile);
    __syncthreads();
    constexpr int PIECES = TILE_N / PIECE;
#pragma unroll 4
    for (int i = threadIdx.x; i < TILE_M * PIECES; i += THREADS) {
        const int row = i / PIECES, column = i % PIECES * PIECE;
        if (top + row < inputs && left + column < outputs)
            *reinterpret_cast<Pack<float, PIECE>*>(dw + (top + row) * outputs + left + column) =
                *reinterpret_cast<const Pack<float, PIECE>*>(tile.acc + row * tile.STRIDE + column);
    }
}
