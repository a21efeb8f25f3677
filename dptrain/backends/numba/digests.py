"""The kernel of `dptrain.backends.digests`; items are words of a flat array."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptrain.native.jit import Items, kernel

Array = NDArray[Any]


@kernel
def add_digests(items: Items, words: Array, bounds: Array, first: Array, sums: Array) -> None:
    """sums[t, p] ← sums[t, p] + Σ x_i (2 i + 1) over the words of part p that thread t has.

    Both factors have 32 bits, so that processors multiply several at a time.

    Args:
        items: words.
        words: uint32 (n,), x.
        bounds: int64 (parts + 1,).
        first: uint64 (1,), position of the first word.
        sums: uint64 (threads, parts).
    """
    for p in range(bounds.size - 1):
        start, stop = max(items.start, bounds[p]), min(items.stop, bounds[p + 1])
        if start < stop:
            total, odd = np.uint64(0), np.uint64(2) * (first[0] + np.uint64(start)) + np.uint64(1)
            for i in range(np.uintp(start), np.uintp(stop)):
                total += np.uint64(words[i]) * np.uint64(np.uint32(odd))
                odd += np.uint64(2)
            sums[items.thread, p] += total
