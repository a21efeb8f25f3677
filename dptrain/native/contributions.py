"""The sum of the gradients of several ranks, along the tree of `dptrain.plan.shards`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptrain.aligned import aligned_zeros
from dptrain.native.jit import kernel
from dptrain.native.threads import ThreadPool

_BLOCK = 512
"""Elements that are summed at a time; up to eight partial sums of as many stay in the L1 cache."""


@kernel
def _sum_contributions(items, out, flat, offsets, merges, partial):
    """Sum contributions; items are elements of `out`.

    Args:
        out: (n,), receives the sum; it may be one of the contributions.
        flat: holds the contributions.
        offsets: int64 (contributions,), the first element of each in `flat`.
        merges: int64 (contributions,), the order, see `dptrain.plan.shards`.
        partial: (threads, depth, _BLOCK), the stack of partial sums.
    """
    stack = partial[items.thread]
    for first in range(items.start, items.stop, _BLOCK):
        count = np.uintp(min(_BLOCK, items.stop - first))
        top = -1
        for c in range(offsets.size):
            source = flat[offsets[c] + first : offsets[c] + first + _BLOCK]
            if merges[c] == 0:
                top += 1
                pushed = stack[top]
                for i in range(count):
                    pushed[i] = source[i]
            else:
                total = stack[top]
                for i in range(count):
                    total[i] += source[i]
            for _ in range(merges[c] - 1):
                left, right = stack[top - 1], stack[top]
                for i in range(count):
                    left[i] += right[i]
                top -= 1
        result, target = stack[0], out[first : items.stop]
        for i in range(count):
            target[i] = result[i]


def bind_sum(
    pool: ThreadPool | None,
    out: NDArray[Any],
    flat: NDArray[Any],
    offsets: NDArray[np.int64],
    merges: NDArray[np.int64],
) -> Callable[[], None]:
    """Return a function that sums contributions into `out`.

    Args:
        pool: its threads compute; None for this thread alone.
        out: (n,), receives the sum; it may be one of the contributions.
        flat: holds the contributions.
        offsets: int64 (contributions,), the first element of each in `flat`.
        merges: int64 (contributions,), the order of the sum, see `dptrain.plan.shards`.
    """
    if pool is None or out.size <= _BLOCK:
        pool = ThreadPool(1)
    shape = pool.threads, _stack_depth(merges), _BLOCK
    partial = aligned_zeros(int(np.prod(shape)), out.dtype.name).reshape(shape)
    launch = pool.bind(_sum_contributions, out, flat, offsets, merges, partial)
    count = out.size
    return lambda: launch(count)


def bind_leading_sum(
    out: NDArray[Any], flat: NDArray[Any], offsets: NDArray[np.int64], merges: NDArray[np.int64]
) -> Callable[[int], None]:
    """Return a function that sums the first so many elements of contributions in this thread.

    Args:
        out: receives the sums.
        flat, offsets, merges: see `bind_sum`.
    """
    partial = aligned_zeros(_stack_depth(merges) * _BLOCK, out.dtype.name)
    stacks = partial.reshape(1, -1, _BLOCK)
    return ThreadPool(1).bind(_sum_contributions, out, flat, offsets, merges, stacks)


def _stack_depth(merges: NDArray[np.int64]) -> int:
    """Return how many partial sums exist at the same time."""
    # A contribution that is merged at once is added in place and needs no entry of its own.
    depth = deepest = 0
    for count in merges.tolist():
        depth += count == 0
        deepest = max(deepest, depth)
        depth -= max(count - 1, 0)
    return deepest
