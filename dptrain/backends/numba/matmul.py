"""Dense layers with register tiles.

Activations are (N, features), weights (I, O), all float32 and contiguous.

A large weight matrix does not fit the L2 cache, and at usual batch sizes each part is used only
briefly. Therefore every kernel reads or writes it sequentially, in blocks that are high enough for
efficient products, prefetches the next block during the current one, and packs the operands that it
reuses (see docs/kernels.md).
"""

from __future__ import annotations

import numpy as np

from dptrain.backends.numba.gemv import fits_registers, multiply_row
from dptrain.backends.numba.jit import inlined, kernel
from dptrain.backends.numba.microkernels import NO_LOWER_BOUND, multiply, multiply_ahead
from dptrain.backends.numba.vector import copy, transpose

_BLOCK = 384
"""Maximum rows of a product."""
_STEPS = 256
"""Maximum steps of a product: a panel of B with this many steps stays in the L1 cache."""
_WIDE = 640
"""Columns of a product with many rows: with `_STEPS` of them, B stays in the L2 cache."""
_ALIASED = 512
"""Elements: rows whose distance is a multiple of this map to two sets of the L1 cache."""
_PITCH = _STEPS + 16
"""Distance of such rows after packing."""
_PANEL = 32
"""Columns of a packed panel; a multiple of two vectors of any processor."""
_GATHERED = 144
"""Features of x that `dense_backward_weight` packs at a time."""
_FEW = 64
"""Number of samples below which reading the weights takes longer than computing with them."""
_ONE = np.ones(1, np.float32)
_RAMP = np.arange(_BLOCK, dtype=np.int32)


def dense_scratch(samples: int, inputs: int, outputs: int) -> tuple[int, int, int]:
    """Return scratch elements per thread for forward, weight gradient and input gradient."""
    backward = samples * (outputs + _GATHERED)
    forward = min(samples, _BLOCK) * _PITCH if inputs % _ALIASED == 0 else 1
    return forward, backward, backward


