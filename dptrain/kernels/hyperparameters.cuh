// What changes from step to step. It lies in device memory, so that a step that was captured once
// can be launched again: float32 (4,), written by dptrain/backends/cuda/replica.py.

#pragma once

constexpr int LEARNING_RATE = 0;    // Learning rate; under Adam divided by 1 − β₁ᵗ.
constexpr int ADAM_CORRECTION = 1;  // Under Adam 1 / sqrt(1 − β₂ᵗ).
constexpr int STOP_REQUESTED = 2;   // 1 where this rank wishes to stop.
constexpr int STEP_INDEX = 3;       // The bits of the step's number, an unsigned integer.
