"""Sums over the GPUs of one node by kernels that write to each other's memory.

Numbers are added in the order of the ranks, or along the tree of micro-shards, so all ranks compute
the same bits.
"""

from __future__ import annotations

import math
import socket
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from dptrain.backends.cuda.device.device import Array, Device, Function, Macro
from dptrain.backends.device_replica import SummedStatistics
from dptrain.backends.replica import Replica
from dptrain.comm.collective import call_on_all_ranks
from dptrain.comm.sums.enqueued import Carrier, Shared
from dptrain.comm.world import World
from dptrain.errors import UserError
from dptrain.plan.flat import SUMS
from dptrain.plan.shards import rank_contributions, sum_expression

VECTOR = 4
"""Numbers that ``all_reduce.cu`` sends by one instruction: 16 bytes."""
VECTOR_BYTES = 4 * VECTOR

EMPTY = 0xFFFFFFFF
"""Bits of a number that has not arrived, as in ``all_reduce.cu``."""

BLOCKS, THREADS = 64, 512
"""Largest number of blocks of a sum, and threads of a block. With 132 blocks a sum of 16 MB takes
80 µs instead of 86 µs, but slows down the stages that overlap with it: a step of cifar took 149 µs
instead of 148 µs (H200)."""

TEST_TIMEOUT_S = 10.0
"""Time limit of the test sum."""

TWO_SHOT_BYTES = 768 << 10
"""A two-shot all-reduce is used if each rank would send more than this in a one-shot all-reduce.
Four H200s, one-shot and two-shot: 256 KB 6.8 and 7.2 µs, 0.8 MB 12.6 and 9.8 µs, 4.3 MB 48 and
26 µs. Two ranks send equally much with both, and one-shot waits once instead of twice."""


@dataclass(frozen=True)
class Channel:
    """The part of the receive buffers that sums of one array use.

    Attributes:
        start: int64, offset in the receive buffer, in vectors of 16 bytes.
        count: vectors of the array.
        share: vectors that each rank sums in a two-shot all-reduce; 0 for a one-shot one.
        counters: uint32, the number of sums that each block has made.
    """

    start: np.int64
    count: int
    share: int
    counters: Array

    @property
    def blocks(self) -> int:
        """Number of blocks of a sum."""
        return min(math.ceil((self.share or self.count) / THREADS), BLOCKS)


class ReceiveBuffers:
    """Memory of each rank's GPU to which the other ranks' GPUs write, initially EMPTY.

    Args:
        world: the ranks, all on one node.
        device: of this rank.
        vectors: size of this rank's buffer, in vectors of 16 bytes.

    Attributes:
        host_addresses: start of each rank's buffer as kernels of this rank access it.
        addresses: the same in device memory, uint64 (ranks,).

    Raises:
        UserError: a GPU cannot access another's memory; the same error on every rank.
    """

    def __init__(self, world: World, device: Device, vectors: int) -> None:
        self._world, self._device = world, device
        self._own: Array | None = None
        self._others: list[int] = []
        try:
            handle = call_on_all_ranks(world, lambda: self._allocate(vectors))
            handles = world.all_gather_json(handle.hex())
            call_on_all_ranks(world, lambda: self._open(handles))
        except UserError:
            self.close()
            raise
        self.addresses = device.zeros((world.size,), "uint64")
        self.host_addresses = [*self._others]
        self.host_addresses.insert(world.rank, device.address(self._own))
        device.upload(self.addresses, np.array(self.host_addresses, np.uint64))

    def _allocate(self, vectors: int) -> bytes:
        self._own, handle = self._device.share(vectors * VECTOR_BYTES)
        self._device.upload(self._own.view("uint32"), np.full(vectors * VECTOR, EMPTY, np.uint32))
        self._device.synchronize()
        return handle

    def _open(self, handles: list[str]) -> None:
        for rank, handle in enumerate(handles):
            if rank != self._world.rank:
                self._others.append(self._device.open_shared(bytes.fromhex(handle)))

    def close(self) -> None:
        """Free the memory when no rank's kernels use it any more; all ranks call this."""
        for address in self._others:
            self._device.close_shared(address)
        self._others = []
        self._world.barrier()
        if self._own is not None:
            self._device.unshare(self._own)
            self._own = None


