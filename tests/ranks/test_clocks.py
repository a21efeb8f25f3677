"""Clocks of ranks, and gradient sums timed by themselves."""

from __future__ import annotations

import time

import numpy as np
import pytest

import dptrain.api as api
from dptrain.comm import STRATEGIES, make_gradient_sum
from dptrain.comm.clocks import clock_offset
from dptrain.comm.world import World
from dptrain.measure.recorder import StepRecorder
from dptrain.network import Dense, Network
from dptrain.plan import make_buckets
from dptrain.training.engines import make_engine
from dptrain.training.engines.sum_timer import SumTimer

pytestmark = pytest.mark.mpi


def test_ranks_of_one_machine_have_one_clock(world: World) -> None:
    found = clock_offset(world)
    # What is told is wrong by half of the round trip at most.
    assert abs(found.offset_ns) <= found.round_trip_ns / 2 + 1
    assert (found.round_trip_ns > 0) == (not world.is_rank_zero)


def test_an_offset_is_found(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    real = time.perf_counter_ns
    ahead = 10**9 * world.rank
    monkeypatch.setattr(time, "perf_counter_ns", lambda: real() + ahead)
    found = clock_offset(world)
    assert abs(found.offset_ns + ahead) <= found.round_trip_ns / 2 + 1


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_sum_alone_is_timed_and_leaves_the_next_step_in_order(
    world: World, strategy: str
) -> None:
    replica = api.make_replica(Network((50,), [Dense(40), Dense(2)]), "reference", 4)
    buckets = make_buckets(replica.plan, 1)
    sums = make_gradient_sum(strategy, world, replica, buckets)
    engine = make_engine(replica, sums, buckets, StepRecorder(replica.plan.stages))
    for number in range(len(buckets)):
        assert engine.time_sum_alone(number) > 0
    replica.flat_gradients[:] = world.rank + 1
    with engine.recorder.step as step:
        timer = SumTimer(sums, step)
        for number in range(len(buckets)):
            timer.start(number)
            timer.poll()
        timer.finish_and_update(lambda elements, learning_rate: None, 0.0)
        record = step.end(samples=1, global_count=1)
    if strategy == "mirrored" or world.is_rank_zero:
        assert (replica.flat_gradients == world.size * (world.size + 1) / 2).all()
    if world.size > 1:
        assert all(end > begin > 0 for begin, end in timer.spans)
        assert [begin for begin, _ in timer.spans] == sorted(begin for begin, _ in timer.spans)
    assert 0 < record.exposed_ns <= record.time_ns
    assert record.exposed_ns + record.other_ns == record.time_ns
    assert record.hidden_ns >= 0


def test_arrays_of_all_ranks_come_to_rank_0(world: World) -> None:
    own = np.arange(2 * (world.rank + 1), dtype=np.int64).reshape(-1, 2) + world.rank
    found = world.gather(own)
    assert (found is None) == (not world.is_rank_zero)
    for rank, array in enumerate(found or []):
        expected = np.arange(2 * (rank + 1)).reshape(-1, 2) + rank
        np.testing.assert_array_equal(array, expected)
