"""What the engines have in common whose steps have ended when they return."""

from __future__ import annotations

import math
from abc import abstractmethod

from dptrain.backends.replica import Replica
from dptrain.batch import Batch
from dptrain.comm.statistics.statistics import StatisticsSum
from dptrain.comm.sums.base import GradientSum
from dptrain.measure.recorder import NO_SUMS, StepRecorder, SumTimes
from dptrain.plan.buckets import Bucket
from dptrain.plan.flat import LOSS
from dptrain.training.engines.base import Engine
from dptrain.training.engines.statistics import StatisticsTimer
from dptrain.training.engines.sum_timer import SumTimer


class SynchronousEngine(Engine):
    """An engine that makes one step at a time and measures the calls of the gradient sum."""

    def __init__(
        self,
        replica: Replica,
        gradient_sum: GradientSum,
        buckets: tuple[Bucket, ...],
        recorder: StepRecorder,
        statistics_sum: StatisticsSum | None = None,
    ) -> None:
        super().__init__(replica, gradient_sum, buckets, recorder, statistics_sum)
        self._sum_timer = SumTimer(gradient_sum, recorder)
        self._statistics_timer = StatisticsTimer(statistics_sum)
        self._update_number = self._num_samples = 0
        self._measures_sums = not gradient_sum.is_identity or statistics_sum is not None

    @abstractmethod
    def _summed_losses(self) -> list[float]:
        """Return the loss sums of the step over all ranks."""

    def _begin_step(self) -> None:
        self.recorder.begin()
        self._statistics_timer.begin_step()
        self._num_samples = 0

    def _record(self, batch: Batch, learning_rate: float) -> None:
        """Record the times of a step and its result."""
        recorder, timer, statistics = self.recorder, self._sum_timer, self._statistics_timer
        sums = self._summed_losses()
        if math.isfinite(sums[LOSS]):
            # A rank that receives the updated parameters counts the update, too.
            self.replica.updates = self._update_number
        times = NO_SUMS
        if self._measures_sums:
            # The buckets of a single rank are not summed, and have no times.
            spans = () if self.gradient_sum.is_identity else timer.spans
            statistics_ns = statistics.time_ns
            exposed_ns = timer.exposed_ns + statistics_ns
            times = SumTimes(exposed_ns, timer.hidden_ns, statistics_ns, timer.calls, spans)
        record = recorder.end(times, samples=self._num_samples, global_count=batch.global_count)
        if recorder.timed:
            self._next_timed = recorder.steps - 1 + self._time_every
        self._done.append(self._result(batch, sums, learning_rate, record))
