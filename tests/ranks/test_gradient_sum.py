"""Every gradient sum: each rank fills in its own number, so that the sum is known."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

import dptrain.api as api
from dptrain.backends.replica import Replica
from dptrain.comm import STRATEGIES, make_gradient_sum
from dptrain.comm.base import GradientSum
from dptrain.comm.mpi import DeviceMirroredSum
from dptrain.comm.world import World
from dptrain.network import Dense, Network, ReLU
from dptrain.plan import SGD, Bucket, make_buckets

pytestmark = pytest.mark.mpi

NETWORK = Network((5,), [Dense(7), ReLU(), Dense(3), ReLU(), Dense(2)])


def _replica(precision: str) -> Replica:
    optimizer = SGD(momentum=0.5)
    return api.make_replica(NETWORK, "reference", 4, precision=precision, optimizer=optimizer)


def in_place(world: World, replica: Replica, buckets: tuple[Bucket, ...]) -> GradientSum:
    """Return a sum by an MPI library that accepts device memory; here it is the host's."""
    return make_gradient_sum("mirrored", world, replica, buckets) if world.comm is None else (
        DeviceMirroredSum(world, replica.flat_gradients, replica.plan.layout.size, buckets)
    )  # fmt: skip


METHODS: dict[str, Any] = {name: partial(make_gradient_sum, name) for name in STRATEGIES}
METHODS["in place"] = in_place


@pytest.mark.parametrize("precision", ["fp32", "fp64"])
@pytest.mark.parametrize("bucket_bytes", [1, 200, 1 << 20])
@pytest.mark.parametrize("strategy", METHODS)
def test_sum_of_rank_numbers(
    world: World, strategy: str, bucket_bytes: int, precision: str
) -> None:
    replica = _replica(precision)
    buckets = make_buckets(replica.plan, bucket_bytes)
    sums = METHODS[strategy](world, replica, buckets)
    flat, size = replica.flat_gradients, replica.plan.layout.size
    total = world.size * (world.size + 1) / 2
    for step in range(3):
        for index, bucket in enumerate(buckets):
            # Values that differ by element too, and are exact in float32.
            pattern = np.arange(bucket.start, bucket.stop) % 64
            flat[bucket.start : bucket.stop] = (world.rank + 1) * (pattern + step)
            sums.start(index)
            sums.poll()
        sums.finish()
        expected = total * (np.arange(flat.size) % 64 + step)
        known_everywhere = strategy != "central" or world.is_rank_zero
        span = slice(0 if known_everywhere else size, None)
        np.testing.assert_array_equal(flat[span], expected[span])


def update_slice(replica: Replica, number: int, elements: slice, learning_rate: float) -> None:
    """Apply update `number` as an engine does."""
    replica.update_slice(elements, learning_rate, number=number)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_update_leaves_all_ranks_equal(world: World, strategy: str) -> None:
    replica = _replica("fp64")
    (bucket,) = buckets = make_buckets(replica.plan, 1 << 20)
    sums = make_gradient_sum(strategy, world, replica, buckets)
    start = replica.flat_parameters.copy()
    for number in (1, 2):
        replica.flat_gradients[bucket.start : bucket.stop] = world.rank + 1
        sums.start(0)
        sums.finish_and_update(partial(update_slice, replica, number), 0.25)
        replica.updates = number
    world.check_equal(replica.flat_parameters, "parameters")
    # v₁ = g, v₂ = ½ g + g: together 2.5 α g; four roundings of numbers below 8.
    moved = start - 2.5 * 0.25 * world.size * (world.size + 1) / 2
    np.testing.assert_allclose(replica.flat_parameters, moved, rtol=0, atol=4 * 8 * 2.0**-53)
    assert replica.updates == 2


def test_buckets_must_cover_the_gradient(world: World) -> None:
    replica = _replica("fp32")
    with pytest.raises(AssertionError, match="cover"):
        make_gradient_sum("mirrored", world, replica, (Bucket(0, 16, 3),))
