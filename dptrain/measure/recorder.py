"""Times of every stage of every step on this rank, on one monotonic clock."""

from __future__ import annotations

import resource
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from time import perf_counter_ns
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dptrain.measure.machine.scheduling import RunDelays, run_delay_ns
from dptrain.plan.plan import Stage

DATA_WAIT = "data_wait"
EXPOSED = "communication.exposed"
HIDDEN = "communication.hidden"
EVALUATION = "evaluation"
CHECKPOINT = "checkpoint"
STATISTICS = "communication.statistics"
STEP = "step"
SPANS = (DATA_WAIT, EXPOSED, HIDDEN, EVALUATION, CHECKPOINT, STATISTICS, STEP)
"""Columns after the stages. `STEP` is the wall time from the completion of the updated parameters
of the step before to that of this step. `HIDDEN` overlaps with stages. `STATISTICS` is the part of
`EXPOSED` in which batch statistics are summed over ranks. Stages and the other columns are parts of
`STEP`."""
RUN_DELAY = "run_delay"
DATA_DELAY = "run_delay.data_wait"
SUM_DELAY = "run_delay.sum"
UPDATE_DELAY = "run_delay.update"
DELAYS = (RUN_DELAY, DATA_DELAY, SUM_DELAY, UPDATE_DELAY)
"""Columns after `SPANS`: run delays within them. `DATA_DELAY` is within `DATA_WAIT`, `SUM_DELAY`
within `EXPOSED` until the first gradients are summed, `UPDATE_DELAY` within `EXPOSED` after that,
and `RUN_DELAY` within the stages and between them. They are `UNKNOWN_NS` if the kernel counts
none."""
UNKNOWN_NS = -1
"""Value of the columns `DELAYS` that could not be measured."""
LONG_NS = 50_000
"""Waits from this duration on are searched for run delays. A shorter one contains less, and what it
contains belongs to the stages around it."""
READ_EVERY_NS = 200_000
"""Least time between two readings of the counters of a thread, which take 2 to 3 µs (AMD EPYC,
Linux 6.18). What a shorter step contains is counted in the next one."""


