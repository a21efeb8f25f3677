// Indices into the array of values that change from step to step: float32 (6,) in device memory.
// dptrain/backends/cuda/replica.py writes it before each step, so that a captured CUDA graph can be
// launched again with new values.

#pragma once

constexpr int LEARNING_RATE = 0;    // Learning rate; for Adam and AdamW divided by 1 − β₁ᵗ.
constexpr int ADAM_CORRECTION = 1;  // For Adam, AdamW and LAMB: 1 / sqrt(1 − β₂ᵗ).
constexpr int STOP_REQUESTED = 2;   // 1 if this rank requests a stop, else 0.
constexpr int STEP_INDEX = 3;       // Index of the step, an unsigned integer stored as its bits.
constexpr int DECAY_RATE = 4;       // For AdamW: the learning rate, not divided.
constexpr int MEAN_CORRECTION = 4;  // For LAMB: 1 / (1 − β₁ᵗ).
constexpr int AVERAGE_WEIGHT = 5;   // Weight of the new parameters in their moving average.
