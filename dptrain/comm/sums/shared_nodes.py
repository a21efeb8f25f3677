"""Sums in shared memory within each node, and by MPI across nodes.

Each rank sums its slice of the gradient over the ranks of its node (`dptrain.comm.sums.shared`).
Then it sums the slice with its peers, the ranks with the same local rank on the other nodes, and
updates it. If nodes have different numbers of ranks, the slices are cut for the smallest node, and
the other ranks of a larger node have none. Transfers of a bucket overlap with the backward pass.

Order of summation: within a node rank by rank; across nodes MPI decides. With micro-shards the
order is the binary tree of `dptrain.plan.shards`: a node adds its contributions as far as the tree
allows, all nodes exchange what remains, and each adds the rest. The loss sums of all ranks are
exchanged and added in the order of ranks, or of the tree, so that all ranks have the same bits.

Cost model, for N nodes with P ranks each, n bytes, and a link per node that takes α + β · bytes:
the sum within the node (`dptrain.comm.sums.shared`), and an all-reduce of n / P bytes by P ranks at
the same time,

    T ≈ T_node + 2 log₂(N) α + 2 (N − 1)/N n β + log₂(N P) α

The last term is the exchange of loss sums. An all-reduce over all N P ranks has to carry as many
bytes over the link, in more messages. With micro-shards the exchange takes (N − 1) k n β, where k
is the number of contributions of a node: 1 if nodes and micro-shards are powers of two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from dptrain.aligned import aligned_zeros
from dptrain.comm.sums.base import GradientSum
from dptrain.comm.sums.shared import SharedSum
from dptrain.comm.world import PIECE, Nodes, World, pieces
from dptrain.native.contributions import bind_sum
from dptrain.native.threads import threads_of
from dptrain.plan.buckets import Bucket
from dptrain.plan.flat import ALIGNMENT
from dptrain.plan.shards import (
    MicroShards,
    Range,
    maximal_subtrees,
    merge_table,
    rank_contributions,
    shards_of_rank,
)
from dptrain.plan.shares import Counts

if TYPE_CHECKING:
    from dptrain.backends.replica import Replica


@dataclass(frozen=True)
class NodeOrder:
    """The order of summation with micro-shards, seen from one node.

    Attributes:
        groups: gradient slots of the node that are added within it: the first, the number, and the
            order in each group. Each group is a subtree and yields one contribution of the node.
        counts: number of contributions of each node.
        merges: the order in which the contributions of all nodes are added.
    """

    groups: tuple[tuple[int, int, NDArray[np.int64]], ...]
    counts: tuple[int, ...]
    merges: NDArray[np.int64]


def node_order(shards: int, nodes: Nodes, owners: Counts = ()) -> NodeOrder:
    """Return the order of summation on this node; each node has consecutive ranks.

    Args:
        shards: number of micro-shards.
        nodes: the nodes of the job.
        owners: micro-shards of each rank, as for `shards_of_rank`.
    """
    size = sum(map(len, nodes.ranks))
    spans = [shards_of_rank(shards, rank, size, owners) for rank in range(size)]

    def subtrees_of(ranks: Sequence[int]) -> tuple[Range, ...]:
        return maximal_subtrees(shards, spans[ranks[0]][0], spans[ranks[-1]][1])

    slots = [part for rank in nodes.own for part in maximal_subtrees(shards, *spans[rank])]
    groups = []
    for start, stop in subtrees_of(nodes.own):
        inside = [i for i, part in enumerate(slots) if start <= part[0] and part[1] <= stop]
        merges = merge_table(shards, [slots[i] for i in inside])
        groups.append((inside[0], len(inside), merges))
    contributions = [subtrees_of(ranks) for ranks in nodes.ranks]
    merges = merge_table(shards, [part for own in contributions for part in own])
    return NodeOrder(tuple(groups), tuple(map(len, contributions)), merges)


class AllReduce:
    """The sum of a slice over the nodes, in the order that MPI chooses."""

    def __init__(self, peers: MPI.Intracomm, target: NDArray[Any]) -> None:
        self._peers, self._target = peers, target

    def start(self) -> list[MPI.Request]:
        """Start the sum of what `target` contains, in place."""
        return [self._peers.Iallreduce(MPI.IN_PLACE, piece) for piece in pieces(self._target)]

    def finish(self) -> None:
        """Complete the sum when the requests are complete."""


class TreeExchange:
    """The sum of a slice over the nodes along the tree of micro-shards.

    Attributes:
        own: (contributions of this node, elements), which the caller fills in.
    """

    def __init__(
        self, peers: MPI.Intracomm, replica: Replica, target: NDArray[Any], order: NodeOrder
    ) -> None:
        self._peers = peers
        size, rows = target.size, sum(order.counts)
        assert rows * size <= PIECE, "a slice is too large for one MPI call"
        self._counts = [count * size for count in order.counts]
        self._received = aligned_zeros(rows * size, target.dtype.name)
        first = sum(order.counts[: peers.Get_rank()])
        self.own = self._received.reshape(rows, size)[first : first + len(order.groups)]
        offsets = np.arange(rows, dtype=np.int64) * size
        self.finish = bind_sum(threads_of(replica), target, self._received, offsets, order.merges)

    def start(self) -> list[MPI.Request]:
        """Start the exchange of contributions."""
        return [self._peers.Iallgatherv(MPI.IN_PLACE, (self._received, self._counts))]


class SharedNodesSum(SharedSum):
    """g ← Σ_r g_r within each node in shared memory, across nodes by MPI."""

    overlaps: ClassVar[bool] = True

    def __init__(self, world: World, replica: Replica, buckets: tuple[Bucket, ...]) -> None:
        self._nodes = world.nodes()
        shards = replica.plan.micro_shards or MicroShards(0, 0, 0)
        total, owners = shards.total, shards.counts
        self._order = node_order(total, self._nodes, owners) if total else None
        self._loss_sizes = [n * ALIGNMENT for n in rank_contributions(total, world.size, owners)[0]]
        # Exchanges by the first element of their slices.
        self._exchanges: dict[int, AllReduce | TreeExchange] = {}
        super().__init__(world, replica, buckets)
        self._loss_request: MPI.Request | None = None
        self._active: list[tuple[int, list[MPI.Request]]] = []
        self._num_exchanged = 0

    def synchronize(self) -> None:
        # The gates of `SharedSum` connect the ranks of one node only.
        GradientSum.synchronize(self)

    def _place_loss_sums(self) -> NDArray[Any]:
        return np.zeros((sum(self._loss_sizes) // ALIGNMENT, ALIGNMENT), self.gradients.dtype)

    def _bind(self, replica: Replica, part: slice) -> list[Callable[[], None]]:
        arrays, target = self._arrays, self.gradients[part]
        offsets, peers = arrays.slot_offsets + part.start, self._nodes.peers
        assert peers is not None, "a rank without peers has no slice"
        if self._order is None:
            self._exchanges[part.start] = AllReduce(peers, target)
            merges = np.minimum(np.arange(offsets.size, dtype=np.int64), 1)
            return [bind_sum(threads_of(replica), target, arrays.elements, offsets, merges)]
        exchange = TreeExchange(peers, replica, target, self._order)
        self._exchanges[part.start] = exchange
        return [
            bind_sum(
                threads_of(replica), row, arrays.elements, offsets[first : first + count], merges
            )
            for row, (first, count, merges) in zip(exchange.own, self._order.groups, strict=True)
        ]

    # Steps.

    def _start(self, bucket: int) -> None:
        super()._start(bucket)
        if bucket == len(self.buckets) - 1:
            assert self.world.comm is not None
            own = np.ascontiguousarray(self._own_loss_sums)
            received = self._loss_sums, self._loss_sizes
            self._loss_request = self.world.comm.Iallgatherv(own, received)

    def _poll(self) -> None:
        """Start the transfer of buckets that all ranks of the node have written."""
        while self._num_exchanged < self._num_started:
            bucket = self._num_exchanged
            if not self._gates.is_open(bucket, self._rounds[bucket]):
                break
            self._sum_slices([bucket])
        for _, requests in self._active:
            MPI.Request.Testall(requests)

    def _sum_slices(self, buckets: Iterable[int]) -> None:
        for bucket in buckets:
            if bucket >= self._num_exchanged:
                self._wait(bucket)
                self._exchange(bucket)

    def _exchange(self, bucket: int) -> None:
        """Sum this rank's slice of a bucket over its node, and start the sum over the nodes."""
        for launch in self._sums[bucket]:
            launch()
        exchange = self._exchange_of(bucket)
        self._active.append((bucket, [] if exchange is None else exchange.start()))
        self._num_exchanged = bucket + 1

    def _exchange_of(self, bucket: int) -> AllReduce | TreeExchange | None:
        part = self._slices[bucket][self.world.local_rank]
        return self._exchanges[part.start] if part.stop > part.start else None

    def _sum_across_nodes(self) -> None:
        for bucket, requests in self._active:
            for request in requests:
                self.world.wait(request, "the gradient sums of the other nodes")
            exchange = self._exchange_of(bucket)
            if exchange is not None:
                exchange.finish()
            if self._loss_request is not None and bucket == len(self.buckets) - 1:
                self.world.wait(self._loss_request, "the loss sums of all ranks")
                self._loss_request = None
                self._sum_loss()
            if self.on_bucket_summed is not None:
                self.on_bucket_summed(bucket)
        self._active.clear()
        self._num_exchanged = 0
