"""Sums along the tree of micro-shards, on the ranks of this run."""

from __future__ import annotations

import numpy as np
import pytest

import dptrain.api as api
from dptrain.comm import make_gradient_sum
from dptrain.comm.world import World
from dptrain.network import Dense, Network, ReLU
from dptrain.plan import MicroShards, make_buckets
from dptrain.plan.shards import add_in_order

pytestmark = pytest.mark.mpi

NETWORK = Network((20,), [Dense(33), ReLU(), Dense(7), ReLU(), Dense(3)])


@pytest.mark.parametrize("shards", [4, 5, 8, 13])
@pytest.mark.parametrize("strategy", ["mirrored", "central"])
def test_sums_are_those_of_one_rank(
    connected: World, strategy: str, shards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Buckets consist of several pieces, and are reported when all of them are summed."""
    monkeypatch.setattr("dptrain.comm.sums.tree.PIECE", 1000)
    if connected.size == 1:
        pytest.skip("one rank sums nothing")
    own = MicroShards.of_rank(shards, connected.rank, connected.size)
    replica = api.make_replica(NETWORK, "numba", 16, micro_shards=own)
    buckets = make_buckets(replica.plan, 100)
    assert len(buckets) > 1
    sums = make_gradient_sum(strategy, connected, replica, buckets, "mpi")
    size = replica.plan.layout.size
    has_sums = strategy == "mirrored" or connected.is_rank_zero
    reported: list[int] = []

    def check(bucket: int) -> None:
        reported.append(bucket)
        part = slice(buckets[bucket].start, buckets[bucket].stop)
        if has_sums:
            np.testing.assert_array_equal(replica.flat_gradients[part], expected[part])

    sums.on_bucket_summed = check
    for step in range(3):
        random = np.random.default_rng(step)
        values = random.normal(size=(shards, replica.flat_gradients.size)).astype(np.float32)
        (expected,) = add_in_order(values.copy(), MicroShards.of_rank(shards).merges)
        slots = add_in_order(values[own.start : own.stop].copy(), own.merges)
        replica.gradient_slots[...] = slots
        for bucket in range(len(buckets)):
            sums.start(bucket)
            sums.poll()
        sums.finish()
        found = replica.flat_gradients
        np.testing.assert_array_equal(found[size:], expected[size:])
        assert reported == list(range(len(buckets)))
        reported.clear()
        if has_sums:
            np.testing.assert_array_equal(found, expected)
    sums.close()
