"""The chunks of a launch are independent: threads may compute them in any order.

Each chunk runs on the memory from before the launch, on a random thread whose scratch memory, like
that of all others, contains NaN. No two chunks may write the same bytes, and none may write outside
of the launch's arrays. What all of them write together must be the result of one thread.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import dptrain.api
from dptrain.backends.replica import Replica
from dptrain.batch import Batch
from dptrain.native import threads
from dptrain.native.jit import Items, kernel
from dptrain.native.threads import ARGUMENTS, ENTRY, ITEMS, Launch, ThreadPool
from dptrain.network import Network
from dptrain.plan import MicroShards
from tests.tiers import tiered
from tests.unit.backends.test_stage_buffers import BATCH, NETWORKS

THREADS = 37
"""Larger than each extent of an array, so that an array of so many rows is scratch memory."""
CALL = ctypes.CFUNCTYPE(ctypes.c_int, *(ctypes.c_int64,) * 4)
POISON = 0xFF


class Block:
    """Consecutive bytes of memory that the chunks of a launch may access.

    Attributes:
        memory: the bytes.
        before: their content before the launch.
        result: their content with what the chunks have written.
        written: the bytes that a chunk has written.
    """

    def __init__(self, start: int, stop: int) -> None:
        size = stop - start
        self.memory = np.frombuffer((ctypes.c_uint8 * size).from_address(start), np.uint8)
        self.before, self.result = self.memory.copy(), self.memory.copy()
        self.written = np.zeros(size, bool)

    def take(self, name: str) -> None:
        """Take what a chunk has written."""
        changed = self.memory != self.before
        assert not (changed & self.written).any(), f"two chunks of {name} write the same bytes"
        self.written |= changed
        self.result[changed] = self.memory[changed]
        self.memory[:] = self.before


def _bounds(array: np.ndarray) -> tuple[int, int]:
    start = array.ctypes.data
    last = sum((n - 1) * stride for n, stride in zip(array.shape, array.strides, strict=True))
    return start, start + last + array.itemsize


def _blocks(arrays: list[np.ndarray]) -> list[Block]:
    """Return the blocks of memory that the arrays cover."""
    merged: list[list[int]] = []
    for start, stop in sorted(map(_bounds, arrays)):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(stop, merged[-1][1])
        else:
            merged.append([start, stop])
    return [Block(*bounds) for bounds in merged]


def _ranges(items: int, choose: random.Random) -> list[tuple[int, int]]:
    """Divide the items into up to six ranges, or into single items, in random order."""
    inner = range(1, items)
    cuts = (
        inner if choose.random() < 0.3 and items < 40 else choose.sample(inner, min(5, items - 1))
    )
    ranges = list(pairwise(sorted({0, items, *cuts})))
    choose.shuffle(ranges)
    return ranges


def run_chunks(launch: Launch, choose: random.Random) -> None:
    """Run a launch, each chunk on the memory from before the launch."""
    launch.make_ready()
    name, slots = launch.failure.split()[1], launch.record.slots
    entry, items = (words[i] for words, i in (slots[ENTRY // 8], slots[ITEMS // 8]))
    call, arguments = CALL(entry), launch.record.address + ARGUMENTS
    if launch._pool.threads == 1 or items < 2:
        assert not call(0, items, 0, arguments)
        return
    arrays = [a for a in launch.record._arrays.values() if isinstance(a, np.ndarray) and a.size]
    scratch = [a for a in arrays if len(a) == THREADS]
    blocks = _blocks([a for a in arrays if len(a) != THREADS])
    for start, stop in _ranges(items, choose):
        thread = choose.randrange(THREADS)
        for rows in scratch:
            rows.view(np.uint8)[...] = POISON
        assert not call(start, stop, thread, arguments)
        for rows in scratch:
            others = np.delete(rows.reshape(THREADS, -1).view(np.uint8), thread, axis=0)
            assert (others == POISON).all(), f"{name} writes the scratch memory of another thread"
        for block in blocks:
            block.take(name)
    for block in blocks:
        block.memory[:] = block.result


@contextmanager
def divided_launches(choose: random.Random) -> Iterator[None]:
    """Run launches by `run_chunks`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Launch, "run", lambda launch: run_chunks(launch, choose))
        yield


