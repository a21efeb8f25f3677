"""Times of stages: nothing lost, nothing counted twice, and next to no cost."""

from __future__ import annotations

import math
import time
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise, repeat
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from numpy.typing import NDArray

import dptrain.api as api
from dptrain.backends import load_backend
from dptrain.backends.device_replica import DeviceReplica, SumsFuture
from dptrain.backends.memory import HostMemory
from dptrain.backends.replica import Replica
from dptrain.batch import Batch
from dptrain.comm import make_gradient_sum
from dptrain.comm.world import World
from dptrain.measure.recorder import (
    CHECKPOINT,
    DATA_WAIT,
    DELAYS,
    EVALUATION,
    EXPOSED,
    SPANS,
    STEP,
    UNKNOWN_NS,
    Laps,
    StepRecord,
    StepRecorder,
    SumTimes,
)
from dptrain.network import get_network
from dptrain.plan import make_buckets
from dptrain.training.engines import DeviceEngine, Engine, make_engine
from dptrain.training.engines.device import FIRST_TIMED, TIMED_EVERY


def record(recorder: StepRecorder, exposed_ns: int = 0, global_count: int = 8) -> None:
    """One step in which every stage takes about 20 µs."""
    recorder.begin()
    recorder.waited()
    for stage in range(len(recorder.names) - len((*SPANS, *DELAYS))):
        time.sleep(20e-6)
        recorder.lap(stage)
    sums = SumTimes(exposed_ns, hidden_ns=5)
    recorder.end(sums, samples=4, global_count=global_count)


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
    begin = time.perf_counter_ns()
    time.sleep(0.02)
    recorder.skip()
    recorder.lap(3)
    end = time.perf_counter_ns()
    recorder.end(samples=1, global_count=1)
    (row,) = recorder.rows()
    assert row[3] <= end - begin - 20_000_000
    assert row[recorder.names.index(STEP)] >= end - begin


