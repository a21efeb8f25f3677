"""The interface of a sum of batch statistics, which each method of summing over ranks implements.

A normalisation over the global minibatch adds partial sums of all ranks in the middle of a step:
in the forward pass before it can normalise, and in the backward pass before the gradient of its
input. These sums are small, some kilobytes, and there are two for each such layer, so their latency
counts. They are float64.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter_ns

import numpy as np
from numpy.typing import NDArray

from dptrain.backends.device_replica import SummedStatistics
from dptrain.comm.world import World
from dptrain.plan.plan import Plan
from dptrain.plan.shards import merge_table, shards_of_rank


@dataclass(frozen=True)
class Parts:
    """The partial sums of all ranks, and the order in which they are added.

    Attributes:
        counts: number of partial sums of each rank: of its micro-shards, or 1.
        merges: the order of the sum, see `dptrain.plan.shards`; a single result remains.
    """

    counts: tuple[int, ...]
    merges: NDArray[np.int64]

    @classmethod
    def of(cls, plan: Plan, ranks: int) -> Parts:
        """Return the partial sums of a plan on so many ranks."""
        if plan.micro_shards is None:
            return cls((1,) * ranks, np.minimum(np.arange(ranks, dtype=np.int64), 1))
        total = plan.micro_shards.total
        owners = plan.micro_shards.counts
        bounds = [shards_of_rank(total, rank, ranks, owners) for rank in range(ranks)]
        leaves = [(index, index + 1) for index in range(total)]
        return cls(tuple(stop - start for start, stop in bounds), merge_table(total, leaves))


class StatisticsSum(ABC):
    """Adds partial sums of all ranks during a step, in host memory; every rank receives the totals.

    All ranks make the same calls in the same order, also those without samples.

    Order of summation: the partial sums of all ranks, one for each micro-shard, along the tree of
    `dptrain.plan.shards`, so that the bits do not depend on how micro-shards fall on ranks. Without
    micro-shards each rank has one, and they are added in the order of ranks.

    Attributes:
        world: the ranks.
        kernel_ranks: ranks over which the kernels that compute statistics on a device add them
            themselves; 0 if they do not, so that `enqueue` is called.
        after_call: called after each call with its begin and end in nanoseconds of
            `time.perf_counter_ns`; None calls nothing.
    """

    memory_bytes: int = 0
    """Device memory that it allocates, as far as it is known."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.kernel_ranks = 0
        self.after_call: Callable[[int, int], None] | None = None

    def __call__(self, parts: NDArray[np.float64], totals: NDArray[np.float64]) -> None:
        """Add the partial sums of all ranks.

        Args:
            parts: (S, K), one row for each micro-shard of this rank; one row without micro-shards.
            totals: (K,), receives the sums over all micro-shards of all ranks.
        """
        begin = perf_counter_ns()
        self._sum(parts, totals)
        if self.after_call is not None:
            self.after_call(begin, perf_counter_ns())

    def enqueue(self, statistics: SummedStatistics) -> None:
        """Replace statistics in device memory by their sums over all ranks.

        They are added in the order of ranks. With micro-shards they are rows of numbers, which are
        0 on all ranks but one, so that the sum collects them. Only sums for devices implement this.
        """
        raise NotImplementedError(f"{type(self).__name__} sums in host memory")

    def close(self) -> None:
        """Release what the ranks share. All ranks call this."""

    @abstractmethod
    def _sum(self, parts: NDArray[np.float64], totals: NDArray[np.float64]) -> None:
        """Implement the call."""


def largest_statistics(plan: Plan) -> int:
    """Return the number of elements of the largest sum of a plan.

    A normalisation of C channels needs two sums of each channel and a number of samples.
    """
    return 2 * max((s.shape[0] for s in plan.network.statistics), default=0) + 1


def largest_sum(plan: Plan) -> int:
    """Return a number of elements that no sum of a plan exceeds, also those of other kernels."""
    return 2 * largest_statistics(plan) + 14
