"""The weight gradient of a dense layer, summed by micro-shards.

For each block of dw, the sums of all micro-shards are computed in the cache and added along the
tree of `dptrain.plan.shards`, so no copy of dw for each micro-shard exists.
"""

from __future__ import annotations

import numpy as np

from dptrain.backends.numba.convolution.microkernels import (
    NO_LOWER_BOUND,
    multiply_plain,
    multiply_spaced,
)
from dptrain.backends.numba.dense.matmul import RAMP, gather, sum_rows
from dptrain.backends.numba.vector import copy
from dptrain.native.jit import inlined, kernel

_HIGH, _WIDE = 48, 64
"""Rows and columns of a block: its sums for a few micro-shards stay in the L1 or L2 cache."""
_GATHERED = 144
"""Features of x that are packed at a time."""
_BLOCK = 384
"""Maximum samples of a product."""


def weight_shards_scratch(samples: int, outputs: int, shards: int) -> int:
    """Return the scratch elements of a thread; the stack has at most `shards` entries."""
    return samples * (outputs + _GATHERED) + shards * max(_HIGH * _WIDE, outputs)


@inlined
def _add_top(stack, size, top):
    """Add the top entry of a stack to the one below it."""
    # With slices, the indices are unsigned, and LLVM vectorises the loop.
    target, source = stack[(top - 2) * size :], stack[(top - 1) * size :]
    for i in range(np.uintp(size)):
        target[i] += source[i]


@inlined
def _sum_block(x, dy, stack, shape, bounds, merges):
    """Evaluate `merges` for a block of dw; leave the results, (rows, columns) each, on the stack.

    The first addition of a micro-shard with a single product is part of that product: the result
    is the same.

    Args:
        x, dy: (flat array, first element, distance of the samples).
        shape: (rows, columns).
    """
    (x, x_start, x_row), (dy, dy_start, dy_row), (rows, columns) = x, dy, shape
    size, top = rows * columns, 0
    for shard in range(len(merges)):
        first, last, merged = bounds[shard], bounds[shard + 1], merges[shard]
        if merged > 0 and last - first <= _BLOCK:
            merged -= 1
            d_row = columns
        else:
            top += 1
            d_row = -1
        start = (top - 1) * size
        for n in range(first, max(last, first + 1), _BLOCK):
            a, a_rows, a_steps = (x, x_start + n * x_row), (RAMP, 0, 1), (RAMP, 0, x_row)
            b, c, c_rows = (dy, dy_start + n * dy_row, dy_row), (stack, start), (RAMP, 0, columns)
            shape = rows, min(_BLOCK, last - n), columns
            if d_row < 0:
                multiply_plain(a, a_rows, a_steps, b, c, c_rows, shape, rows)
            else:
                d = stack, start, d_row
                multiply_spaced(a, a_rows, a_steps, b, d, c, c_rows, shape, NO_LOWER_BOUND, rows)
            d_row = columns
        for _ in range(merged):
            _add_top(stack, size, top)
            top -= 1


@inlined
def _sum_biases(dy, outputs, gradients, bounds, merges, stack):
    """Evaluate `merges` for db."""
    top = 0
    for shard in range(len(merges)):
        first, last = bounds[shard], bounds[shard + 1]
        entry = stack[top * outputs : (top + 1) * outputs]
        sum_rows(dy[first * outputs :], last - first, entry)
        top += 1
        for _ in range(merges[shard]):
            _add_top(stack, outputs, top)
            top -= 1
    for slot in range(gradients.slots):
        copy(stack, slot * outputs, gradients.db, slot * gradients.pitch, outputs)


@kernel
def dense_backward_weight_shards(items, x, dy, gradients, bounds, merges, scratch):
    """Compute `matmul.dense_backward_weight` for micro-shards; items are inputs.

    Args:
        x: (N, inputs).
        dy: (N, outputs).
        gradients: `reduction.GradientSlots` for the results of `merges`.
        bounds: int64 (micro-shards + 1,), the first sample of each.
        merges: int64 (micro-shards,), see `dptrain.plan.shards`.
        scratch: a row of `weight_shards_scratch` elements for each part.
    """
    inputs, outputs = x.shape[1], dy.shape[1]
    samples = bounds[-1]
    x_flat, dy_flat, mine = x.reshape(-1), dy.reshape(-1), scratch[items.thread]
    packed = mine[samples * outputs : samples * (outputs + _GATHERED)]
    panels, stack = mine[: samples * outputs], mine[samples * (outputs + _GATHERED) :]
    if items.start == 0 < items.stop:
        _sum_biases(dy_flat, outputs, gradients, bounds, merges, stack)
    for o in range(0, outputs, _WIDE):
        columns = min(_WIDE, outputs - o)
        gather(dy_flat, o, outputs, panels, o * samples, samples, columns, columns)
    for first in range(items.start, items.stop, _GATHERED):
        gathered = min(_GATHERED, items.stop - first)
        gather(x_flat, first, inputs, packed, 0, samples, gathered, gathered)
        for i in range(0, gathered, _HIGH):
            rows = min(_HIGH, gathered - i)
            for o in range(0, outputs, _WIDE):
                columns = min(_WIDE, outputs - o)
                a, b = (packed, i, gathered), (panels, o * samples, columns)
                _sum_block(a, b, stack, (rows, columns), bounds, merges)
                for slot in range(gradients.slots):
                    for m in range(rows):
                        target = slot * gradients.pitch + (first + i + m) * outputs + o
                        copy(stack, (slot * rows + m) * columns, gradients.dw, target, columns)
