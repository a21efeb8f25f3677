// Optimizers: one pass over the flat arrays of parameters w, gradients g and optimizer state, all
// float32 (count,). Launched with one thread for each vector of VECTOR elements, in blocks of 256.
//
// The arrays consist of segments that are updated alike: segment k ends before element
// segment_ends[k], (num_segments,), and has the weight decay and the factor of the learning rate
// segment_rates[k], (num_segments, 2). Segments begin at multiples of 16 elements. The learning rate
// comes from hyperparameters, float32 (6,) (hyperparameters.cuh). If the loss, loss_sums[0] of float32 (3,), is not finite, nothing is
// updated, so that the state before the failure can be inspected.
//
// Source: Kingma and Ba, "Adam: a method for stochastic optimization", 2015; Loshchilov and Hutter,
// "Decoupled weight decay regularization", 2019; Tieleman and Hinton, "Lecture 6.5, RMSprop", 2012;
// Sutskever et al., "On the importance of initialization and momentum in deep learning", 2013.

#include "dependent_launch.cuh"
#include "hyperparameters.cuh"
#include "vector.cuh"

// Flush small state to zero, as on the CPU, where it would become denormal and slow.
__device__ inline float flush_small(float value) { return fabsf(value) < 1e-30f ? 0.0f : value; }

struct Rates {
    float decay, factor;
};

__device__ inline Rates rates_at(int i, const int* segment_ends, const float* segment_rates,
                                 int num_segments) {
    int found = 0;
    for (int k = 1; k < num_segments; ++k) found = i * VECTOR >= segment_ends[k - 1] ? k : found;
    return {segment_rates[2 * found], segment_rates[2 * found + 1]};
}

#define COMMON_PARAMETERS                                                          \
    const float *loss_sums, const float *hyperparameters, const int *segment_ends, \
        const float *segment_rates, int num_segments, int count

// Stochastic gradient descent: w ← w − α d, with d = g + λ w.
extern "C" __global__ void sgd(float* w, const float* g, COMMON_PARAMETERS) {
    wait_for_previous_kernel();
    int i;
    if (!vector_index(count, i)) return;
    Floats values = load(w, i);
    const Floats gradient = load_streaming(g, i);
    const Rates rates = rates_at(i, segment_ends, segment_rates, num_segments);
    const float decay = rates.decay, rate = hyperparameters[LEARNING_RATE] * rates.factor;
    if (!is_finite(loss_sums[0])) return;
    for (int k = 0; k < VECTOR; ++k) values.at[k] -= rate * (gradient.at[k] + decay * values.at[k]);
    store(w, i, values);
}

// With momentum: v ← μ v + d;  w ← w − α (d + μ v) with Nesterov momentum, else w ← w − α v.
extern "C" __global__ void sgd_momentum(float* w, const float* g, float* v, COMMON_PARAMETERS,
                                        float momentum, int nesterov) {
    wait_for_previous_kernel();
    int i;
    if (!vector_index(count, i)) return;
    Floats values = load(w, i), velocity = load(v, i);
    const Floats gradient = load_streaming(g, i);
    const Rates rates = rates_at(i, segment_ends, segment_rates, num_segments);
    const float decay = rates.decay, rate = hyperparameters[LEARNING_RATE] * rates.factor;
    if (!is_finite(loss_sums[0])) return;
    for (int k = 0; k < VECTOR; ++k) {
        const float d = gradient.at[k] + decay * values.at[k];
        velocity.at[k] = flush_small(momentum * velocity.at[k] + d);
        values.at[k] -= rate * (nesterov ? d + momentum * velocity.at[k] : velocity.at[k]);
    }
    store(w, i, values);
    store(v, i, velocity);
}

// Adam: m ← β₁ m + (1 − β₁) d;  v ← β₂ v + (1 − β₂) d²;  w ← w − rate m / (sqrt(v) correction + ε),
// with rate = α / (1 − β₁ᵗ) and correction = 1 / sqrt(1 − β₂ᵗ). The host computes rest = 1 − β,
// which would have one more rounding error in float32.
extern "C" __global__ void adam(float* w, const float* g, float* m, float* v, COMMON_PARAMETERS,
                                float beta1, float beta2, float epsilon, float rest1, float rest2) {
    wait_for_previous_kernel();
    int i;
    if (!vector_index(count, i)) return;
    Floats values = load(w, i), first = load(m, i), second = load(v, i);
    const Floats gradient = load_streaming(g, i);
    const Rates rates = rates_at(i, segment_ends, segment_rates, num_segments);
    const float decay = rates.decay, rate = hyperparameters[LEARNING_RATE] * rates.factor,
                correction = hyperparameters[ADAM_CORRECTION];
    if (!is_finite(loss_sums[0])) return;
    for (int k = 0; k < VECTOR; ++k) {
        const float d = gradient.at[k] + decay * values.at[k];
        first.at[k] = flush_small(beta1 * first.at[k] + rest1 * d);
        second.at[k] = flush_small(beta2 * second.at[k] + rest2 * d * d);
        values.at[k] -= rate * first.at[k] / (sqrtf(second.at[k]) * correction + epsilon);
    }
    store(w, i, values);
    store(m, i, first);
    store(v, i, second);
}

