"""Training steps on a device whose gradients MPI sums, in host memory or in place."""

from __future__ import annotations

import math
from collections.abc import Iterator

from dptrain.backends.device_replica import DeviceReplica
from dptrain.backends.replica import Replica
from dptrain.batch import Batch
from dptrain.comm.statistics.statistics import StatisticsSum
from dptrain.comm.sums.base import GradientSum
from dptrain.measure.recorder import StepRecorder
from dptrain.plan.buckets import Bucket
from dptrain.plan.flat import LOSS, SUMS
from dptrain.training.engines.device import FIRST_TIMED, TIMED_EVERY
from dptrain.training.engines.programs import Programs
from dptrain.training.engines.statistics import summing_statistics
from dptrain.training.engines.synchronous import SynchronousEngine


class HostSumDeviceEngine(SynchronousEngine):
    """Steps of a device whose gradients MPI sums, in host memory or in place.

    Each step has ended when it returns, because the host reads the loss before the update. A step
    whose batch statistics the host sums is not captured.
    """

    def __init__(
        self,
        replica: Replica,
        gradient_sum: GradientSum,
        buckets: tuple[Bucket, ...],
        recorder: StepRecorder,
        statistics_sum: StatisticsSum | None = None,
    ) -> None:
        assert isinstance(replica, DeviceReplica)
        super().__init__(replica, gradient_sum, buckets, recorder, statistics_sum)
        self.device_replica = replica
        self.time_stages(FIRST_TIMED, TIMED_EVERY)
        self._programs = Programs(replica)
        # MPI may sum the gradients in device memory; otherwise this is a copy in host memory.
        self._is_copied = gradient_sum.gradients is not replica.flat_gradients

    def step(self, batches: Iterator[Batch], learning_rate: float, *, stop: bool = False) -> None:
        with self._step as timing:
            self._num_samples = 0
            for _ in range(self.passes - 1):
                batch = next(batches)
                self._load(batch, learning_rate, stop=stop)
                self._forward_backward(batch)
                self._store_gradients()
            batch = next(batches)
            self._load(batch, learning_rate, stop=stop)
            self._forward_backward(batch)
            if not timing.timed:
                for bucket in range(len(self.gradient_sum.buckets)):
                    self._start_sum(bucket)
            self._sum_timer.finish_and_update(self._update_slice, learning_rate)
            self._record(batch, learning_rate)

    def _load(self, batch: Batch, learning_rate: float, *, stop: bool) -> None:
        step, replica = self._step, self.device_replica
        step.data_wait()
        step.timed = self._is_timed(batch)
        replica.context.part = batch.part
        self._num_samples += len(batch.samples)
        if step.timed:
            replica.memory.synchronize()
            step.other()
        self._update_number = replica.updates + 1
        replica.stage_batch(batch, learning_rate=learning_rate, stop=stop)
        replica.unpack_staged_batch()
        replica.sums_future()
        self._end_stage(self._load_index)

    def _forward_backward(self, batch: Batch) -> None:
        with summing_statistics(
            self.device_replica, self.statistics_sum, after_call=self._step.interrupt
        ):
            if self._step.timed:
                self.device_replica.run(self._after_stage, overlap=False)
            elif self.statistics_sum is None:
                self._programs.run(batch, self.device_replica.run)
            else:
                self.device_replica.run()

    def _after_stage(self, stage: int) -> None:
        self._end_stage(stage)
        if self._is_last_pass:
            for bucket in self._buckets_after.get(stage, ()):
                self._start_sum(bucket)
        self._sum_timer.poll()
        self._step.other()

    @property
    def _is_last_pass(self) -> bool:
        return self.replica.context.part == self.passes - 1

    def _store_gradients(self) -> None:
        self._step.other()
        super()._store_gradients()
        self._end_stage(self._update_index)

    def _end_stage(self, stage: int) -> None:
        if self._step.timed:
            self.replica.memory.synchronize()
        self._step.stage(stage)

    def _start_sum(self, bucket: int) -> None:
        if self.passes > 1:
            self._add_stored_gradients(bucket)
        self._fetch_gradients(bucket)
        self._sum_timer.start(bucket)

    def _fetch_gradients(self, bucket: int) -> None:
        """Wait for the gradients of a bucket; copy them to the host if they are summed there."""
        memory, gradient_sum = self.replica.memory, self.gradient_sum
        if self._is_copied:
            elements = slice(gradient_sum.buckets[bucket].start, gradient_sum.buckets[bucket].stop)
            for slot, target in enumerate(gradient_sum.contributions):
                memory.download(self.replica.gradient_slots[slot, elements], target[elements])
        else:
            memory.synchronize()

    def _update_slice(self, elements: slice, learning_rate: float) -> None:
        """Update some parameters, unless the loss over all ranks is not finite."""
        if not math.isfinite(self._summed_losses()[LOSS]):
            return
        replica, gradients = self.replica, self.gradient_sum.gradients
        if self._is_copied:
            size = self.gradient_sum.num_parameters
            for part in (elements, slice(size, size + len(SUMS))):
                replica.memory.upload(replica.flat_gradients[part], gradients[part])
        self._step.other()
        replica.update_slice(elements, learning_rate, number=self._update_number)
        self._end_stage(self._update_index)

    def _summed_losses(self) -> list[float]:
        if not self._is_copied:
            return self.replica.loss_sums()
        size = self.gradient_sum.num_parameters
        sums: list[float] = self.gradient_sum.gradients[size : size + len(SUMS)].tolist()
        return sums

    def _sum_alone(self, bucket: int) -> None:
        self._fetch_gradients(bucket)
        super()._sum_alone(bucket)
        if self._is_copied:
            self.replica.memory.upload(self.replica.flat_gradients, self.gradient_sum.gradients)
        self.replica.memory.synchronize()
