"""Times of stages: nothing lost, nothing counted twice, and next to no cost."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise, repeat
from operator import itemgetter
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
from dptrain.measure.recorder import Step, StepRecorder
from dptrain.measure.step_record import (
    CHECKPOINT,
    DATA_WAIT,
    DELAYS,
    EVALUATION,
    EXPOSED,
    SPANS,
    STEP,
    UNKNOWN_NS,
    Program,
    StepRecord,
)
from dptrain.network import get_network
from dptrain.plan import make_buckets
from dptrain.training.engines import DeviceEngine, Engine, make_engine
from dptrain.training.engines.device import FIRST_TIMED, TIMED_EVERY


def record(recorder: StepRecorder, exposed_ns: int = 0, global_count: int = 8) -> None:
    """One step in which every stage takes about 20 µs."""
    with recorder.step as step:
        step.data_wait()
        for stage in range(len(recorder.names) - len((*SPANS, *DELAYS))):
            time.sleep(20e-6)
            step.stage(stage)
        step.add_exposed(0, exposed_ns)
        step.end(samples=4, global_count=global_count)


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
    with recorder.step as step:
        begin = time.perf_counter_ns()
        time.sleep(0.02)
        step.other()
        step.stage(3)
        end = time.perf_counter_ns()
        step.end(samples=1, global_count=1)
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
        with recorder.step as current:
            now = end
            current.end(samples=1, global_count=1)

    with recorder.between(EVALUATION):  # Before the first step, it is a part of none.
        now = 40
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
    assert recorder.totals_ns == {EVALUATION: 70, CHECKPOINT: 5}


def test_busy_times_are_those_of_whole_minibatches_without_sums_and_evaluations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0
    monkeypatch.setattr("dptrain.measure.recorder.perf_counter_ns", lambda: now)
    recorder = StepRecorder([])
    for samples, exposed, evaluation, timed in (
        (4, 5, 0, False), (4, 7, 11, True), (2, 0, 0, True), (4, 1, 0, False),
    ):  # fmt: skip
        if evaluation:
            with recorder.between(EVALUATION):
                now += evaluation
        with recorder.step as step:
            step.timed = timed
            now += 100 - exposed
            step.other()
            now += exposed
            step.exposed()
            step.end(samples=samples, global_count=samples)
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
    program = Program([4, 5, 6], lambda: ends, 100, ((120, 135), (138, 140), (160, 170)))
    assert list(program.intervals()) == [
        (4, 100, 110), (5, 110, 120), (EXPOSED, 120, 135), (5, 135, 138), (EXPOSED, 138, 140),
        (5, 140, 150), (6, 150, 160), (EXPOSED, 160, 170), (6, 170, 200),
    ]  # fmt: skip


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

    def prepare_score(self, batches: Any, *, key: Any) -> None:
        raise AssertionError("this replica evaluates nothing")

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
    # What was not measured is not taken from an earlier step.
    assert (rows[~timed, recorder.names.index(EXPOSED)] == 0).all()
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
        with recorder.step as step:
            for _ in range(2):
                step.other()
                time.sleep(0.001)
                step.stage(0)
            step.end(samples=1, global_count=1)
    rows = recorder.rows()
    assert (rows[:, 0] >= 2_000_000).all()
    assert (rows[:, 0] <= rows[:, recorder.names.index(STEP)]).all()


class Clock:
    """A clock that a test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000
        monkeypatch.setattr("dptrain.measure.recorder.perf_counter_ns", lambda: self.now)


def make_random_step(
    random_: random.Random, clock: Clock, step: Step, expected: dict[Any, int]
) -> list[tuple[Any, int, int]]:
    """Make random calls of a step; return its intervals, and add their durations to `expected`."""
    intervals: list[tuple[Any, int, int]] = []

    def interrupted(part: Any) -> None:
        """Let some time pass, in which batch statistics may be summed."""
        begin = clock.now
        for _ in range(random_.choice((0, 0, 0, 1, 2))):
            clock.now += random_.randint(0, 9)
            intervals.append((part, begin, clock.now))
            begin = clock.now
            clock.now += random_.randint(0, 9)
            step.interrupt(begin, clock.now)
            intervals.append((EXPOSED, begin, clock.now))
            begin = clock.now
        clock.now += random_.randint(0, 9)
        intervals.append((part, begin, clock.now))

    for _ in range(random_.randint(0, 30)):
        kind = random_.randint(0, 4)
        if kind == 0:
            index = random_.randrange(3)
            interrupted(index)
            step.stage(index)
        elif kind == 1:
            indices, ends = random_.sample(range(3), 2), []
            for index in indices:
                interrupted(index)
                ends.append(clock.now)
            clock.now += random_.randint(0, 9)
            step.stages(indices, lambda ends=ends: ends)  # type: ignore[misc]
        elif kind == 2:
            interrupted(DATA_WAIT)
            step.data_wait()
        elif kind == 3:
            interrupted(EXPOSED)
            step.exposed()
        else:
            interrupted("other")
            step.other()
    for part, begin, end in intervals:
        expected[part] = expected.get(part, 0) + end - begin
    return [each for each in intervals if each[0] != "other" and each[2] > each[1]]


