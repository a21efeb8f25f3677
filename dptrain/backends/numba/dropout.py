"""Dropout with the masks of `dptrain.plan.random`, computed again here in compiled code."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptrain.backends.numba.jit import inlined, kernel
from dptrain.plan.random import MULTIPLIERS, ROUNDS, WEYL

Array = NDArray[Any]

_FIRST, _SECOND = np.uint64(MULTIPLIERS[0]), np.uint64(MULTIPLIERS[1])
_FIRST_WEYL, _SECOND_WEYL = np.uint64(WEYL[0]), np.uint64(WEYL[1])
_MASK, _SHIFT = np.uint64(0xFFFFFFFF), np.uint64(32)


@inlined
def _philox(block: Any, sample: Any, step: Any, layer: Any, key0: Any, key1: Any) -> Any:
    """Four 32-bit words for one block, held in 64-bit integers as the products need them."""
    c0, c1, c2, c3 = block & _MASK, sample & _MASK, step & _MASK, layer & _MASK
    for _ in range(ROUNDS):
        p0, p1 = _FIRST * c0, _SECOND * c2
        c0, c1 = (p1 >> _SHIFT) ^ c1 ^ key0, p1 & _MASK
        c2, c3 = (p0 >> _SHIFT) ^ c3 ^ key1, p0 & _MASK
        key0, key1 = (key0 + _FIRST_WEYL) & _MASK, (key1 + _SECOND_WEYL) & _MASK
    return c0, c1, c2, c3


@kernel
def dropout_mask(
    start: int, stop: int, thread: int,
    mask: Array, threshold: int, layer: int, samples: Array, key0: int, key1: int, step: int,
) -> None:  # fmt: skip
    """1 where an element is kept, else 0; items are samples.

    Args:
        mask: uint8 (N, blocks, 4), elements in memory order, the last block perhaps beyond them.
        threshold: words below it are dropped.
        layer, step, key0, key1: of the counter and the key.
        samples: int64 (N,), identities.
    """
    limit, layer_, step_ = np.uint64(threshold), np.uint64(layer), np.uint64(step)
    k0, k1 = np.uint64(key0), np.uint64(key1)
    for n in range(start, stop):
        sample = np.uint64(samples[n])
        for block in range(mask.shape[1]):
            w0, w1, w2, w3 = _philox(np.uint64(block), sample, step_, layer_, k0, k1)
            mask[n, block, 0] = w0 >= limit
            mask[n, block, 1] = w1 >= limit
            mask[n, block, 2] = w2 >= limit
            mask[n, block, 3] = w3 >= limit


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
