"""The order of samples and their distribution to ranks: functions of seed, epoch, step and rank.

An epoch is a permutation of all samples, cut into minibatches; the last one may be smaller. A
minibatch is cut into one contiguous shard for each rank, of equal or other sizes
(`dptrain.plan.shares`); with micro-shards (`dptrain.plan.shards`), shards consist of whole
micro-shards. Thus every sample is used exactly
once in an epoch, and the samples of a step do not depend on the number of ranks. Balanced sampling
replaces the permutation by an order that has each class equally often.

If gradients accumulate over several passes, the minibatch is cut into one micro-batch for each pass
first, and micro-batches into shards: the samples of a pass do not depend on the number of ranks,
and neither do its batch statistics. With micro-shards, the shard of each rank is cut into passes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from dptrain.plan.shards import MicroShards
from dptrain.plan.shares import Counts

_MASK_64 = 0xFFFFFFFFFFFFFFFF


def epoch_order(num_samples: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return the order in which an epoch uses the samples.

    The order sorts one random number per sample, taken from Philox keyed by (seed, epoch). NumPy
    guarantees these numbers for all its versions, but not the results of its shuffles; therefore a
    resumed run has the same order after an upgrade.

    Args:
        num_samples: samples of the training split.
        seed: of the run.
        epoch: from 0.

    Returns:
        int64 (num_samples,), a permutation of 0 … num_samples − 1.
    """
    key = np.array([seed & _MASK_64, epoch & _MASK_64], dtype=np.uint64)
    numbers = np.random.Philox(key=key).random_raw(num_samples)
    # This takes a quarter of the time of a stable sort. The results differ only if some of these
    # 64-bit numbers are equal.
    order = np.argsort(numbers)
    ordered = numbers[order]
    if (ordered[1:] == ordered[:-1]).any():
        order = np.argsort(numbers, kind="stable")
    return order.astype(np.int64, copy=False)


def balanced_order(labels: NDArray[np.int64], seed: int, epoch: int) -> NDArray[np.int64]:
    """Return an order of an epoch in which each class has equally many of the samples.

    The number of samples of different classes differs by at most one; the classes with one more
    change from epoch to epoch. The samples of a class occur equally often, with a difference of at
    most one. Of a class with more samples than that, each epoch has different ones.

    Args:
        labels: (num_samples,), the class of each sample.
        seed: of the run.
        epoch: from 0.

    Returns:
        int64 (num_samples,), numbers below num_samples; some can be missing, or there several
        times.

    Example:
        >>> labels = np.array([0, 0, 0, 0, 0, 0, 0, 1])
        >>> np.bincount(labels[balanced_order(labels, seed=0, epoch=0)])
        array([4, 4])
    """
    count, shuffled = len(labels), epoch_order(len(labels), seed, epoch)
    classes = [shuffled[labels[shuffled] == label] for label in np.unique(labels)]
    each, more = divmod(count, len(classes))
    sizes = [each + ((i - epoch * more) % len(classes) < more) for i in range(len(classes))]
    chosen = np.concatenate([np.resize(m, n) for m, n in zip(classes, sizes, strict=True)])
    # The orders of epochs have the streams 0, 1, …, and that of the validation data has −1.
    return chosen[epoch_order(count, seed, -2 - epoch)]


