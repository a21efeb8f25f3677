"""Micro-shards: the parts of a global minibatch whose gradients are summed in a fixed order.

The global minibatch is cut into V micro-shards by position. What is summed over samples is summed
for each micro-shard first, and then over micro-shards along a fixed binary tree over their indices:

    V = 8                    0..8                     V = 5            0..5
                     0..4          4..8                            0..4     4
                  0..2  2..4    4..6  6..8                      0..2  2..4
                  0  1  2  3    4  5  6  7                      0  1  2  3

A rank owns a range of micro-shards. It computes the sum of each maximal subtree inside its range,
in one gradient slot each; the sum over ranks computes the remaining nodes of the tree. The result
is the same for any number of ranks up to V. An empty micro-shard contributes zeros.

Both sums follow a table `merges`, which describes the evaluation with a stack: after contribution i
has been pushed, the two top entries are added `merges[i]` times. The entries that remain at the end
are the results, in order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dptrain.errors import UserError
from dptrain.plan.shares import Counts, equal_counts

Range = tuple[int, int]
"""Start and stop of a range of micro-shards."""


def micro_shard_bounds(count: int, shards: int) -> NDArray[np.int64]:
    """Return the bounds of the micro-shards of a minibatch.

    The sizes of micro-shards differ by at most one, the larger ones come first, and they are empty
    if there are more micro-shards than samples.

    Args:
        count: samples of the global minibatch.
        shards: number of micro-shards.

    Returns:
        int64 (shards + 1,); micro-shard v consists of samples ``bounds[v]`` … ``bounds[v + 1]``.
    """
    small, larger = divmod(count, shards)
    indices = np.arange(shards + 1, dtype=np.int64)
    return indices * small + np.minimum(indices, larger)


def shards_of_rank(shards: int, rank: int, ranks: int, counts: Counts = ()) -> Range:
    """Return the micro-shards that a rank owns.

    Args:
        shards: number of micro-shards.
        rank, ranks: the rank, and the number of ranks.
        counts: micro-shards of each rank; if it is empty, their numbers differ by at most one.
    """
    counts = counts or equal_counts(shards, ranks)
    return sum(counts[:rank]), sum(counts[: rank + 1])


def middle(start: int, stop: int) -> int:
    """Return where the tree divides start … stop: after the largest power of two below its size."""
    return start + (1 << ((stop - start - 1).bit_length() - 1))


def maximal_subtrees(shards: int, first: int, last: int) -> tuple[Range, ...]:
    """Return the subtrees that cover the micro-shards first … last exactly, as few as possible."""

    def visit(start: int, stop: int) -> tuple[Range, ...]:
        if stop <= first or last <= start:
            return ()
        if first <= start and stop <= last:
            return ((start, stop),)
        half = middle(start, stop)
        return visit(start, half) + visit(half, stop)

    return visit(0, shards)


def merge_table(shards: int, parts: Sequence[Range]) -> NDArray[np.int64]:
    """Return the table that adds contributions along the tree, as far as they reach.

    Args:
        shards: number of micro-shards.
        parts: consecutive subtrees, one for each contribution.

    Returns:
        int64 (parts,); see the description of this module.
    """
    leaves = {part: index for index, part in enumerate(parts)}
    first, last = parts[0][0], parts[-1][1]
    merges = np.zeros(len(parts), np.int64)

    def visit(start: int, stop: int) -> int:
        """Return the index of the last contribution to this node; -1 if there is none."""
        if (start, stop) in leaves:
            return leaves[start, stop]
        if stop <= first or last <= start:
            return -1
        half = middle(start, stop)
        left = visit(start, half)
        index = max(left, visit(half, stop))
        if first <= start and stop <= last:
            merges[index] += 1
        return index

    visit(0, shards)
    return merges


def rank_contributions(
    shards: int, ranks: int, counts: Counts = ()
) -> tuple[tuple[int, ...], NDArray[np.int64]]:
    """Return what each rank contributes to the sum over ranks, and the order of that sum.

    Args:
        shards: number of micro-shards, at least one for each rank; 0 if there are none, and ranks
            are then added one after the other.
        ranks: number of ranks.
        counts: micro-shards of each rank, as for `shards_of_rank`.

    Returns:
        The number of gradient slots of each rank, and the table `merges` for all slots of rank 0,
        all slots of rank 1 and so on; a single result remains.
    """
    if not shards:
        return (1,) * ranks, np.minimum(np.arange(ranks, dtype=np.int64), 1)
    parts = [
        maximal_subtrees(shards, *shards_of_rank(shards, rank, ranks, counts))
        for rank in range(ranks)
    ]
    return tuple(map(len, parts)), merge_table(shards, [part for own in parts for part in own])


def sum_expression(merges: NDArray[np.int64]) -> list[str]:
    """Return a table `merges` as expressions of ``at(i)``, the value of contribution i, in C.

    Example:
        >>> sum_expression(MicroShards.of_rank(5).merges)
        ['(((at(0)+at(1))+(at(2)+at(3)))+at(4))']
    """
    stack: list[str] = []
    for index, count in enumerate(merges.tolist()):
        stack.append(f"at({index})")
        for _ in range(count):
            right = stack.pop()
            stack[-1] = f"({stack[-1]}+{right})"
    return stack


def add_in_order(
    contributions: Iterable[NDArray[np.generic]], merges: NDArray[np.int64]
) -> list[NDArray[np.generic]]:
    """Evaluate a table `merges` on arrays, which are overwritten.

    Args:
        contributions: arrays of equal shape; sums are written to the first operand.
        merges: the table.

    Returns:
        The results, in order.
    """
    stack: list[NDArray[np.generic]] = []
    for contribution, count in zip(contributions, merges.tolist(), strict=True):
        stack.append(contribution)
        for _ in range(count):
            right = stack.pop()
            np.add(stack[-1], right, out=stack[-1])
    return stack


def addition_steps(merges: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return a table `merges` as a list of additions of rows in place.

    Returns:
        int64 (additions, 2): pairs (a, b), row a ← row a + row b, in order; and int64 (results,):
        the rows that hold the results afterwards.
    """
    stack: list[int] = []
    steps: list[tuple[int, int]] = []
    for index, count in enumerate(merges.tolist()):
        stack.append(index)
        for _ in range(count):
            right = stack.pop()
            steps.append((stack[-1], right))
    return np.array(steps, np.int64).reshape(-1, 2), np.array(stack, np.int64)


