"""Sums over MPI along the tree of micro-shards: the same bits for any number of ranks.

Order: the contributions of all ranks, one for each gradient slot, are added as the table of
`dptrain.plan.shards.rank_contributions` says. MPI only copies, because it may add in any order.

Cost of `TreeSum` for n bytes on p ranks with s slots each, if a message takes α + β · bytes: an
all-to-all and an all-gather, 2 (p − 1) α + (1 + s) n (p − 1)/p β, and s n bytes to add on each
rank. That is (1 + s)/2 of the traffic of the best all-reduce; s is 1 if ranks and micro-shards are
powers of two. `CentralTreeSum`: rank 0 receives (p − 1) s n bytes and adds all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from dptrain.backends.replica import Replica
from dptrain.comm.sums.base import GradientSum
from dptrain.comm.sums.central import CentralSum
from dptrain.comm.world import PIECE, World
from dptrain.plan.buckets import Bucket
from dptrain.plan.flat import ALIGNMENT
from dptrain.plan.plan import Plan
from dptrain.plan.shards import add_in_order, rank_contributions

Pending = tuple[MPI.Request, slice, NDArray[Any]]
"""A transfer of contributions to some elements of the gradient, and where they arrive."""


def slots_in_host_memory(replica: Replica) -> NDArray[Any]:
    """Return the gradient slots of a replica, or a copy if they are in the memory of a device."""
    slots = replica.gradient_slots
    if not replica.memory.asynchronous:
        return slots
    return replica.memory.host_copy(slots.reshape(-1)).reshape(slots.shape)


class _Contributions:
    """The gradient slots of all ranks, and the order in which they are added.

    Args:
        world: the ranks.
        plan: has micro-shards.
        own: the gradient slots of this rank, in host memory.
    """

    def __init__(self, world: World, plan: Plan, own: NDArray[Any]) -> None:
        assert plan.micro_shards is not None
        self.own, shards = own, plan.micro_shards
        self.counts, self._merges = rank_contributions(shards.total, world.size, shards.counts)

    def pieces(self, bucket: Bucket) -> Iterator[slice]:
        """Yield ranges of elements that are few enough for one MPI call."""
        length = max(PIECE // sum(self.counts), ALIGNMENT)
        for start in range(bucket.start, bucket.stop, length):
            yield slice(start, min(start + length, bucket.stop))

    def packed(self, elements: slice, bounds: list[int]) -> NDArray[Any]:
        """Return the own slots of some elements, ordered by slice and then by slot.

        Args:
            elements: of the flat gradient.
            bounds: of the slices, from `elements.start`.
        """
        rows = self.own[:, elements]
        if len(rows) == 1:
            return rows.reshape(-1)
        parts = [rows[:, a:b].reshape(-1) for a, b in pairwise(bounds)]
        return np.concatenate(parts)

    def add(self, received: NDArray[Any]) -> NDArray[Any]:
        """Return the sum of contributions that lie one after the other; they are overwritten."""
        (total,) = add_in_order(received.reshape(sum(self.counts), -1), self._merges)
        return total


class TreeSum(GradientSum):
    """g ← Σ_v g_v over micro-shards on every rank; each rank adds one slice.

    Args:
        world: the ranks.
        replica: has the gradient slots; its plan has micro-shards. Those of a device are copied.
        buckets: of the flat gradient.
    """

    name: ClassVar[str] = "mirrored"
    transport: ClassVar[str] = "mpi"

    def __init__(self, world: World, replica: Replica, buckets: tuple[Bucket, ...]) -> None:
        slots = slots_in_host_memory(replica)
        gradients = slots[0][: replica.flat_gradients.size]
        super().__init__(world, gradients, replica.plan.trained.size, buckets)
        assert world.comm is not None
        self.comm, self._slots = world.comm, _Contributions(world, replica.plan, slots)
        self._pending: list[tuple[int, Pending]] = []

    @property
    def contributions(self) -> NDArray[Any]:
        return self._slots.own

    def _bounds(self, elements: slice) -> list[int]:
        """Return the bounds of the slice of each rank, from `elements.start`."""
        length, ranks = elements.stop - elements.start, self.world.size
        size = -(-length // (ranks * ALIGNMENT)) * ALIGNMENT
        return [min(rank * size, length) for rank in range(ranks + 1)]

    def _start(self, bucket: int) -> None:
        for elements in self._slots.pieces(self.buckets[bucket]):
            bounds, counts = self._bounds(elements), self._slots.counts
            sizes = np.diff(bounds)
            mine = int(sizes[self.world.rank])
            sent = self._slots.packed(elements, bounds)
            received = np.empty(sum(counts) * mine, sent.dtype)
            request = self.comm.Ialltoallv(
                (sent, (sizes * len(self._slots.own)).tolist()),
                (received, [count * mine for count in counts]),
            )
            self._pending.append((bucket, (request, elements, received)))

    def _poll(self) -> None:
        for _, (request, _, _) in self._pending:
            request.Test()

    def _finish(self) -> None:
        # All ranks start the same collectives in the same order: first every all-to-all, then every
        # all-gather.
        gathers = []
        for bucket, (request, elements, received) in self._pending:
            self.world.wait(request, "the contributions of all ranks to a gradient sum")
            bounds = self._bounds(elements)
            target = self.gradients[elements]
            start, stop = bounds[self.world.rank], bounds[self.world.rank + 1]
            target[start:stop] = self._slots.add(received)
            gathered = (target, np.diff(bounds).tolist())
            gathers.append((bucket, self.comm.Iallgatherv(MPI.IN_PLACE, gathered)))
        self._pending.clear()
        for index, (bucket, request) in enumerate(gathers):
            self.world.wait(request, "the gradient sums of all ranks")
            is_last = index + 1 == len(gathers) or gathers[index + 1][0] != bucket
            if is_last and self.on_bucket_summed is not None:
                self.on_bucket_summed(bucket)


class CentralTreeSum(CentralSum):
    """g ← Σ_v g_v over micro-shards on rank 0 only; the loss sums reach every rank.

    Args:
        world: the ranks.
        replica: has the gradient slots; its plan has micro-shards. Those of a device are copied.
        buckets: of the flat gradient.
    """

    def __init__(self, world: World, replica: Replica, buckets: tuple[Bucket, ...]) -> None:
        slots = slots_in_host_memory(replica)
        gradients = slots[0][: replica.flat_gradients.size]
        trained = replica.flat_parameters[: replica.plan.trained.size]
        super().__init__(world, gradients, buckets, trained, replica.memory)
        self._slots = _Contributions(world, replica.plan, slots)
        self._pending: list[tuple[int, Pending]] = []

    @property
    def contributions(self) -> NDArray[Any]:
        return self._slots.own

    def _start(self, bucket: int) -> None:
        for elements in self._slots.pieces(self.buckets[bucket]):
            length = elements.stop - elements.start
            sent = self._slots.packed(elements, [0, length])
            counts = self._slots.counts if self.world.is_rank_zero else ()
            received = np.empty(sum(counts) * length, sent.dtype)
            request = self.comm.Igatherv(sent, (received, [count * length for count in counts]))
            self._pending.append((bucket, (request, elements, received)))

    def _poll(self) -> None:
        for _, (request, _, _) in self._pending:
            request.Test()

    def _finish(self) -> None:
        for bucket, (request, elements, received) in self._pending:
            self.world.wait(request, "the contributions of all ranks to a gradient sum")
            if self.world.is_rank_zero:
                self.gradients[elements] = self._slots.add(received)
            if elements.stop == self.gradients.size:
                sums = self.gradients[self.num_parameters :]
                self.world.wait(self.comm.Ibcast(sums), "the loss sums of rank 0")
            is_last = elements.stop == self.buckets[bucket].stop
            if is_last and self.on_bucket_summed is not None:
                self.on_bucket_summed(bucket)
        self._pending.clear()
