"""What the engines have in common whose steps have ended when they return."""

from __future__ import annotations

import math
from abc import abstractmethod

from dptrain.backends.replica import Replica
from dptrain.batch import Batch
from dptrain.comm.statistics.statistics import StatisticsSum
from dptrain.comm.sums.base import GradientSum
from dptrain.measure.recorder import StepRecorder
from dptrain.plan.buckets import Bucket
from dptrain.plan.flat import LOSS
from dptrain.training.engines.base import Engine
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
        self._step = recorder.step
        self._sum_timer = SumTimer(gradient_sum, recorder.step)
        self._update_number = self._num_samples = 0

    @abstractmethod
    def _summed_losses(self) -> list[float]:
        """Return the loss sums of the step over all ranks."""

    def _record(self, batch: Batch, learning_rate: float) -> None:
        """Record the times of a step and its result."""
        sums = self._summed_losses()
        if math.isfinite(sums[LOSS]):
            # A rank that receives the updated parameters counts the update, too.
            self.replica.updates = self._update_number
        record = self._step.end(
            samples=self._num_samples,
            global_count=batch.global_count,
            # The buckets of a single rank are not summed, and have no times.
            sums=() if self.gradient_sum.is_identity else self._sum_timer.spans,
        )
        if record.timed:
            self._next_timed = record.step + self._time_every
        self._done.append(self._result(batch, sums, learning_rate, record))