class Laps(NamedTuple):
    """Stages that ran one after another.

    Attributes:
        stages: their indices.
        ends: returns the times at which they ended.
        begin: time at which the first one began.
        outside: begin and end of intervals during stages that are not parts of them.
    """

    stages: Sequence[int]
    ends: Callable[[], Sequence[int]]
    begin: int
    outside: tuple[tuple[int, int], ...] = ()

    def times(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield index, end, duration and time outside of each stage, as if that came at its end."""
        calls, last = deque(self.outside), self.begin
        for stage, end in zip(self.stages, self.ends(), strict=True):
            outside_ns = 0
            while calls and calls[0][1] <= end:
                begin, returned = calls.popleft()
                outside_ns += returned - begin
            yield stage, end - outside_ns, end - last - outside_ns, outside_ns
            last = end


class SumTimes(NamedTuple):
    """What sums over the ranks took from a step, as its engine has measured it.

    Attributes:
        exposed_ns: time in which communication blocked computation.
        hidden_ns: time in which communication overlapped with computation.
        statistics_ns: the part of `exposed_ns` in sums of batch statistics.
        calls: begin and end of each interval in which communication blocked computation, without
            the times outside of stages that `StepRecorder.lap` and `laps` received.
        spans: begin and end of each bucket's sum.
    """

    exposed_ns: int = 0
    hidden_ns: int = 0
    statistics_ns: int = 0
    calls: Sequence[tuple[int, int]] = ()
    spans: Sequence[tuple[int, int]] = ()


NO_SUMS = SumTimes()
"""A step without communication."""


UNKNOWN = (UNKNOWN_NS,) * len(DELAYS)
Workers = Sequence[tuple[int, bytes]]
"""Number and schedstat line of each compute thread other than the caller's."""


class StepDelays:
    """Lines of schedstat files during a step, from which its run delays are computed.

    A compute thread that waits for a core delays a step of T threads by 1/T of that time, because
    the others compute its share meanwhile (`dptrain.native.threads`). So the delays of a step that
    belong to no wait count with the mean over its threads.

    Args:
        line: of the own thread at the begin of the step.
        workers: lines of the other compute threads when they were read last.
    """

    __slots__ = ("_begin", "_marks", "_workers_after", "_workers_before")

    def __init__(self, line: bytes, workers: Workers = ()) -> None:
        self._begin = line
        self._marks: list[tuple[str | None, int, bytes]] = []
        self._workers_before = self._workers_after = workers

    def mark(self, name: str | None, line: bytes, most_ns: int) -> None:
        """Assign the delay since the last mark to a column; what exceeds `most_ns`, to `RUN_DELAY`.

        Args:
            name: one of `DELAYS`; None if it belongs to another part of the step.
            line: of the own thread.
            most_ns: duration of the wait.
        """
        self._marks.append((name, most_ns, line))

    def end(self, line: bytes, workers: Workers | None) -> StepDelays:
        """End the step; return the delays of the next one."""
        self._marks.append((RUN_DELAY, 1 << 62, line))
        if workers is not None:
            self._workers_after = workers
        return StepDelays(line, self._workers_after)

    def without_marks(self) -> StepDelays:
        """Return the delays of a step that was not read."""
        return StepDelays(self._begin)

    def columns(self) -> tuple[int, ...]:
        """Return the nanoseconds of `DELAYS`, or `UNKNOWN`."""
        found: dict[str | None, int] = dict.fromkeys(DELAYS, 0)
        before = run_delay_ns(self._begin)
        if before is None:
            return UNKNOWN
        for name, most_ns, line in self._marks:
            now = run_delay_ns(line)
            if now is None:
                return UNKNOWN
            in_wait = min(now - before, most_ns)
            found[name] = found.get(name, 0) + in_wait
            found[RUN_DELAY] += now - before - in_wait
            before = now
        workers = dict(self._workers_before)
        of_workers = 0
        for number, line in self._workers_after:
            first, last = run_delay_ns(workers.get(number, line)), run_delay_ns(line)
            if first is None or last is None:
                return UNKNOWN
            of_workers += last - first
        threads = 1 + len(self._workers_after)
        found[RUN_DELAY] = (found[RUN_DELAY] + of_workers) // threads
        return tuple(found[name] for name in DELAYS)


@dataclass(eq=False, init=False)
class StepRecord:
    """The record of a step: durations in nanoseconds, and perhaps time stamps.

    Time stamps are on the clock `time.perf_counter_ns`. Those after `end` exist if the recorder
    keeps them, see `StepRecorder.stamped`.

    Attributes:
        stages: duration of each stage, by index; `complete_stages` adds those of `laps`.
        laps: stages that ran one after another and are not in `stages` yet.
        data_wait_ns, exposed_ns, hidden_ns, evaluation_ns, checkpoint_ns, statistics_ns, time_ns:
            the columns of `SPANS`.
        delays: the run delays of the step; None if they were not measured.
        involuntary_switches, page_faults: how often the system took a core from a thread of this
            process in the step, and how often a thread used a page that had no memory yet; 0 if
            `delays` is None.
        step: number of the step, counted from the recorder's first.
        samples: samples of this rank's shard.
        global_count: samples of the global minibatch.
        timed: True if the step was timed stage by stage.
        begin: end of the step before; of a first step, of one after `StepRecorder.restart` and of
            one on a device, the request for its minibatch.
        request, data, end: request for the minibatch, its arrival, end of the step.
        ends: end of each stage, by index.
        outside, calls: begin and end of intervals in which communication blocked computation, of
            those that `StepRecorder.lap` received and of the others.
        pieces: begin and end of each piece of a stage that `StepRecorder.add_lap` timed.
        sums: begin and end of each bucket's sum.
    """

    stages: list[int]
    laps: tuple[Laps, ...] = ()
    data_wait_ns: int = 0
    exposed_ns: int = 0
    hidden_ns: int = 0
    evaluation_ns: int = 0
    checkpoint_ns: int = 0
    statistics_ns: int = 0
    time_ns: int = 0
    delays: StepDelays | None = None
    involuntary_switches: int = 0
    page_faults: int = 0
    step: int = 0
    samples: int = 0
    global_count: int = 0
    timed: bool = True
    begin: int = 0
    request: int = 0
    data: int = 0
    end: int = 0
    ends: Sequence[int] = ()
    outside: tuple[tuple[int, int], ...] = ()
    calls: tuple[tuple[int, int], ...] = ()
    pieces: tuple[tuple[int, int], ...] = ()
    sums: tuple[tuple[int, int], ...] = ()

    def __init__(self, stages: list[int]) -> None:
        # All else has its default: a step should take as little time as possible.
        self.stages = stages

    def complete_stages(self) -> None:
        """Add the times of `laps`, which until then keep the kernels of the step in memory."""
        if not self.laps:
            return
        ends = list(self.ends)
        for laps in self.laps:
            for stage, end, time, outside_ns in laps.times():
                self.stages[stage] += time
                if ends:
                    ends[stage] = end
                    self.outside += ((end, end + outside_ns),) if outside_ns else ()
        self.laps, self.ends = (), ends

    def columns(self) -> list[int]:
        """Return the nanoseconds of `StepRecorder.names`."""
        self.complete_stages()
        return [
            *self.stages,
            self.data_wait_ns,
            self.exposed_ns,
            self.hidden_ns,
            self.evaluation_ns,
            self.checkpoint_ns,
            self.statistics_ns,
            self.time_ns,
            *(UNKNOWN if self.delays is None else self.delays.columns()),
        ]

    def stage_spans(self) -> tuple[tuple[int, int], ...]:
        """Return begin and end of each stage, by index."""
        self.complete_stages()
        return tuple((end - time, end) for time, end in zip(self.stages, self.ends, strict=True))

    def exposed_spans(self) -> tuple[tuple[int, int], ...]:
        """Return begin and end of each interval in which communication blocked computation.

        Sums during a stage are moved to its end, and those between the pieces of an update to its
        begin.
        """
        self.complete_stages()
        found = (*self.outside, *self.calls)
        return tuple(sorted(self._before_pieces(*call) for call in found))

    def _before_pieces(self, begin: int, end: int) -> tuple[int, int]:
        """Return an interval as if all pieces of the stage came after it, unless all came before.

        A stage with pieces is shown as one interval that ends with the last piece.
        """
        if not self.pieces or begin >= self.pieces[-1][0]:
            return begin, end
        earlier_ns = sum(stop - start for start, stop in self.pieces if stop <= begin)
        return begin - earlier_ns, end - earlier_ns


class StepRecorder:
    """Records the times of the last `capacity` steps.

    Use: `begin`, then `lap(stage)` after each stage and `skip` after anything that is not part of
    a stage, then `end`. A lap reads the clock once. On a device, `complete` follows when the step
    has ended.

    Attributes:
        names: columns of `rows`: stages by name, then `SPANS` and `DELAYS`.
        steps: number of steps since the start, dropped ones included.
        totals_ns: time of everything that `between` measured, by name.
        timed: True if the present step is timed stage by stage, so that its laps are valid.
        read_every_ns: least time between two readings of run delays.
        stamped: the records of all steps since this was set to a list, with their time stamps;
            None keeps no time stamps.
    """

    def __init__(self, stages: Sequence[Stage], capacity: int = 2048) -> None:
        self.names = (*(stage.name for stage in stages), *SPANS, *DELAYS)
        self.steps = 0
        self.timed = True
        self.stamped: list[StepRecord] | None = None
        self.totals_ns = {EVALUATION: 0, CHECKPOINT: 0}
        self._records: deque[StepRecord] = deque(maxlen=capacity)
        self._zeros = [0] * len(stages)
        self._ends = [0] * len(stages)
        self._record = StepRecord(self._zeros.copy())
        self._between: dict[str, int] | None = None
        self._last = self._completed = 0
        self._run_delays: RunDelays | None = None
        self._delays: StepDelays | None = None
        self._usage: resource.struct_rusage | None = None
        self._read_ns = 0
        self.read_every_ns = READ_EVERY_NS

    def watch(self, workers: Callable[[], Sequence[int]] = tuple) -> None:
        """Measure run delays, involuntary context switches and page faults of all further steps.

        Use this if the thread that calls `begin` computes.

        Args:
            workers: returns the native numbers of the other compute threads.
        """
        self._run_delays, self._delays = RunDelays(workers), None

    def begin(self) -> None:
        """Begin a step: its minibatch is requested next."""
        # A stage in several pieces adds to its time, so every step starts from 0.
        self._record = record = StepRecord(self._zeros.copy())
        record.request = self._last = now = perf_counter_ns()
        self._completed = self._completed or now
        if self._run_delays is not None:
            self._run_delays.follow_caller()
            if self._delays is None:
                workers = self._run_delays.read_workers(now)
                self._delays = StepDelays(self._run_delays.read(), workers or ())
                self._usage = resource.getrusage(resource.RUSAGE_SELF)

    def mark(self, name: str | None, most_ns: int = 1 << 62) -> None:
        """Assign the run delay since the last mark to a column, see `StepDelays.mark`."""
        if self._delays is not None and self._run_delays is not None:
            self._delays.mark(name, self._run_delays.read(), most_ns)

    def restart(self) -> None:
        """Let the next step begin with `begin`: what happened since the last belongs to no step."""
        self._completed, self._between, self._delays = 0, None, None

    @contextmanager
    def between(self, name: str) -> Iterator[None]:
        """Measure `EVALUATION` or `CHECKPOINT` between two steps, a part of the second one."""
        self.mark(RUN_DELAY)
        begin = perf_counter_ns()
        yield
        duration = perf_counter_ns() - begin
        self.mark(None)
        self._between = self._between or {EVALUATION: 0, CHECKPOINT: 0}
        self._between[name] += duration
        self.totals_ns[name] += duration

    def lap(self, stage: int, outside_ns: int = 0) -> None:
        """Add the time since the last lap or skip to a stage, which may run in several passes.

        Args:
            stage: index of the stage.
            outside_ns: time at the end of this interval that does not belong to the stage.
        """
        now = perf_counter_ns()
        self._record.stages[stage] += now - self._last - outside_ns
        self._ends[stage] = now - outside_ns
        self._last = now
        if outside_ns:
            self._record.outside += ((now - outside_ns, now),)

    def laps(
        self,
        stages: Sequence[int],
        ends: Callable[[], Sequence[int]],
        outside: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Add times to stages that ran one after another, like `lap` after each of them.

        Args:
            stages: indices of the stages.
            ends: returns the nanoseconds on the clock `time.perf_counter_ns` at which they ended.
            outside: begin and end of intervals during stages that are not parts of them, in order.
        """
        # Times are computed when the record is read: that would take 16 µs of each step.
        self._record.laps += (Laps(stages, ends, self._last, (*outside,)),)
        self._last = perf_counter_ns()

    def clear(self, stage: int) -> None:
        """Set the time of stage number `stage` to 0, before `add_lap`."""
        self._record.stages[stage], self._ends[stage] = 0, self._last

    def add_lap(self, stage: int) -> None:
        """Add the time since the last lap or skip to stage number `stage`, which may run in pieces.

        Call `clear` before the first piece.
        """
        now = perf_counter_ns()
        if self.stamped is not None:
            self._record.pieces += ((self._last, now),)
        self._record.stages[stage] += now - self._last
        self._ends[stage] = self._last = now

    def put(self, stage: int, nanoseconds: int, end: int) -> None:
        """Add to the time of a stage, as measured by another clock, and set when it ended."""
        self._record.stages[stage] += nanoseconds
        self._ends[stage] = end

    def skip(self) -> None:
        """Assign the time since the last lap or skip to no stage."""
        self._last = perf_counter_ns()

    def waited(self) -> None:
        """Add the time since the last lap or skip to waiting for data."""
        record, now = self._record, perf_counter_ns()
        record.data_wait_ns += now - self._last
        if now - self._last >= LONG_NS:
            self.mark(DATA_DELAY, now - self._last)
        record.data = self._last = now

    def end(
        self,
        sums: SumTimes = NO_SUMS,
        *,
        samples: int,
        global_count: int,
        enqueued: bool = False,
    ) -> StepRecord:
        """End the step and return its record.

        Args:
            sums: the time of communication.
            samples: samples of this rank's shard.
            global_count: samples of the global minibatch.
            enqueued: True if the step may not have ended; `complete` is called when it has.
        """
        # Few operations: after the kernels of a step their code and data are in no cache.
        now, record = perf_counter_ns(), self._record
        if sums is not NO_SUMS:
            record.exposed_ns, record.hidden_ns = sums.exposed_ns, sums.hidden_ns
            record.statistics_ns = sums.statistics_ns
        if self._between is not None:
            record.evaluation_ns = self._between[EVALUATION]
            record.checkpoint_ns = self._between[CHECKPOINT]
            self._between = None
        record.begin, record.end = record.request if enqueued else self._completed, now
        if not enqueued:
            record.time_ns, self._completed = now - self._completed, now
        if self._delays is not None:
            self._end_delays(self._delays, record, now)
        record.samples, record.global_count, record.timed = samples, global_count, self.timed
        record.step = self.steps
        if self.stamped is not None:
            record.ends = self._ends.copy()
            record.calls, record.sums = (*sums.calls,), (*sums.spans,)
            self.stamped.append(record)
        self._records.append(record)
        self.steps += 1
        return record

    def _end_delays(self, delays: StepDelays, record: StepRecord, now: int) -> None:
        run_delays, before = self._run_delays, self._usage
        if now - self._read_ns < self.read_every_ns or run_delays is None or before is None:
            record.delays = delays.without_marks()
            return
        self._read_ns = now
        record.delays = delays
        self._delays = delays.end(run_delays.read(), run_delays.read_workers(now))
        self._usage = usage = resource.getrusage(resource.RUSAGE_SELF)
        record.involuntary_switches = usage.ru_nivcsw - before.ru_nivcsw
        record.page_faults = usage.ru_minflt + usage.ru_majflt - before.ru_minflt - before.ru_majflt

    def complete(self, record: StepRecord, ended_ns: int | None = None) -> None:
        """Set the duration of a step whose updated parameters are complete.

        Args:
            record: of the step.
            ended_ns: when they were, on the clock `time.perf_counter_ns`; None for now.
        """
        now = perf_counter_ns() if ended_ns is None else max(ended_ns, self._completed)
        record.time_ns = now - self._completed
        self._completed = now

    def complete_stages(self) -> None:
        """Compute the times of all stages now, which until then keep the kernels in memory."""
        for record in self._records:
            record.complete_stages()
        self._record = StepRecord(self._zeros.copy())

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
        recorder.read_every_ns = read_every_ns
        begin = perf_counter_ns()
        for _ in range(steps):
            recorder.begin()
            recorder.waited()
            for stage in range(len(stages)):
                recorder.lap(stage)
                recorder.skip()
            if sums:
                recorder.mark(RUN_DELAY)
            recorder.end(samples=1, global_count=1)
        return (perf_counter_ns() - begin) / steps / 1e6

    always, never = (min(measure(20, every) for _ in range(10)) for every in (0, 1 << 62))
    share_read = min(1e6 * step_ms / READ_EVERY_NS, 1.0)
    return never + share_read * max(always - never, 0.0)