class Peers(Carrier):
    """Sums by kernels that write to the receive buffers of the other ranks and wait for theirs.

    Args:
        world: the ranks, all on one node.
        replica: has the loss sums.
        shared: the arrays that are summed and broadcast.
        timeout_s: how long a kernel waits for another rank; the world's timeout by default. After
            that it sets the replica's loss sums to NaN.

    Raises:
        UserError: a GPU cannot access another's memory; the same error on every rank.
    """

    transport: ClassVar[str] = "peer"
    kernels_add_statistics: ClassVar[bool] = True

    def __init__(
        self, world: World, replica: Replica, shared: Shared, timeout_s: float | None = None
    ) -> None:
        assert isinstance(replica.memory, Device)
        self.size, self.rank, self.device = world.size, np.int32(world.rank), replica.memory
        first = replica.plan.trained.size
        self._loss_sums = replica.flat_gradients[first : first + len(SUMS)]
        self._timeout_ns = np.uint64(1e9 * (world.timeout if timeout_s is None else timeout_s))
        self._timed_out = self.device.zeros((1,), "uint32")
        self._one_shot, self._two_shot = (
            self.device.function(
                "all_reduce.cu", f"{name}_all_reduce", RANKS=world.size, **_order(world, replica)
            )
            for name in ("one_shot", "two_shot")
        )
        self._channels: dict[int, Channel] = {}
        vectors = 0
        for array in shared.all_reduced:
            two_shot = self.size > 2 and (self.size - 1) * array.nbytes > TWO_SHOT_BYTES
            vectors = self._add_channel(array, vectors, senders=self.size, two_shot=two_shot)
        for array in shared.broadcast:
            vectors = self._add_channel(array, vectors, senders=1)
        starts = []
        for statistics in shared.statistics:
            starts.append(np.int64(vectors))
            vectors += 2 * self.size * statistics.channels * (2 if statistics.has_count else 1)
        # Other ranks send nothing to a rank other than 0 in a reduction.
        received = vectors
        for array in shared.reduced:
            vectors = self._add_channel(array, vectors, senders=self.size)
        vectors = vectors if world.is_rank_zero else received
        self._buffers = ReceiveBuffers(world, self.device, vectors)
        for statistics, start in zip(shared.statistics, starts, strict=True):
            self._connect_statistics(statistics, start)
        if shared.statistics:
            self._sum_statistics = [
                self.device.function("rank_sums.cu", "sum_statistics", HAS_COUNT=has_count)
                for has_count in (0, 1)
            ]
            self.device.load_functions()
        self.memory_bytes = vectors * VECTOR_BYTES

    def _add_channel(
        self, array: Array, start: int, *, senders: int, two_shot: bool = False
    ) -> int:
        """Add a channel that begins at `start`, and return where the next one begins."""
        count = array.size // VECTOR
        assert array.size == count * VECTOR
        share = math.ceil(count / self.size) if two_shot else 0
        counters = self.device.zeros((BLOCKS,), "uint32")
        channel = Channel(np.int64(start), count, share, counters)
        self._channels[self.device.address(array)] = channel
        # Double buffering: a sum writes to one half while the other is still read.
        return start + 2 * (2 * self.size * share or senders * count)

    def _connect_statistics(self, statistics: SummedStatistics, start: np.int64) -> None:
        """Set the arguments of the kernel that adds statistics over the ranks.

        Args:
            statistics: what it adds.
            start: offset of their part of the receive buffers, in vectors of 16 bytes.
        """
        buffers = self._buffers
        columns = math.ceil(statistics.channels / statistics.column_channels)
        counters = self.device.zeros((columns,), "uint32")
        own, following = (
            np.uint64(buffers.host_addresses[(self.rank + k) % self.size]) for k in (0, 1)
        )
        statistics.arguments = (
            np.int32(self.size),
            self.rank,
            buffers.addresses,
            own,
            following,
            start,
            counters,
            self._timed_out,
            self._loss_sums,
            self._timeout_ns,
        )
        statistics.compile()

    def all_reduce(self, array: Array) -> None:
        channel = self._channels[self.device.address(array)]
        if channel.share:
            self._launch(self._two_shot, array, channel.share)
        else:
            self._launch(self._one_shot, array, self.size, self.size)

    def reduce(self, array: Array) -> None:
        self._launch(self._one_shot, array, self.size, 1)

    def broadcast(self, array: Array) -> None:
        self._launch(self._one_shot, array, 1, self.size)

    def sum_statistics(self, statistics: SummedStatistics) -> None:
        sizes = map(np.int32, (statistics.channels, statistics.column_channels))
        self._sum_statistics[statistics.has_count](
            (1, 1, 1), (THREADS, 1, 1), [statistics.array, *sizes, *statistics.arguments]
        )

    def _launch(self, kernel: Function, array: Array, *numbers: int) -> None:
        channel = self._channels[self.device.address(array)]
        counts = map(np.int32, (channel.count, *numbers))
        state = self.rank, channel.counters, self._timed_out, self._loss_sums, self._timeout_ns
        kernel(
            (channel.blocks, 1, 1),
            (THREADS, 1, 1),
            [array.view("uint32"), *counts, self._buffers.addresses, channel.start, *state],
        )

    def close(self) -> None:
        self._buffers.close()


def _order(world: World, replica: Replica) -> dict[str, Macro]:
    """Return the macro of the order of summation, if it follows the tree of micro-shards."""
    shards = replica.plan.micro_shards
    if shards is None or world.size == 2:  # The order of two numbers is irrelevant.
        return {}
    _, merges = rank_contributions(shards.total, world.size, shards.counts)
    (total,) = sum_expression(merges)
    return {"RANKS_SUM": total}


def peer_error(world: World, replica: Replica) -> str | None:
    """Return why peer-to-peer memory is not available; None after a successful test sum."""
    devices = world.all_gather_json([socket.gethostname(), replica.memory.identity])
    if any(host != devices[0][0] for host, _ in devices):
        return "peer-to-peer memory needs all ranks on one node; use --transport nccl"
    if any(devices.count(device) > 1 for device in devices):
        return (
            "peer-to-peer memory needs a GPU for every rank, but some ranks share one; use "
            "--transport host, or start one rank per GPU"
        )
    memory = replica.memory
    array = memory.zeros((VECTOR,), "float32")
    memory.upload(array, np.array([1, world.rank, 0, 0], np.float32))
    try:
        peers = Peers(world, replica, Shared([array]), TEST_TIMEOUT_S)
    except UserError as error:
        return str(error)
    peers.all_reduce(array)
    found = memory.download(array).tolist()
    peers.close()
    is_right = found == [world.size, world.size * (world.size - 1) / 2, 0, 0]
    if all(world.all_gather_json(is_right)):
        return None
    return (
        "a test sum through peer-to-peer memory has the wrong result on some rank; use "
        "--transport nccl"
    )
