"""What a pass of a step enqueues on a device: stages, sums over ranks, update, time stamps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from dptrain.backends.device_replica import DeviceReplica
from dptrain.backends.replica import Listener
from dptrain.comm.statistics.statistics import StatisticsSum
from dptrain.comm.sums.base import GradientSum
from dptrain.plan.lowering import Phase
from dptrain.training.engines.device_times import DeviceTimes
from dptrain.training.engines.programs import Kind
from dptrain.training.engines.statistics import summing_statistics


class Work(NamedTuple):
    """The work of a pass, and the kinds of its programs; the second ones are timed by stage."""

    enqueue: Callable[[], None]
    kind: Kind
    enqueue_timed: Callable[[], None]
    timed_kind: Kind


class DeviceWork:
    """Enqueues the work of the passes of a step.

    Args:
        replica: the network.
        gradient_sum: sums its gradients over the ranks.
        buckets_after: numbers of the buckets that are final after a stage.
        statistics_sum: adds batch statistics over the ranks; None if each rank uses its own.
        loads_ahead: True if other work unpacks the minibatch, during the step before.

    Attributes:
        times: time stamps of passes that are timed by stage.
    """

    def __init__(
        self,
        replica: DeviceReplica,
        gradient_sum: GradientSum,
        buckets_after: Mapping[int, Sequence[int]],
        statistics_sum: StatisticsSum | None,
        *,
        loads_ahead: bool,
    ) -> None:
        self._replica, self._sum, self._buckets_after = replica, gradient_sum, buckets_after
        self._statistics_sum, self._loads_ahead = statistics_sum, loads_ahead
        self._passes = replica.plan.passes
        self.times = DeviceTimes(replica, gradient_sum, buckets_after, statistics_sum)
        stages = replica.plan.stages
        self._load = next(s.index for s in stages if s.phase is Phase.LOAD)
        self._update = next(s.index for s in stages if s.phase is Phase.UPDATE)
        self._early_pass = Work(
            self._enqueue_early_pass,
            Kind.EARLY_PASS,
            self._enqueue_timed_early_pass,
            Kind.TIMED_EARLY_PASS,
        )
        self._last_pass = Work(
            self._enqueue_step, Kind.STEP, self._enqueue_timed_step, Kind.TIMED_STEP
        )

    def of_pass(self, part: int) -> Work:
        """Return the work of a pass of a step; the last one sums gradients and updates."""
        return self._last_pass if part == self._passes - 1 else self._early_pass

    def enqueue_loaded_step(self) -> None:
        """Enqueue the last pass of a step whose minibatch is unpacked."""
        replica, gradient_sum = self._replica, self._sum
        self._enqueue_stages(self._start_sums, early=gradient_sum.is_identity)
        self._finish_sum()
        replica.enqueue_sums_copy()
        gradient_sum.update(self._enqueue_update, 0.0)

    def _enqueue_step(self) -> None:
        self._unpack()
        self.enqueue_loaded_step()

    def _enqueue_early_pass(self) -> None:
        self._unpack()
        self._enqueue_stages(None)
        self._replica.enqueue_sums_copy()
        self._store_gradients()

    def _unpack(self) -> None:
        if not self._loads_ahead:
            self._replica.unpack_staged_batch()

    def _enqueue_stages(self, listener: Listener | None, *, early: bool = False) -> None:
        with summing_statistics(self._replica, self._statistics_sum):
            self._replica.run(listener, early=early)

    def _start_sums(self, stage: int) -> None:
        """Start the sums of the buckets that are final after a stage."""
        for bucket in self._buckets_after.get(stage, ()):
            self._start_sum(bucket)

    def _start_sum(self, bucket: int) -> None:
        if self._passes > 1 and not self._sum.is_identity:
            with self._sum.stream():
                self._add_stored_gradients(bucket)
        self._sum.start(bucket)

    def _finish_sum(self) -> None:
        if self._passes > 1 and self._sum.is_identity:
            for bucket in range(len(self._sum.buckets)):
                self._add_stored_gradients(bucket)
        self._sum.finish()

    def _store_gradients(self) -> None:
        accumulation = self._replica.accumulation
        assert accumulation is not None, "a step has one pass"
        accumulation.store(self._replica.context.part)

    def _add_stored_gradients(self, bucket: int) -> None:
        accumulation, chosen = self._replica.accumulation, self._sum.buckets[bucket]
        assert accumulation is not None, "a step has one pass"
        accumulation.add(slice(chosen.start, chosen.stop))

    def _enqueue_update(self, elements: slice, learning_rate: float) -> None:
        """Enqueue the update; the learning rate was staged, and the kernel checks the loss."""
        self._replica.enqueue_update(rest=self._sum.is_identity)

    # The same, with time stamps after the stages, which do not overlap.

    def _enqueue_timed_early_pass(self) -> None:
        self._enqueue_timed_stages(self.times.record_stage)
        self.times.record_sum()
        self._replica.enqueue_sums_copy()
        self._store_gradients()
        self.times.record_stage(self._update)

    def _enqueue_timed_step(self) -> None:
        replica, times = self._replica, self.times

        def after_stage(stage: int) -> None:
            times.record_stage(stage)
            for bucket in self._buckets_after.get(stage, ()):
                self._start_sum(bucket)
                times.record_bucket(bucket)

        self._enqueue_timed_stages(after_stage)
        self._finish_sum()
        times.record_sum()
        self._sum.update(lambda elements, learning_rate: replica.enqueue_update(), 0.0)
        times.record_stage(self._update)
        replica.enqueue_sums_copy()

    def _enqueue_timed_stages(self, after_stage: Listener) -> None:
        self.times.record_begin()
        self._replica.unpack_staged_batch()
        self.times.record_stage(self._load)
        with summing_statistics(self._replica, self._statistics_sum, self.times.sum_statistics):
            self._replica.run(after_stage, overlap=False)
