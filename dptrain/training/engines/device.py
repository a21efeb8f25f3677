"""Training steps on a device: the host enqueues steps ahead and receives their results later."""

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
from dptrain.plan.flat import LOSS
from dptrain.training.engines.base import Engine, StepResult
from dptrain.training.engines.device_steps import DeviceSteps, Staged, Timing
from dptrain.training.engines.device_work import DeviceWork

FIRST_TIMED = 10
"""Number of steps before the first that is timed stage by stage. During these, the programs of both
kinds of steps are captured for each staging slot, of which there are up to four. If some of these
steps have a smaller minibatch, the first timed step is later."""

TIMED_EVERY = 500
"""One step in so many is timed stage by stage. Its stages do not overlap, and the host waits for
it, which takes 75 to 160 µs (H200, H100), as long as several small steps."""


UNTIMED, REHEARSED = Timing(), Timing(rehearses=True)
"""Of a step that is not timed, if no steps are timed and if some are."""

LOAD_AHEAD_FLOPS = 2e9
"""Smallest step whose minibatch is loaded during the step before. This takes the host 7 to 13 µs
more, of about 50 (host of an H100), which the steps of smaller networks do not hide. A step of
cifar with 32 samples has 3.4 GFLOP and takes 70 µs; one of model0 0.3 and about 40."""


class DeviceEngine(Engine):
    """Enqueues each step as one captured program, the sum over the ranks included.

    The host does not wait for a step until `max_steps_in_flight` later ones are enqueued, unless it
    is timed stage by stage; see `DeviceSteps`. If a step has several passes, each is a program with
    a minibatch of its own, and counts as a step in flight.

    Attributes:
        steps: stages, enqueues and awaits the passes.
    """

    separates_sums = False

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
        flops = sum(stage.flops for stage in replica.plan.stages)
        self.loads_ahead = replica.loads_ahead and flops >= LOAD_AHEAD_FLOPS
        work = DeviceWork(
            replica,
            gradient_sum,
            self._buckets_after,
            statistics_sum,
            loads_ahead=self.loads_ahead,
        )
        self._times = work.times
        self.steps = DeviceSteps(
            replica, work, gradient_sum.world, self._end_pass, loads_ahead=self.loads_ahead
        )
        self.time_stages(FIRST_TIMED, TIMED_EVERY)
        self._stops = False
        self._failed: Staged | None = None

    @property
    def max_steps_in_flight(self) -> int:
        return self.steps.max_in_flight

    @property
    def upload_ms(self) -> float:
        return self.device_replica.upload_ms

    def step(self, batches: Iterator[Batch], learning_rate: float, *, stop: bool = False) -> None:
        steps, num_samples = self.steps, 0
        with self.recorder.step as current:
            for part in range(self.passes):
                batch = next(batches)
                begin = current.data_wait()
                if part == 0:
                    timing = self._timing(batch)
                staged = steps.stage(batch, learning_rate, timing, stop=stop)
                end = current.other()
                steps.enqueue(staged)
                timing = staged.timing
                current.timed = timing.by_stage
                if timing.by_stage:
                    self._times.record(current)
                else:
                    current.add_stage(self._load_index, begin, end)
                current.other()
                num_samples += len(batch.samples)
            self._record(staged, num_samples)

    def results(self, *, wait: bool = False) -> list[StepResult]:
        if wait or self._stops:
            self.steps.finish()
        results = super().results()
        if self._failed is not None:
            # Later steps have been staged, but not unpacked to the same buffer.
            self.device_replica.select_step(self._failed.slot, len(self._failed.batch.samples))
        if self._stops:
            results = [result._replace(stop=result is results[-1]) for result in results]
        return results

    def release_programs(self) -> None:
        self.steps.release_programs()

    def _timing(self, batch: Batch) -> Timing:
        """Return how a step is timed, the same on every rank."""
        number, some = self.recorder.steps, self._next_timed is not None
        by_stage = self._is_timed(batch)
        if not by_stage and not (some and number <= FIRST_TIMED):
            return REHEARSED if some else UNTIMED
        return Timing(
            by_stage=by_stage,
            is_needed=self._time_every == 1,
            rehearses=some and number >= FIRST_TIMED - self.steps.rehearsals,
            alone=by_stage or (some and number <= FIRST_TIMED),
        )

    def _record(self, staged: Staged, num_samples: int) -> None:
        """Record a step, and wait for it if it is timed."""
        staged.record = record = self.recorder.step.end(
            samples=num_samples,
            global_count=staged.batch.global_count,
            sums=self._times.spans,
            enqueued=True,
        )
        if record.timed:
            self.steps.result(staged)
            self._next_timed = record.step + self._time_every

    def _end_pass(self, staged: Staged, sums: list[float]) -> None:
        """Record the result of a pass that has ended, if it is the last one of a step."""
        if self._failed is None and not math.isfinite(sums[LOSS]):
            self._failed = staged
        if staged.record is None:
            return
        self.recorder.complete(staged.record, staged.ended_ns)
        result = self._result(staged.batch, sums, staged.learning_rate, staged.record)
        self._done.append(result)
        self._stops = self._stops or result.stop

    def time_sum_alone(self, bucket: int) -> int:
        time_ns = super().time_sum_alone(bucket)
        # Repeated sums overflow, and a step after a loss that is not finite changes nothing.
        self.device_replica.reset_loss()
        return time_ns

    def _sum_alone(self, bucket: int) -> None:
        super()._sum_alone(bucket)
        self.replica.memory.synchronize()
