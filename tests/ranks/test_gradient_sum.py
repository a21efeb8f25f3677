"""Every gradient sum: each rank fills in its own number, so that the sum is known."""

from __future__ import annotations

import resource
import time
from functools import partial
from typing import Any

import numpy as np
import pytest

import dptrain.api as api
from dptrain.backends import load_backend
from dptrain.backends.replica import Replica
from dptrain.comm import STRATEGIES, make_gradient_sum
from dptrain.comm.sums.base import GradientSum
from dptrain.comm.sums.mpi import DeviceMirroredSum
from dptrain.comm.sums.shared import share_arrays
from dptrain.comm.world import World
from dptrain.errors import UserError
from dptrain.network import Dense, Network, ReLU
from dptrain.plan import SGD, Bucket, MicroShards, make_buckets, make_plan
from dptrain.plan.shards import add_in_order, rank_contributions
from tests.ranks.attempts import repeat_if_disturbed

pytestmark = pytest.mark.mpi

NETWORK = Network((5,), [Dense(7), ReLU(), Dense(3), ReLU(), Dense(2)])


def _replica(precision: str, world: World, method: str) -> Replica:
    """Return a replica; its arrays are in shared memory for the method ``shared``."""
    backend = load_backend("reference")
    plan = make_plan(NETWORK, backend, 4, precision=precision, optimizer=SGD(momentum=0.5))
    shares = method == "shared" and world.size > 1
    return backend.make_replica(plan, arrays=share_arrays(world, plan) if shares else None)


def in_place(world: World, replica: Replica, buckets: tuple[Bucket, ...]) -> GradientSum:
    """Return a sum by an MPI library that accepts device memory; here it is the host's."""
    return make_gradient_sum("mirrored", world, replica, buckets) if world.comm is None else (
        DeviceMirroredSum(world, replica.flat_gradients, replica.plan.layout.size, buckets)
    )  # fmt: skip


METHODS: dict[str, Any] = {name: partial(make_gradient_sum, name) for name in STRATEGIES}
METHODS["in place"] = in_place
METHODS["shared"] = partial(make_gradient_sum, "mirrored")


@pytest.mark.parametrize(
    ("bucket_bytes", "precision"), [(1, "fp32"), (200, "fp64"), (1 << 20, "fp32")]
)
@pytest.mark.parametrize("strategy", METHODS)
def test_sum_of_rank_numbers(
    world: World, strategy: str, bucket_bytes: int, precision: str
) -> None:
    replica = _replica(precision, world, strategy)
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


@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
@pytest.mark.parametrize("method", [*STRATEGIES, "shared"])
def test_update_leaves_all_ranks_equal(world: World, method: str, bucket_bytes: int) -> None:
    replica = _replica("fp64", world, method)
    buckets = make_buckets(replica.plan, bucket_bytes)
    sums = METHODS[method](world, replica, buckets)
    world.barrier()  # The first rank has drawn the shared parameters.
    start = replica.flat_parameters.copy()
    for number in (1, 2):
        for index, bucket in enumerate(buckets):
            replica.flat_gradients[bucket.start : bucket.stop] = world.rank + 1
            sums.start(index)
        sums.finish_and_update(partial(update_slice, replica, number), 0.25)
        replica.updates = number
    world.check_equal(replica.flat_parameters, "parameters")
    # v₁ = g, v₂ = ½ g + g: together 2.5 α g; four roundings of numbers below 8.
    moved = start - 2.5 * 0.25 * world.size * (world.size + 1) / 2
    np.testing.assert_allclose(replica.flat_parameters, moved, rtol=0, atol=4 * 8 * 2.0**-53)
    assert replica.updates == 2


def test_buckets_must_cover_the_gradient(world: World) -> None:
    replica = api.make_replica(NETWORK, "reference", 4)
    with pytest.raises(AssertionError, match="cover"):
        make_gradient_sum("mirrored", world, replica, (Bucket(0, 16, 3),))


def test_memory_that_cannot_be_shared_is_an_error_on_every_rank(connected: World) -> None:
    plan = make_plan(NETWORK, load_backend("reference"), 4)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(UserError, match="cannot be shared by the ranks of a node"):
            share_arrays(connected, plan)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert share_arrays(connected, plan).gradients.sum() == 0


def test_a_sum_over_shards_follows_their_tree(connected: World) -> None:
    """The sum equals that of NumPy along the tree, bit for bit."""
    if connected.size == 1:
        pytest.skip("one rank sums nothing")
    shards = 2 * connected.size + 1
    backend = load_backend("numba")
    own = MicroShards.of_rank(shards, connected.rank, connected.size)
    plan = make_plan(NETWORK, backend, 4, micro_shards=own)
    replica = backend.make_replica(plan, arrays=share_arrays(connected, plan))
    sums = make_gradient_sum("mirrored", connected, replica, make_buckets(plan))
    counts, merges = rank_contributions(shards, connected.size)
    size = plan.layout.gradient_size
    values = np.random.default_rng(5).normal(size=(sum(counts), size)).astype(np.float32)
    first = sum(counts[: connected.rank])
    replica.gradient_slots[...] = values[first : first + counts[connected.rank]]
    sums.start(0)
    sums.finish()
    [expected] = add_in_order(values, merges)
    np.testing.assert_array_equal(replica.flat_gradients, expected)


@pytest.mark.more
def test_ranks_that_share_cores_sleep_while_they_wait(
    connected: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A waiting rank uses little processor time, which others need."""
    if connected.size == 1:
        pytest.skip("one rank sums nothing")
    monkeypatch.setattr(World, "node_cores", lambda world: 1)
    replica = _replica("fp32", connected, "shared")
    sums = make_gradient_sum("mirrored", connected, replica, make_buckets(replica.plan))

    def check(factor: float) -> None:
        waited = used = 0.0
        for _ in range(8):
            if connected.is_rank_zero:
                time.sleep(0.1 * factor)
            begin, used_before = time.perf_counter(), time.thread_time()
            sums.start(0)
            sums.finish_and_update(partial(update_slice, replica, 1), 0.0)
            waited += time.perf_counter() - begin
            used += time.thread_time() - used_before
        if not connected.is_rank_zero:
            # Part of the time, in which other programs may keep this rank from waiting.
            assert waited > 0.2
            assert used < waited / 4

    repeat_if_disturbed(connected, check)
