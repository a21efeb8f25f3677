"""The sum of partial parameter gradients, along the tree of `dptrain.plan.shards`."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dptrain.native.jit import kernel

_BLOCK = 256
"""Elements of a row that are added at a time; with 32 rows they stay in the L1 cache."""


class GradientSlots(NamedTuple):
    """The gradients of a layer, of which there are several, see `dptrain.plan.shards`.

    Attributes:
        dw, db: flat; the gradients of slot s start at element s · `pitch`.
        size: number of weights, which the biases follow in sums of both.
        pitch: elements from one slot to the next.
        slots: number of slots.
    """

    dw: NDArray[Any]
    db: NDArray[Any]
    size: int
    pitch: int
    slots: int


@kernel
def sum_partials(items, partial, steps, results, gradients):
    """Sum rows of `partial` in place, and store the results; items are elements of a row.

    Args:
        partial: (rows, weights and biases of a layer).
        steps: int64 (additions, 2), see `dptrain.plan.shards.addition_steps`.
        results: int64 (slots,), the rows that hold the results.
        gradients: `GradientSlots`.
    """
    dw, db, size, pitch, _ = gradients
    for first in range(items.start, items.stop, _BLOCK):
        last = min(first + _BLOCK, items.stop)
        for k in range(len(steps)):
            target, source = partial[steps[k, 0]], partial[steps[k, 1]]
            for i in range(np.uintp(first), np.uintp(last)):
                target[i] += source[i]
        for slot in range(len(results)):
            total, begin = partial[results[slot]], slot * pitch
            for i in range(np.uintp(first), np.uintp(min(last, max(size, first)))):
                dw[begin + i] = total[i]
            for i in range(max(first, size), last):
                db[begin + i - size] = total[i]
