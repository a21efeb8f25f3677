"""Sums over the GPUs of one node, which write into each other's memory."""

from __future__ import annotations

import math
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import numpy as np

from dptrain.backends.cuda.device import Array, Device, Function
from dptrain.backends.replica import Replica
from dptrain.comm.enqueued import Carrier, Shared
from dptrain.comm.world import World
from dptrain.errors import UserError
from dptrain.plan.flat import SUMS

T = TypeVar("T")

WORD = 4
"""Numbers that ``all_reduce.cu`` sends by one instruction."""

EMPTY = 0xFFFFFFFF
"""As ``all_reduce.cu`` has it."""

BLOCKS, THREADS = 64, 512
"""Most blocks of a sum, and threads of a block. 132 blocks sum 16 MB in 80 µs instead of 86, but
take from the stages beside them: cifar's step of 148 µs became 149."""

TRIAL_S = 10.0
"""How long numbers may travel when nothing else does."""

SHARES_BYTES = 768 << 10
"""Where each rank would have more to send, it adds a share of all instead: H200s, 4 ranks, at once
and by shares: 256 KB 6.8 and 7.2 µs, 0.8 MB 12.6 and 9.8, 4.3 MB 48 and 26. Two ranks send as much
either way, and wait once or twice."""


@dataclass(frozen=True)
class Channel:
    """What sums of one array use.

    Attributes:
        start: int64, of its part of an inbox, in words of 16 bytes.
        count: words of the array.
        share: words that each rank adds up, where not every rank adds up all; else 0.
        turns: uint32, counts the sums of every block.
    """

    start: np.int64
    count: int
    share: int
    turns: Array

    @property
    def blocks(self) -> int:
        """Of a sum."""
        return min(math.ceil((self.share or self.count) / THREADS), BLOCKS)


class Inboxes:
    """Memory of each rank's GPU that the other ranks' GPUs write into, all words EMPTY.

    Args:
        world: the ranks, of one node.
        device: of this rank.
        words: of this rank's, 16 bytes each.

    Attributes:
        addresses: uint64 (ranks,) where they begin, as kernels of this rank reach them.

    Raises:
        UserError: a GPU does not reach another's memory; on every rank.
    """

    def __init__(self, world: World, device: Device, words: int) -> None:
        self._world, self._device = world, device
        self._own: Array | None = None
        self._others: list[int] = []
        handles = world.all_gather_json(self._agreed(lambda: self._make(words)).hex())
        self._agreed(lambda: self._reach(handles))
        self.addresses = device.zeros((world.size,), "uint64")
        addresses = [*self._others]
        addresses.insert(world.rank, device.address(self._own))
        device.upload(self.addresses, np.array(addresses, np.uint64))

    def _make(self, words: int) -> bytes:
        self._own, handle = self._device.share(words * 4 * WORD)
        self._device.upload(self._own.view("uint32"), np.full(words * WORD, EMPTY, np.uint32))
        self._device.synchronize()
        return handle

    def _reach(self, handles: list[str]) -> None:
        for rank, handle in enumerate(handles):
            if rank != self._world.rank:
                self._others.append(self._device.open_shared(bytes.fromhex(handle)))

    def _agreed(self, action: Callable[[], T]) -> T:
        """What the action gives, if every rank's does."""
        result, error = [], None
        try:
            result.append(action())
        except UserError as caught:
            error = caught
        try:
            self._world.agree(error)
        except UserError:
            self.close()
            raise
        return result[0]

    def close(self) -> None:
        """Give the memory back when no rank's kernels use it any more; all ranks call it."""
        for address in self._others:
            self._device.close_shared(address)
        self._others = []
        self._world.barrier()
        if self._own is not None:
            self._device.unshare(self._own)
            self._own = None


