// Incorrect kernels, each with one error.

extern "C" __global__ void missing_barrier(const float* x, float* y) {
    __shared__ float tile[64];
    tile[threadIdx.x] = x[threadIdx.x];
    y[threadIdx.x] = tile[63 - threadIdx.x];
}

// The barrier before the writes of the next iteration is missing.
extern "C" __global__ void early_reuse(const float* x, float* y) {
    __shared__ float tile[64];
    float sum = 0.0f;
    for (int round = 0; round < 3; round++) {
        tile[threadIdx.x] = x[64 * round + threadIdx.x];
        __syncthreads();
        sum += tile[63 - threadIdx.x];
    }
    y[threadIdx.x] = sum;
}

extern "C" __global__ void blocks_share(float* y) {
    if (threadIdx.x == 0) y[0] += 1.0f;
}

extern "C" __global__ void lanes_without_barrier(int* y) {
    __shared__ int tile[32];
    tile[threadIdx.x] = threadIdx.x;
    y[threadIdx.x] = tile[threadIdx.x ^ 1];
}

extern "C" __global__ void lanes_with_barrier(int* y) {
    __shared__ int tile[32];
    tile[threadIdx.x] = threadIdx.x;
    __syncwarp();
    y[threadIdx.x] = tile[threadIdx.x ^ 1];
}

extern "C" __global__ void divergent_barriers(float* y) {
    if (threadIdx.x % 2 == 0) {
        __syncthreads();
    } else {
        __syncthreads();
    }
    y[threadIdx.x] = 1.0f;
}

extern "C" __global__ void lonely_shuffle(int* y) {
    if (threadIdx.x == 0) y[0] = __shfl_sync(0x3u, 1, 1);
    if (threadIdx.x == 1) __syncthreads();
}

extern "C" __global__ void beyond_the_end(const float* x, float* y, int count) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    y[i] = x[i];
}

extern "C" __global__ void beyond_the_tile(float* y) {
    __shared__ float tile[32];
    tile[threadIdx.x] = 1.0f;
    __syncthreads();
    y[threadIdx.x] = tile[threadIdx.x + 1];
}

extern "C" __global__ void unwritten_tile(float* y) {
    __shared__ float tile[32];
    if (threadIdx.x != 3) tile[threadIdx.x] = 1.0f;
    __syncthreads();
    y[threadIdx.x] = tile[31 - threadIdx.x];
}

extern "C" __global__ void vectors(const float4* x, float4* y) { y[threadIdx.x] = x[threadIdx.x]; }

// The result depends on the order of execution, because atomics do not order threads.
extern "C" __global__ void first_come(int* turn, int* y) {
    y[blockIdx.x * blockDim.x + threadIdx.x] = atomicAdd(turn, 1);
}

// Threads write halves of words, then whole words, and read both; barrier `missing` is left out.
extern "C" __global__ void parts_of_words(float* y, int missing) {
    __shared__ unsigned words[32];
    unsigned short* halves = reinterpret_cast<unsigned short*>(words);
    const int i = threadIdx.x;
    halves[i] = i;
    if (missing != 0) __syncthreads();
    const unsigned word = i < 32 ? words[31 - i] : 0;
    if (missing != 1) __syncthreads();
    if (i < 32) words[i] = word;
    if (missing != 2) __syncthreads();
    y[i] = halves[63 - i];
}

// Half of the lanes vote, the others exchange values.
extern "C" __global__ void mixed_operations(int* y) {
    const int t = threadIdx.x;
    y[t] = t % 2 ? __ballot_sync(0xffffffffu, t > 8) : __shfl_sync(0xffffffffu, t, 0);
}
