// One kernel for each feature of the emulator.

#ifndef OFFSET
#define OFFSET 0
#endif

template <int THREADS> __device__ int block_sum(int value) {
    __shared__ int part[THREADS];
    int t = threadIdx.x;
    part[t] = value;
    __syncthreads();
    for (int d = THREADS / 2; d > 0; d /= 2) {
        if (t < d) part[t] += part[t + d];
        __syncthreads();
    }
    return part[0];
}

extern "C" __global__ void barrier(const int* x, int* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    int sum = block_sum<64>(i < n ? x[i] : 0);
    if (threadIdx.x == 0) y[blockIdx.x] = sum;
}

extern "C" __global__ void dynamic(const float* x, float* y) {
    extern __shared__ float tile[];
    tile[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    y[threadIdx.x] = tile[blockDim.x - 1 - threadIdx.x];
}

extern "C" __global__ void shuffles(int* y) {
    int lane = threadIdx.x % 32;
    int* row = y + 6 * threadIdx.x;
    row[0] = __shfl_sync(0xffffffffu, lane, 5, 8);
    row[1] = __shfl_up_sync(0xffffffffu, lane, 3);
    row[2] = __shfl_down_sync(0xffffffffu, lane, 3, 16);
    row[3] = __shfl_xor_sync(0xffffffffu, lane, 9);
    row[4] = int(__ballot_sync(0xffffffffu, lane % 3 == 0));
    row[5] = lane < 16 ? int(__ballot_sync(0xffffu, lane % 2 == 0)) : -1;
}

extern "C" __global__ void atomics(int* count, float* sum, unsigned* order) {
    atomicAdd(count, 1);
    atomicMax(count + 1, int(threadIdx.x));
    atomicAdd(sum, 0.5f);
    order[atomicAdd(order + 1024, 1u)] = blockIdx.x * blockDim.x + threadIdx.x;
}

extern "C" __global__ void indices(int* y) {
    int block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    int thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    y[block * blockDim.x * blockDim.y * blockDim.z + thread] = 1000 * block + thread + OFFSET;
}

extern "C" __global__ void double_vectors(const float4* x, float4* y) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    float4 v = x[i];
    y[i] = make_float4(2.0f * v.x, 2.0f * v.y, 2.0f * v.z, 2.0f * v.w);
}

extern "C" __global__ void bytes(unsigned* y) {
    y[0] = __byte_perm(0x00800180u, 0x05060708u, 0x4210);
    y[1] = __byte_perm(0x00800180u, 0, 0xAA88);  // Like CUDA's function: as 0x2200.
    y[2] = emulator::prmt(0x00800180u, 0, 0xAA88);
}