def test_steps_last_from_completion_to_completion(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time between two steps belongs to the second one, evaluation and checkpoint by name."""
    now = 0
    monkeypatch.setattr("dptrain.measure.recorder.perf_counter_ns", lambda: now)
    recorder = StepRecorder([])

    def step(request: int, end: int) -> None:
        nonlocal now
        now = request
        recorder.begin()
        now = end
        recorder.end(samples=1, global_count=1)

    step(100, 110)
    with recorder.between(EVALUATION):
        now = 140
    with recorder.between(CHECKPOINT):
        now = 145
    step(150, 160)
    step(161, 171)
    now = 1000
    recorder.restart()
    step(2000, 2012)
    rows = recorder.rows()
    assert rows[:, recorder.names.index(STEP)].tolist() == [10, 50, 11, 12]
    assert rows[:, recorder.names.index(EVALUATION)].tolist() == [0, 30, 0, 0]
    assert rows[:, recorder.names.index(CHECKPOINT)].tolist() == [0, 5, 0, 0]
    assert recorder.totals_ns == {EVALUATION: 30, CHECKPOINT: 5}


def test_busy_times_are_those_of_whole_minibatches_without_sums_and_evaluations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0
    monkeypatch.setattr("dptrain.measure.recorder.perf_counter_ns", lambda: now)
    recorder = StepRecorder([])
    for samples, exposed, evaluation, recorder.timed in (
        (4, 5, 0, False), (4, 7, 11, True), (2, 0, 0, True), (4, 1, 0, False),
    ):  # fmt: skip
        if evaluation:
            with recorder.between(EVALUATION):
                now += evaluation
        recorder.begin()
        now += 100
        recorder.end(SumTimes(exposed), samples=samples, global_count=samples)
    whole = [[4, 95, 5], [4, 93, 7], [4, 99, 1]]
    assert recorder.busy_times(0, only_timed=False).tolist() == whole
    assert recorder.busy_times(0, only_timed=True).tolist() == whole[1:2]
    assert recorder.busy_times(2, only_timed=False).tolist() == whole[2:]


def test_only_the_last_steps_are_kept_and_all_are_counted(replica: api.Replica) -> None:
    recorder = StepRecorder(replica.plan.stages, capacity=4)
    for i in range(7):
        record(recorder, exposed_ns=i, global_count=8 if i % 2 else 3)
    column = recorder.names.index(EXPOSED)
    assert recorder.steps == 7
    assert sorted(recorder.rows()[:, column]) == [3, 4, 5, 6]
    assert sorted(recorder.rows(global_count=8)[:, column]) == [3, 5]


def test_columns_are_in_the_order_of_their_names(replica: api.Replica) -> None:
    recorder = StepRecorder(replica.plan.stages)
    stages = list(range(len(replica.plan.stages)))
    durations = {
        "data_wait": 101, "communication.exposed": 102, "communication.hidden": 103,
        "evaluation": 104, "checkpoint": 105, "communication.statistics": 106, "step": 107,
    }  # fmt: skip
    record = StepRecord(stages)
    for name, duration in durations.items():
        setattr(record, "time_ns" if name == STEP else f"{name.rpartition('.')[2]}_ns", duration)
    found = dict(zip(recorder.names, record.columns(), strict=True))
    delays = dict.fromkeys(DELAYS, UNKNOWN_NS)  # Unknown, not 0: nothing was measured.
    assert found == {s.name: s.index for s in replica.plan.stages} | delays | durations


def test_sums_of_statistics_are_no_part_of_the_stages_that_they_interrupt() -> None:
    ends = [110, 150, 200]
    laps = Laps([4, 5, 6], lambda: ends, 100, ((120, 135), (138, 140), (160, 170)))
    assert list(laps.times()) == [(4, 110, 10, 0), (5, 133, 23, 17), (6, 190, 40, 10)]


def test_timing_costs_less_than_five_percent_of_a_step() -> None:
    """Steps with and without timing take turns, so that a busy machine slows both alike.

    Pairs are compared, not two heaps, in time of the one thread that computes: what other programs
    take of its core is not counted. The upper end of the 95% interval of the median ratio, by order
    statistics, must come to lie below the bound: on a quiet machine it does after the first pairs,
    on a busy one after more.
    """
    replica = api.make_replica(get_network("model0"), "numba", 32)
    recorder = StepRecorder(replica.plan.stages)
    buckets = make_buckets(replica.plan)
    sums = make_gradient_sum("mirrored", World.single(), replica, buckets)
    engine = make_engine(replica, sums, buckets, recorder)
    random = np.random.default_rng(0)
    x = random.standard_normal((32, 3, 32, 32), np.float32)
    y = random.integers(0, 10, 32).astype(np.int32)
    batches = repeat(Batch(0, 0, x, y, np.arange(32), 32))

    def seconds(timed: bool) -> float:
        engine.time_stages(0 if timed else None)
        begin = time.thread_time()
        engine.step(batches, 0.0)
        engine.results()
        return time.thread_time() - begin

    for timed in (True, False, True, False):
        seconds(timed)
    ratios: list[float] = []
    high = math.inf
    while high >= 1.05 and len(ratios) < 4000:
        for number in range(200):
            # Each way comes first as often as the other.
            first = number % 2 == 0
            one, other = seconds(first), seconds(not first)
            ratios.append(one / other if first else other / one)
        middle, reach = len(ratios) // 2, math.ceil(0.98 * len(ratios) ** 0.5)
        ratios.sort()
        low, median, high = (ratios[middle + d] for d in (-reach, 0, reach))
    assert high < 1.05, f"steps take {median:.4f} times as long, {low:.4f} to {high:.4f}"


class Asynchronous(HostMemory):
    """Counts how often the host waits for it."""

    asynchronous = True
    waits = 0

    def synchronize(self) -> None:
        self.waits += 1


class FakeDeviceReplica(DeviceReplica):
    """A replica in host memory that looks like one on a device: stage k takes k + 1 ns."""

    now = 0
    staging_slot = 0
    cache_images = share_cached_images = upload_hyperparameters = Mock()
    # It has no slots for steps in series.
    encode_windows = move_staged_batch = unpack_series_step = open_series_step = end_series_step = (
        Mock()
    )
    series_future = staged_sums = staged_time = Mock()
    image_format = None

    def __init__(self, max_steps_in_flight: int) -> None:
        plan = api.make_replica(get_network("mlp-5"), "reference", 2).plan
        super().__init__(load_backend("reference"), plan, seed=0)
        self.memory: Asynchronous = Asynchronous()
        self.max_steps_in_flight = max_steps_in_flight
        self.times = np.zeros(2 * len(plan.stages) + 2, np.int64)

    def stage_batch(
        self,
        batch: Batch,
        *,
        learning_rate: Any = None,
        slot: int | None = None,
        **options: Any,
    ) -> None:
        self.staging_slot = slot or 0
        self.load(batch, **options)

    def unpack_staged_batch(self) -> None:
        pass

    def load_stream(self) -> AbstractContextManager[None]:
        return nullcontext()

    def select_step(self, slot: int, n: int) -> None:
        pass

    def run(self, listener: Any = None, *, overlap: bool = True, early: bool = False) -> None:
        Replica.run(self, listener)

    def enqueue_sums_copy(self) -> None:
        pass

    def enqueue_update(self, *, rest: bool = False) -> None:
        self.update_kernel()(self.context)

    def sums_future(self) -> SumsFuture:
        sums = self.loss_sums()
        return lambda timeout: sums

    def record_time(self, index: int) -> None:
        self.now += index + 1
        self.times[index] = self.now

    def recorded_times(self) -> NDArray[np.int64]:
        return self.times


def engine_of(replica: Replica, ranks: int = 1) -> Engine:
    """Return an engine that believes in so many ranks."""
    buckets = make_buckets(replica.plan, 2**18)
    sums = make_gradient_sum("mirrored", World.single(), replica, buckets)
    sums.world.size = ranks
    return make_engine(replica, sums, buckets, StepRecorder(replica.plan.stages))


def batch_of(step: int) -> Batch:
    """Two samples of zeros."""
    return Batch(step, 0, np.zeros((2, 50), np.float32), np.zeros((2, 1)), np.arange(2), 2)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_device_is_waited_for_and_timed_now_and_then(ranks: int) -> None:
    replica = FakeDeviceReplica(0)
    engine = engine_of(replica, ranks)
    assert isinstance(engine, DeviceEngine)
    batches = repeat(batch_of(0))
    num_results, by_stage = [], []
    for number in range(FIRST_TIMED + TIMED_EVERY + 40):
        before = replica.now
        engine.step(batches, 0.0)
        num_results.append(len(engine.results()))
        if replica.now > before:
            by_stage.append(number)
    # There is one staging slot: the first such step runs uncaptured, and the next is captured.
    second = FIRST_TIMED + TIMED_EVERY
    assert by_stage == [8, 9, FIRST_TIMED, second]
    # A timed step is reported with the one before; the next one has none to report.
    assert num_results == [0, *[1] * 9, 2, 0, *[1] * (TIMED_EVERY - 2), 2, 0, *[1] * 38]
    assert replica.memory.waits == 0
    assert len(engine.results(wait=True)) == 1
    recorder = engine.recorder
    rows, _, timed = recorder.all_rows()
    assert np.flatnonzero(timed).tolist() == [FIRST_TIMED, second]
    rows = rows[timed]
    for stage in replica.plan.stages[1:-1]:
        assert (rows[:, stage.index] == stage.index + 1).all()
    exposed = len(replica.plan.stages) + 1 if ranks > 1 else 0
    assert (rows[:, recorder.names.index("communication.exposed")] == exposed).all()


def test_a_steps_time_has_what_the_device_takes() -> None:
    """In a steady state a step waits for the one before, which takes as long."""
    replica = FakeDeviceReplica(0)

    def done_after_3_ms(timeout: float) -> list[float]:
        time.sleep(0.003)
        return [0.0, 0.0, 0.0]

    replica.sums_future = lambda: done_after_3_ms  # type: ignore[method-assign]
    engine = engine_of(replica)
    results = []
    for _ in range(5):
        engine.step(repeat(batch_of(0)), 0.0)
        results += engine.results()
    assert len(results) == 4
    assert all(result.time_ns > 3e6 for result in results[1:])


@pytest.mark.parametrize("ahead", [1, 3])
def test_times_of_steps_in_flight_add_up_to_the_time_of_all(
    ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device makes a step in 2 ms; the host pauses twice, once when all are reported.

    The clock counts reads, waits and pauses, but not what other programs take of the core.
    """
    now = 0

    def read_clock() -> int:
        nonlocal now
        now += 1000
        return now

    def wait_until(time_ns: int) -> None:
        nonlocal now
        now = max(now, time_ns)

    monkeypatch.setattr("dptrain.measure.recorder.perf_counter_ns", read_clock)
    replica = FakeDeviceReplica(ahead)
    engine = engine_of(replica)
    engine.time_stages(None)
    device = 0

    def sums_future() -> SumsFuture:
        nonlocal device
        device = end = max(device, now) + 2_000_000

        def wait(timeout: float) -> list[float]:
            wait_until(end)
            return [0.0, 0.0, 0.0]

        return wait

    replica.sums_future = sums_future  # type: ignore[method-assign]
    results, num_results, expected = [], [], 0
    for number in range(16):
        begin = now
        engine.step(repeat(batch_of(number)), 0.0)
        found = engine.results(wait=number % 8 == 7)
        expected += now - begin
        num_results.append(len(found))
        results += found
        if number in (3, 7):
            # What the host does between two steps is part of the second one.
            wait_until(now + 5_000_000)
            expected += 5_000_000
    assert num_results == [*[0] * ahead, *[1] * (7 - ahead), 1 + ahead] * 2
    assert [result.step for result in results] == list(range(16))
    rows = engine.recorder.rows()[:, engine.recorder.names.index(STEP)]
    assert rows.tolist() == [result.time_ns for result in results]
    assert 0 <= expected - rows.sum() < 0.01 * expected


@pytest.mark.parametrize("ahead", [1, 2])
def test_a_stop_request_is_reported_with_the_last_step_in_flight(ahead: int) -> None:
    engine = engine_of(FakeDeviceReplica(ahead))
    engine.time_stages(None)
    reported = []
    for number in range(ahead + 2):
        engine.step(repeat(batch_of(number)), 0.0, stop=number == 1)
        reported.append([(result.step, result.stop) for result in engine.results()])
    last = [(number, number == ahead + 1) for number in range(1, ahead + 2)]
    assert reported == [*[[]] * ahead, [(0, False)], last]


def test_pieces_of_a_stage_add_up_within_a_step_and_not_over_steps(replica: api.Replica) -> None:
    recorder = StepRecorder(replica.plan.stages)
    for _ in range(3):
        recorder.begin()
        for _ in range(2):
            recorder.skip()
            time.sleep(0.001)
            recorder.add_lap(0)
        recorder.end(samples=1, global_count=1)
    rows = recorder.rows()
    assert (rows[:, 0] >= 2_000_000).all()
    assert (rows[:, 0] <= rows[:, recorder.names.index(STEP)]).all()


def test_sums_between_pieces_of_an_update_do_not_overlap_it(replica: api.Replica) -> None:
    """The update is shown as one interval, at the end of its pieces."""
    recorder = StepRecorder(replica.plan.stages)
    recorder.stamped = []
    recorder.begin()
    calls = []
    for number in range(4):
        begin = time.perf_counter_ns()
        time.sleep(0.001)
        calls.append((begin, time.perf_counter_ns()))
        if number < 3:
            recorder.skip()
            time.sleep(0.002)
            recorder.add_lap(0)
    recorder.end(SumTimes(calls=calls), samples=1, global_count=1)
    (found,) = recorder.stamped
    update, exposed = found.stage_spans()[0], found.exposed_spans()
    assert [end - begin for begin, end in exposed] == [end - begin for begin, end in calls]
    assert (exposed[0], exposed[3]) == (calls[0], calls[3])
    spans = sorted([update, *exposed])
    assert spans.index(update) == 3
    assert all(before[1] <= after[0] for before, after in pairwise(spans))
