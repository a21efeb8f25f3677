"""Sums of batch statistics by MPI: an all-gather, after which every rank adds in the same order.

MPI's own all-reduce may add in any order. The numbers are few, so that every rank receives all of
them in about the same time. Cost model: log₂(P) messages of α + β · bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from dptrain.backends.device_replica import SummedStatistics
from dptrain.backends.memory import Memory
from dptrain.comm.statistics.statistics import Parts, StatisticsSum
from dptrain.comm.world import World
from dptrain.plan.plan import Plan
from dptrain.plan.shards import add_in_order


def add_gathered(
    world: World,
    comm: MPI.Intracomm,
    rows: NDArray[np.float64],
    counts: Sequence[int],
    merges: NDArray[np.int64],
) -> NDArray[np.float64]:
    """Gather the rows of all members of a communicator, and return their sum.

    Args:
        world: limits the wait.
        comm: every member calls this function.
        rows: (rows of this member, K), contiguous.
        counts: number of rows of each member.
        merges: the order of the sum.
    """
    width = rows.shape[1]
    received = np.empty((sum(counts), width))
    request = comm.Iallgatherv(rows, (received, [count * width for count in counts]))
    world.wait(request, "the batch statistics of all ranks")
    [total] = add_in_order(received, merges)
    return np.asarray(total, np.float64)


class MpiStatisticsSum(StatisticsSum):
    """Adds partial sums in host memory by MPI.

    Args:
        world: the ranks; every rank makes the object.
        plan: of the replicas.
        memory: of the replica; sums in a device's memory are copied to the host and back.
    """

    def __init__(self, world: World, plan: Plan, memory: Memory) -> None:
        super().__init__(world)
        # The kernels of a device add micro-shards themselves.
        added = replace(plan, micro_shards=None) if memory.asynchronous else plan
        self._parts, self._memory = Parts.of(added, world.size), memory
        assert world.comm is not None
        # Sums of gradients are in progress on the communicator of the world.
        world.barrier()  # It has a time limit, unlike the call that follows.
        self._comm = world.comm.Dup()

    def _sum(self, parts: NDArray[np.float64], totals: NDArray[np.float64]) -> None:
        rows = np.ascontiguousarray(parts)
        totals[:] = add_gathered(
            self.world, self._comm, rows, self._parts.counts, self._parts.merges
        )

    def enqueue(self, statistics: SummedStatistics) -> None:
        array = statistics.array
        own = np.array(self._memory.download(array), np.float64)
        totals = np.empty_like(own)
        self(own[None], totals)
        self._memory.upload(array, totals)

    def close(self) -> None:
        self._comm.Free()