@inlined
def _even(total, most):  # type: ignore[no-untyped-def]
    """Return a block length of at most `most` that divides `total` without a short last block."""
    return -(-total // -(-total // most))


@inlined
def _forward_small_batch(start, stop, x, w, b, y, relu):  # type: ignore[no-untyped-def]
    """Compute `dense_forward` for fewer samples than fill tiles; reading w limits the speed."""
    inputs, outputs = w.shape
    if fits_registers(outputs):
        lower_bound = np.float32(0) if relu else NO_LOWER_BOUND
        for n in range(start, stop):
            x_start, y_start = n * inputs, n * outputs
            multiply_row(
                x.reshape(-1), x_start, w.reshape(-1), 0, b, 0, y.reshape(-1), y_start,
                inputs, outputs, lower_bound,
            )  # fmt: skip
        return
    whole = inputs - inputs % 4
    for n in range(start, stop):
        for o in range(outputs):
            y[n, o] = b[o]
        for i in range(0, whole, 4):
            x0, x1, x2, x3 = x[n, i], x[n, i + 1], x[n, i + 2], x[n, i + 3]
            for o in range(np.uintp(outputs)):
                y[n, o] += (x0 * w[i, o] + x1 * w[i + 1, o]) + (x2 * w[i + 2, o] + x3 * w[i + 3, o])
        for i in range(whole, inputs):
            for o in range(outputs):
                y[n, o] += x[n, i] * w[i, o]
        if relu:
            for o in range(outputs):
                y[n, o] = np.float32(0.0) if y[n, o] <= 0.0 else y[n, o]


@inlined
def _gather(source, start, row, target, target_start, rows, columns, pitch):  # type: ignore[no-untyped-def]
    """Copy a block so that its rows are `pitch` apart."""
    for n in range(rows):
        copy(source, start + n * row, target, target_start + n * pitch, columns)


@kernel
def dense_forward(start, stop, thread, x, w, b, y, relu, scratch):  # type: ignore[no-untyped-def]
    """y[n, o] = b[o] + Σ x[n, i] · w[i, o], optionally max(y, 0); items are samples.

    Rows of x that would evict each other from the L1 cache are packed.
    """
    inputs, outputs = w.shape
    x_flat, w_flat, y_flat = x.reshape(-1), w.reshape(-1), y.reshape(-1)
    if stop - start < 4:
        _forward_small_batch(start, stop, x, w, b, y, relu)
        return
    # Blocks of w that fit the L2 cache. For few samples they are whole rows, so that w is read
    # sequentially; for many samples, sums that stay in registers matter more.
    wide = outputs if stop - start <= _FEW else min(outputs, _WIDE)
    deep = _even(inputs, max(32, min(_STEPS, 98304 // wide)))
    mine, aliased = scratch[thread], inputs % _ALIASED == 0
    for n in range(start, stop, _BLOCK):
        rows = min(_BLOCK, stop - n)
        for o in range(0, outputs, wide):
            for i in range(0, inputs, deep):
                steps = min(deep, inputs - i)
                a, a_start, a_row = x_flat, n * inputs + i, inputs
                if aliased:
                    a, a_start, a_row = mine, 0, _PITCH
                    _gather(x_flat, n * inputs + i, inputs, mine, 0, rows, steps, _PITCH)
                lower_bound = np.float32(0) if relu and i + steps == inputs else NO_LOWER_BOUND
                at = n * outputs + o
                d, d_start, d_row = (b, o, 0) if i == 0 else (y_flat, at, outputs)
                multiply_ahead(
                    (a, a_start),
                    (_RAMP, 0, a_row),
                    (_RAMP, 0, 1),
                    (w_flat, i * outputs + o, outputs),
                    (d, d_start, d_row),
                    (y_flat, at),
                    (_RAMP, 0, outputs),
                    (rows, steps, min(wide, outputs - o)),
                    lower_bound,
                    (w_flat, (i + steps) * outputs + o),
                )


@kernel
def dense_backward_input(start, stop, thread, dy, w, dx, scratch):  # type: ignore[no-untyped-def]
    """dx[n, i] = Σ dy[n, o] · w[i, o]; items are samples.

    The tiles compute the transpose of dx, so that w is read once and sequentially.
    """
    inputs, outputs = w.shape
    samples = stop - start
    mine = scratch[thread]
    turned, block = mine[: outputs * samples], mine[outputs * samples :]
    deep = _even(outputs, _STEPS)
    w_flat, dx_flat = w.reshape(-1), dx.reshape(-1)
    transpose(dy.reshape(-1), start * outputs, outputs, turned, 0, samples, samples, outputs)
    for i in range(0, inputs, 48):
        rows = min(48, inputs - i)
        for o in range(0, outputs, deep):
            steps = min(deep, outputs - o)
            multiply_ahead(
                (w_flat, i * outputs + o),
                (_RAMP, 0, outputs),
                (_RAMP, 0, 1),
                (turned, o * samples, samples),
                (block, 0, -1 if o == 0 else samples),
                (block, 0),
                (_RAMP, 0, samples),
                (rows, steps, samples),
                NO_LOWER_BOUND,
                (w_flat, (i + 48) * outputs + o * 48),
            )
        transpose(block, 0, samples, dx_flat, start * inputs + i, inputs, rows, samples)


@inlined
def sum_rows(source, rows, sums):  # type: ignore[no-untyped-def]
    """sums[c] = Σ_r source[r, c], computed as a product with ones."""
    columns = len(sums)
    sums[:] = 0
    for r in range(0, rows, _BLOCK):
        multiply(
            (_ONE, 0),
            (_RAMP, 0, 0),
            (_RAMP, 0, 0),
            (source, r * columns, columns),
            (sums, 0, 0),
            (sums, 0),
            (_RAMP, 0, 0),
            (1, min(_BLOCK, rows - r), columns),
            NO_LOWER_BOUND,
        )


@kernel
def dense_backward_weight(  # type: ignore[no-untyped-def]
    start, stop, thread, x, dy, dw, db, scratch, samples
):
    """dw[i, o] = Σ x[n, i] · dy[n, o]; db[o] = Σ dy[n, o]; items are inputs i.

    The nonempty range that starts at input 0 also writes db.
    """
    inputs, outputs = dw.shape
    x_flat, dy_flat, dw_flat = x.reshape(-1), dy.reshape(-1), dw.reshape(-1)
    if start == 0 < stop:
        sum_rows(dy_flat, samples, db)
    if samples == 0:
        dw[start:stop] = 0
    mine = scratch[thread]
    panels, block = mine[: samples * outputs], mine[samples * outputs :]
    # dy is read once for every 48 inputs: directly for small layers, else from packed panels.
    packed = stop - start > 4 * 48
    if packed:
        for o in range(0, outputs, _PANEL):
            columns = min(_PANEL, outputs - o)
            _gather(dy_flat, o, outputs, panels, o * samples, samples, columns, columns)
    else:
        panels = dy_flat
    for first in range(start, stop, _GATHERED):
        gathered = min(_GATHERED, stop - first)
        _gather(x_flat, first, inputs, block, 0, samples, gathered, gathered)
        for i in range(0, gathered, 48):
            # Few rows at a time, so that dw is written sequentially.
            rows = min(48, gathered - i)
            for o in range(0, outputs, _PANEL):
                columns = min(_PANEL, outputs - o)
                dw_start = (first + i) * outputs + o
                panel, row = (o * samples, columns) if packed else (o, outputs)
                for n in range(0, samples, _BLOCK):
                    multiply_ahead(
                        (block, n * gathered + i),
                        (_RAMP, 0, 1),
                        (_RAMP, 0, gathered),
                        (panels, panel + n * row, row),
                        (dw_flat, dw_start, -1 if n == 0 else outputs),
                        (dw_flat, dw_start),
                        (_RAMP, 0, outputs),
                        (rows, min(_BLOCK, samples - n), columns),
                        NO_LOWER_BOUND,
                        (dw_flat, (first + i + 48) * outputs + o * 48),
                    )
