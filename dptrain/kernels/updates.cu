// Update rules, one pass over the flat arrays of parameters w, gradients g and optimizer state.
//
// Elements fall into runs that share a weight decay: run k ends before element stops[k] and decays
// by decays[k]. Runs begin at multiples of 16 elements.

#include "vector.cuh"

// State below this counts as zero, as on the CPU, where it would become denormal and slow.
__device__ inline float flushed(float value) { return fabsf(value) < 1e-30f ? 0.0f : value; }

__device__ inline float decay_at(int i, const int* stops, const float* decays, int runs) {
    int k = 0;
    while (k < runs - 1 && i * VECTOR >= stops[k]) ++k;
    return decays[k];
}

// w ← w − α d, with d = g + λ w.
extern "C" __global__ void sgd(
    Floats* w, const Floats* g, const int* stops, const float* decays, int runs, int count,
    float rate) {
    int i;
    if (!mine(count, i)) return;
    const float decay = decay_at(i, stops, decays, runs);
    Floats values = w[i];
    const Floats gradient = g[i];
    for (int k = 0; k < VECTOR; ++k)
        values.at[k] -= rate * (gradient.at[k] + decay * values.at[k]);
    w[i] = values;
}

// v ← μ v + d;  w ← w − α (d + μ v) under Nesterov, else w ← w − α v.
extern "C" __global__ void sgd_momentum(
    Floats* w, const Floats* g, Floats* v, const int* stops, const float* decays, int runs,
    int count, float momentum, int nesterov, float rate) {
    int i;
    if (!mine(count, i)) return;
    const float decay = decay_at(i, stops, decays, runs);
    Floats values = w[i], velocity = v[i];
    const Floats gradient = g[i];
    for (int k = 0; k < VECTOR; ++k) {
        const float d = gradient.at[k] + decay * values.at[k];
        velocity.at[k] = flushed(momentum * velocity.at[k] + d);
        values.at[k] -= rate * (nesterov ? d + momentum * velocity.at[k] : velocity.at[k]);
    }
    w[i] = values;
    v[i] = velocity;
}

// m ← β₁ m + (1 − β₁) d;  v ← β₂ v + (1 − β₂) d²;  w ← w − rate m / (sqrt(v) correction + ε),
// with rate = α / (1 − β₁ᵗ) and correction = 1 / sqrt(1 − β₂ᵗ). The host computes 1 − β: in
// float32 that would be one rounding worse.
extern "C" __global__ void adam(
    Floats* w, const Floats* g, Floats* m, Floats* v, const int* stops, const float* decays,
    int runs, int count, float beta1, float beta2, float epsilon, float rest1, float rest2,
    float rate, float correction) {
    int i;
    if (!mine(count, i)) return;
    const float decay = decay_at(i, stops, decays, runs);
    Floats values = w[i], first = m[i], second = v[i];
    const Floats gradient = g[i];
    for (int k = 0; k < VECTOR; ++k) {
        const float d = gradient.at[k] + decay * values.at[k];
        first.at[k] = flushed(beta1 * first.at[k] + rest1 * d);
        second.at[k] = flushed(beta2 * second.at[k] + rest2 * d * d);
        values.at[k] -= rate * first.at[k] / (sqrtf(second.at[k]) * correction + epsilon);
    }
    w[i] = values;
    m[i] = first;
    v[i] = second;
}
