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

// The weight decay and the learning rate of the elements of a thread.
struct Rates {
    float decay, rate, factor;
};

__device__ inline Rates rates_at(int i, const int* segment_ends, const float* segment_rates,
                                 int num_segments, const float* hyperparameters) {
    int found = 0;
    for (int k = 1; k < num_segments; ++k) found = i * VECTOR >= segment_ends[k - 1] ? k : found;
    const float factor = segment_rates[2 * found + 1];
    return {segment_rates[2 * found], hyperparameters[LEARNING_RATE] * factor, factor};
}

#define COMMON_PARAMETERS                                                          \
    const float *loss_sums, const float *hyperparameters, const int *segment_ends, \
        const float *segment_rates, int num_segments, int count
#define COMMON_ARGUMENTS \
    loss_sums, hyperparameters, segment_ends, segment_rates, num_segments, count

// Call rule(input, rates, values) for each element of this thread's vector: `input` is read from the
// array `from` by `load_from`, and `values` from `arrays`, to which they are written afterwards.
template <class Rule, class... Arrays>
__device__ inline void update_with(Floats (*load_from)(const float*, int), const float* from,
                                   COMMON_PARAMETERS, const Rule& rule, Arrays*... arrays) {
    constexpr int ARRAYS = sizeof...(arrays);
    wait_for_previous_kernel();
    int i;
    if (!vector_index(count, i)) return;
    Floats found[ARRAYS] = {load(arrays, i)...};
    const Floats input = load_from(from, i);
    const Rates rates = rates_at(i, segment_ends, segment_rates, num_segments, hyperparameters);
    if (!is_finite(loss_sums[0])) return;
    for (int k = 0; k < VECTOR; ++k) {
        float values[ARRAYS];
        for (int n = 0; n < ARRAYS; ++n) values[n] = found[n].at[k];
        rule(input.at[k], rates, values);
        for (int n = 0; n < ARRAYS; ++n) found[n].at[k] = values[n];
    }
    int n = 0;
    (store(arrays, i, found[n++]), ...);
}

// Stochastic gradient descent: w ← w − α d, with d = g + λ w.
extern "C" __global__ void sgd(float* w, const float* g, COMMON_PARAMETERS) {
    const auto rule = [](float g, const Rates& rates, float (&values)[1]) {
        auto& [w] = values;
        w -= rates.rate * (g + rates.decay * w);
    };
    update_with(load_streaming, g, COMMON_ARGUMENTS, rule, w);
}

// With momentum: v ← μ v + d;  w ← w − α (d + μ v) with Nesterov momentum, else w ← w − α v.
extern "C" __global__ void sgd_momentum(float* w, const float* g, float* v, COMMON_PARAMETERS,
                                        float momentum, int nesterov) {
    const auto rule = [=](float g, const Rates& rates, float (&values)[2]) {
        auto& [w, v] = values;
        const float d = g + rates.decay * w;
        v = flush_small(momentum * v + d);
        w -= rates.rate * (nesterov ? d + momentum * v : v);
    };
    update_with(load_streaming, g, COMMON_ARGUMENTS, rule, w, v);
}

// Constants of Adam. The host computes rest = 1 − β, which would have one more rounding error in
// float32.
struct Moments {
    float beta1, beta2, epsilon, rest1, rest2, correction;

    // m ← β₁ m + (1 − β₁) d;  v ← β₂ v + (1 − β₂) d²; return scale m / (sqrt(v) correction + ε).
    __device__ float step(float scale, float d, float& m, float& v) const {
        m = flush_small(beta1 * m + rest1 * d);
        v = flush_small(beta2 * v + rest2 * d * d);
        return scale * m / (sqrtf(v) * correction + epsilon);
    }
};

#define ADAM_PARAMETERS float beta1, float beta2, float epsilon, float rest1, float rest2
#define ADAM_MOMENTS \
    { beta1, beta2, epsilon, rest1, rest2, hyperparameters[ADAM_CORRECTION] }

// Adam: w ← w − rate m / (sqrt(v) correction + ε), with d = g + λ w, rate = α / (1 − β₁ᵗ) and
// correction = 1 / sqrt(1 − β₂ᵗ).
extern "C" __global__ void adam(float* w, const float* g, float* m, float* v, COMMON_PARAMETERS,
                                ADAM_PARAMETERS) {
    const auto rule = [=](float g, const Rates& rates, float (&values)[3]) {
        auto& [w, m, v] = values;
        const Moments moments = ADAM_MOMENTS;
        w -= moments.step(rates.rate, g + rates.decay * w, m, v);
    };
    update_with(load_streaming, g, COMMON_ARGUMENTS, rule, w, m, v);
}

// AdamW: d = g;  w ← w − α λ w − rate m / (sqrt(v) correction + ε).
extern "C" __global__ void adamw(float* w, const float* g, float* m, float* v, COMMON_PARAMETERS,
                                 ADAM_PARAMETERS) {
    const auto rule = [=](float g, const Rates& rates, float (&values)[3]) {
        auto& [w, m, v] = values;
        const Moments moments = ADAM_MOMENTS;
        const float shrink = hyperparameters[DECAY_RATE] * rates.decay * rates.factor;
        w -= moments.step(rates.rate, g, m, v) + shrink * w;
    };
    update_with(load_streaming, g, COMMON_ARGUMENTS, rule, w, m, v);
}

// LAMB: g ← (m / (1 − β₁ᵗ)) / (sqrt(v) correction + ε) + λ w, with m and v as for AdamW. Norms of
// layers scale it (clipping.cu), and sgd makes the update.
extern "C" __global__ void lamb_direction(const float* w, float* g, float* m, float* v,
                                          COMMON_PARAMETERS, ADAM_PARAMETERS) {
    const auto rule = [=](float w, const Rates& rates, float (&values)[3]) {
        auto& [g, m, v] = values;
        const Moments moments = ADAM_MOMENTS;
        g = moments.step(hyperparameters[MEAN_CORRECTION], g, m, v) + rates.decay * w;
    };
    update_with(load, w, COMMON_ARGUMENTS, rule, g, m, v);
}

// RMSProp: v ← ρ v + (1 − ρ) d²;  w ← w − α d / (sqrt(v) + ε).
extern "C" __global__ void rmsprop(float* w, const float* g, float* v, COMMON_PARAMETERS, float rho,
                                   float rest, float epsilon) {
    const auto rule = [=](float g, const Rates& rates, float (&values)[2]) {
        auto& [w, v] = values;
        const float d = g + rates.decay * w;
        v = flush_small(rho * v + rest * d * d);
        w -= rates.rate * d / (sqrtf(v) + epsilon);
    };
    update_with(load_streaming, g, COMMON_ARGUMENTS, rule, w, v);
}

// With momentum: b ← μ b + d / (sqrt(v) + ε);  w ← w − α b.
extern "C" __global__ void rmsprop_momentum(float* w, const float* g, float* v, float* b,
                                            COMMON_PARAMETERS, float rho, float rest,
                                            float epsilon, float momentum) {
    const auto rule = [=](float g, const Rates& rates, float (&values)[3]) {
        auto& [w, v, b] = values;
        const float d = g + rates.decay * w;
        v = flush_small(rho * v + rest * d * d);
        b = flush_small(momentum * b + d / (sqrtf(v) + epsilon));
        w -= rates.rate * b;
    };
    update_with(load_streaming, g, COMMON_ARGUMENTS, rule, w, v, b);
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