@pytest.mark.parametrize("stamped", [False, True])
def test_parts_add_up_to_the_step_exactly_whatever_the_calls(
    stamped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    stages = api.make_replica(get_network("mlp-5"), "reference", 2).plan.stages[:3]
    for seed in range(300):
        random_, recorder = random.Random(seed), StepRecorder(stages)
        recorder.stamped = [] if stamped else None
        for _ in range(3):
            expected: dict[Any, int] = {}
            end, is_first = clock.now, not recorder.steps
            for name in random_.choices((EVALUATION, CHECKPOINT), k=random_.randint(0, 2)):
                with recorder.between(name):
                    duration = random_.randint(0, 9)
                    clock.now += duration
                expected[name] = expected.get(name, 0) + duration * (not is_first)
            clock.now += random_.randint(0, 9)
            end = clock.now if is_first else end
            with recorder.step as step:
                intervals = make_random_step(random_, clock, step, expected)
                clock.now += random_.randint(0, 9)
                record = step.end(samples=1, global_count=1)
            assert record.time_ns == clock.now - end, seed
            found = dict(zip(recorder.names, record.columns(), strict=True))
            assert record.stages == [expected.get(index, 0) for index in range(3)], seed
            for name in (DATA_WAIT, EXPOSED, EVALUATION, CHECKPOINT):
                assert found[name] == expected.get(name, 0), (seed, name)
            parts = sum(record.stages) + sum(
                found[name] for name in (DATA_WAIT, EXPOSED, EVALUATION, CHECKPOINT)
            )
            assert parts + record.other_ns == record.time_ns, seed
            assert record.other_ns >= expected.get("other", 0), seed
            # In time stamps, too, nothing overlaps, and nothing is missing.
            stamps = [each for each in record.intervals() if each.end > each.begin]
            assert stamps == (sorted(intervals, key=itemgetter(1)) if stamped else []), seed


USES: dict[str, Callable[[StepRecorder], object]] = {
    "stage": lambda recorder: recorder.step.stage(0),
    "stages": lambda recorder: recorder.step.stages([0], lambda: [0]),
    "data_wait": lambda recorder: recorder.step.data_wait(),
    "exposed": lambda recorder: recorder.step.exposed(),
    "other": lambda recorder: recorder.step.other(),
    "interrupt": lambda recorder: recorder.step.interrupt(0, 1),
    "add_stage": lambda recorder: recorder.step.add_stage(0, 0, 1),
    "add_exposed": lambda recorder: recorder.step.add_exposed(0, 1),
    "set_active": lambda recorder: recorder.step.set_active(1),
    "mark_stages": lambda recorder: recorder.step.mark_stages(),
    "end": lambda recorder: recorder.step.end(samples=1, global_count=1),
}
"""Calls within a step; all methods of it."""
BETWEEN: dict[str, Callable[[StepRecorder], object]] = {
    "between": lambda recorder: recorder.between(EVALUATION).__enter__(),
    "restart": lambda recorder: recorder.restart(),
    "__enter__": lambda recorder: recorder.step.__enter__(),
}
"""Calls between steps."""


def test_every_method_of_a_step_is_tried() -> None:
    public = {name for name, each in vars(Step).items() if callable(each) and name[0] != "_"}
    assert public == set(USES)


@pytest.mark.parametrize("seed", range(50))
def test_calls_in_a_wrong_order_raise_at_once(seed: int, replica: api.Replica) -> None:
    """A random sequence of calls: each either is in order, or raises and changes nothing."""
    random_, recorder = random.Random(seed), StepRecorder(replica.plan.stages)
    is_open, steps = False, 0
    for _ in range(200):
        name = random_.choice([*USES, *BETWEEN])
        in_order = is_open if name in USES else not is_open
        if not in_order:
            message = "no step is in progress" if name in USES else "a step is in progress"
            with pytest.raises(RuntimeError, match=message):
                (USES | BETWEEN)[name](recorder)
        elif name == "between":
            with recorder.between(EVALUATION):
                pass
        else:
            (USES | BETWEEN)[name](recorder)
            is_open = name != "end" if name in USES else name == "__enter__"
            steps += name == "end"
        assert (recorder.step.is_open, recorder.steps) == (is_open, steps)


def test_a_step_without_an_end_raises_and_a_failed_one_is_abandoned() -> None:
    recorder = StepRecorder([])
    with pytest.raises(RuntimeError, match="left without `end`"), recorder.step:
        pass
    with pytest.raises(KeyError), recorder.step as step:
        raise KeyError
    assert not recorder.step.is_open
    assert recorder.steps == 0
    with recorder.step as step:
        record = step.end(samples=1, global_count=1, enqueued=True)
    assert record.time_ns == 0
    recorder.complete(record)
    with pytest.raises(RuntimeError, match="step 0 is complete already"):
        recorder.complete(record)


def test_sums_between_pieces_of_an_update_do_not_overlap_it(replica: api.Replica) -> None:
    recorder = StepRecorder(replica.plan.stages)
    recorder.stamped = []
    with recorder.step as step:
        for number in range(4):
            step.other()
            time.sleep(0.001)
            step.exposed()
            if number < 3:
                time.sleep(0.002)
                step.stage(0)
        step.end(samples=1, global_count=1)
    (found,) = recorder.stamped
    intervals = found.intervals()
    assert [each.part for each in intervals] == [EXPOSED, 0, EXPOSED, 0, EXPOSED, 0, EXPOSED]
    assert all(before.end <= after.begin for before, after in pairwise(intervals))
    assert sum(e.end - e.begin for e in intervals if e.part == 0) == found.stages[0]
