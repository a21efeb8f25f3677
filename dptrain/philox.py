"""Counter-based random numbers: each value is a pure function of key and counter.

Philox4x32 with 10 rounds maps a 128-bit counter and a 64-bit key to four 32-bit words. Dropout
uses key = seed and counter = (block, sample, step, layer), so the mask of a sample does not depend
on the rank, the backend or the thread. A block is four consecutive elements of the sample in the
order H, W, C, or of a vector.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011, section 4.3.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)


def philox(
    counter: tuple[NDArray[np.uint64] | int, ...], key: tuple[int, int]
) -> tuple[NDArray[np.uint64], ...]:
    """Return the four words of Philox4x32-10, as uint64 arrays that hold 32-bit values.

    Args:
        counter: four 32-bit values, scalars or arrays that broadcast.
        key: two 32-bit values.
    """
    mask = np.uint64(0xFFFFFFFF)
    shift = np.uint64(32)
    c0, c1, c2, c3 = (np.asarray(c, dtype=np.uint64) & mask for c in counter)
    k0, k1 = key
    for _ in range(ROUNDS):
        p0 = np.uint64(MULTIPLIERS[0]) * c0
        p1 = np.uint64(MULTIPLIERS[1]) * c2
        c0, c1, c2, c3 = (
            (p1 >> shift) ^ c1 ^ np.uint64(k0),
            p1 & mask,
            (p0 >> shift) ^ c3 ^ np.uint64(k1),
            p0 & mask,
        )
        k0, k1 = (k0 + WEYL[0]) & 0xFFFFFFFF, (k1 + WEYL[1]) & 0xFFFFFFFF
    return c0, c1, c2, c3


def dropout_keep(
    rate: float, size: int, *, seed: int, step: int, layer: int, samples: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Return the elements that a dropout layer keeps.

    Args:
        rate: probability of a zero.
        size: number of elements of a sample.
        seed: seed of the run.
        step: number of the training step.
        layer: index of the layer in the network.
        samples: int64 (n,), identifiers of the samples.

    Returns:
        Bool (n, size), elements in the order H, W, C; True if word ≥ threshold(rate).
    """
    blocks = np.arange(-(-size // 4), dtype=np.uint64)[None, :]
    ids = np.asarray(samples).astype(np.uint64)[:, None]
    key = (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF)
    words = philox((blocks, ids, step, layer), key)
    stacked = np.stack(np.broadcast_arrays(*words), axis=-1).reshape(len(ids), 4 * blocks.size)
    return np.asarray(stacked[:, :size] >= np.uint64(threshold(rate)))


def threshold(rate: float) -> int:
    """Return rate · 2³², rounded; elements with a smaller random word are set to zero."""
    return round(rate * 2.0**32)
