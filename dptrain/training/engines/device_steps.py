"""Steps on a device: staged, enqueued as captured programs, several at a time, and awaited.

`DeviceSteps.stage` writes a minibatch to a staging slot, `enqueue` lets the device compute, and
`result` waits. All that makes this fast is in here: the programs that are captured, the minibatch
that is unpacked during the step before, steps in series, and the number of steps in flight.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import NamedTuple

from dptrain.backends.device_replica import DeviceReplica, SumsFuture
from dptrain.batch import Batch
from dptrain.comm.world import World
from dptrain.measure.step_record import StepRecord
from dptrain.training.engines.device_work import DeviceWork
from dptrain.training.engines.programs import Kind, Programs
from dptrain.training.engines.series import Series, SeriesClock

SHORT_SLOT = 0
"""Staging slot of minibatches that are smaller than others, such as the last one of an epoch. A
graph is valid for one slot only, and its capture takes 1 to 2 ms."""


SERIES_FLOPS = 1e11
"""Largest step that is enqueued in series. Longer ones take longer than all that the host does."""


class Timing(NamedTuple):
    """What the caller of `DeviceSteps` measures.

    Attributes:
        by_stage: True if the step is timed stage by stage.
        is_needed: False lets a step that is not ready for this be an ordinary one.
        rehearses: True if steps that are timed by stage follow, whose programs are captured now.
        alone: True if the step is not enqueued in series, so that its own programs are captured.
    """

    by_stage: bool = False
    is_needed: bool = False
    rehearses: bool = False
    alone: bool = False


@dataclass(eq=False, slots=True)
class Staged:
    """A pass of a step, from its staging to its end.

    Attributes:
        batch: its minibatch.
        learning_rate: of the update.
        timing: what is measured; `timing.by_stage` becomes False if it cannot be.
        slot: its staging slot.
        series: the steps that are enqueued with it; None if it has a program of its own.
        sums: waits for its end.
        record: of the step, if this is its last pass and the caller has set it.
        ended_ns: when it ended on the clock of `time.perf_counter_ns`; None for a step that is not
            in series: when the wait for it ends.
        has_ended: True if `DeviceSteps` has waited for it.
    """

    batch: Batch
    learning_rate: float
    timing: Timing
    slot: int
    series: Series | None = None
    sums: SumsFuture | None = None
    record: StepRecord | None = None
    ended_ns: int | None = None
    has_ended: bool = False


class DeviceSteps:
    """Stages, enqueues and awaits the passes of steps.

    Another program unpacks the minibatch of a step during the step before, if the replica has two
    input buffers and the step is long enough: a step of cifar with 32 samples in bfloat16 takes
    73.7 µs instead of 79.5 (one H100).

    Short steps whose minibatches are encoded are enqueued in series, as one program: the host then
    does for several steps what it otherwise does for each, and the device does not wait for it. A
    step of model0 with 32 samples in bfloat16 takes 81 µs instead of 97, one of cifar 84 instead of
    123, one of model-small in float32 78 instead of 106 (medians of 13 pairs in alternation, H200).

    Steps that are timed by stage do not overlap stages, a kernel writes a time stamp after each
    stage, and the host waits for them; they unpack their own minibatch. Their programs are
    rehearsed before the first of them, so that the host's work to capture a graph is not in their
    times.

    Args:
        replica: the network.
        work: what the passes enqueue.
        world: the ranks, which all make the same calls.
        loads_ahead: True if minibatches are unpacked during the step before.
        on_end: called with each pass that has ended, in order, and with its loss sums.

    Attributes:
        max_in_flight: steps that may be enqueued and not finished when the next one is enqueued.
        captures_timed: True if timed steps are captured like others. False enqueues their stages
            one by one, so that NVTX ranges can be set around them.
    """

    def __init__(
        self,
        replica: DeviceReplica,
        work: DeviceWork,
        world: World,
        on_end: Callable[[Staged, list[float]], None],
        *,
        loads_ahead: bool,
    ) -> None:
        self._replica, self._work, self._world = replica, work, world
        self._on_end, self._loads_ahead = on_end, loads_ahead
        self._programs, self.captures_timed = Programs(replica), True
        flops = sum(stage.flops for stage in replica.plan.stages)
        is_short = flops <= SERIES_FLOPS and replica.plan.passes == 1
        # All ranks see a stop request after the same step only if as many steps are in flight.
        found = world.all_gather_json(
            [is_short and bool(replica.series_slots), replica.max_steps_in_flight]
        )
        self._makes_series = all(may for may, _ in found)
        self.max_in_flight: int = min(steps for _, steps in found)
        self._num_slots: int = 1 + self.max_in_flight  # Of steps that are not in series.
        self._series: Series | None = None
        self._num_series = 0
        self._series_clock = SeriesClock(replica)
        self._in_flight: deque[Staged] = deque()
        self._largest_count = 0

    @property
    def rehearsals(self) -> int:
        """Steps in which the programs of timed steps are captured: one per slot and one more."""
        return self._num_slots + 1

    def stage(
        self, batch: Batch, learning_rate: float, timing: Timing, *, stop: bool = False
    ) -> Staged:
        """Write a minibatch and its hyperparameters to a staging slot that no step uses.

        Args:
            batch: the minibatch of a pass.
            learning_rate: of the update, the same on every rank.
            timing: what is measured.
            stop: True if this rank requests a stop.
        """
        self._largest_count = max(self._largest_count, batch.global_count)
        series = self._series_for(batch, timing)
        slot = self._free_slot(batch) if series is None else series.add_step()
        replica = self._replica
        # The bias correction of Adam counts the update of this step.
        replica.updates += batch.part == 0
        replica.context.part = batch.part
        replica.stage_batch(batch, learning_rate=learning_rate, stop=stop, slot=slot)
        return Staged(batch, learning_rate, timing, slot, series)

    def enqueue(self, staged: Staged) -> None:
        """Let the device compute a pass, or the whole series if this step is its last.

        Returns when the pass has ended if it is timed by stage; otherwise at most `max_in_flight`
        others are left.
        """
        series = staged.series
        if series is not None:
            staged.sums = series.sums_of(staged.slot)
            self._in_flight.append(staged)
            if series.is_full:
                self._series = None
                series.enqueue(staged.batch, self._programs, self._work.enqueue_loaded_step)
            return
        if self._is_timed(staged):
            self._enqueue_timed(staged)
        else:
            self._enqueue_untimed(staged)
        self._await_all_but(max(self._num_slots - 2, 0))
        self._in_flight.append(staged)

    def result(self, staged: Staged) -> None:
        """Wait for a pass, and for all before it; `on_end` receives their loss sums."""
        self.flush()
        while not staged.has_ended:
            self._await_first()

    def flush(self) -> None:
        """Enqueue the steps that were staged in series, each one by itself, because they are few.

        Only whole series are captured: each number of steps would need programs of its own, and a
        capture takes several milliseconds.
        """
        series, self._series = self._series, None
        if series is None:
            return
        rest = [self._in_flight.pop() for _ in series.slots]
        for staged in reversed(rest):
            slot = self._free_slot(staged.batch)
            self._replica.move_staged_batch(staged.slot, slot)
            staged.slot, staged.series = slot, None
            self._enqueue_untimed(staged)
            self._in_flight.append(staged)

    def finish(self) -> None:
        """Wait for all passes in flight."""
        self.flush()
        self._await_all_but(0)

    def release_programs(self) -> None:
        """Release captured graphs."""
        self._programs.clear()

    def _series_for(self, batch: Batch, timing: Timing) -> Series | None:
        """Return the series that a step joins; all steps of one have the same size."""
        joins = self._makes_series and batch.message is not None
        joins = joins and not timing.alone and batch.global_count == self._largest_count
        series = self._series
        if not joins or (series is not None and series.global_count != batch.global_count):
            self.flush()
        if joins and self._series is None:
            self._series = self._begin_series(batch.global_count)
        return self._series

    def _begin_series(self, global_count: int) -> Series:
        """Return a series whose slots no step in flight uses."""
        slots = self._replica.series_slots
        half = len(slots) // 2
        slots = slots[half:] if self._num_series % 2 else slots[:half]
        self._num_series += 1
        self.max_in_flight = 2 * len(slots) - 1
        while any(staged.slot in slots for staged in self._in_flight):
            self._await_first()
        return Series(self._replica, slots, global_count)

    def _free_slot(self, batch: Batch) -> int:
        """Return a staging slot after the pass that used it has ended."""
        slot = (self._replica.staging_slot + 1) % self._num_slots
        if batch.global_count < self._largest_count:
            slot = SHORT_SLOT
        while any(staged.slot == slot for staged in self._in_flight):
            self._await_first()
        return slot

    def _is_timed(self, staged: Staged) -> bool:
        """Return whether a pass runs as if it were timed by stage, and update its timing."""
        timing, is_ready = staged.timing, self._is_ready(staged)
        if not timing.by_stage:
            is_whole = staged.batch.global_count == self._largest_count
            return timing.rehearses and is_whole and not is_ready
        if not is_ready:
            # What the host does to capture the program would be in the times of earlier steps.
            self._await_all_but(0)
            # If few steps are timed, a later one can be; if all are, the caller requested each.
            staged.timing = timing._replace(by_stage=timing.is_needed)
        return True

    def _is_ready(self, staged: Staged) -> bool:
        """Return whether the host only launches a captured program for a timed pass."""
        kind = self._work.of_pass(staged.batch.part).timed_kind
        return not self.captures_timed or self._programs.is_captured(
            staged.batch, kind=kind, slot=staged.slot
        )

    def _enqueue_timed(self, staged: Staged) -> None:
        """Run the program of a pass that writes time stamps; wait for it if they are read."""
        work = self._work.of_pass(staged.batch.part)
        if self.captures_timed:
            self._programs.run(
                staged.batch, work.enqueue_timed, kind=work.timed_kind, slot=staged.slot
            )
        else:
            work.enqueue_timed()
        staged.sums = self._replica.sums_future()
        if staged.timing.by_stage:
            # Earlier steps end now, and not when this one does.
            self._await_all_but(0)
            self.wait_for(staged.sums)

    def _enqueue_untimed(self, staged: Staged) -> None:
        """Run the program of a pass."""
        replica, run, slot = self._replica, self._programs.run, staged.slot
        work = self._work.of_pass(staged.batch.part)
        if self._loads_ahead:
            with replica.load_stream():
                run(staged.batch, replica.unpack_staged_batch, kind=Kind.LOAD, slot=slot)
        run(staged.batch, work.enqueue, kind=work.kind, slot=slot)
        staged.sums = replica.sums_future()

    def _await_all_but(self, remaining: int) -> None:
        """Wait for all passes in flight except the last `remaining`."""
        while len(self._in_flight) > remaining:
            self._await_first()

    def _await_first(self) -> None:
        """Wait for the first of the passes in flight."""
        staged = self._in_flight.popleft()
        assert staged.sums is not None, "the pass was not enqueued"
        sums = self.wait_for(staged.sums)
        staged.has_ended = True
        if staged.series is not None:
            staged.ended_ns = self._series_clock.ended_ns(staged.series, staged.slot)
        elif staged.record is not None:
            self._series_clock.reset()
        self._on_end(staged, sums)

    def wait_for(self, sums: SumsFuture) -> list[float]:
        """Return the loss sums of a pass when the device has finished it.

        Raises:
            TimeoutError: it took longer than the world's timeout; if there are several ranks, a
                `RankTimeoutError` that names the rank.
        """
        world = self._world
        if world.size == 1:
            return sums(world.timeout)
        begin = monotonic()
        world.activity.begin_wait()
        try:
            received = sums(world.timeout)
        except TimeoutError:
            raise world.timeout_error("a gradient sum", monotonic() - begin) from None
        world.activity.end_wait()
        return received
