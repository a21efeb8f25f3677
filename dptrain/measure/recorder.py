"""Times of every stage of every step on this rank, on one monotonic clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from time import perf_counter_ns
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

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


@dataclass(frozen=True)
class Moments:
    """Time stamps of one step, in nanoseconds on the clock `time.perf_counter_ns`.

    Attributes:
        step: number of the step, counted from the recorder's first.
        timed: True if the step was timed stage by stage.
        begin: end of the step before; of a first step, of one after `StepRecorder.restart` and of
            one on a device, the request for its minibatch.
        request, data, end: request for the minibatch, its arrival, end of the step.
        stages: begin and end of each stage, by index.
        exposed: begin and end of each interval in which communication blocked computation. Sums
            during a stage are moved to its end, and those between the pieces of an update to its
            begin.
        sums: begin and end of each bucket's sum.
    """

    step: int
    timed: bool
    begin: int
    request: int
    data: int
    end: int
    stages: tuple[tuple[int, int], ...]
    exposed: tuple[tuple[int, int], ...]
    sums: tuple[tuple[int, int], ...]


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


@dataclass(slots=True)
class Row:
    """The record of a step.

    Attributes:
        times: nanoseconds, one for each name of `StepRecorder.names`.
        samples: samples of this rank's shard.
        global_count: samples of the global minibatch.
        timed: True if the step was timed stage by stage.
        laps: stages whose times `complete_times` has not added yet.
    """

    times: list[int]
    samples: int
    global_count: int
    timed: bool
    laps: tuple[Laps, ...] = ()

    @property
    def time_ns(self) -> int:
        """Duration of the step, see `SPANS`."""
        return self.times[-1]

    def complete_times(self) -> list[int]:
        """Return `times` with those of all stages."""
        for laps in self.laps:
            for index, _, time, _ in laps.times():
                self.times[index] += time
        self.laps = ()
        return self.times


class _Note(NamedTuple):
    """What `StepRecorder.note_moments` keeps of a step.

    Attributes:
        step: number of the step.
        row: its record.
        times: begin, request, data and end of `Moments`.
        ends: end of each stage, by index, except for those in `laps`.
        laps: stages that were timed by `StepRecorder.laps`.
        pieces: begin and end of each piece of a stage that `StepRecorder.add_lap` timed.
        exposed, sums: see `Moments`.
    """

    step: int
    row: Row
    times: tuple[int, int, int, int]
    ends: list[int]
    laps: tuple[Laps, ...]
    pieces: tuple[tuple[int, int], ...]
    exposed: tuple[tuple[int, int], ...]
    sums: tuple[tuple[int, int], ...]

    def moments(self) -> Moments:
        """Return the time stamps."""
        exposed = [self._before_pieces(*call) for call in self.exposed]
        for laps in self.laps:
            for stage, end, _, outside_ns in laps.times():
                self.ends[stage] = end
                exposed += [(end, end + outside_ns)] if outside_ns else []
        took = self.row.complete_times()
        stages = tuple((end - took[i], end) for i, end in enumerate(self.ends))
        exposed.sort()
        return Moments(self.step, self.row.timed, *self.times, stages, (*exposed,), self.sums)

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
        names: columns of `rows`: stages by name, then `SPANS`.
        steps: number of steps since the start, dropped ones included.
        totals_ns: time of everything that `between` measured, by name.
        timed: True if the present step is timed stage by stage, so that its laps are valid.
        keeps_moments: True if time stamps are recorded, see `moments`.
    """

    def __init__(self, stages: Sequence[Stage], capacity: int = 2048) -> None:
        self.names = (*(stage.name for stage in stages), *SPANS)
        self.steps = 0
        self.timed = True
        self._rows: deque[Row] = deque(maxlen=capacity)
        self._zeros = [0] * len(self.names)
        self._row = self._zeros.copy()
        self._laps: tuple[Laps, ...] = ()
        self._outside: list[tuple[int, int]] = []
        self._pieces: list[tuple[int, int]] = []
        self._ends = [0] * len(self.names)
        self.keeps_moments = False
        self._moments: list[Moments] = []
        self._notes: list[_Note] = []
        self._spans = len(stages)
        self.totals_ns = {EVALUATION: 0, CHECKPOINT: 0}
        self._between: list[int] | None = None
        self._request = self._last = 0
        self._began = self._ended = self._completed = 0

    @property
    def moments(self) -> list[Moments] | None:
        """Time stamps of every step since this was set to a list; None records none."""
        if not self.keeps_moments:
            return None
        self._moments += [note.moments() for note in self._notes]
        self._notes.clear()
        return self._moments

    @moments.setter
    def moments(self, moments: list[Moments] | None) -> None:
        self.keeps_moments, self._moments = moments is not None, moments or []
        self._notes = []

    def begin(self) -> None:
        """Begin a step: its minibatch is requested next."""
        # A stage in several pieces adds to its time, so every step starts from 0.
        self._row, self._laps = self._zeros.copy(), ()
        self._outside.clear()
        self._pieces.clear()
        self._request = self._last = now = perf_counter_ns()
        self._completed = self._completed or now

    def restart(self) -> None:
        """Let the next step begin with `begin`: what happened since the last belongs to no step."""
        self._completed, self._between = 0, None

    @contextmanager
    def between(self, name: str) -> Iterator[None]:
        """Measure `EVALUATION` or `CHECKPOINT` between two steps, a part of the second one."""
        begin = perf_counter_ns()
        yield
        duration = perf_counter_ns() - begin
        self._between = self._between or [0, 0]
        self._between[(EVALUATION, CHECKPOINT).index(name)] += duration
        self.totals_ns[name] += duration

    def lap(self, stage: int, outside_ns: int = 0) -> None:
        """Add the time since the last lap or skip to a stage, which may run in several passes.

        Args:
            stage: index of the stage.
            outside_ns: time at the end of this interval that does not belong to the stage.
        """
        now = perf_counter_ns()
        self._row[stage] += now - self._last - outside_ns
        self._ends[stage] = now - outside_ns
        self._last = now
        if outside_ns:
            self._outside.append((now - outside_ns, now))

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
        # Times are computed when the row is read: that would take 16 µs of each step.
        self._laps += (Laps(stages, ends, self._last, (*outside,)),)
        self._last = perf_counter_ns()

    def clear(self, stage: int) -> None:
        """Set the time of stage number `stage` to 0, before `add_lap`."""
        self._row[stage], self._ends[stage] = 0, self._last

    def add_lap(self, stage: int) -> None:
        """Add the time since the last lap or skip to stage number `stage`, which may run in pieces.

        Call `clear` before the first piece.
        """
        now = perf_counter_ns()
        if self.keeps_moments:
            self._pieces.append((self._last, now))
        self._row[stage] += now - self._last
        self._ends[stage] = self._last = now

    def put(self, stage: int, nanoseconds: int, end: int) -> None:
        """Add to the time of a stage, as measured by another clock, and set when it ended."""
        self._row[stage] += nanoseconds
        self._ends[stage] = end

    def skip(self) -> None:
        """Assign the time since the last lap or skip to no stage."""
        self._last = perf_counter_ns()

    def waited(self) -> None:
        """Add the time since the last lap or skip to waiting for data."""
        now = perf_counter_ns()
        self._row[self._spans] += now - self._last
        self._ends[self._spans] = self._last = now

    def end(
        self,
        *,
        exposed_ns: int,
        hidden_ns: int,
        samples: int,
        global_count: int,
        statistics_ns: int = 0,
        enqueued: bool = False,
    ) -> Row:
        """End the step.

        Args:
            exposed_ns: time in which communication blocked computation.
            statistics_ns: the part of it in sums of batch statistics.
            hidden_ns: time in which communication overlapped with computation.
            samples: samples of this rank's shard.
            global_count: samples of the global minibatch.
            enqueued: True if the step may not have ended; `complete` is called when it has.

        Returns:
            The record of the step.
        """
        # Few operations: after the kernels of a step their code and data are in no cache.
        now, times, first = perf_counter_ns(), self._row, self._spans
        times[first + 1], times[first + 2], times[-2] = exposed_ns, hidden_ns, statistics_ns
        if self._between is not None:
            times[first + 3], times[first + 4] = self._between
            self._between = None
        self._ended = now
        if enqueued:
            self._began = self._request
        else:
            self._began, self._completed = self._completed, now
            times[-1] = now - self._began
        row = Row(times, samples, global_count, self.timed, self._laps)
        self._rows.append(row)
        self.steps += 1
        return row

    def complete_rows(self) -> None:
        """Compute the times of all stages now, which until then keep the kernels in memory."""
        for row in self._rows:
            row.complete_times()
        self._laps = ()

    def complete(self, row: Row, ended_ns: int | None = None) -> None:
        """Set the duration of a step whose updated parameters are complete.

        Args:
            row: its record.
            ended_ns: when they were, on the clock `time.perf_counter_ns`; None for now.
        """
        now = perf_counter_ns() if ended_ns is None else max(ended_ns, self._completed)
        row.times[-1] = now - self._completed
        self._completed = now

    def note_moments(
        self, exposed: Iterable[tuple[int, int]], sums: Iterable[tuple[int, int]]
    ) -> None:
        """Record the time stamps of the step that has just ended, if `moments` is a list.

        Args:
            exposed, sums: see `Moments`; without the times outside of stages that `lap` and `laps`
                received.
        """
        if not self.keeps_moments:
            return
        # Time stamps are computed when they are read: that would take 40 µs of each step.
        times = self._began, self._request, self._ends[self._spans], self._ended
        ends = self._ends[: self._spans]
        exposed = (*self._outside, *exposed)
        self._notes.append(
            _Note(
                self.steps - 1,
                self._rows[-1],
                times,
                ends,
                self._laps,
                (*self._pieces,),
                exposed,
                (*sums,),
            )
        )

    def rows(self, global_count: int | None = None) -> NDArray[np.int64]:
        """Return nanoseconds: one row per recorded step, oldest first, and one column per name.

        Args:
            global_count: selects steps whose global minibatch had so many samples.
        """
        kept = (row for row in self._rows if global_count in (None, row.global_count))
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
        rows = list(islice(self._rows, max(len(self._rows) - (self.steps - first), 0), None))
        whole = max((row.global_count for row in rows), default=0)
        exposed, *between = (self.names.index(n) for n in (EXPOSED, EVALUATION, CHECKPOINT))
        found = [
            (row.samples, row.time_ns - sum(row.times[i] for i in between), row.times[exposed])
            for row in rows
            if row.global_count == whole and (row.timed or not only_timed)
        ]
        table = np.array(found, np.int64).reshape(len(found), 3)
        table[:, 1] -= table[:, 2]
        return table

    def timed_rows(self, last: int) -> NDArray[np.int64]:
        """Return the rows of those of the `last` steps that were timed stage by stage."""
        first = max(len(self._rows) - last, 0)
        return self._table(row for row in islice(self._rows, first, None) if row.timed)

    def all_rows(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
        """Return rows, minibatch sizes and `timed` flags of all recorded steps, oldest first."""
        counts = np.array([row.global_count for row in self._rows], np.int64)
        timed = np.array([row.timed for row in self._rows], np.bool_)
        return self._table(self._rows), counts, timed

    def mean_samples(self, global_count: int | None = None) -> float:
        """Return the mean number of samples of this rank's shard.

        Args:
            global_count: selects steps whose global minibatch had so many samples.
        """
        samples = [r.samples for r in self._rows if global_count in (None, r.global_count)]
        return float(np.mean(samples)) if samples else 0.0

    def _table(self, rows: Iterable[Row]) -> NDArray[np.int64]:
        times = [row.complete_times() for row in rows]
        return np.array(times, np.int64).reshape(len(times), len(self.names))


def timing_cost_ms(stages: Sequence[Stage]) -> float:
    """Return the milliseconds that a recorder's calls take in a step.

    The calls are timed by themselves; the smallest of several measurements counts, because
    interruptions only make them longer.
    """
    recorder = StepRecorder(stages, capacity=1)

    def measure(steps: int) -> float:
        begin = perf_counter_ns()
        for _ in range(steps):
            recorder.begin()
            recorder.waited()
            for stage in range(len(stages)):
                recorder.lap(stage)
                recorder.skip()
            recorder.end(exposed_ns=0, hidden_ns=0, samples=1, global_count=1)
            recorder.note_moments((), ())
        return (perf_counter_ns() - begin) / steps / 1e6

    return min(measure(20) for _ in range(10))
