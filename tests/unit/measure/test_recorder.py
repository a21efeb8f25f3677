"""Times of stages: nothing lost, nothing counted twice, and next to no cost."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from itertools import repeat

import numpy as np
import pytest
from numpy.typing import NDArray

import dptrain.api as api
from dptrain.backends.memory import HostMemory
from dptrain.backends.replica import Replica
from dptrain.comm import make_gradient_sum
from dptrain.comm.world import World
from dptrain.data.loader import Batch
from dptrain.measure.recorder import DATA_WAIT, EXPOSED, STEP, StepRecorder
from dptrain.network import get_network
from dptrain.plan import make_buckets
from dptrain.training.step import Stepper


def record(recorder: StepRecorder, exposed_ns: int = 0, global_count: int = 8) -> None:
    """One step in which every stage takes about 20 µs."""
    recorder.begin()
    recorder.waited()
    for stage in range(len(recorder.names) - 4):
        time.sleep(20e-6)
        recorder.lap(stage)
    recorder.end(exposed_ns=exposed_ns, hidden_ns=5, samples=4, global_count=global_count)


@pytest.fixture
def replica() -> api.Replica:
    """A small network in memory."""
    return api.make_replica(get_network("model-small"), "reference", 8)


def test_parts_of_a_step_add_up_to_it(replica: api.Replica) -> None:
    recorder = StepRecorder(replica.plan.stages)
    for _ in range(5):
        record(recorder)
    rows = recorder.rows()
    stages = rows[:, : len(replica.plan.stages)].sum(axis=1)
    whole = rows[:, recorder.names.index(STEP)]
    assert (stages >= 20_000 * len(replica.plan.stages)).all()
    assert (stages + rows[:, recorder.names.index(DATA_WAIT)] <= whole).all()


def test_what_is_skipped_belongs_to_no_stage(replica: api.Replica) -> None:
    recorder = StepRecorder(replica.plan.stages)
    recorder.begin()
    time.sleep(0.02)
    recorder.skip()
    recorder.lap(3)
    recorder.end(exposed_ns=0, hidden_ns=0, samples=1, global_count=1)
    (row,) = recorder.rows()
    assert row[3] < 20_000_000 <= row[recorder.names.index(STEP)]


def test_only_the_last_steps_are_kept_and_all_are_counted(replica: api.Replica) -> None:
    recorder = StepRecorder(replica.plan.stages, capacity=4)
    for i in range(7):
        record(recorder, exposed_ns=i, global_count=8 if i % 2 else 3)
    column = recorder.names.index(EXPOSED)
    assert recorder.steps == 7
    assert sorted(recorder.rows()[:, column]) == [3, 4, 5, 6]
    assert sorted(recorder.rows(global_count=8)[:, column]) == [3, 5]


def test_timing_costs_less_than_two_percent_of_a_step() -> None:
    """Steps with and without timing take turns, so that a busy machine slows both alike.

    Pairs are compared, not two heaps, in time of the one thread that computes: what other programs
    take of its core is not counted. The upper end of the 95% interval of the median ratio, by order
    statistics, must come to lie below the bound: on a quiet machine it does after the first pairs,
    on a busy one after more.
    """
    replica = api.make_replica(get_network("model0"), "numba", 32)
    recorder = StepRecorder(replica.plan.stages)
    buckets = make_buckets(replica.plan, None)
    sums = make_gradient_sum("mirrored", World.single(), replica, buckets)
    stepper = Stepper(replica, sums, buckets, recorder)
    random = np.random.default_rng(0)
    x = random.standard_normal((32, 3, 32, 32), np.float32)
    y = random.integers(0, 10, 32).astype(np.int32)
    batches = repeat(Batch(0, 0, x, y, np.arange(32), 32))

    def seconds(timed: bool) -> float:
        stepper.time(0 if timed else None)
        begin = time.thread_time()
        stepper.take(batches, 0.0)
        stepper.results()
        return time.thread_time() - begin

    for timed in (True, False, True, False):
        seconds(timed)
    ratios: list[float] = []
    high = math.inf
    while high >= 1.02 and len(ratios) < 4000:
        for number in range(200):
            # Each way comes first as often as the other.
            first = number % 2 == 0
            one, other = seconds(first), seconds(not first)
            ratios.append(one / other if first else other / one)
        middle, reach = len(ratios) // 2, math.ceil(0.98 * len(ratios) ** 0.5)
        ratios.sort()
        low, median, high = (ratios[middle + d] for d in (-reach, 0, reach))
    assert high < 1.02, f"steps take {median:.4f} times as long, {low:.4f} to {high:.4f}"


class Asynchronous(HostMemory):
    """Counts how often it is waited for."""

    asynchronous = True
    waits = 0

    def synchronize(self) -> None:
        self.waits += 1


class Clockwork(Replica):
    """Stages whose times are known: stage k takes k + 1 ns."""

    def stamp(self, place: int) -> None:
        self.times = getattr(self, "times", np.zeros(2 * len(self.plan.stages) + 2, np.int64))
        self.times[place] = self.now = getattr(self, "now", 0) + place + 1

    def stamps(self) -> NDArray[np.int64]:
        return self.times


def pipelined(ahead: int) -> tuple[Stepper, Replica]:
    """One rank whose device may have so many steps under way when the next is begun."""
    replica = api.make_replica(get_network("mlp-5"), "reference", 2)
    replica.memory, replica.ahead = Asynchronous(), ahead
    buckets = make_buckets(replica.plan, 2**18)
    sums = make_gradient_sum("mirrored", World.single(), replica, buckets)
    stepper = Stepper(replica, sums, buckets, StepRecorder(replica.plan.stages))
    stepper.time(None)
    return stepper, replica


def batch_of(step: int) -> Batch:
    """Two samples of zeros."""
    return Batch(step, 0, np.zeros((2, 50), np.float32), np.zeros((2, 1)), np.arange(2), 2)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_device_is_waited_for_and_timed_now_and_then(ranks: int) -> None:
    replica = api.make_replica(get_network("mlp-5"), "reference", 2)
    replica.memory = memory = Asynchronous()
    replica.__class__ = Clockwork
    recorder = StepRecorder(replica.plan.stages)
    buckets = make_buckets(replica.plan, 2**18)
    sums = make_gradient_sum("mirrored", World.single(), replica, buckets)
    sums.world.size = ranks
    stepper = Stepper(replica, sums, buckets, recorder)
    batch = Batch(0, 0, np.zeros((2, 50), np.float32), np.zeros((2, 1)), np.arange(2), 2)
    told, by_stage = [], []
    for number in range(300):
        recorder.begin()
        before = getattr(replica, "now", 0)
        stepper.step(batch, 0.0)
        told.append(len(stepper.results()))
        if getattr(replica, "now", 0) > before:
            by_stage.append(number)
    # Messages come by one turn here: its first such step is started as it is, the next captured.
    assert by_stage == [8, 9, 10, 260]
    # A step that is timed is told of with the one before; the next has none to tell of.
    assert told == [0, *[1] * 9, 2, 0, *[1] * 248, 2, 0, *[1] * 38]
    assert memory.waits == 0
    assert len(stepper.results(wait=True)) == 1
    rows, _, timed = recorder.in_order()
    assert np.flatnonzero(timed).tolist() == [10, 260]
    rows = rows[timed]
    for stage in replica.plan.stages[1:-1]:
        assert (rows[:, stage.index] == stage.index + 1).all()
    exposed = len(replica.plan.stages) + 1 if ranks > 1 else 0
    assert (rows[:, recorder.names.index("communication.exposed")] == exposed).all()


def test_a_steps_time_has_what_the_device_takes() -> None:
    """In a steady state a step waits for the one before, which takes as long."""
    replica = api.make_replica(get_network("mlp-5"), "reference", 2)
    replica.memory = Asynchronous()

    def done_after_3_ms(timeout: float) -> list[float]:
        time.sleep(0.003)
        return [0.0, 0.0, 0.0]

    replica.begun = lambda: done_after_3_ms  # type: ignore[method-assign]
    recorder = StepRecorder(replica.plan.stages)
    buckets = make_buckets(replica.plan, 2**18)
    sums = make_gradient_sum("mirrored", World.single(), replica, buckets)
    stepper = Stepper(replica, sums, buckets, recorder)
    batch = Batch(0, 0, np.zeros((2, 50), np.float32), np.zeros((2, 1)), np.arange(2), 2)
    results = []
    for _ in range(5):
        recorder.begin()
        stepper.step(batch, 0.0)
        results += stepper.results()
    assert len(results) == 4
    assert all(result.time_ns > 3e6 for result in results[1:])


@pytest.mark.parametrize("ahead", [1, 3])
def test_times_of_steps_under_way_add_up_to_the_time_of_all(ahead: int) -> None:
    """A device makes a step in 2 ms; the host pauses twice, once when all are told."""
    stepper, replica = pipelined(ahead)
    device = 0.0

    def begun() -> Callable[[float], list[float]]:
        nonlocal device
        device = end = max(device, time.perf_counter()) + 0.002

        def wait(timeout: float) -> list[float]:
            time.sleep(max(end - time.perf_counter(), 0.0))
            return [0.0, 0.0, 0.0]

        return wait

    replica.begun = begun  # type: ignore[method-assign]
    results, told, seconds = [], [], 0.0
    for number in range(16):
        begin = time.perf_counter()
        stepper.take(repeat(batch_of(number)), 0.0)
        found = stepper.results(wait=number % 8 == 7)
        seconds += time.perf_counter() - begin
        told.append(len(found))
        results += found
        if number in (3, 7):
            begin = time.perf_counter()
            time.sleep(0.005)
            # What the device does meanwhile is part of its steps.
            seconds += time.perf_counter() - begin if number == 3 else 0.0
    assert told == [*[0] * ahead, *[1] * (7 - ahead), 1 + ahead] * 2
    assert [result.step for result in results] == list(range(16))
    rows = stepper.recorder.rows()[:, stepper.recorder.names.index(STEP)]
    assert rows.tolist() == [result.time_ns for result in results]
    assert 0.0 <= seconds - rows.sum() / 1e9 < 0.1 * seconds


@pytest.mark.parametrize("ahead", [1, 2])
def test_who_stops_is_told_with_the_last_step_begun(ahead: int) -> None:
    stepper, _ = pipelined(ahead)
    told = []
    for number in range(ahead + 2):
        stepper.take(repeat(batch_of(number)), 0.0, stop=number == 1)
        told.append([(result.step, result.stop) for result in stepper.results()])
    last = [(number, number == ahead + 1) for number in range(1, ahead + 2)]
    assert told == [*[[]] * ahead, [(0, False)], last]
