"""Random numbers of augmentation: words of Philox, see `dptrain.philox`, as fractions."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptrain.native.jit import Items, kernel
from dptrain.philox import MULTIPLIERS, ROUNDS, WEYL

Array = NDArray[Any]

_MASK, _SHIFT = np.uint64(0xFFFFFFFF), np.uint64(32)
_MULTIPLIER0, _MULTIPLIER1 = np.uint64(MULTIPLIERS[0]), np.uint64(MULTIPLIERS[1])
_WEYL0, _WEYL1 = np.uint64(WEYL[0]), np.uint64(WEYL[1])


@kernel
def draw(items: Items, samples: Array, words: Array, draws: Array) -> None:
    """Draw the numbers of samples; items are samples.

    Args:
        samples: int64 (n,), their indices.
        words: uint64 (4,), epoch, stream, and the two halves of the seed.
        draws: float64 (4 · blocks, n), receives words · 2⁻³²; rows 4b to 4b + 3 are block b.
    """
    for block in range(draws.shape[0] // 4):
        for n in range(np.uintp(items.start), np.uintp(items.stop)):
            c0, c1 = np.uint64(block), np.uint64(samples[n]) & _MASK
            c2, c3, k0, k1 = words[0], words[1], words[2], words[3]
            for _ in range(ROUNDS):
                p0, p1 = _MULTIPLIER0 * c0, _MULTIPLIER1 * c2
                c0, c1 = (p1 >> _SHIFT) ^ c1 ^ k0, p1 & _MASK
                c2, c3 = (p0 >> _SHIFT) ^ c3 ^ k1, p0 & _MASK
                k0, k1 = (k0 + _WEYL0) & _MASK, (k1 + _WEYL1) & _MASK
            first = 4 * block
            draws[first, n] = c0 * 2.0**-32
            draws[first + 1, n] = c1 * 2.0**-32
            draws[first + 2, n] = c2 * 2.0**-32
            draws[first + 3, n] = c3 * 2.0**-32