@dataclass(frozen=True)
class MicroShards:
    """The micro-shards of one rank in a step, or in one of several passes for an update.

    Attributes:
        total: number of micro-shards of the global minibatch.
        start, stop: those of this rank.
        counts: number of those of each rank; empty if they are divided equally.
        batch_size: samples of a whole global minibatch; 0 if this rank has one of the largest
            micro-shards.
    """

    total: int
    start: int
    stop: int
    counts: Counts = ()
    batch_size: int = 0

    @classmethod
    def of_rank(
        cls, total: int, rank: int = 0, ranks: int = 1, passes: int = 1, counts: Counts = (),
        batch_size: int = 0,
    ) -> MicroShards:  # fmt: skip
        """Return the micro-shards of a rank; of all ranks by default.

        If an update has several passes, return those of the first pass; `counts` is then empty.

        Raises:
            UserError: there are several passes, but a rank or a pass would not have a whole
                subtree, so that sums over passes and then over ranks could not follow the tree.
        """
        if passes == 1:
            return cls(total, *shards_of_rank(total, rank, ranks, counts), counts, batch_size)
        of_rank, rest = divmod(total, ranks)
        if rest or of_rank.bit_count() != 1 or of_rank % passes:
            raise UserError(
                f"--accumulate is {passes} and --shards is {total} on {ranks} "
                f"rank{'s' * (ranks > 1)}, but each pass must sum a whole subtree of the "
                "micro-shards; use powers of two for --accumulate and for --shards divided by the "
                f"number of ranks, such as --accumulate {_power_of_two(passes)} --shards "
                f"{ranks * max(_power_of_two(of_rank), _power_of_two(passes))}"
            )
        first = rank * of_rank
        return cls(total, first, first + of_rank // passes, batch_size=batch_size)

    def of_pass(self, number: int) -> MicroShards:
        """Return the micro-shards of pass `number` of the same rank, if these are of pass 0."""
        first = number * self.count
        return replace(self, start=self.start + first, stop=self.stop + first)

    @property
    def count(self) -> int:
        """Number of micro-shards of this rank."""
        return self.stop - self.start

    @cached_property
    def subtrees(self) -> tuple[Range, ...]:
        """The maximal subtrees of this rank, one for each gradient slot."""
        return maximal_subtrees(self.total, self.start, self.stop)

    @cached_property
    def merges(self) -> NDArray[np.int64]:
        """The table that adds this rank's micro-shards; one result remains for each slot."""
        leaves = [(index, index + 1) for index in range(self.start, self.stop)]
        return merge_table(self.total, leaves)

    def span(self, global_count: int) -> slice:
        """Return this rank's samples in a global minibatch of `global_count` samples."""
        bounds = micro_shard_bounds(global_count, self.total)
        return slice(int(bounds[self.start]), int(bounds[self.stop]))

    def num_samples(self, global_count: int) -> int:
        """Return how many samples this rank has in a global minibatch."""
        return int(self.offsets(global_count)[-1])

    def largest(self, num_samples: int) -> int:
        """Return the samples of the largest micro-shard of all ranks.

        Args:
            num_samples: of this rank in a whole minibatch.
        """
        samples, shards = self.batch_size, self.total
        if not samples:
            samples, shards = num_samples, self.count
        return max(-(-samples // shards), 1)

    def offsets(self, global_count: int) -> NDArray[np.int64]:
        """Return the bounds of this rank's micro-shards in its part of the minibatch.

        Returns:
            int64 (count + 1,), starting with 0.
        """
        bounds = micro_shard_bounds(global_count, self.total)[self.start : self.stop + 1]
        offsets: NDArray[np.int64] = bounds - bounds[0]
        return offsets


def _power_of_two(number: int) -> int:
    """Return the smallest power of two that is at least `number`."""
    return 1 << max(number - 1, 0).bit_length()
