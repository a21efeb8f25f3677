"""Times of every stage of every step on this rank, by one monotonic clock."""

from __future__ import annotations

from collections.abc import Sequence
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


class StepRecorder:
    """Keeps the last `capacity` steps in memory that is allocated once.

    Use: `begin`, then `lap(stage)` after each stage and `skip` after anything that is not part of
    a stage, then `end`. A lap costs one clock reading.

    Attributes:
        names: columns of `rows`: stages by name, then `SPANS`.
        steps: steps recorded since the start, those no longer kept included.
        timed: whether laps of the present step are times of stages. Where stages return before
            they are done, they are only in steps that wait after each.
    """

    def __init__(self, stages: Sequence[Stage], capacity: int = 2048) -> None:
        self.names = (*(stage.name for stage in stages), *SPANS)
        self.steps = 0
        self.timed = True
        self._rows = np.zeros((capacity, len(self.names)), np.int64)
        self._samples = np.zeros((capacity, 2), np.int64)
        self._timed = np.zeros(capacity, np.bool_)
        self._row = [0] * len(self.names)
        self._spans = len(stages)
        self._start = self._last = 0

    def begin(self) -> None:
        """A step starts now."""
        self._start = self._last = perf_counter_ns()

    def lap(self, stage: int, outside_ns: int = 0) -> None:
        """What ran since the last lap or skip was stage number `stage`, but for `outside_ns`."""
        now = perf_counter_ns()
        self._row[stage] = now - self._last - outside_ns
        self._last = now

    def put(self, stage: int, nanoseconds: int) -> None:
        """Stage number `stage` took so long by another clock."""
        self._row[stage] = nanoseconds

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

    def rows(self, global_count: int | None = None) -> NDArray[np.int64]:
        """Nanoseconds, one row a kept step in no particular order, one column a name.

        Args:
            global_count: only steps whose minibatch had this many samples.
        """
        kept = min(self.steps, len(self._rows))
        rows = self._rows[:kept]
        if global_count is None:
            return rows
        chosen: NDArray[np.int64] = rows[self._samples[:kept, 1] == global_count]
        return chosen

    def timed_rows(self) -> NDArray[np.int64]:
        """As `rows`, of steps whose laps are times of stages; of all if there is none."""
        kept = min(self.steps, len(self._rows))
        timed = self._timed[:kept]
        chosen: NDArray[np.int64] = self._rows[:kept][timed] if timed.any() else self._rows[:kept]
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
