"""Training steps on a device: the host enqueues steps ahead and receives their results later."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from time import monotonic
from typing import NamedTuple

from dptrain.backends.device_replica import DeviceReplica, SumsFuture
from dptrain.backends.replica import Listener, Replica
from dptrain.batch import Batch
from dptrain.comm.statistics.statistics import StatisticsSum
from dptrain.comm.sums.base import GradientSum
from dptrain.measure.recorder import Row, StepRecorder
from dptrain.plan.buckets import Bucket
from dptrain.plan.flat import LOSS
from dptrain.training.engines.base import Engine, StepResult
from dptrain.training.engines.device_times import DeviceTimes
from dptrain.training.engines.programs import Kind, Programs
from dptrain.training.engines.series import Series, SeriesClock
from dptrain.training.engines.statistics import summing_statistics

FIRST_TIMED = 10
"""Number of steps before the first that is timed stage by stage. During these, the programs of both
kinds of steps are captured for each staging slot, of which there are up to four. If some of these
steps have a smaller minibatch, the first timed step is later."""

TIMED_EVERY = 500
"""One step in so many is timed stage by stage. Its stages do not overlap, and the host waits for
it, which takes 75 to 160 µs (H200, H100), as long as several small steps."""


SHORT_SLOT = 0
"""Staging slot of minibatches that are smaller than others, such as the last one of an epoch. A
graph is valid for one slot only, and its capture takes 1 to 2 ms."""


LOAD_AHEAD_FLOPS = 2e9
"""Smallest step whose minibatch is loaded during the step before. This takes the host 7 to 13 µs
more, of about 50 (host of an H100), which the steps of smaller networks do not hide. A step of
cifar with 32 samples has 3.4 GFLOP and takes 70 µs; one of model0 0.3 and about 40."""


SERIES_FLOPS = 1e11
"""Largest step that is enqueued in series. Longer ones take longer than all that the host does."""


class _StepInFlight(NamedTuple):
    """A step whose result is not known yet; `row` belongs to the recorder.

    A pass that is not the last one of a step has no row and no result. `series` is None for a step
    with a program of its own.
    """

    slot: int
    sums: SumsFuture
    batch: Batch
    learning_rate: float
    row: Row | None
    series: Series | None = None


class _Work(NamedTuple):
    """The work of a pass, and the kinds of its programs; the second ones are timed by stage."""

    enqueue: Callable[[], None]
    kind: Kind
    enqueue_timed: Callable[[], None]
    timed_kind: Kind


class DeviceEngine(Engine):
    """Enqueues each step as one captured program, the sum over the ranks included.

    Another program unpacks the minibatch of a step during the step before, if the replica has two
    input buffers and the step is long enough: a step of cifar with 32 samples in bfloat16 takes
    73.7 µs instead of 79.5 (one H100).

    Short steps whose minibatches are encoded are enqueued in series, as one program: the host then
    does for several steps what it otherwise does for each, and the device does not wait for it. A
    step of model0 with 32 samples in bfloat16 takes 39 to 50 µs instead of 50 to 67, one of cifar
    71.5 instead of 75.5 to 83 (one H200, two alternating runs).

    The host does not wait for a step until `max_steps_in_flight` later ones are enqueued. Steps
    that are timed stage by stage do not overlap stages, a kernel writes a time stamp after each
    stage, and the host waits for them; they unpack their own minibatch. Their programs are
    rehearsed before the first of them, so that the host's work to capture a graph is not in their
    times.

    If a step has several passes, each is a program with a minibatch of its own, and counts as a
    step in flight.

    Attributes:
        captures_timed: True if timed steps are captured like others. False enqueues their stages
            one by one, so that NVTX ranges can be set around them.
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
        self._slot = 0
        flops = sum(stage.flops for stage in replica.plan.stages)
        self.loads_ahead = replica.loads_ahead and flops >= LOAD_AHEAD_FLOPS
        self.captures_timed = True
        self.time_stages(FIRST_TIMED, TIMED_EVERY)
        self._programs = Programs(replica)
        may_make_series = flops <= SERIES_FLOPS and self.passes == 1 and bool(replica.series_slots)
        # All ranks see a stop request after the same step only if as many steps are in flight.
        found = gradient_sum.world.all_gather_json([may_make_series, replica.max_steps_in_flight])
        self._makes_series = all(may for may, _ in found)
        self.max_steps_in_flight = min(steps for _, steps in found)
        self._num_slots = 1 + self.max_steps_in_flight  # Of steps that are not in series.
        self._series: Series | None = None
        self._num_series = 0
        self._series_clock = SeriesClock(replica)
        self._in_flight: deque[_StepInFlight] = deque()
        self._stops = False
        self._failed: _StepInFlight | None = None
        self._device_times = DeviceTimes(replica, gradient_sum, self._buckets_after, statistics_sum)
        self._early_work = _Work(
            self._enqueue_early_pass, Kind.EARLY_PASS,
            self._enqueue_timed_early_pass, Kind.TIMED_EARLY_PASS,
        )  # fmt: skip
        self._last_work = _Work(
            self._enqueue_step, Kind.STEP, self._enqueue_timed_step, Kind.TIMED_STEP
        )

    def step(self, batches: Iterator[Batch], learning_rate: float, *, stop: bool = False) -> None:
        recorder, num_samples = self.recorder, 0
        recorder.begin()
        for left in range(self.passes - 1, -1, -1):
            batch = next(batches)
            recorder.waited()
            if batch.part == 0:
                recorder.timed = self._is_timed(batch)
            if self._joins_series(batch):
                self._add_to_series(batch, learning_rate, stop=stop)
                return
            self._enqueue_series()
            num_samples += len(batch.samples)
            self._slot = self._free_slot(batch)
            self._stage(batch, learning_rate, self._slot, stop=stop)
            if recorder.timed and batch.part:
                recorder.skip()  # The device times it.
            else:
                recorder.lap(self._load_index)
            sums = self._enqueue(batch, self._early_work if left else self._last_work)
            self._collect(max(self._num_slots - 2, 0))
            if left:
                in_flight = _StepInFlight(self._slot, sums, batch, learning_rate, None)
                self._in_flight.append(in_flight)
                recorder.skip()
        self._record(batch, learning_rate, sums, num_samples)

    def _joins_series(self, batch: Batch) -> bool:
        """Return whether a step is enqueued with others; all of a series have the same size."""
        if batch.message is None or not self._makes_series or self.recorder.timed:
            return False
        if self._next_timed is not None and self.recorder.steps <= FIRST_TIMED:
            return False  # The programs of single steps are captured.
        return batch.global_count == self._largest_count

    def _add_to_series(self, batch: Batch, learning_rate: float, *, stop: bool) -> None:
        """Stage a step; enqueue it with those before if the series is full."""
        series = self._series
        if series is not None and series.global_count != batch.global_count:
            self._enqueue_series()
            series = None
        if series is None:
            series = self._series = self._begin_series(batch.global_count)
        slot = series.add_step()
        self._stage(batch, learning_rate, slot, stop=stop)
        self._record(batch, learning_rate, series.sums_of(slot), len(batch.samples), series)
        if series.is_full:
            self._enqueue_series()

    def _begin_series(self, global_count: int) -> Series:
        """Return a series whose slots no step in flight uses."""
        slots = self.device_replica.series_slots
        half = len(slots) // 2
        slots = slots[half:] if self._num_series % 2 else slots[:half]
        self._num_series += 1
        self.max_steps_in_flight = 2 * len(slots) - 1
        while any(step.slot in slots for step in self._in_flight):
            self._collect(len(self._in_flight) - 1)
        return Series(self.device_replica, slots, global_count)

    def _enqueue_series(self) -> None:
        """Enqueue the steps that were staged in series, or each one by itself if they are few.

        Only whole series are captured: each number of steps would need programs of its own, and a
        capture takes several milliseconds.
        """
        series, self._series = self._series, None
        if series is None:
            return
        if series.is_full:
            series.enqueue(self._in_flight[-1].batch, self._programs, self._enqueue_loaded_step)
            return
        staged = [self._in_flight.pop() for _ in series.slots]
        for step in reversed(staged):
            self._slot = self._free_slot(step.batch)
            self.device_replica.move_staged_batch(step.slot, self._slot)
            sums = self._enqueue_untimed(step.batch, self._last_work)
            self._in_flight.append(step._replace(slot=self._slot, sums=sums, series=None))

    @property
    def upload_ms(self) -> float:
        return self.device_replica.upload_ms

    def results(self, *, wait: bool = False) -> list[StepResult]:
        if wait or self._stops:
            self._enqueue_series()
            self._collect(0)
        results = super().results()
        if self._failed is not None:
            # Later steps have been staged, but not unpacked to the same buffer.
            self.device_replica.select_step(self._failed.slot, len(self._failed.batch.samples))
        if self._stops:
            results = [result._replace(stop=result is results[-1]) for result in results]
        return results

    def release_programs(self) -> None:
        self._programs.clear()

    def _free_slot(self, batch: Batch) -> int:
        """Return a staging slot after the step that used it has ended."""
        slot = (self.device_replica.staging_slot + 1) % self._num_slots
        if batch.global_count < self._largest_count:
            slot = SHORT_SLOT
        while any(step.slot == slot for step in self._in_flight):
            self._collect(len(self._in_flight) - 1)
        return slot

    def _stage(self, batch: Batch, learning_rate: float, slot: int, *, stop: bool) -> None:
        """Write a minibatch and its hyperparameters to a staging slot."""
        # The bias correction of Adam counts the update of this step.
        self.replica.updates += batch.part == 0
        self.replica.context.part = batch.part
        self.device_replica.stage_batch(batch, learning_rate=learning_rate, stop=stop, slot=slot)

    def _enqueue(self, batch: Batch, work: _Work) -> SumsFuture:
        """Run the program of a pass, and wait for it if the step is timed."""
        recorder, slot = self.recorder, self._slot
        timed = recorder.timed
        by_stage = timed or self._rehearses(batch, slot, work.timed_kind)
        if timed and not self._is_ready(batch, slot, work.timed_kind):
            # What the host does to capture the program would be in the times of earlier steps.
            self._collect(0)
            # If few steps are timed, a later one can be; if all are, the caller requested each.
            recorder.timed = self._time_every == 1
        if not by_stage:
            return self._enqueue_untimed(batch, work)
        if self.captures_timed:
            self._programs.run(batch, work.enqueue_timed, kind=work.timed_kind, slot=slot)
        else:
            work.enqueue_timed()
        sums = self.device_replica.sums_future()
        if recorder.timed:
            # Earlier steps end now, and not when this one does.
            self._collect(0)
            self._wait_for(sums)
            self._device_times.record(recorder)
        return sums

    def _enqueue_untimed(self, batch: Batch, work: _Work) -> SumsFuture:
        """Run the program of a pass that is not timed by stage."""
        replica, run, slot = self.device_replica, self._programs.run, self._slot
        if self.loads_ahead:
            with replica.load_stream():
                run(batch, replica.unpack_staged_batch, kind=Kind.LOAD, slot=slot)
        run(batch, work.enqueue, kind=work.kind, slot=slot)
        return replica.sums_future()

    def _rehearses(self, batch: Batch, slot: int, kind: Kind) -> bool:
        """Return whether an untimed step runs as if it were timed: one per slot and one more."""
        first = FIRST_TIMED - self._num_slots - 1
        if self._next_timed is None or self.recorder.steps < first:
            return False
        return batch.global_count == self._largest_count and not self._is_ready(batch, slot, kind)

    def _is_ready(self, batch: Batch, slot: int, kind: Kind) -> bool:
        """Return whether the host only launches a captured program for a timed step."""
        if not self.captures_timed:
            return True
        return self._programs.is_captured(batch, kind=kind, slot=slot)

    def _enqueue_early_pass(self) -> None:
        self._unpack()
        self._enqueue_stages(None)
        self.device_replica.enqueue_sums_copy()
        self._store_gradients()

    def _unpack(self) -> None:
        """Enqueue what unpacks the minibatch, unless this is done during the step before."""
        if not self.loads_ahead:
            self.device_replica.unpack_staged_batch()

    def _enqueue_stages(self, listener: Listener | None, *, early: bool = False) -> None:
        replica = self.device_replica
        with summing_statistics(replica, self.statistics_sum):
            replica.run(listener, early=early)

    def _enqueue_step(self) -> None:
        self._unpack()
        self._enqueue_loaded_step()

    def _enqueue_loaded_step(self) -> None:
        replica, gradient_sum = self.device_replica, self.gradient_sum
        self._enqueue_stages(self._start_buckets, early=gradient_sum.is_identity)
        self._finish_sum()
        replica.enqueue_sums_copy()
        gradient_sum.update(self._enqueue_update, 0.0)

    def _start_buckets(self, stage: int) -> None:
        for bucket in self._buckets_after.get(stage, ()):
            self._start_sum(bucket)

    def _start_sum(self, bucket: int) -> None:
        if self.passes > 1 and not self.gradient_sum.is_identity:
            with self.gradient_sum.stream():
                self._add_stored_gradients(bucket)
        self.gradient_sum.start(bucket)

    def _finish_sum(self) -> None:
        if self.passes > 1 and self.gradient_sum.is_identity:
            for bucket in range(len(self.gradient_sum.buckets)):
                self._add_stored_gradients(bucket)
        self.gradient_sum.finish()

    def _enqueue_update(self, elements: slice, learning_rate: float) -> None:
        """Enqueue the update; the learning rate was staged, and the kernel checks the loss."""
        self.device_replica.enqueue_update(rest=self.gradient_sum.is_identity)

    def _enqueue_timed_early_pass(self) -> None:
        self._enqueue_timed_stages(self._device_times.record_stage)
        self._device_times.record_sum()
        self.device_replica.enqueue_sums_copy()
        self._store_gradients()
        self._device_times.record_stage(self._update_index)

    def _enqueue_timed_stages(self, after_stage: Listener) -> None:
        replica, times = self.device_replica, self._device_times
        times.record_begin()
        replica.unpack_staged_batch()
        times.record_stage(self._load_index)
        with summing_statistics(replica, self.statistics_sum, times.sum_statistics):
            replica.run(after_stage, overlap=False)

    def _enqueue_timed_step(self) -> None:
        replica, gradient_sum, times = self.device_replica, self.gradient_sum, self._device_times

        def after_stage(stage: int) -> None:
            times.record_stage(stage)
            for bucket in self._buckets_after.get(stage, ()):
                self._start_sum(bucket)
                times.record_bucket(bucket)

        self._enqueue_timed_stages(after_stage)
        self._finish_sum()
        times.record_sum()
        gradient_sum.update(lambda elements, learning_rate: replica.enqueue_update(), 0.0)
        times.record_stage(self._update_index)
        replica.enqueue_sums_copy()

    def _record(
        self,
        batch: Batch,
        learning_rate: float,
        sums: SumsFuture,
        num_samples: int,
        series: Series | None = None,
    ) -> None:
        """Record a staged step, and wait for it if it is timed."""
        recorder, times = self.recorder, self._device_times
        row = recorder.end(
            exposed_ns=times.exposed_ns,
            hidden_ns=times.hidden_ns,
            statistics_ns=times.statistics_ns,
            samples=num_samples,
            global_count=batch.global_count,
            enqueued=True,
        )
        if recorder.keeps_moments:
            recorder.note_moments(times.calls, times.spans)
        slot = self._slot if series is None else series.slots[-1]
        self._in_flight.append(_StepInFlight(slot, sums, batch, learning_rate, row, series))
        if recorder.timed:
            self._collect(0)
            self._next_timed = recorder.steps - 1 + self._time_every

    def _collect(self, remaining: int) -> None:
        """Wait for the results of all steps in flight except the last `remaining`."""
        while len(self._in_flight) > remaining:
            step = self._in_flight.popleft()
            sums = self._wait_for(step.sums)
            if self._failed is None and not math.isfinite(sums[LOSS]):
                self._failed = step
            if step.row is None:
                continue
            if step.series is None:
                self._series_clock.reset()
                self.recorder.complete(step.row)
            else:
                ended_ns = self._series_clock.ended_ns(step.series, step.slot)
                self.recorder.complete(step.row, ended_ns)
            result = self._result(step.batch, sums, step.learning_rate, step.row)
            self._done.append(result)
            self._stops = self._stops or result.stop

    def _wait_for(self, sums: SumsFuture) -> list[float]:
        """Return the loss sums of a step when the device has finished it.

        Raises:
            TimeoutError: it took longer than the world's timeout; if there are several ranks, a
                `RankTimeoutError` that names the rank.
        """
        world, begin = self.gradient_sum.world, monotonic()
        world.activity.begin_wait()
        try:
            received = sums(world.timeout)
        except TimeoutError:
            if world.size == 1:
                raise
            raise world.timeout_error("a gradient sum", monotonic() - begin) from None
        world.activity.end_wait()
        return received

    def time_sum_alone(self, bucket: int) -> int:
        time_ns = super().time_sum_alone(bucket)
        # Repeated sums overflow, and a step after a loss that is not finite changes nothing.
        self.device_replica.reset_loss()
        return time_ns

    def _sum_alone(self, bucket: int) -> None:
        super()._sum_alone(bucket)
        self.replica.memory.synchronize()
