// Losses of z (N, F) and their gradients dz, and what a step adds up: sums[0] = loss · scale, with
// scale = 1 / samples of the global minibatch, and sums[1] = number of correct answers.
//
// One block, a thread for each sample. Threads add up the samples that fall to them, then a tree
// adds up the threads: the order, and so every bit, is the same in every run. dz is written only
// where `backward` says so.

constexpr int THREADS = 256;

struct Answer {
    double loss;
    int correct;
};

// The sum over all threads, which thread 0 writes.
__device__ inline void finish(Answer own, float factor, float* sums) {
    __shared__ double losses[THREADS];
    __shared__ int correct[THREADS];
    const int t = threadIdx.x;
    losses[t] = own.loss;
    correct[t] = own.correct;
    for (int half = THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (t < half) {
            losses[t] += losses[t + half];
            correct[t] += correct[t + half];
        }
    }
    if (t == 0) {
        sums[0] = float(losses[0] * factor);
        sums[1] = float(correct[0]);
    }
}

// Loss = −log softmax(z)[label]; dz = (softmax(z) − onehot) · scale.
extern "C" __global__ void __launch_bounds__(THREADS) softmax_cross_entropy(
    const float* z, const int* labels, float* dz, float* sums, int n, int outputs, float scale,
    int backward) {
    Answer answer = {0.0, 0};
    for (int sample = threadIdx.x; sample < n; sample += THREADS) {
        const float* row = z + sample * outputs;
        int best = 0;
        for (int k = 1; k < outputs; ++k)
            if (row[k] > row[best]) best = k;
        const float largest = row[best];
        float total = 0.0f;
        for (int k = 0; k < outputs; ++k) total += expf(row[k] - largest);
        const int label = labels[sample];
        answer.loss += logf(total) - (row[label] - largest);
        answer.correct += best == label;
        if (!backward) continue;
        for (int k = 0; k < outputs; ++k) {
            const float share = expf(row[k] - largest) / total;
            dz[sample * outputs + k] = (share - (k == label ? 1.0f : 0.0f)) * scale;
        }
    }
    finish(answer, scale, sums);
}

// Loss = mean over outputs of log(1 + exp(z)) − z y; dz = (σ(z) − y) · scale / F. Correct: every
// output on the right side of ½.
extern "C" __global__ void __launch_bounds__(THREADS) sigmoid_cross_entropy(
    const float* z, const float* target, float* dz, float* sums, int n, int outputs, float scale,
    int backward) {
    const float factor = scale / outputs;
    Answer answer = {0.0, 0};
    for (int sample = threadIdx.x; sample < n; sample += THREADS) {
        bool right = true;
        for (int k = 0; k < outputs; ++k) {
            const int i = sample * outputs + k;
            const float value = z[i], y = target[i];
            // max(z, 0) is written so that a NaN stays.
            const float positive = value <= 0.0f ? 0.0f : value;
            answer.loss += positive - value * y + log1pf(expf(-fabsf(value)));
            right = right && (value > 0.0f) == (y > 0.5f);
            if (backward) dz[i] = (0.5f + 0.5f * tanhf(0.5f * value) - y) * factor;
        }
        answer.correct += right;
    }
    finish(answer, factor, sums);
}

// Loss = mean over outputs of (z − y)²; dz = 2 (z − y) · scale / F. No answer is correct.
extern "C" __global__ void __launch_bounds__(THREADS) mean_squared_error(
    const float* z, const float* target, float* dz, float* sums, int n, int outputs, float scale,
    int backward) {
    const float factor = scale / outputs;
    Answer answer = {0.0, 0};
    for (int i = threadIdx.x; i < n * outputs; i += THREADS) {
        const float d = z[i] - target[i];
        answer.loss += double(d) * d;
        if (backward) dz[i] = 2.0f * d * factor;
    }
    finish(answer, factor, sums);
}