def occurrences(order: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return for each sample of an order how often it is there before.

    Example:
        >>> occurrences(np.array([3, 1, 3, 3, 1]))
        array([0, 0, 1, 2, 1])
    """
    by_sample = np.argsort(order, kind="stable")
    ordered = order[by_sample]
    found = np.empty_like(order)
    found[by_sample] = np.arange(len(order)) - np.searchsorted(ordered, ordered)
    return found


def steps_per_epoch(num_samples: int, batch_size: int) -> int:
    """Return the number of minibatches in an epoch; a smaller last one counts."""
    return -(-num_samples // batch_size)


def samples_before(num_samples: int, batch_size: int, step: int) -> int:
    """Return the number of samples that the steps before `step` use, all ranks together.

    Example:
        >>> samples_before(10, 4, 2), samples_before(10, 4, 3), samples_before(10, 4, 4)
        (8, 10, 14)
    """
    epochs, steps = divmod(step, steps_per_epoch(num_samples, batch_size))
    return epochs * num_samples + steps * batch_size


def minibatch_span(num_samples: int, batch_size: int, step: int) -> slice:
    """Return the range of a step's minibatch in the order of its epoch."""
    start = step % steps_per_epoch(num_samples, batch_size) * batch_size
    return slice(start, min(start + batch_size, num_samples))


def minibatch(num_samples: int, batch_size: int, seed: int, step: int) -> NDArray[np.int64]:
    """Return the samples of the global minibatch of a step.

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


def shard(count: int, rank: int, size: int, counts: Counts = ()) -> slice:
    """Return the range of `count` items that belongs to `rank` out of `size` ranks.

    Shards are contiguous, disjoint and cover everything; their sizes differ by at most one, the
    larger ones first. With more ranks than items some shards are empty.

    Args:
        count: number of items.
        rank, size: the rank, and the number of ranks.
        counts: shares of the ranks, to which shards are then proportional, rounded; empty for equal
            ones.

    Example:
        >>> [shard(5, rank, 2) for rank in (0, 1)], [shard(8, rank, 2, (3, 1)) for rank in (0, 1)]
        ([slice(0, 3, None), slice(3, 5, None)], [slice(0, 6, None), slice(6, 8, None)])
    """
    if counts:
        total, before = sum(counts), sum(counts[:rank])
        return slice(before * count // total, (before + counts[rank]) * count // total)
    small, larger = divmod(count, size)
    start = rank * small + min(rank, larger)
    return slice(start, start + small + (rank < larger))


def pass_shards(count: int, rank: int, size: int, passes: int) -> tuple[slice, ...]:
    """Return the ranges of a minibatch that belong to a rank, one for each pass.

    The larger shards of different passes belong to different ranks.

    Args:
        count: samples of the minibatch.
        rank, size: the rank and the number of ranks.
        passes: number of passes.

    Example:
        >>> pass_shards(10, rank=0, size=2, passes=2)
        (slice(0, 3, None), slice(8, 10, None))
        >>> pass_shards(10, rank=1, size=2, passes=2)
        (slice(3, 5, None), slice(5, 8, None))
    """
    found = []
    for number in range(passes):
        whole = shard(count, number, passes)
        own = shard(whole.stop - whole.start, (rank + number) % size, size)
        found.append(slice(whole.start + own.start, whole.start + own.stop))
    return tuple(found)


@dataclass(frozen=True)
class Sampler:
    """The samples of one rank in each step.

    Attributes:
        num_samples: samples of the training split.
        batch_size: of the global minibatch.
        seed: of the run.
        rank, size: this rank and the number of ranks.
        micro_shards: the micro-shards of this rank, in the first pass if there are several; None
            divides samples.
        passes: number of passes of a step.
        counts: without micro-shards and with one pass, the samples of each rank in a whole
            minibatch; empty divides them equally.
        labels: (num_samples,), the class of each sample, for epochs that have each class equally
            often; None for epochs that have each sample once.
    """

    num_samples: int
    batch_size: int
    seed: int
    rank: int = 0
    size: int = 1
    micro_shards: MicroShards | None = None
    passes: int = 1
    counts: Counts = ()
    labels: NDArray[np.int64] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        assert min(self.num_samples, self.batch_size) >= 1
        assert 0 <= self.rank < self.size

    @property
    def steps_per_epoch(self) -> int:
        """Minibatches in an epoch; a smaller last one counts."""
        return steps_per_epoch(self.num_samples, self.batch_size)

    @property
    def largest_shard(self) -> int:
        """Largest number of samples that this rank, or another one, has in a pass."""
        count = min(self.batch_size, self.num_samples)
        if self.counts:
            return self.counts[self.rank]
        if self.micro_shards is None:
            return -(-count // (self.size * self.passes))
        return max(int(span.stop - span.start) for span in self.spans(count))

    def spans(self, count: int) -> tuple[slice, ...]:
        """Return the ranges of this rank's samples in a minibatch of `count`, one for each pass."""
        if self.counts:
            return (shard(count, self.rank, self.size, self.counts),)
        if self.micro_shards is None:
            return pass_shards(count, self.rank, self.size, self.passes)
        return tuple(self.micro_shards.of_pass(i).span(count) for i in range(self.passes))

    def shard_size(self, count: int) -> int:
        """Return the number of this rank's samples in a minibatch of `count` samples."""
        return int(self.pass_spans(count)[-1].stop)

    def pass_spans(self, count: int, *, following: int = 0) -> list[slice]:
        """Return the range of each pass in this rank's samples of a minibatch of `count`.

        Args:
            count: samples of the minibatch, all ranks together.
            following: as for `shards`; the ranges contain these samples.
        """
        lengths = (span.stop - span.start + following for span in self.spans(count))
        stops = accumulate(lengths, initial=0)
        return [slice(start, stop) for start, stop in pairwise(stops)]

    def order(self, epoch: int) -> NDArray[np.int64]:
        """Return the samples of an epoch in their order, int64 (num_samples,)."""
        if self.labels is not None:
            return balanced_order(self.labels, self.seed, epoch)
        return epoch_order(self.num_samples, self.seed, epoch)

    def order_and_draws(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the order, and for each of its samples the number by which changes are drawn.

        This number is the sample, unless the order has the sample several times.
        """
        order = self.order(epoch)
        if self.labels is None:
            return order, order
        return order, order + self.num_samples * occurrences(order)

    def epochs(self, steps: range) -> Iterator[tuple[int, range]]:
        """Yield each epoch that contains some of `steps`, with those steps."""
        first = steps.start
        while first < steps.stop:
            epoch = first // self.steps_per_epoch
            stop = min((epoch + 1) * self.steps_per_epoch, steps.stop)
            yield epoch, range(first, stop)
            first = stop

    def shards(
        self, order: NDArray[np.int64], steps: range, *, following: int = 0
    ) -> Iterator[tuple[range, int, NDArray[np.int64]]]:
        """Yield this rank's samples in steps of one epoch, grouped by the size of the minibatch.

        Args:
            order: of the epoch.
            steps: consecutive steps of the epoch.
            following: number of samples that follow those of each pass in the minibatch, and are
                added to them; the first sample of the minibatch follows the last one.

        Yields:
            Steps with minibatches of equal size, this size, and the samples, int64 (steps, n).
            Those of the first pass are first; see `pass_spans`.
        """
        whole = len(order) // self.batch_size
        smaller = max(
            steps.start, steps.start // self.steps_per_epoch * self.steps_per_epoch + whole
        )
        for part in (range(steps.start, min(steps.stop, smaller)), range(smaller, steps.stop)):
            if not part:
                continue
            span = minibatch_span(len(order), self.batch_size, part.start)
            count = span.stop - span.start
            minibatches = order[span.start :][: len(part) * count].reshape(len(part), count)
            numbers = [np.arange(span.start, span.stop + following) for span in self.spans(count)]
            yield part, count, minibatches[:, np.concatenate(numbers) % count]