class Peers(Carrier):
    """Sums by kernels that send numbers to where the others' kernels wait for them.

    Args:
        world: the ranks, of one node.
        replica: whose arrays they are.
        shared: the arrays.
        patience_s: how long a kernel waits for another rank's numbers; the world's timeout where
            left out. Behind that, the replica's shared sums are NaN.

    Raises:
        UserError: a GPU does not reach another's memory; on every rank.
    """

    transport: ClassVar[str] = "peer"

    def __init__(
        self, world: World, replica: Replica, shared: Shared, patience_s: float | None = None
    ) -> None:
        assert isinstance(replica.memory, Device)
        self.size, self.rank, self.device = world.size, np.int32(world.rank), replica.memory
        first = replica.plan.layout.size
        self._sums = replica.flat_gradients[first : first + len(SUMS)]
        self._patience_ns = np.uint64(1e9 * (world.timeout if patience_s is None else patience_s))
        self._gave_up = self.device.zeros((1,), "uint32")
        self._at_once = self.device.function(
            "all_reduce.cu", "one_shot_all_reduce", RANKS=world.size
        )
        self._by_shares = self.device.function(
            "all_reduce.cu", "two_shot_all_reduce", RANKS=world.size
        )
        self._channels: dict[int, Channel] = {}
        words = 0
        for array in shared.all_reduced:
            shares = self.size > 2 and (self.size - 1) * array.nbytes > SHARES_BYTES
            words = self._add(array, words, givers=self.size, shares=shares)
        for array in shared.broadcast:
            words = self._add(array, words, givers=1)
        own = words
        for array in shared.reduced:
            words = self._add(array, words, givers=self.size)
        words = words if world.is_rank_zero else own
        self._inboxes = Inboxes(world, self.device, words)
        self.memory_bytes = words * 4 * WORD

    def _add(self, array: Array, start: int, *, givers: int, shares: bool = False) -> int:
        """Make an array's channel at a place of the inboxes; where the next one begins."""
        count = array.size // WORD
        assert array.size == count * WORD
        share = math.ceil(count / self.size) if shares else 0
        turns = self.device.zeros((BLOCKS,), "uint32")
        self._channels[self.device.address(array)] = Channel(np.int64(start), count, share, turns)
        return start + 2 * (2 * self.size * share or givers * count)

    def all_reduce(self, array: Array) -> None:
        channel = self._channels[self.device.address(array)]
        if channel.share:
            self._start(self._by_shares, array, channel.share)
        else:
            self._start(self._at_once, array, self.size, self.size)

    def reduce(self, array: Array) -> None:
        self._start(self._at_once, array, self.size, 1)

    def broadcast(self, array: Array) -> None:
        self._start(self._at_once, array, 1, self.size)

    def _start(self, function: Function, array: Array, *numbers: int) -> None:
        channel = self._channels[self.device.address(array)]
        elements = np.int32(channel.count), *map(np.int32, numbers)
        state = self.rank, channel.turns, self._gave_up, self._sums, self._patience_ns
        addresses = self._inboxes.addresses
        function(
            (channel.blocks, 1, 1),
            (THREADS, 1, 1),
            [array.view("uint32"), *elements, addresses, channel.start, *state],
        )

    def close(self) -> None:
        self._inboxes.close()


def peer_error(world: World, replica: Replica) -> str | None:
    """Why the ranks' GPUs cannot write into each other's memory; None where they can, and did."""
    places = world.all_gather_json([socket.gethostname(), replica.memory.identity])
    if any(host != places[0][0] for host, _ in places):
        return "ranks of several nodes have no memory in common; use --transport nccl"
    if any(places.count(place) > 1 for place in places):
        return "GPUs sum by themselves with one rank each; use --transport host"
    memory = replica.memory
    array = memory.zeros((WORD,), "float32")
    memory.upload(array, np.array([1, world.rank, 0, 0], np.float32))
    try:
        peers = Peers(world, replica, Shared([array]), TRIAL_S)
    except UserError as error:
        return str(error)
    peers.all_reduce(array)
    got = memory.download(array).tolist()
    peers.close()
    right = got == [world.size, world.size * (world.size - 1) / 2, 0, 0]
    if all(world.all_gather_json(right)):
        return None
    return "what one GPU wrote into another's memory did not arrive; use --transport nccl"
