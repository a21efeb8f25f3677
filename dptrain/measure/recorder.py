"""Times of every stage of every step on this rank, by one monotonic clock."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter_ns

import numpy as np
from numpy.typing import NDArray

from dptrain.plan.plan import Stage

DATA_WAIT = "data_wait"
EXPOSED = "communication.exposed"
HIDDEN = "communication.hidden"
STEP = "step"
SPANS = (DATA_WAIT, EXPOSED, HIDDEN, STEP)
"""What is recorded besides stages. `HIDDEN` lies inside stages; the rest are parts of `STEP`."""


@dataclass(frozen=True)
class Moments:
    """When things were in one step, in nanoseconds of the clock `time.perf_counter_ns`.

    Attributes:
        step: number of the step, counted from the recorder's first.
        timed: whether `stages` are known.
        begin, data, end: of the step; and when its minibatch was there.
        stages: begin and end of each stage that ran, by index.
        exposed: begin and end of each stretch that communication kept computing from.
        sums: begin and end of each bucket's sum.
    """

    step: int
    timed: bool
    begin: int
    data: int
    end: int
    stages: tuple[tuple[int, int], ...]
    exposed: tuple[tuple[int, int], ...]
    sums: tuple[tuple[int, int], ...]


class StepRecorder:
    """Keeps the last `capacity` steps in memory that is allocated once.

    Use: `begin`, then `lap(stage)` after each stage and `skip` after anything that is not part of
    a stage, then `end`. A lap costs one clock reading.

    Attributes:
        names: columns of `rows`: stages by name, then `SPANS`.
        steps: steps recorded since the start, those no longer kept included.
        timed: whether laps of the present step are times of stages. Where stages return before
            they are done, they are only in steps that wait after each.
        moments: of every step since this became a list; None: they are not kept.
    """

    def __init__(self, stages: Sequence[Stage], capacity: int = 2048) -> None:
        self.names = (*(stage.name for stage in stages), *SPANS)
        self.steps = 0
        self.timed = True
        self._rows = np.zeros((capacity, len(self.names)), np.int64)
        self._samples = np.zeros((capacity, 2), np.int64)
        self._timed = np.zeros(capacity, np.bool_)
        self._row = [0] * len(self.names)
        self._ends = [0] * len(self.names)
        self.moments: list[Moments] | None = None
        self._spans = len(stages)
        self._start = self._last = 0

    def begin(self) -> None:
        """A step starts now."""
        self._start = self._last = perf_counter_ns()

    def lap(self, stage: int, outside_ns: int = 0) -> None:
        """What ran since the last lap or skip was stage number `stage`, but for `outside_ns`."""
        now = perf_counter_ns()
        self._row[stage] = now - self._last - outside_ns
        # Outside is what came last in the lap.
        self._ends[stage] = now - outside_ns
        self._last = now

    def put(self, stage: int, nanoseconds: int, end: int) -> None:
        """Stage number `stage` took so long, up to `end`, as another clock has found."""
        self._row[stage], self._ends[stage] = nanoseconds, end

    def skip(self) -> None:
        """What ran since the last lap or skip belongs to no stage."""
        self._last = perf_counter_ns()

    def waited(self) -> None:
        """What ran since the last lap or skip was waiting for data."""
        self.lap(self._spans)

    def end(self, *, exposed_ns: int, hidden_ns: int, samples: int, global_count: int) -> int:
        """The step ends now.

        Args:
            exposed_ns: time that communication kept this rank from computing.
            hidden_ns: time that communication was under way behind computing.
            samples: samples of this rank's shard.
            global_count: samples of the minibatch.

        Returns:
            Nanoseconds since `begin`.
        """
        total = perf_counter_ns() - self._start
        row = self._row
        row[self._spans + 1 :] = (exposed_ns, hidden_ns, total)
        place = self.steps % len(self._rows)
        self._rows[place] = row
        self._samples[place] = samples, global_count
        self._timed[place] = self.timed
        self.steps += 1
        return total

    def note_moments(
        self, exposed: Iterable[tuple[int, int]], sums: Iterable[tuple[int, int]]
    ) -> None:
        """Keep when things were in the step that has just ended.

        Args:
            exposed, sums: as `Moments` has them.
        """
        if self.moments is None:
            return
        number = self.steps - 1
        total = int(self._rows[number % len(self._rows), -1])
        stages = zip(self._ends[: self._spans], self._row[: self._spans], strict=True)
        self.moments.append(
            Moments(
                number,
                self.timed,
                self._start,
                self._ends[self._spans],
                self._start + total,
                tuple((end - took, end) for end, took in stages),
                tuple(exposed),
                tuple(sums),
            )
        )

    def rows(self, global_count: int | None = None) -> NDArray[np.int64]:
        """Nanoseconds, one row a kept step, oldest first, one column a name.

        Args:
            global_count: only steps whose minibatch had this many samples.
        """
        rows, samples, _ = self.in_order()
        return rows if global_count is None else rows[samples == global_count]

    def timed_rows(self, last: int) -> NDArray[np.int64]:
        """Those of the `last` steps whose laps are times of stages; there may be none."""
        rows, _, timed = self.in_order()
        chosen: NDArray[np.int64] = rows[-last:][timed[-last:]]
        return chosen

    def in_order(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
        """Of every kept step, oldest first: `rows`, minibatch samples, and whether it was timed."""
        first = max(self.steps - len(self._rows), 0)
        order = np.arange(first, self.steps) % len(self._rows)
        return self._rows[order], self._samples[order, 1], self._timed[order]

    def mean_samples(self, global_count: int | None = None) -> float:
        """Mean number of samples of this rank's shard.

        Args:
            global_count: in steps whose minibatch had this many samples.
        """
        samples = self._samples[: min(self.steps, len(self._rows))]
        if global_count is not None:
            samples = samples[samples[:, 1] == global_count]
        return float(samples[:, 0].mean()) if len(samples) else 0.0


def timing_cost_ms(stages: Sequence[Stage]) -> float:
    """Milliseconds that the calls of a recorder take in a step, found by making them alone.

    The best of some spells: what interrupts one is not the recorder's.
    """
    recorder = StepRecorder(stages, capacity=1)

    def spell(steps: int) -> float:
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

    return min(spell(20) for _ in range(10))
