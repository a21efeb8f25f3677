"""Which sample goes where: pure functions of seed, epoch, step, rank and size.

An epoch is one order of all samples, cut into minibatches; the last one may be smaller. A
minibatch is cut into one contiguous shard a rank. So every sample is used exactly once an epoch,
at any number of ranks, and what a step computes does not depend on that number.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_WORD = 0xFFFFFFFFFFFFFFFF


def epoch_order(num_samples: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Order in which an epoch uses the samples.

    The order sorts one random word a sample, taken from Philox keyed by (seed, epoch). NumPy
    promises these words for all its versions, which it does not for its own shuffles: a resumed
    run sees the same order after an upgrade.

    Args:
        num_samples: samples of the training split.
        seed: of the run.
        epoch: from 0.

    Returns:
        int64 (num_samples,), a permutation of 0 … num_samples − 1.
    """
    key = np.array([seed & _WORD, epoch & _WORD], dtype=np.uint64)
    words = np.random.Philox(key=key).random_raw(num_samples)
    return np.argsort(words, kind="stable").astype(np.int64, copy=False)


def steps_per_epoch(num_samples: int, batch_size: int) -> int:
    """Minibatches in an epoch; a smaller last one counts."""
    return -(-num_samples // batch_size)


def minibatch_span(num_samples: int, batch_size: int, step: int) -> slice:
    """Place of a step's minibatch in the order of its epoch."""
    start = step % steps_per_epoch(num_samples, batch_size) * batch_size
    return slice(start, min(start + batch_size, num_samples))


def minibatch(num_samples: int, batch_size: int, seed: int, step: int) -> NDArray[np.int64]:
    """Samples of the global minibatch of a step.

    Args:
        num_samples: samples of the training split.
        batch_size: of the global minibatch.
        seed: of the run.
        step: global step number, from 0; ``step // steps_per_epoch`` is the epoch.

    Returns:
        int64 (batch_size,), fewer in the last step of an epoch.
    """
    epoch = step // steps_per_epoch(num_samples, batch_size)
    return epoch_order(num_samples, seed, epoch)[minibatch_span(num_samples, batch_size, step)]


def shard(count: int, rank: int, size: int) -> slice:
    """Part of `count` items that belongs to `rank` out of `size` ranks.

    Shards are contiguous, disjoint and cover everything; their sizes differ by at most one, the
    larger ones first. With more ranks than items some shards are empty.
    """
    small, larger = divmod(count, size)
    start = rank * small + min(rank, larger)
    return slice(start, start + small + (rank < larger))
