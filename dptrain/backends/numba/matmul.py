"""Fully connected layers as loops over register tiles.

Activations (N, features), weights (I, O), all float32 and contiguous.
"""

from __future__ import annotations

import numpy as np

from dptrain.backends.numba.jit import kernel
from dptrain.backends.numba.microkernels import multiply
from dptrain.backends.numba.vector import transpose

NOTHING = np.float32(-np.inf)
_BLOCK = 384
_RAMP = np.arange(_BLOCK, dtype=np.int32)


def dense_scratch(samples: int, inputs: int, outputs: int) -> int:
    """Elements of scratch that `dense_backward_input` needs for each thread."""
    return samples * outputs + 48 * samples


@kernel
def dense_forward(start, stop, thread, x, w, b, y, relu):  # type: ignore[no-untyped-def]
    """y[n, o] = b[o] + Σ x[n, i] · w[i, o], or max(y, 0) of that; items are samples."""
    inputs, outputs = w.shape
    x_flat, w_flat, y_flat = x.reshape(-1), w.reshape(-1), y.reshape(-1)
    # A block of w lies side by side in memory and is small enough for L2.
    block = max(32, min(_BLOCK, 65536 // outputs))
    for i in range(0, inputs, block):
        steps = min(block, inputs - i)
        floor = np.float32(0) if relu and i + steps == inputs else NOTHING
        for n in range(start, stop, _BLOCK):
            rows = min(_BLOCK, stop - n)
            d, d_start, d_row = (b, 0, 0) if i == 0 else (y_flat, n * outputs, outputs)
            multiply(
                (x_flat, n * inputs + i),
                (_RAMP, 0, inputs),
                (_RAMP, 0, 1),
                (w_flat, i * outputs, outputs),
                (d, d_start, d_row),
                (y_flat, n * outputs),
                (_RAMP, 0, outputs),
                (rows, steps, outputs),
                floor,
            )


@kernel
def dense_backward_input(start, stop, thread, dy, w, dx, scratch):  # type: ignore[no-untyped-def]
    """dx[n, i] = Σ dy[n, o] · w[i, o]; items are samples.

    The tiles compute its transpose, so that w is read once and as it lies.
    """
    inputs, outputs = w.shape
    samples = stop - start
    mine = scratch[thread]
    turned, block = mine[: outputs * samples], mine[outputs * samples :]
    w_flat, dx_flat = w.reshape(-1), dx.reshape(-1)
    transpose(dy.reshape(-1), start * outputs, outputs, turned, 0, samples, samples, outputs)
    for i in range(0, inputs, 48):
        rows = min(48, inputs - i)
        for o in range(0, outputs, _BLOCK):
            steps = min(_BLOCK, outputs - o)
            multiply(
                (w_flat, i * outputs + o),
                (_RAMP, 0, outputs),
                (_RAMP, 0, 1),
                (turned, o * samples, samples),
                (block, 0, -1 if o == 0 else samples),
                (block, 0),
                (_RAMP, 0, samples),
                (rows, steps, samples),
                NOTHING,
            )
        transpose(block, 0, samples, dx_flat, start * inputs + i, inputs, rows, samples)


@kernel
def dense_backward_weight(start, stop, thread, x, dy, dw, db):  # type: ignore[no-untyped-def]
    """dw[i, o] = Σ x[n, i] · dy[n, o]; db[o] = Σ dy[n, o]; items are inputs i.

    The range that starts at 0 also writes db.
    """
    samples, inputs = x.shape
    outputs = dy.shape[1]
    x_flat, dy_flat, dw_flat = x.reshape(-1), dy.reshape(-1), dw.reshape(-1)
    if start == 0:
        db[:] = 0
        for n in range(samples):
            for o in range(outputs):
                db[o] += dy[n, o]
    if samples == 0:
        dw[start:stop] = 0
    for i in range(start, stop, 24):
        # Few rows at a time, so that dw is written as it lies.
        rows = min(24, stop - i)
        for n in range(0, samples, _BLOCK):
            steps = min(_BLOCK, samples - n)
            multiply(
                (x_flat, n * inputs + i),
                (_RAMP, 0, 1),
                (_RAMP, 0, inputs),
                (dy_flat, n * outputs, outputs),
                (dw_flat, i * outputs, -1 if n == 0 else outputs),
                (dw_flat, i * outputs),
                (_RAMP, 0, outputs),
                (rows, steps, outputs),
                NOTHING,
            )
