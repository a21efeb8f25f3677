// The function of each element that is fused into a normalisation before it; ReLU by default.
//
// elementwise/activations.py writes others from their expressions, as macros:
// ACTIVATION_FORWARD   statements that return y from x
// ACTIVATION_BACKWARD  statements that return dx from dy and ACTIVATION_SAVED
// ACTIVATION_SAVED     x or y
// SAVES_OUTPUT         1 if ACTIVATION_SAVED is y

#pragma once

#ifndef ACTIVATION_FORWARD
#define ACTIVATION_FORWARD return x <= 0.0f ? 0.0f : x;
#define ACTIVATION_BACKWARD return y > 0.0f ? dy : 0.0f;
#define ACTIVATION_SAVED y
#define SAVES_OUTPUT 1
#endif

// How the gradient before the function follows from dy.
//     0  there is no function
//     1  its input z is computed again, as in the forward pass: nothing else is read
//     2  its output y is read, because z also contains another tensor; ReLU only
#ifndef ACTIVATION_FROM
#define ACTIVATION_FROM 0
#endif

__device__ inline float activate(float x) { ACTIVATION_FORWARD }

__device__ inline float activation_gradient(float dy, float ACTIVATION_SAVED) {
    ACTIVATION_BACKWARD
}

// The gradient before the function, from z, or from y with ACTIVATION_FROM 2.
__device__ inline float gradient_before_activation(float dy, float from) {
    if (ACTIVATION_FROM == 0) return dy;
    const bool is_saved = ACTIVATION_FROM == 2 || !SAVES_OUTPUT;
    return activation_gradient(dy, is_saved ? from : activate(from));
}
