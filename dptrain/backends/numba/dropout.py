"""Dropout with the masks of `dptrain.plan.random`, computed again here in compiled code."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptrain.backends.numba.jit import expanded, kernel
from dptrain.plan.random import MULTIPLIERS, ROUNDS, WEYL

Array = NDArray[Any]

_FIRST, _SECOND = np.uint64(MULTIPLIERS[0]), np.uint64(MULTIPLIERS[1])
_FIRST_WEYL, _SECOND_WEYL = np.uint64(WEYL[0]), np.uint64(WEYL[1])
_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)

assert ROUNDS == 10  # `_philox` writes them out


@expanded
def _round(c0: Any, c1: Any, c2: Any, c3: Any, k0: Any, k1: Any, r: Any) -> Any:
    p0, p1 = _FIRST * c0, _SECOND * c2
    k0, k1 = (k0 + r * _FIRST_WEYL) & _LOW, (k1 + r * _SECOND_WEYL) & _LOW
    return (p1 >> _HALF) ^ c1 ^ k0, p1 & _LOW, (p0 >> _HALF) ^ c3 ^ k1, p0 & _LOW


@expanded
def _two_rounds(c0: Any, c1: Any, c2: Any, c3: Any, k0: Any, k1: Any, r: int) -> Any:
    c0, c1, c2, c3 = _round(c0, c1, c2, c3, k0, k1, np.uint64(r))
    return _round(c0, c1, c2, c3, k0, k1, np.uint64(r + 1))


@expanded
def _philox(c0: Any, c1: Any, c2: Any, c3: Any, k0: Any, k1: Any) -> Any:
    """Four 32-bit words of a counter, held in 64-bit integers as the products need them.

    A loop over the rounds would keep the compiler from computing eight blocks at a time.
    """
    c0, c1, c2, c3 = _two_rounds(c0, c1, c2, c3, k0, k1, 0)
    c0, c1, c2, c3 = _two_rounds(c0, c1, c2, c3, k0, k1, 2)
    c0, c1, c2, c3 = _two_rounds(c0, c1, c2, c3, k0, k1, 4)
    c0, c1, c2, c3 = _two_rounds(c0, c1, c2, c3, k0, k1, 6)
    return _two_rounds(c0, c1, c2, c3, k0, k1, 8)


@kernel
def dropout_mask(
    start: int, stop: int, thread: int,
    mask: Array, threshold: int, layer: int, samples: Array, key0: int, key1: int, step: int,
) -> None:  # fmt: skip
    """Bytes 1 where an element is kept, else 0; items are samples.

    Args:
        mask: uint32 (N, blocks): four elements each, in memory order, the lowest byte first. Four
            single bytes would not be written by vectors: 15 ns a block instead of 2.
        threshold: words below it are dropped.
        layer, step, key0, key1: of the counter and the key.
        samples: int64 (N,), identities.
    """
    limit, layer_, step_ = np.uint64(threshold), np.uint64(layer) & _LOW, np.uint64(step) & _LOW
    k0, k1 = np.uint64(key0), np.uint64(key1)
    for n in range(start, stop):
        sample = np.uint64(samples[n]) & _LOW
        for block in range(mask.shape[1]):
            w0, w1, w2, w3 = _philox(np.uint64(block) & _LOW, sample, step_, layer_, k0, k1)
            mask[n, block] = (
                np.uint32(w0 >= limit)
                | (np.uint32(w1 >= limit) << np.uint32(8))
                | (np.uint32(w2 >= limit) << np.uint32(16))
                | (np.uint32(w3 >= limit) << np.uint32(24))
            )


@kernel
def dropout_apply(
    start: int, stop: int, thread: int, x: Array, mask: Array, y: Array, factor: float
) -> None:
    """Y = x · factor where kept, x · 0 elsewhere, so that NaN stays; items are samples.

    Args:
        x, y: (N, elements).
        mask: uint8 (N, elements or a few more).
    """
    scale = np.float32(factor)
    for n in range(start, stop):
        for i in range(x.shape[1]):
            y[n, i] = x[n, i] * (scale if mask[n, i] else np.float32(0.0))


@kernel
def dropout_in_place(
    start: int, stop: int, thread: int, y: Array, mask: Array, factor: float
) -> None:
    """As `dropout_apply`, in place."""
    scale = np.float32(factor)
    for n in range(start, stop):
        for i in range(y.shape[1]):
            y[n, i] *= scale if mask[n, i] else np.float32(0.0)