@pytest.fixture(autouse=True)
def no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start no threads, whatever the size of a pool."""
    monkeypatch.setattr(threads, "own_cores", lambda: [0])


def _poison(replica: Replica) -> None:
    """Fill buffers and gradients with NaN."""
    replica._arena[:] = POISON
    replica.gradient_slots[...] = np.nan


def _train_step(replica: Replica, n: int, seed: int) -> list[Any]:
    """Make a training step and an evaluation without programs; return all results."""
    rng, network = np.random.default_rng(seed), replica.plan.network
    x = rng.standard_normal((n, *network.input_shape)).astype(np.float32)
    y = rng.integers(0, network.num_outputs, n)
    _poison(replica)
    replica.load(Batch.of(x, y))
    Replica.run(replica)
    replica.update(0.01)
    named = replica.parameters, replica.gradients, replica.statistics
    results = [{name: arrays[name].tobytes() for name in arrays} for arrays in named]
    _poison(replica)
    replica.load(Batch.of(x, y), training=False)
    Replica.run_forward(replica, loss=True)
    return [*results, replica.loss_sums()[:2], replica.output().tobytes()]


@pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS)
@pytest.mark.parametrize("shards", tiered([0, 3], [3]))
def test_chunks_of_training_are_independent(network: Network, shards: int) -> None:
    """Gradients without micro-shards depend on the number of threads, and on nothing else."""
    micro_shards = MicroShards.of_rank(shards) if shards else None
    whole, divided = (
        dptrain.api.make_replica(
            network, "numba", BATCH, threads=count, micro_shards=micro_shards, recompute=True
        )
        for count in (1 if shards else THREADS, THREADS)
    )
    for seed, n in enumerate((BATCH, 3, BATCH)):
        expected = _train_step(whole, n, seed)
        with divided_launches(random.Random(seed)):
            assert _train_step(divided, n, seed) == expected


@pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS)
def test_chunks_of_inference_are_independent(network: Network) -> None:
    """Also those that fold a batch normalisation into a convolution."""
    whole, divided = (
        dptrain.api.make_replica(network, "numba", BATCH, threads=count, training=False)
        for count in (1, THREADS)
    )
    rng = np.random.default_rng(1)
    for n in (BATCH, 2):
        x = rng.standard_normal((n, *network.input_shape)).astype(np.float32)
        for replica in (whole, divided):
            for name in replica.parameters:
                replica.parameters[name] = 1.5 * replica.parameters[name]
            replica._arena[:] = POISON
        expected = whole.forward(x)
        with divided_launches(random.Random(n)):
            divided.load(Batch.of(x), training=False)
            Replica.run_forward(divided, loss=False)
        np.testing.assert_array_equal(divided.output(), expected)


@kernel
def add_to_first(items: Items, x: Any, y: Any) -> None:
    """Add all items to one element, which needs a barrier or an atomic addition."""
    for i in range(items.start, items.stop):
        y[0] += x[i]


@kernel
def use_first_row(items: Items, x: Any, scratch: Any) -> None:
    """Copy items to the scratch memory of the first thread."""
    for i in range(items.start, items.stop):
        scratch[0, 0] = x[i]


@pytest.mark.parametrize(
    ("function", "rows", "message"),
    [(add_to_first, 1, "write the same bytes"), (use_first_row, THREADS, "of another thread")],
)
def test_a_kernel_with_a_data_race_fails(function: Any, rows: int, message: str) -> None:
    x, y = np.ones(30, np.float32), np.zeros((rows, 1), np.float32)
    launch = ThreadPool(THREADS).bind(function, x, y.reshape(-1) if rows == 1 else y)
    launch.set_items(len(x))
    with pytest.raises(AssertionError, match=message), divided_launches(random.Random(3)):
        launch.run()