// AdamW: m and v as for Adam, with d = g;  w ← w − α λ w − rate m / (sqrt(v) correction + ε).
extern "C" __global__ void adamw(float* w, const float* g, float* m, float* v, COMMON_PARAMETERS,
                                 float beta1, float beta2, float epsilon, float rest1,
                                 float rest2) {
    wait_for_previous_kernel();
    int i;
    if (!vector_index(count, i)) return;
    Floats values = load(w, i), first = load(m, i), second = load(v, i);
    const Floats gradient = load_streaming(g, i);
    const Rates rates = rates_at(i, segment_ends, segment_rates, num_segments);
    const float rate = hyperparameters[LEARNING_RATE] * rates.factor,
                correction = hyperparameters[ADAM_CORRECTION],
                shrink = hyperparameters[DECAY_RATE] * rates.decay * rates.factor;
    if (!is_finite(loss_sums[0])) return;
    for (int k = 0; k < VECTOR; ++k) {
        const float d = gradient.at[k];
        first.at[k] = flush_small(beta1 * first.at[k] + rest1 * d);
        second.at[k] = flush_small(beta2 * second.at[k] + rest2 * d * d);
        values.at[k] -= rate * first.at[k] / (sqrtf(second.at[k]) * correction + epsilon) +
                        shrink * values.at[k];
    }
    store(w, i, values);
    store(m, i, first);
    store(v, i, second);
}

// LAMB: g ← (m / (1 − β₁ᵗ)) / (sqrt(v) correction + ε) + λ w, with m and v as for AdamW. Norms of
// layers scale it (clipping.cu), and sgd makes the update.
extern "C" __global__ void lamb_direction(const float* w, float* g, float* m, float* v,
                                          COMMON_PARAMETERS, float beta1, float beta2,
                                          float epsilon, float rest1, float rest2) {
    wait_for_previous_kernel();
    int i;
    if (!vector_index(count, i)) return;
    const Floats values = load(w, i);
    Floats gradient = load(g, i), first = load(m, i), second = load(v, i);
    const float decay = rates_at(i, segment_ends, segment_rates, num_segments).decay;
    const float correction = hyperparameters[ADAM_CORRECTION],
                mean = hyperparameters[MEAN_CORRECTION];
    if (!is_finite(loss_sums[0])) return;
    for (int k = 0; k < VECTOR; ++k) {
        const float own = gradient.at[k];
        first.at[k] = flush_small(beta1 * first.at[k] + rest1 * own);
        second.at[k] = flush_small(beta2 * second.at[k] + rest2 * own * own);
        gradient.at[k] = mean * first.at[k] / (sqrtf(second.at[k]) * correction + epsilon) +
                         decay * values.at[k];
    }
    store(g, i, gradient);
    store(m, i, first);
    store(v, i, second);
}

// RMSProp: v ← ρ v + (1 − ρ) d²;  w ← w − α d / (sqrt(v) + ε).
extern "C" __global__ void rmsprop(float* w, const float* g, float* v, COMMON_PARAMETERS, float rho,
                                   float rest, float epsilon) {
    wait_for_previous_kernel();
    int i;
    if (!vector_index(count, i)) return;
    Floats values = load(w, i), second = load(v, i);
    const Floats gradient = load_streaming(g, i);
    const Rates rates = rates_at(i, segment_ends, segment_rates, num_segments);
    const float decay = rates.decay, rate = hyperparameters[LEARNING_RATE] * rates.factor;
    if (!is_finite(loss_sums[0])) return;
    for (int k = 0; k < VECTOR; ++k) {
        const float d = gradient.at[k] + decay * values.at[k];
        second.at[k] = flush_small(rho * second.at[k] + rest * d * d);
        values.at[k] -= rate * d / (sqrtf(second.at[k]) + epsilon);
    }
    store(w, i, values);
    store(v, i, second);
}

// With momentum: b ← μ b + d / (sqrt(v) + ε);  w ← w − α b.
extern "C" __global__ void rmsprop_momentum(float* w, const float* g, float* v, float* b,
                                            COMMON_PARAMETERS, float rho, float rest,
                                            float epsilon, float momentum) {
    wait_for_previous_kernel();
    int i;
    if (!vector_index(count, i)) return;
    Floats values = load(w, i), second = load(v, i), velocity = load(b, i);
    const Floats gradient = load_streaming(g, i);
    const Rates rates = rates_at(i, segment_ends, segment_rates, num_segments);
    const float decay = rates.decay, rate = hyperparameters[LEARNING_RATE] * rates.factor;
    if (!is_finite(loss_sums[0])) return;
    for (int k = 0; k < VECTOR; ++k) {
        const float d = gradient.at[k] + decay * values.at[k];
        second.at[k] = flush_small(rho * second.at[k] + rest * d * d);
        velocity.at[k] = flush_small(momentum * velocity.at[k] + d / (sqrtf(second.at[k]) + epsilon));
        values.at[k] -= rate * velocity.at[k];
    }
    store(w, i, values);
    store(v, i, second);
    store(b, i, velocity);
}

// Moving average of the parameters after the update: average ← average + weight (w − average).
extern "C" __global__ void average_parameters(float* average, const float* w,
                                              const float* loss_sums, const float* hyperparameters,
                                              int count) {
    wait_for_previous_kernel();
    int i;
    if (!vector_index(count, i)) return;
    Floats mean = load(average, i);
    const Floats values = load(w, i);
    const float weight = hyperparameters[AVERAGE_WEIGHT];
    if (!is_finite(loss_sums[0])) return;
    for (int k = 0; k < VECTOR; ++k) mean.at[k] += weight * (values.at[k] - mean.at[k]);
    store(average, i, mean);
}
