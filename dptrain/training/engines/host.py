"""Training steps on a CPU: the stages run in order, and each step has ended when it returns."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from dptrain.backends.flat_arrays import uses_norms
from dptrain.backends.replica import Replica
from dptrain.batch import Batch
from dptrain.comm.statistics.statistics import StatisticsSum
from dptrain.comm.sums.base import GradientSum
from dptrain.measure.recorder import StepRecorder
from dptrain.native.threads import threads_of
from dptrain.plan.buckets import Bucket
from dptrain.plan.flat import LOSS, SUMS
from dptrain.training.digests.guard import StateGuard, make_guard
from dptrain.training.digests.replay import Replay
from dptrain.training.engines.synchronous import SynchronousEngine


class HostEngine(SynchronousEngine):
    """Runs the stages of a step in order, and sums gradients during the backward pass.

    A step that is not timed stage by stage starts its gradient sums when backward has ended. If a
    step has several passes, gradients are summed over the ranks in the last one.
    """

    def __init__(
        self,
        replica: Replica,
        gradient_sum: GradientSum,
        buckets: tuple[Bucket, ...],
        recorder: StepRecorder,
        statistics_sum: StatisticsSum | None = None,
        *,
        guards_state: bool = False,
        replay: Replay | None = None,
    ) -> None:
        super().__init__(replica, gradient_sum, buckets, recorder, statistics_sum)
        pool = threads_of(replica)
        recorder.watch(tuple if pool is None else pool.native_ids)
        self._sum_own_statistics = replica.sum_statistics
        # One rank sums nothing, and has nothing to time.
        self._timed_sum = gradient_sum if gradient_sum.is_identity else self._sum_timer
        size = replica.plan.trained.size
        self._loss_sums = replica.flat_gradients[size : size + len(SUMS)]
        self._stages = [stage.index for stage, _ in replica.stages]
        self._replay = replay
        self._guard = make_guard(gradient_sum, replica) if guards_state else None
        if uses_norms(replica.plan) or self._guard is not None:
            self._timed_sum.before_update = self._prepare_update
        # One rank sums nothing.
        self._overlaps = gradient_sum.overlaps and not gradient_sum.is_identity

    def step(self, batches: Iterator[Batch], learning_rate: float, *, stop: bool = False) -> None:
        gradient_sum = self._timed_sum
        with self._step:
            self._num_samples = 0
            for _ in range(self.passes - 1):
                self._make_early_pass(next(batches), stop=stop)
            batch = next(batches)
            self.load(batch, stop=stop)
            start = gradient_sum.start if self.passes == 1 else self._add_and_start
            self.forward_backward(batch, on_bucket_ready=start)
            guard = self._guard if self._guard is not None and self._guard.receives else None
            if guard is not None:
                guard.release()
            gradient_sum.finish_and_update(self.update_slice, learning_rate)
            if guard is not None:
                self._store_digests(guard, slice(0, self.replica.plan.trained.size))
            self._record(batch, learning_rate)

    def _make_early_pass(self, batch: Batch, *, stop: bool) -> None:
        """Make a pass that is not the last one of a step, and keep its gradients."""
        self.load(batch, stop=stop)
        self.forward_backward(batch, on_bucket_ready=lambda bucket: None)
        self._step.other()
        self._store_gradients()
        self._step.stage(self._update_index)

    def _add_and_start(self, bucket: int) -> None:
        """Add the gradients of earlier passes to a bucket, and start its sum."""
        self._step.other()
        self._add_stored_gradients(bucket)
        self._step.stage(self._update_index)
        self._timed_sum.start(bucket)

    def load(self, batch: Batch, *, stop: bool) -> None:
        """Copy a minibatch into the replica.

        After a pass whose loss is not finite, its minibatch stays, so that it can be inspected.
        """
        step, replica = self._step, self.replica
        step.data_wait()
        step.timed = self._is_timed(batch)
        replica.context.part = batch.part
        self._num_samples += len(batch.samples)
        if batch.part and not math.isfinite(self._loss_sums[LOSS]):
            return
        self._update_number = replica.updates + 1
        replica.load(batch, stop=stop)
        step.stage(self._load_index)

    def forward_backward(self, batch: Batch, on_bucket_ready: Callable[[int], None]) -> None:
        """Compute loss and gradients.

        Args:
            batch: the loaded minibatch.
            on_bucket_ready: called with the index of each bucket when its gradients are final.

        Raises:
            CorruptedError: gradients differ that were computed twice; on every rank.
        """
        replica, statistics_sum = self.replica, self.statistics_sum
        recording = None if self._replay is None else self._replay.begin(batch)
        if statistics_sum is not None:
            # Outside of steps, and in steps of other engines, the replica sums nothing over ranks.
            replica.sum_statistics = statistics_sum
            statistics_sum.after_call = self._step.interrupt
        if recording is not None:
            replica.sum_statistics = recording.recorded(replica.sum_statistics)
        if self._step.timed and self._overlaps and recording is None:
            self._run_and_sum(on_bucket_ready)
        else:
            self._run()
            if self._replay is not None and recording is not None:
                replica.sum_statistics = self._sum_own_statistics
                self._replay.check(batch, recording)
                self._step.other()
            for bucket in range(len(self.gradient_sum.buckets)):
                on_bucket_ready(bucket)
        if statistics_sum is not None:
            replica.sum_statistics = self._sum_own_statistics
            statistics_sum.after_call = None

    def _run(self) -> None:
        """Run all stages; their times are computed later."""
        if self._step.timed:
            self._step.stages(self._stages, self.replica.run_timed())
        else:
            self.replica.run()

    def _run_and_sum(self, on_bucket_ready: Callable[[int], None]) -> None:
        """Run stage by stage, and report each bucket as soon as its gradients are final."""
        step, replica = self._step, self.replica
        for stage, kernel in replica.stages:
            kernel(replica.context)
            step.stage(stage.index)
            for bucket in self._buckets_after.get(stage.index, ()):
                on_bucket_ready(bucket)
            self._sum_timer.poll()
            step.other()

    def _prepare_update(self) -> None:
        """Check the state that only this rank has, and apply norms, before an update."""
        if self._guard is not None:
            self._step.other()
            self._guard.release()
            self._step.stage(self._update_index)
        if uses_norms(self.replica.plan):
            self.apply_norms()

    def apply_norms(self) -> None:
        """Clip and scale the gradients that this rank updates, unless the loss is not finite.

        The loss is the same on all ranks, so all of them wait for each other, or none does.
        """
        if not math.isfinite(self._loss_sums[LOSS]):
            return
        self._step.other()
        slices, share = self.gradient_sum.updated_slices, self.gradient_sum.share_squares
        self.replica.apply_norms(slices, number=self._update_number, share=share)
        self._step.stage(self._update_index)

    def update_slice(self, elements: slice, learning_rate: float) -> None:
        """Update some parameters, unless the loss over all ranks is not finite."""
        if math.isfinite(self._loss_sums[LOSS]):
            self._step.other()
            self.replica.update_slice(elements, learning_rate, number=self._update_number)
            if self._guard is not None:
                self._store_digests(self._guard, elements)
            self._step.stage(self._update_index)

    def _store_digests(self, guard: StateGuard, elements: slice) -> None:
        guard.store(elements, self._update_number, is_required=self.requires_guard)

    def check_state(self) -> None:
        if self._guard is not None:
            self._guard.check()

    def _summed_losses(self) -> list[float]:
        sums: list[float] = self._loss_sums.tolist()
        return sums
