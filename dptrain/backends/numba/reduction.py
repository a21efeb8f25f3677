"""The sum of partial parameter gradients, along the tree of `dptrain.plan.shards`."""

from __future__ import annotations

import numpy as np

from dptrain.native.jit import kernel

_BLOCK = 256
"""Elements of a row that are added at a time; with 32 rows they stay in the L1 cache."""


@kernel
def sum_partials(items, partial, steps, results, dw, db, size, pitch):
    """Sum rows of `partial` in place, and store the results; items are elements of a row.

    Args:
        partial: (rows, weights and biases of a layer).
        steps: int64 (additions, 2), see `dptrain.plan.shards.addition_steps`.
        results: int64 (slots,), the rows that hold the results.
        dw, db: the gradients; that of slot s starts at element s · `pitch`.
        size: number of weights; the biases follow.
        pitch: elements from one slot to the next.
    """
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
