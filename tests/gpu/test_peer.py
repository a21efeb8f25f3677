"""Sums through peer-to-peer memory: two ranks in one process, whose kernels run on one GPU.

Each rank has a stream and a receive buffer of its own. The kernels of both ranks must run at the
same time, so they are loaded before.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from dptrain.backends.cuda.device.gpu import GPU
from dptrain.comm.sums.peer import BLOCKS, EMPTY, THREADS, VECTOR

RANKS = 2
TIMEOUT_NS = 2_000_000_000


class Rank:
    """What one rank has on the GPU.

    Args:
        rank: its number.
        vectors: size of its receive buffer, in vectors of 16 bytes.
    """

    def __init__(self, rank: int, vectors: int) -> None:
        self.rank, self.device = rank, GPU()
        self.buffer = self.device.zeros((vectors * VECTOR,), "uint32")
        self.device.upload(self.buffer, np.full(vectors * VECTOR, EMPTY, np.uint32))
        self.counts = self.device.zeros((BLOCKS,), "uint32")
        self.timed_out = self.device.zeros((1,), "uint32")
        self.loss_sums = self.device.zeros((3,), "float32")
        self.inboxes = self.device.zeros((RANKS,), "uint64")

    def connect(self, ranks: list[Rank]) -> None:
        """Store the addresses of all receive buffers."""
        addresses = [each.device.address(each.buffer) for each in ranks]
        self.device.upload(self.inboxes, np.array(addresses, np.uint64))

    def start(self, name: str, array: Any, *numbers: int) -> None:
        """Start the kernel `name` on this rank's stream."""
        self.device.function("all_reduce.cu", name, RANKS=RANKS)(
            (2, 1, 1), (THREADS, 1, 1),
            [
                array.view("uint32"), np.int32(array.size // VECTOR), *map(np.int32, numbers),
                self.inboxes, np.int64(0), np.int32(self.rank), self.counts, self.timed_out,
                self.loss_sums, np.uint64(TIMEOUT_NS),
            ],
        )  # fmt: skip


def connected(name: str, *numbers: int, vectors: int) -> list[Rank]:
    """Return two ranks, whose kernels have run once for no elements."""
    ranks = [Rank(rank, vectors) for rank in range(RANKS)]
    for rank in ranks:
        rank.connect(ranks)
        rank.start(name, rank.device.zeros((0,), "float32"), *numbers)
    for rank in ranks:
        rank.device.synchronize()
    return ranks


def numbers_of(rank: int, turn: int, count: int) -> NDArray[np.float32]:
    """Of very different sizes, so that another order of addition gives other bits."""
    random = np.random.default_rng((rank, turn))
    x = random.normal(size=count) * 10.0 ** random.integers(-4, 4, size=count)
    return x.astype(np.float32)


@pytest.mark.parametrize("name", ["one_shot_all_reduce", "two_shot_all_reduce"])
@pytest.mark.parametrize("count", [4, 20, 8204])
def test_sums_are_added_in_the_order_of_ranks(count: int, name: str) -> None:
    """8204 numbers take every thread of both blocks three times; both halves are used again."""
    vectors = count // VECTOR
    shard = -(-vectors // RANKS)
    sizes = (shard,) if name == "two_shot_all_reduce" else (RANKS, RANKS)
    ranks = connected(name, *sizes, vectors=4 * RANKS * shard)
    arrays = [rank.device.zeros((count,), "float32") for rank in ranks]
    for turn in range(4):
        parts = [numbers_of(rank.rank, turn, count) for rank in ranks]
        for rank, array, part in zip(ranks, arrays, parts, strict=True):
            rank.device.upload(array, part)
            rank.device.synchronize()
        for rank, array in zip(ranks, arrays, strict=True):
            rank.start(name, array, *sizes)
        for rank, array in zip(ranks, arrays, strict=True):
            np.testing.assert_array_equal(rank.device.download(array), parts[0] + parts[1])
            assert not rank.device.download(rank.timed_out).any()


def test_a_rank_that_is_alone_ends_with_loss_sums_that_are_not_finite() -> None:
    rank, _ = connected("one_shot_all_reduce", RANKS, RANKS, vectors=4)
    rank.start("one_shot_all_reduce", rank.device.zeros((VECTOR,), "float32"), RANKS, RANKS)
    assert np.isnan(rank.device.download(rank.loss_sums)).all()
    assert rank.device.download(rank.timed_out).all()
