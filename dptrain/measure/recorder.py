"""Times of every stage of every step on this rank, on one monotonic clock.

The time of a step is divided, not collected: each call of a `Step` assigns the time since the call
before to one part. So no time is lost or counted twice, whatever the order of the calls.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from time import perf_counter_ns
from types import TracebackType
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from dptrain.measure.step_record import (
    CHECKPOINT,
    DATA_DELAY,
    DATA_WAIT,
    DELAYS,
    EVALUATION,
    EXPOSED,
    READ_EVERY_NS,
    RUN_DELAY,
    SPANS,
    SUM_DELAY,
    DelayMeter,
    Interval,
    Program,
    StepRecord,
    divide,
)
from dptrain.plan.plan import Stage

LONG_NS = 50_000
"""Waits from this duration on are searched for run delays. A shorter one contains less, and what it
contains belongs to the stages around it."""


class _NoStep:
    """Stands for the record while no step is in progress, so that no call needs to test for it."""

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # What `inspect` looks for.
            raise AttributeError(name)
        _refuse_use()

    def __setattr__(self, name: str, value: object) -> NoReturn:
        _refuse_use()

    def __getitem__(self, index: int) -> NoReturn:
        _refuse_use()


def _refuse_use() -> NoReturn:
    raise RuntimeError("no step is in progress; call this within `with recorder.step as step:`")


_NO_STEP: Any = _NoStep()


class Step:
    """The step in progress: divides its time into parts.

    Each of `stage`, `stages`, `data_wait`, `exposed` and `other` reads the clock once and assigns
    the time since the last of these calls, or since the begin of the step, to a part. A part may
    consist of several pieces. Every step is a block ``with recorder.step as step:`` in which `end`
    is called once; other calls outside of the block or after `end` raise a `RuntimeError`, as does
    a block without `end`. An exception within the block abandons the step, whose time becomes a
    part of the next one.

    Attributes:
        timed: whether the step is timed stage by stage; the caller sets it, True by default.

    Example:
        >>> recorder = StepRecorder([])
        >>> with recorder.step as step:
        ...     arrived_ns = step.data_wait()
        ...     record = step.end(samples=8, global_count=8)
        >>> record.time_ns == record.data_wait_ns + record.other_ns
        True
        >>> step.other()
        Traceback (most recent call last):
        RuntimeError: no step is in progress; call this within `with recorder.step as step:`
    """

    __slots__ = ("_calls", "_has_details", "_last", "_record", "_recorder", "_stages", "timed")

    def __init__(self, recorder: StepRecorder) -> None:
        self._recorder, self.timed = recorder, True
        self._record: StepRecord = _NO_STEP
        self._stages: list[int] = _NO_STEP
        self._last = 0
        self._calls: list[tuple[int, int]] = []
        self._has_details = False

    def __enter__(self) -> Step:
        if self._record is not _NO_STEP:
            raise RuntimeError("a step is in progress; call `end` before the next one begins")
        recorder = self._recorder
        # A stage may have several pieces, which are added, so every step starts from 0.
        record = StepRecord(recorder.zeros.copy())
        record.begin = now = perf_counter_ns()
        self.timed, self._last, self._has_details = True, now, False
        recorder._begin(record, now)
        if recorder.stamped is not None:
            record.stamps, self._has_details = [], True
        if self._calls:  # Of a step that was abandoned.
            self._calls.clear()
        self._record, self._stages = record, record.stages
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._record is not _NO_STEP:
            self._record = self._stages = _NO_STEP
            if kind is None:
                raise RuntimeError("the block of a step was left without `end`")

    @property
    def is_open(self) -> bool:
        """True while a step is in progress."""
        return self._record is not _NO_STEP

    def stage(self, index: int) -> None:
        """Assign the time since the last call to a stage."""
        now = perf_counter_ns()
        self._stages[index] += self._divide(index, now) if self._has_details else now - self._last
        self._last = now

    def stages(self, indices: Sequence[int], ends: Callable[[], Sequence[int]]) -> None:
        """Assign the time since the last call to stages that ran one after another.

        Args:
            indices: of the stages.
            ends: returns the nanoseconds on the clock `time.perf_counter_ns` at which they ended.
        """
        now = perf_counter_ns()
        calls = tuple(self._calls) if self._has_details else ()
        self._record.programs += (Program(indices, ends, self._last, calls),)
        self._calls.clear()
        self._last = now

    def other(self) -> int:
        """Assign the time since the last call to no part; return the present time."""
        now = perf_counter_ns()
        if self._has_details:
            self._divide(None, now)
        self._record.end = self._last = now
        return now

    def data_wait(self) -> int:
        """Assign the time since the last call to waiting for data; return the present time."""
        now = perf_counter_ns()
        time_ns = self._divide(DATA_WAIT, now) if self._has_details else now - self._last
        self._record.data_wait_ns += time_ns
        if time_ns >= LONG_NS:
            self._recorder.mark_delay(DATA_DELAY, time_ns)
        self._last = now
        return now

    def exposed(self, delay: str = SUM_DELAY) -> None:
        """Assign the time since the last call to communication that blocked computation.

        Args:
            delay: one of `DELAYS`, which receives the run delay within a long call.
        """
        now = perf_counter_ns()
        time_ns = self._divide(EXPOSED, now) if self._has_details else now - self._last
        self._record.exposed_ns += time_ns
        if time_ns >= LONG_NS:
            self._recorder.mark_delay(delay, time_ns)
        self._last = now

    def interrupt(self, begin: int, end: int) -> None:
        """Assign a sum of batch statistics to communication; no part that it interrupts has it.

        Args:
            begin, end: since the last call, in the order of several of them.
        """
        record = self._record
        record.exposed_ns += end - begin
        record.statistics_ns += end - begin
        self._calls.append((begin, end))
        self._has_details = True
        if end - begin >= LONG_NS:
            self._recorder.mark_delay(SUM_DELAY, end - begin)

    def add_stage(self, index: int, begin: int, end: int) -> None:
        """Add a piece of a stage that another clock has measured, such as that of a device."""
        self._stages[index] += end - begin
        if self._record.stamps is not None:
            self._record.stamps.append(Interval(index, begin, end))

    def add_exposed(self, begin: int, end: int, *, statistics: bool = False) -> None:
        """Add communication that another clock has measured, perhaps of batch statistics."""
        record = self._record
        record.exposed_ns += end - begin
        record.statistics_ns += (end - begin) * statistics
        if record.stamps is not None:
            record.stamps.append(Interval(EXPOSED, begin, end))

    def set_active(self, active_ns: int) -> None:
        """Set for how long sums of gradients were in progress: what was not exposed was hidden."""
        record = self._record
        record.hidden_ns = max(active_ns - (record.exposed_ns - record.statistics_ns), 0)

    def mark_stages(self) -> None:
        """Assign the run delay until now to the stages, and the time since the last call to none.

        What follows may belong to a sum.
        """
        self._recorder.mark_delay(RUN_DELAY)
        self.other()

    def end(
        self,
        *,
        samples: int,
        global_count: int,
        sums: Sequence[tuple[int, int]] = (),
        enqueued: bool = False,
    ) -> StepRecord:
        """End the step and return its record.

        Args:
            samples: samples of this rank's shard.
            global_count: samples of the global minibatch.
            sums: begin and end of each bucket's sum.
            enqueued: True if a device may not have ended the step; `StepRecorder.complete` is
                called when it has.
        """
        # Few operations: after the kernels of a step their code and data are in no cache.
        now, record = perf_counter_ns(), self._record
        record.end = now
        if self._has_details:
            self._divide(None, now)
        record.samples, record.global_count, record.timed = samples, global_count, self.timed
        if record.stamps is not None:
            record.sums = (*sums,)
        self._recorder._end(record, now, enqueued=enqueued)
        self._record = self._stages = _NO_STEP
        return record

    def _divide(self, part: int | str | None, now: int) -> int:
        """Return the time since the last call without interruptions; keep its intervals."""
        record, calls = self._record, self._calls
        time_ns = now - self._last - sum(end - begin for begin, end in calls)
        if record.stamps is not None:
            found = divide(part, self._last, now, calls)
            record.stamps += [interval for interval in found if interval.part is not None]
        calls.clear()
        self._has_details = record.stamps is not None
        return time_ns


class StepRecorder:
    """Records the times of the last `capacity` steps.

    Attributes:
        names: columns of `rows`: stages by name, then `SPANS` and `DELAYS`.
        step: the step in progress; see `Step`.
        steps: number of steps since the start, dropped ones included.
        totals_ns: time of everything that `between` measured, by name.
        zeros: a duration of 0 for each stage.
        stamped: the records of all steps since this was set to a list, with their time stamps;
            None keeps no time stamps.
        delays: measures run delays; None if the thread that makes steps does not compute.
    """

    def __init__(self, stages: Sequence[Stage], capacity: int = 2048) -> None:
        self.names = (*(stage.name for stage in stages), *SPANS, *DELAYS)
        self.step = Step(self)
        self.steps = 0
        self.stamped: list[StepRecord] | None = None
        self.totals_ns = {EVALUATION: 0, CHECKPOINT: 0}
        self.zeros = [0] * len(stages)
        self.delays: DelayMeter | None = None
        self._records: deque[StepRecord] = deque(maxlen=capacity)
        self._between: dict[str, int] | None = None
        self._completed = 0

    def watch(self, workers: Callable[[], Sequence[int]] = tuple) -> None:
        """Measure run delays, involuntary context switches and page faults of all further steps.

        Use this if the thread that makes the steps computes.

        Args:
            workers: returns the native numbers of the other compute threads.
        """
        self.delays = DelayMeter(workers)

    def mark_delay(self, name: str | None, most_ns: int = 1 << 62) -> None:
        """Assign the run delay since the last mark to a column, see `StepDelays.mark`."""
        if self.delays is not None:
            self.delays.mark(name, most_ns)

    def restart(self) -> None:
        """Let the next step begin with its block: what happened since the last is in no step.

        Raises:
            RuntimeError: a step is in progress.
        """
        self._refuse_open("restart")
        self._completed, self._between = 0, None
        if self.delays is not None:
            self.delays.forget()

    @contextmanager
    def between(self, name: str) -> Iterator[None]:
        """Measure `EVALUATION` or `CHECKPOINT` between two steps, a part of the second one.

        Raises:
            RuntimeError: a step is in progress.
        """
        self._refuse_open(name)
        self.mark_delay(RUN_DELAY)
        begin = perf_counter_ns()
        yield
        duration = perf_counter_ns() - begin
        self.mark_delay(None)
        self.totals_ns[name] += duration
        if self._completed:  # Before the first step, it is a part of none.
            self._between = self._between or {EVALUATION: 0, CHECKPOINT: 0}
            self._between[name] += duration

    def _refuse_open(self, what: str) -> None:
        if self.step.is_open:
            raise RuntimeError(f"a step is in progress; call `end` before the {what}")

    def _begin(self, record: StepRecord, now: int) -> None:
        """Begin a step with what came since the step before."""
        if not self._completed:
            self._completed = now
        if self._between is not None:
            record.evaluation_ns = self._between[EVALUATION]
            record.checkpoint_ns = self._between[CHECKPOINT]
        if self.delays is not None:
            self.delays.begin(now)

    def _end(self, record: StepRecord, now: int, *, enqueued: bool) -> None:
        """Keep the record of a step that has ended."""
        self._between = None
        if not enqueued:
            record.begin = self._completed
            record.time_ns, self._completed = now - self._completed, now
        if self.delays is not None:
            self.delays.end(record, now)
        record.step = self.steps
        if self.stamped is not None:
            self.stamped.append(record)
        self._records.append(record)
        self.steps += 1

    def complete(self, record: StepRecord, ended_ns: int | None = None) -> None:
        """Set the duration of a step whose updated parameters are complete.

        Args:
            record: of the step.
            ended_ns: when they were, on the clock `time.perf_counter_ns`; None for now.

        Raises:
            RuntimeError: the step is complete already.
        """
        if record.time_ns:
            raise RuntimeError(f"step {record.step} is complete already")
        now = perf_counter_ns() if ended_ns is None else max(ended_ns, self._completed)
        record.time_ns = now - self._completed
        self._completed = now

    def complete_stages(self) -> None:
        """Compute the times of all stages now, which until then keep the kernels in memory."""
        for record in self._records:
            record.complete()

    def rows(self, global_count: int | None = None) -> NDArray[np.int64]:
        """Return nanoseconds: one row per recorded step, oldest first, and one column per name.

        Args:
            global_count: selects steps whose global minibatch had so many samples.
        """
        kept = (each for each in self._records if global_count in (None, each.global_count))
        return self._table(kept)

    def busy_times(self, first: int, *, only_timed: bool) -> NDArray[np.int64]:
        """Return how long this rank computed in recorded steps, and how long sums blocked it.

        Evaluations and checkpoints do not count.

        Args:
            first: number of the first step; smaller minibatches than the largest are omitted.
            only_timed: True omits steps that were not timed stage by stage.

        Returns:
            (steps, 3): samples of this rank, and nanoseconds of computation and of communication.
        """
        skipped = max(len(self._records) - (self.steps - first), 0)
        records = list(islice(self._records, skipped, None))
        whole = max((record.global_count for record in records), default=0)
        found = [
            (
                record.samples,
                record.time_ns - record.evaluation_ns - record.checkpoint_ns,
                record.exposed_ns,
            )
            for record in records
            if record.global_count == whole and (record.timed or not only_timed)
        ]
        table = np.array(found, np.int64).reshape(len(found), 3)
        table[:, 1] -= table[:, 2]
        return table

    def timed_rows(self, last: int) -> NDArray[np.int64]:
        """Return the rows of those of the `last` steps that were timed stage by stage."""
        first = max(len(self._records) - last, 0)
        return self._table(each for each in islice(self._records, first, None) if each.timed)

    def all_rows(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
        """Return rows, minibatch sizes and `timed` flags of all recorded steps, oldest first."""
        counts = np.array([record.global_count for record in self._records], np.int64)
        timed = np.array([record.timed for record in self._records], np.bool_)
        return self._table(self._records), counts, timed

    def mean_samples(self, global_count: int | None = None) -> float:
        """Return the mean number of samples of this rank's shard.

        Args:
            global_count: selects steps whose global minibatch had so many samples.
        """
        samples = [r.samples for r in self._records if global_count in (None, r.global_count)]
        return float(np.mean(samples)) if samples else 0.0

    def mean_counts(self, first: int) -> tuple[float, float] | None:
        """Return the involuntary context switches and page faults of a step, means.

        Args:
            first: number of the first step.

        Returns:
            None if a step was not observed.
        """
        found = [record for record in self._records if record.step >= first]
        if not found or any(record.delays is None for record in found):
            return None
        switches = [record.involuntary_switches for record in found]
        return float(np.mean(switches)), float(np.mean([r.page_faults for r in found]))

    def _table(self, records: Iterable[StepRecord]) -> NDArray[np.int64]:
        times = [record.columns() for record in records]
        return np.array(times, np.int64).reshape(len(times), len(self.names))


def timing_cost_ms(stages: Sequence[Stage], *, sums: bool, step_ms: float) -> float:
    """Return the milliseconds that a recorder's calls take in a step.

    Args:
        stages: of the step.
        sums: True if gradients are summed over ranks.
        step_ms: median step; in short steps run delays are not read each time.

    The calls are timed by themselves; the smallest of several measurements counts, because
    interruptions only make them longer.
    """
    recorder = StepRecorder(stages, capacity=1)
    recorder.watch()

    def measure(steps: int, read_every_ns: int) -> float:
        assert recorder.delays is not None
        recorder.delays.read_every_ns = read_every_ns
        begin = perf_counter_ns()
        for _ in range(steps):
            with recorder.step as step:
                step.data_wait()
                for stage in range(len(stages)):
                    step.stage(stage)
                    step.other()
                if sums:
                    step.mark_stages()
                step.end(samples=1, global_count=1)
        return (perf_counter_ns() - begin) / steps / 1e6

    always, never = (min(measure(20, every) for _ in range(10)) for every in (0, 1 << 62))
    share_read = min(1e6 * step_ms / READ_EVERY_NS, 1.0)
    return never + share_read * max(always - never, 0.0)
