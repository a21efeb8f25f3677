"""The record of a training step: durations of its parts, time stamps, and run delays."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dptrain.measure.machine.scheduling import RunDelays, run_delay_ns

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
READ_EVERY_NS = 200_000
"""Least time between two readings of the counters of a thread, which take 2 to 3 µs (AMD EPYC,
Linux 6.18). What a shorter step contains is counted in the next one."""


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


class DelayMeter:
    """Reads the run delays, involuntary context switches and page faults of steps.

    Args:
        workers: returns the native numbers of the compute threads other than the caller's.

    Attributes:
        read_every_ns: least time between two readings.
    """

    def __init__(self, workers: Callable[[], Sequence[int]] = tuple) -> None:
        self.read_every_ns = READ_EVERY_NS
        self._reader = RunDelays(workers)
        self._delays: StepDelays | None = None
        self._usage: resource.struct_rusage | None = None
        self._read_ns = 0

    def begin(self, now: int) -> None:
        """Begin a step of the thread that calls, or continue after the step before."""
        self._reader.follow_caller()
        if self._delays is None:
            self._delays = StepDelays(self._reader.read(), self._reader.read_workers(now) or ())
            self._usage = resource.getrusage(resource.RUSAGE_SELF)

    def mark(self, name: str | None, most_ns: int = 1 << 62) -> None:
        """Assign the run delay since the last mark to a column, see `StepDelays.mark`."""
        if self._delays is not None:
            self._delays.mark(name, self._reader.read(), most_ns)

    def forget(self) -> None:
        """Forget what was measured since the last step; it belongs to no step."""
        self._delays = None

    def end(self, record: StepRecord, now: int) -> None:
        """End the step of a record; set what was measured."""
        delays, before = self._delays, self._usage
        if delays is None or before is None:
            return
        if now - self._read_ns < self.read_every_ns:
            record.delays = delays.without_marks()
            return
        self._read_ns, record.delays = now, delays
        self._delays = delays.end(self._reader.read(), self._reader.read_workers(now))
        self._usage = usage = resource.getrusage(resource.RUSAGE_SELF)
        record.involuntary_switches = usage.ru_nivcsw - before.ru_nivcsw
        record.page_faults = usage.ru_minflt + usage.ru_majflt - before.ru_minflt - before.ru_majflt


class Interval(NamedTuple):
    """A part of a step that ran without interruption.

    Attributes:
        part: index of a stage, `DATA_WAIT` or `EXPOSED`; None for the rest of the step.
        begin, end: nanoseconds on the clock `time.perf_counter_ns`.
    """

    part: int | str | None
    begin: int
    end: int


Calls = Sequence[tuple[int, int]]
"""Begin and end of intervals in nanoseconds, in order and without overlap."""


def divide(part: int | str | None, begin: int, end: int, calls: Calls) -> Iterator[Interval]:
    """Divide a part of a step at the sums over ranks that interrupted it.

    Example:
        >>> for found in divide(4, 100, 150, [(120, 135)]):
        ...     print(found.part, found.begin, found.end)
        4 100 120
        communication.exposed 120 135
        4 135 150
    """
    for call_begin, call_end in calls:
        yield Interval(part, begin, call_begin)
        yield Interval(EXPOSED, call_begin, call_end)
        begin = call_end
    yield Interval(part, begin, end)


class Program(NamedTuple):
    """Stages that ran one after another in one call, whose times are computed when they are read.

    That takes 16 µs, and until then keeps the kernels of the step in memory.

    Attributes:
        stages: their indices.
        ends: returns the times at which they ended.
        begin: of the first one.
        calls: the sums over ranks that interrupted the stages.
    """

    stages: Sequence[int]
    ends: Callable[[], Sequence[int]]
    begin: int
    calls: Calls

    def intervals(self) -> Iterator[Interval]:
        """Yield the intervals of the stages, and of the sums that interrupted them."""
        begin, calls = self.begin, list(self.calls)
        for stage, end in zip(self.stages, self.ends(), strict=True):
            inside = [call for call in calls if call[1] <= end]
            del calls[: len(inside)]
            yield from divide(stage, begin, end, inside)
            begin = end


@dataclass(eq=False, init=False)
class StepRecord:
    """The record of a step: durations in nanoseconds, and perhaps time stamps.

    On a host the step consists of its stages, the parts `data_wait_ns`, `exposed_ns`,
    `evaluation_ns` and `checkpoint_ns`, and the rest, `other_ns`: they add up to `time_ns` exactly.
    On a device the stages are those of the device, and the step is the time from the completion of
    the step before to that of this one; a step that is not timed stage by stage has no stages.

    Attributes:
        stages: duration of each stage, by index; `complete` adds those of `programs`.
        programs: stages that are not in `stages` yet.
        data_wait_ns, exposed_ns, hidden_ns, evaluation_ns, checkpoint_ns, statistics_ns, time_ns:
            the columns of `SPANS`; `time_ns` is 0 until a step on a device is complete.
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
        end: end of the step, or on a device of its enqueuing.
        stamps: the intervals of the step in the order in which they were recorded; None if the
            recorder keeps no time stamps, see `StepRecorder.stamped`.
        sums: begin and end of each bucket's sum, with time stamps.
    """

    stages: list[int]
    programs: tuple[Program, ...] = ()
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
    end: int = 0
    stamps: list[Interval] | None = None
    sums: tuple[tuple[int, int], ...] = ()

    def __init__(self, stages: list[int]) -> None:
        # All else has its default: a step should take as little time as possible.
        self.stages = stages

    def complete(self) -> None:
        """Add the times of `programs`."""
        programs, self.programs = self.programs, ()
        for program in programs:
            for part, begin, end in program.intervals():
                if isinstance(part, int):
                    self.stages[part] += end - begin
                if self.stamps is not None:
                    self.stamps.append(Interval(part, begin, end))

    @property
    def other_ns(self) -> int:
        """Time of a step on a host that belongs to no stage and to no other part."""
        self.complete()
        between = self.evaluation_ns + self.checkpoint_ns
        return self.time_ns - sum(self.stages) - self.data_wait_ns - self.exposed_ns - between

    def columns(self) -> list[int]:
        """Return the nanoseconds of `StepRecorder.names`."""
        self.complete()
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

    def intervals(self) -> list[Interval]:
        """Return the intervals of the step in order; none without time stamps."""
        self.complete()
        return sorted(self.stamps or (), key=lambda interval: interval.begin)
