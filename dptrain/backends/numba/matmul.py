"""Fully connected layers as loops over register tiles.

Activations (N, features), weights (I, O), all float32 and contiguous.

A large matrix of weights comes from beyond the second cache, and at the batch sizes of training no
part of it is used for long. So forward asks for the next block of it while it computes with this
one; backward reads or writes it in the order in which it lies, and brings together what it uses
again and again. 6400 inputs, 3200 outputs, one core, GFLOP/s before and after, as the processor's
clock allowed: 32 samples forward 81 and 127; 128 samples forward 90 and 155, by the weights 86 and
170.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from dptrain.backends.numba.jit import inlined, kernel
from dptrain.backends.numba.microkernels import multiply
from dptrain.backends.numba.vector import I8P, I32, flatten_arguments, transpose

NOTHING = np.float32(-np.inf)
_BLOCK = 384
"""Rows or columns of a block: with `_STEPS` it fits the second cache several times."""
_STEPS = 256
"""Steps of a product: a panel of B with so many stays in the first cache."""
_PANEL = 32
"""Columns that lie together; a multiple of two vectors of any processor."""
_LINE = 16
"""Elements of a cache line."""
_RAMP = np.arange(_BLOCK, dtype=np.int32)


@intrinsic
def _prefetch(typingctx, array, start):  # type: ignore[no-untyped-def]
    """Ask for the cache line of an element; the second cache is where it should be."""
    sig = types.none(array, start)

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        (pointer,) = flatten_arguments(context, builder, sig.args, args)
        kind = ir.FunctionType(ir.VoidType(), [I8P, I32, I32, I32])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        builder.call(function, [builder.bitcast(pointer, I8P), I32(0), I32(2), I32(1)])
        return context.get_dummy_value()

    return sig, codegen


def dense_scratch(samples: int, inputs: int, outputs: int) -> int:
    """Elements of scratch that either backward kernel needs for each thread."""
    return samples * outputs + 48 * samples


@inlined
def _even(total, most):  # type: ignore[no-untyped-def]
    """A length of at most `most` that splits `total` without a short rest."""
    return -(-total // -(-total // most))


@inlined
def _prefetch_share(w, place, row, rows, columns, part, parts):  # type: ignore[no-untyped-def]
    """Ask for the `part`-th of `parts` shares of a block of w that starts at `place`."""
    for r in range(rows * part // parts, rows * (part + 1) // parts):
        for c in range(0, columns, _LINE):
            _prefetch(w, place + r * row + c)


@inlined
def _forward_few(start, stop, x, w, b, y, relu):  # type: ignore[no-untyped-def]
    """As `dense_forward`, for too few samples to fill tiles: then reading w is all that counts."""
    inputs, outputs = w.shape
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


@kernel
def dense_forward(start, stop, thread, x, w, b, y, relu):  # type: ignore[no-untyped-def]
    """y[n, o] = b[o] + Σ x[n, i] · w[i, o], or max(y, 0) of that; items are samples."""
    if stop - start < 4:
        _forward_few(start, stop, x, w, b, y, relu)
        return
    inputs, outputs = w.shape
    block = _even(inputs, _STEPS)
    x_flat, w_flat, y_flat = x.reshape(-1), w.reshape(-1), y.reshape(-1)
    for n in range(start, stop, _BLOCK):
        rows = min(_BLOCK, stop - n)
        for o in range(0, outputs, _BLOCK):
            wide = min(_BLOCK, outputs - o)
            for i in range(0, inputs, block):
                steps = min(block, inputs - i)
                floor = np.float32(0) if relu and i + steps == inputs else NOTHING
                ahead, behind = (i + block, o) if i + block < inputs else (0, o + _BLOCK)
                deep_, wide_ = min(block, inputs - ahead), min(_BLOCK, outputs - behind)
                for k in range(0, wide, 2 * _PANEL):
                    part, parts = k // (2 * _PANEL), -(-wide // (2 * _PANEL))
                    following = ahead * outputs + behind
                    _prefetch_share(w_flat, following, outputs, deep_, wide_, part, parts)
                    at = n * outputs + o + k
                    d, d_start, d_row = (b, o + k, 0) if i == 0 else (y_flat, at, outputs)
                    multiply(
                        (x_flat, n * inputs + i),
                        (_RAMP, 0, inputs),
                        (_RAMP, 0, 1),
                        (w_flat, i * outputs + o + k, outputs),
                        (d, d_start, d_row),
                        (y_flat, at),
                        (_RAMP, 0, outputs),
                        (rows, steps, min(2 * _PANEL, wide - k)),
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
    deep = _even(outputs, _STEPS)
    w_flat, dx_flat = w.reshape(-1), dx.reshape(-1)
    transpose(dy.reshape(-1), start * outputs, outputs, turned, 0, samples, samples, outputs)
    for i in range(0, inputs, 48):
        rows = min(48, inputs - i)
        for o in range(0, outputs, deep):
            steps = min(deep, outputs - o)
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


@inlined
def _gather(source, start, row, target, target_start, rows, columns):  # type: ignore[no-untyped-def]
    """Copy a block so that its rows lie side by side."""
    for n in range(rows):
        for c in range(np.uintp(columns)):
            target[target_start + n * columns + c] = source[start + n * row + c]


@kernel
def dense_backward_weight(  # type: ignore[no-untyped-def]
    start, stop, thread, x, dy, dw, db, scratch, samples
):
    """dw[i, o] = Σ x[n, i] · dy[n, o]; db[o] = Σ dy[n, o]; items are inputs i.

    The range that starts at 0 also writes db.
    """
    inputs, outputs = dw.shape
    x_flat, dy_flat, dw_flat = x.reshape(-1), dy.reshape(-1), dw.reshape(-1)
    if start == 0:
        db[:] = 0
        for n in range(samples):
            for o in range(outputs):
                db[o] += dy[n, o]
    if samples == 0:
        dw[start:stop] = 0
    mine = scratch[thread]
    panels, block = mine[: samples * outputs], mine[samples * outputs :]
    for o in range(0, outputs, _PANEL):
        columns = min(_PANEL, outputs - o)
        _gather(dy_flat, o, outputs, panels, o * samples, samples, columns)
    for i in range(start, stop, 24):
        # Few rows at a time, so that dw is written as it lies.
        rows = min(24, stop - i)
        _gather(x_flat, i, inputs, block, 0, samples, rows)
        for o in range(0, outputs, _PANEL):
            columns = min(_PANEL, outputs - o)
            for n in range(0, samples, _BLOCK):
                multiply(
                    (block, n * rows),
                    (_RAMP, 0, 1),
                    (_RAMP, 0, rows),
                    (panels, o * samples + n * columns, columns),
                    (dw_flat, i * outputs + o, -1 if n == 0 else outputs),
                    (dw_flat, i * outputs + o),
                    (_RAMP, 0, outputs),
                    (rows, min(_BLOCK, samples - n), columns),
                    NOTHING,
                )
