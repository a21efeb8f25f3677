"""Training steps on a CPU: the stages run in order, and each step has ended when it returns."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from dptrain.backends.replica import Replica
from dptrain.comm.base import GradientSum
from dptrain.data.loader import Batch
from dptrain.measure.recorder import StepRecorder
from dptrain.plan.buckets import Bucket
from dptrain.plan.flat import LOSS, SUMS
from dptrain.training.engines.base import Engine
from dptrain.training.engines.sum_timer import SumTimer


class HostEngine(Engine):
    """Runs the stages of a step in order, and sums gradients during the backward pass.

    A step that is not timed stage by stage starts its gradient sums when backward has ended.
    """

    def __init__(
        self,
        replica: Replica,
        gradient_sum: GradientSum,
        buckets: tuple[Bucket, ...],
        recorder: StepRecorder,
    ) -> None:
        super().__init__(replica, gradient_sum, buckets, recorder)
        self._sum_timer = SumTimer(gradient_sum)
        # One rank sums nothing, and has nothing to time.
        self._timed_sum = gradient_sum if gradient_sum.is_identity else self._sum_timer
        size = replica.plan.layout.size
        self._loss_sums = replica.flat_gradients[size : size + len(SUMS)]
        self._update_number = 0
        self._stages = [stage.index for stage, _ in replica.stages]
        # One rank sums nothing.
        self._overlaps = gradient_sum.overlaps and not gradient_sum.is_identity

    def step(self, batches: Iterator[Batch], learning_rate: float, *, stop: bool = False) -> None:
        gradient_sum = self._timed_sum
        self.recorder.begin()
        batch = next(batches)
        self.load(batch, stop=stop)
        self.forward_backward(on_bucket_ready=gradient_sum.start)
        gradient_sum.finish_and_update(self.update_slice, learning_rate)
        self._record(batch, learning_rate)

    def load(self, batch: Batch, *, stop: bool) -> None:
        """Copy a minibatch into the replica."""
        recorder, replica = self.recorder, self.replica
        recorder.waited()
        recorder.timed = self._is_timed(batch)
        recorder.clear(self._update_index)
        self._update_number = replica.updates + 1
        replica.load(
            batch.x,
            batch.y,
            crop_windows=batch.crop_windows,
            recolourings=batch.recolourings,
            samples=batch.samples,
            global_count=batch.global_count,
            step=batch.step,
            stop=stop,
        )
        recorder.lap(self._load_index)

    def forward_backward(self, on_bucket_ready: Callable[[int], None]) -> None:
        """Compute loss and gradients.

        Args:
            on_bucket_ready: called with the index of each bucket when its gradients are final.
        """
        recorder, replica = self.recorder, self.replica
        if recorder.timed and self._overlaps:
            self._run_and_sum(on_bucket_ready)
            return
        if recorder.timed:
            recorder.laps(self._stages, replica.run_timed())
        else:
            replica.run()
        for bucket in range(len(self.gradient_sum.buckets)):
            on_bucket_ready(bucket)

    def _run_and_sum(self, on_bucket_ready: Callable[[int], None]) -> None:
        """Run stage by stage, and report each bucket as soon as its gradients are final."""
        recorder, replica = self.recorder, self.replica
        for stage, kernel in replica.stages:
            kernel(replica.context)
            recorder.lap(stage.index)
            for bucket in self._buckets_after.get(stage.index, ()):
                on_bucket_ready(bucket)
            self._sum_timer.poll()
            recorder.skip()

    def update_slice(self, elements: slice, learning_rate: float) -> None:
        """Update some parameters, unless the loss over all ranks is not finite."""
        if math.isfinite(self._loss_sums[LOSS]):
            self.recorder.skip()
            self.replica.update_slice(elements, learning_rate, number=self._update_number)
            self.recorder.add_lap(self._update_index)

    def _record(self, batch: Batch, learning_rate: float) -> None:
        """Record the times of a step and its result."""
        recorder, timer = self.recorder, self._sum_timer
        sums: list[float] = self._loss_sums.tolist()
        if math.isfinite(sums[LOSS]):
            # A rank that receives the updated parameters counts the update, too.
            self.replica.updates = self._update_number
        row = recorder.end(
            exposed_ns=timer.exposed_ns,
            hidden_ns=timer.hidden_ns,
            samples=len(batch.samples),
            global_count=batch.global_count,
        )
        if recorder.keeps_moments:
            # The buckets of a single rank are not summed, and have no times.
            spans = () if self.gradient_sum.is_identity else timer.spans
            recorder.note_moments(timer.calls, spans)
        if recorder.timed:
            self._next_timed = recorder.steps - 1 + self._time_every
        self._done.append(self._result(batch, sums, learning_rate, row))
