"""Sums in memory that the ranks of a node share: each rank sums and updates a slice.

The gradients of all ranks of a node lie in one segment, together with one copy of the parameters
and of the optimizer state. A step after the backward pass:

1. Publish: the rank copies its loss sums to the segment and arrives at the gate of each bucket.
2. Wait until all ranks have arrived. Now all gradients are final, and no rank reads parameters.
3. Sum: rank r adds slice r of all gradients, into its own gradient. Every rank adds the loss sums
   of all ranks, so that all know at once whether the loss is finite.
4. Update: rank r updates slice r of the parameters and of the optimizer state.
5. Wait until all ranks have updated their slices. Now the ranks may compute with the new
   parameters, and overwrite their gradients.

There are two synchronisations, nothing is copied between ranks, and no all-gather is needed. A
checkpoint is written between steps only, so it never contains half-updated parameters.

Order of summation: rank 0, rank 1, …, for every element; with micro-shards the binary tree of
`dptrain.plan.shards`. It depends neither on the slices nor on the number of threads.

Cost model, for P ranks, n elements of b bytes, and a memory bandwidth B of the node that all ranks
share: each rank reads P n / P elements of gradients and writes n / P, the update reads and writes
n / P parameters and as much of the state, so

    T ≈ 2 t_gate(P) + (P + 1 + 2 (1 + s)) n b / B,      s: arrays of the optimizer state

where a gate takes one atomic addition per rank, one after the other, and the time in which a cache
line reaches all ranks. An all-reduce by MPI copies gradients through shared buffers as
well, and each rank updates all n parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from dptrain.backends.flat_arrays import FlatArrays, state_names, uses_norms
from dptrain.comm.node.gates import Gates
from dptrain.comm.node.segment import map_segment
from dptrain.comm.sums.base import GradientSum, UpdateSlice
from dptrain.comm.world import World
from dptrain.native.contributions import bind_sum
from dptrain.native.gates import GATE_BYTES
from dptrain.native.threads import threads_of
from dptrain.plan.buckets import Bucket
from dptrain.plan.flat import ALIGNMENT
from dptrain.plan.plan import Plan
from dptrain.plan.shards import MicroShards, rank_contributions

if TYPE_CHECKING:
    from dptrain.backends.replica import Replica

PAGE = 4096
"""Alignment of arrays in the segment."""

SQUARE_BYTES = 8
"""Size of an element of `FlatArrays.squares`."""


@dataclass(frozen=True, kw_only=True)
class SharedArrays(FlatArrays):
    """Flat arrays in memory that the ranks of a node share.

    Attributes:
        gates: int32 (gates, 64), the gates of the buckets and one for the end of a step.
        elements: the whole segment as elements of the gradient's type.
        slot_offsets: first element of each gradient slot of each rank of the node, in order.
        first_slots: number of the first slot of each rank of the node, and the number of all slots.
        loss_sums: (slots of the node, 16), copies of the ends of the gradients.
        merges: the order in which gradient slots of all ranks of the job are added.
    """

    gates: NDArray[np.int32]
    elements: NDArray[Any]
    slot_offsets: NDArray[np.int64]
    first_slots: NDArray[np.int64]
    loss_sums: NDArray[Any]
    merges: NDArray[np.int64]


class _SegmentLayout:
    """Offsets in bytes of the arrays in the segment of a node, each on pages of its own.

    Args:
        plan: with training.
        counts: number of gradient slots of each rank of the node, in order.

    Attributes:
        gates, loss_sums: offsets of the gates, and of the copies of the loss sums.
        flat: offsets of the parameters and of the arrays of the optimizer state.
        gradients: offset of the gradient slots of each rank.
        squares: offsets of the rows of sums of squares; none if the update uses no norm.
        size: of the segment.
    """

    def __init__(self, plan: Plan, counts: Sequence[int]) -> None:
        self._counts, self._itemsize, self._layout = counts, plan.itemsize, plan.layout
        self.size = 0
        self.num_gates = len(plan.layout.slots) + 2
        self.gates = self._append(self.num_gates * GATE_BYTES)
        self.loss_sums = self._append(sum(counts) * ALIGNMENT * plan.itemsize)
        sizes = plan.layout.size, *(plan.trained.size for _ in state_names(plan))
        self.flat = [self._append(size * plan.itemsize) for size in sizes]
        self.gradients = [self._append(count * self._slot_bytes) for count in counts]
        rows, row = plan.squares_shape
        at = self._append(rows * row * SQUARE_BYTES)
        self.squares = [at + number * row * SQUARE_BYTES for number in range(rows)]

    def _append(self, size_bytes: int) -> int:
        """Extend the segment by an array; return its offset."""
        begin, self.size = self.size, self.size + -(-size_bytes // PAGE) * PAGE
        return begin

    @property
    def _slot_bytes(self) -> int:
        return self._layout.gradient_pitch * self._itemsize

    @property
    def slot_offsets(self) -> NDArray[np.int64]:
        """First element of each gradient slot of each rank."""
        slots = [
            (begin + slot * self._slot_bytes) // self._itemsize
            for begin, count in zip(self.gradients, self._counts, strict=True)
            for slot in range(count)
        ]
        return np.array(slots, np.int64)

    def ranges_of(self, local_rank: int, num_updating: int) -> list[tuple[int, int]]:
        """Return (start, stop) of the ranges that a rank reserves: those to which it writes.

        Args:
            local_rank: the rank; the first one of a node also reserves the gates, the loss sums
                and the frozen parameters.
            num_updating: number of ranks that divide the parameters.
        """
        trained, end = self._layout.trained.size, self._layout.size * self._itemsize
        mine = slice_of_rank(slice(0, trained), local_rank, num_updating)
        start, stop = mine.start * self._itemsize, mine.stop * self._itemsize
        begin = self.gradients[local_rank]
        ranges = [(at + start, at + stop) for at in self.flat]
        ranges.append((begin, begin + self._counts[local_rank] * self._slot_bytes))
        for at in self.squares:
            first, last = (at + i // ALIGNMENT * SQUARE_BYTES for i in (mine.start, mine.stop))
            ranges.append((first, last))
        if local_rank:
            return ranges
        first, parameters = trained * self._itemsize, self.flat[0]
        return [*ranges, (0, parameters), (parameters + first, parameters + end)]


def share_arrays(world: World, plan: Plan) -> SharedArrays:
    """Return the flat arrays of this rank in memory that the ranks of the node share.

    Args:
        world: the ranks; every rank calls this function.
        plan: with training; equal on all ranks except for the micro-shards.

    Raises:
        AgreedError: memory cannot be shared; on every rank.
    """
    shards = plan.micro_shards or MicroShards(0, 0, 0)
    counts_of_all, merges = rank_contributions(shards.total, world.size, shards.counts)
    nodes, me = world.nodes(), world.local_rank
    counts = [counts_of_all[rank] for rank in nodes.own]
    segment = _SegmentLayout(plan, counts)
    mapped = map_segment(world, segment.size, segment.ranges_of(me, nodes.smallest))

    def view(at: int, *shape: int) -> NDArray[Any]:
        return np.frombuffer(mapped, plan.dtype, math.prod(shape), at).reshape(shape)

    parameters = view(segment.flat[0], plan.layout.size)
    state = [view(at, plan.trained.size) for at in segment.flat[1:]]
    num_words = segment.num_gates * GATE_BYTES // 4
    gates = np.frombuffer(mapped, np.int32, num_words, segment.gates)
    return SharedArrays(
        parameters=parameters,
        gradients=view(segment.gradients[me], counts[me], plan.layout.gradient_pitch),
        state=dict(zip(state_names(plan), state, strict=True)),
        squares=np.frombuffer(
            mapped, np.float64, math.prod(plan.squares_shape), segment.squares[0]
        ).reshape(plan.squares_shape)
        if uses_norms(plan)
        else None,
        is_owner=world.first_on_node(),
        is_shared=True,
        gates=gates.reshape(segment.num_gates, -1),
        elements=view(0, segment.size // plan.itemsize),
        slot_offsets=segment.slot_offsets,
        first_slots=np.cumsum([0, *counts]),
        loss_sums=view(segment.loss_sums, sum(counts), ALIGNMENT),
        merges=merges,
    )


def slice_of_rank(elements: slice, rank: int, ranks: int) -> slice:
    """Return the slice of `elements` that a rank sums and updates; bounds are multiples of 16.

    Args:
        elements: of the flat arrays.
        rank: the local rank; it has no elements if it is not below `ranks`.
        ranks: number of ranks that divide the elements.

    Example:
        >>> [slice_of_rank(slice(0, 80), rank, 2) for rank in range(2)]
        [slice(0, 32, None), slice(32, 80, None)]
    """
    units = (elements.stop - elements.start) // ALIGNMENT
    start, stop = units * min(rank, ranks) // ranks, units * min(rank + 1, ranks) // ranks
    return slice(elements.start + start * ALIGNMENT, elements.start + stop * ALIGNMENT)


class SharedSum(GradientSum):
    """g ← Σ_r g_r in memory that the ranks of a node share; each rank updates its slice."""

    name: ClassVar[str] = "mirrored"
    transport: ClassVar[str] = "shared"
    overlaps: ClassVar[bool] = False

    def __init__(self, world: World, replica: Replica, buckets: tuple[Bucket, ...]) -> None:
        assert isinstance(replica.arrays, SharedArrays), "the replica has arrays of its own"
        size = replica.plan.trained.size
        super().__init__(world, replica.flat_gradients, size, buckets)
        self._arrays = replica.arrays
        self._rounds = [0] * len(buckets)
        first, last = self._arrays.first_slots[world.local_rank :][:2]
        self._own_loss_sums = self._arrays.gradients[:, size : size + ALIGNMENT]
        self._published_loss_sums = self._arrays.loss_sums[first:last]
        self._slices = [self._slices_of(bucket) for bucket in buckets]
        self._gates = Gates(world, self._arrays.gates)
        assert len(buckets) < len(self._gates), "more buckets than gates"
        mine = [slices[world.local_rank] for slices in self._slices]
        self._sums = [self._bind(replica, part) if part.stop > part.start else [] for part in mine]
        self._loss_sums = self._place_loss_sums()
        self._sum_loss = bind_sum(
            threads_of(replica),
            self.gradients[size:],
            self._loss_sums.reshape(-1),
            np.arange(len(self._loss_sums), dtype=np.int64) * ALIGNMENT,
            self._arrays.merges,
        )
        self._parts = [part for part in mine if part.stop > part.start]

    def _slices_of(self, bucket: Bucket) -> list[slice]:
        """Return the slice of a bucket that each rank of the node sums and updates."""
        elements = slice(bucket.start, min(bucket.stop, self.num_parameters))
        ranks = self.world.nodes().smallest
        return [slice_of_rank(elements, rank, ranks) for rank in range(self.world.local_size)]

    def _place_loss_sums(self) -> NDArray[Any]:
        """Return where the loss sums of all ranks of the job arrive, (slots, 16)."""
        return self._arrays.loss_sums

    def _bind(self, replica: Replica, part: slice) -> list[Callable[[], None]]:
        """Return functions that sum a slice over the gradient slots of the node's ranks."""
        arrays = self._arrays
        offsets = arrays.slot_offsets + part.start
        return [
            bind_sum(
                threads_of(replica), self.gradients[part], arrays.elements, offsets, arrays.merges
            )
        ]

    # Steps.

    @property
    def updated_slices(self) -> tuple[slice, ...]:
        return tuple(self._parts)

    def synchronize(self) -> None:
        self._synchronize("the ranks of this node to arrive")

    def finish_and_update(self, update_slice: UpdateSlice, learning_rate: float) -> None:
        assert self._num_started == len(self.buckets), "finish before every bucket was started"
        self._sum_slices(range(len(self.buckets)))
        self._sum_across_nodes()
        self.update(update_slice, learning_rate)
        self._num_started = 0

    def share_squares(self) -> None:
        self._synchronize("the ranks of this node to compute norms")

    def update(self, update_slice: UpdateSlice, learning_rate: float) -> None:
        if self.before_update is not None:
            self.before_update()
        for part in self._parts:
            update_slice(part, learning_rate)
        self._synchronize("the ranks of this node to update their parameters")

    def sum_alone(self, bucket: int) -> None:
        self._start(bucket)
        self._sum_slices([bucket])
        self._sum_across_nodes()
        self._synchronize("the ranks of this node to sum their gradients")

    def _start(self, bucket: int) -> None:
        if bucket == len(self.buckets) - 1:
            self._published_loss_sums[...] = self._own_loss_sums
        self._rounds[bucket] = self._gates.arrive(bucket)

    def _poll(self) -> None:
        """Do nothing: a rank sums when its backward pass has ended."""

    def _finish(self) -> None:
        self._sum_slices(range(len(self.buckets)))
        self._sum_across_nodes()
        self._synchronize("the ranks of this node to sum their gradients")
        self._gather_slices()
        self._synchronize("the ranks of this node to read the gradients")

    def _sum_slices(self, buckets: Any) -> None:
        """Sum this rank's slices of some buckets over the ranks of the node, and the loss sums."""
        for bucket in buckets:
            self._wait(bucket)
            for launch in self._sums[bucket]:
                launch()
            if bucket == len(self.buckets) - 1:
                self._sum_loss()
            if self.on_bucket_summed is not None:
                self.on_bucket_summed(bucket)

    def _sum_across_nodes(self) -> None:
        """Sum this rank's slices and the loss sums over the nodes; here there is one node."""

    def _gather_slices(self) -> None:
        """Copy the slices that other ranks have summed."""
        arrays = self._arrays
        begins = arrays.slot_offsets[arrays.first_slots[:-1]]
        for rank, begin in enumerate(begins.tolist()):
            if rank == self.world.local_rank:
                continue
            for slices in self._slices:
                part = slices[rank]
                self.gradients[part] = arrays.elements[begin + part.start : begin + part.stop]

    # Waiting.

    def _synchronize(self, what: str) -> None:
        """Wait until all ranks of the node call this method."""
        last = len(self._gates) - 1
        self._gates.wait(last, self._gates.arrive(last), what)

    def _wait(self, bucket: int) -> None:
        """Wait for the gradients of a bucket of all ranks of the node."""
        what = "the gradients of the ranks of this node"
        self._gates.wait(bucket, self._rounds[bucket], what)
