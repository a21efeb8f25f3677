"""One training step on one rank: compute, sum with the others, update, and note the times.

Where stages return before they are done, on a GPU, a step is one program (`Memory.program`): all
that it does is enqueued at once, the sum over the ranks included if that can be, and its result is
asked for when the next step is under way. Every `TIMED_EVERY`-th step is run in order, with a clock
read behind each stage, and waited for.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from dptrain.backends.replica import Replica
from dptrain.comm.base import GradientSum
from dptrain.comm.world import AgreedError
from dptrain.data.loader import Batch
from dptrain.measure.recorder import StepRecorder
from dptrain.plan.buckets import Bucket
from dptrain.plan.flat import CORRECT, LOSS, STOP
from dptrain.plan.lowering import Phase

TIMED_EVERY = 250
"""Where stages return before they are done, one step in so many is timed stage by stage. It waits
for the device twice, some 170 µs of an H200: one in fifty made model0's steps of 32 samples 5%
longer."""

FIRST_TIMED = 9

AHEAD = 1
"""Steps that may be under way when the next one is begun."""


@dataclass(frozen=True)
class StepResult:
    """What all ranks know of a step that is done.

    Attributes:
        step: its number, from 0.
        loss: mean over the global minibatch. Where it is not finite, no update was made.
        correct: correct answers in it.
        stop: whether any rank wishes to stop.
        samples: size of the global minibatch.
        learning_rate: of its update.
        time_ns: of the step, what it waits for included.
    """

    step: int
    loss: float
    correct: int
    stop: bool
    samples: int
    learning_rate: float
    time_ns: int


def _always(step: int) -> bool:
    return True


def _now_and_then(step: int) -> bool:
    return step % TIMED_EVERY == FIRST_TIMED


@dataclass(frozen=True)
class _UnderWay:
    """A step whose result is not known yet."""

    sums: Callable[[float], NDArray[np.float64]]
    batch: Batch
    learning_rate: float
    time_ns: int

    def result(self, timeout: float) -> StepResult:
        sums = self.sums(timeout)
        if math.isnan(sums[STOP]):  # A loss may be; a wish is a number, unless nobody knows it.
            raise TimeoutError(
                f"a sum over the ranks was given up after {timeout:.0f} s: another rank hangs, was "
                "stopped or has left"
            )
        return StepResult(
            step=self.batch.step,
            loss=float(sums[LOSS]),
            correct=round(float(sums[CORRECT])),
            stop=float(sums[STOP]) > 0,
            samples=self.batch.global_count,
            learning_rate=self.learning_rate,
            time_ns=self.time_ns,
        )


class Stepper:
    """Runs the stages of a replica and hands each bucket on as soon as it is final.

    `take` makes a step of the next batch; `results` gives what is known so far. Use it as a context
    manager where ranks share more than MPI.

    Attributes:
        is_timed: whether the step of a number, counted from the recorder's first, is timed stage by
            stage. Where stages are done when they return, a step that is not runs without a
            listener, and its sums start when backward is over.
        captures_timed: whether steps that are timed stage by stage are captured like the others;
            if not, each stage is started from here, where marks can be set around it.
    """

    def __init__(
        self,
        replica: Replica,
        gradient_sum: GradientSum,
        buckets: tuple[Bucket, ...],
        recorder: StepRecorder,
    ) -> None:
        self.replica, self.gradient_sum, self.recorder = replica, gradient_sum, recorder
        waits = replica.memory.asynchronous
        self.is_timed: Callable[[int], bool] = _now_and_then if waits else _always
        self.captures_timed = True
        self._due: dict[int, list[int]] = {}
        for number, bucket in enumerate(buckets):
            self._due.setdefault(bucket.after, []).append(number)
        self._stages = replica.plan.stages
        self._load = next(s.index for s in self._stages if s.phase is Phase.LOAD)
        self._update = next(s.index for s in self._stages if s.phase is Phase.UPDATE)
        self._programs: dict[tuple[int, bool, int], Callable[[], None]] = {}
        self._under_way: deque[_UnderWay] = deque()
        self._done: list[StepResult] = []

    def take(self, batches: Iterator[Batch], learning_rate: float, *, stop: bool = False) -> None:
        """Wait for the next of `batches` and make its step, or begin it; all of it is timed.

        Args:
            batches: this rank's shards, one a step.
            learning_rate, stop: as `step` has them.
        """
        self.recorder.begin()
        batch = next(batches)
        self.recorder.waited()
        self.step(batch, learning_rate, stop=stop)

    def step(self, batch: Batch, learning_rate: float, *, stop: bool = False) -> None:
        """Make the step of `batch`, or begin it; closes the recorder's step.

        Args:
            batch: this rank's shard.
            learning_rate: of the update, which is the same on every rank.
            stop: whether this rank was asked to end.
        """
        recorder, waits = self.recorder, self.replica.memory.asynchronous
        recorder.timed = self.is_timed(recorder.steps)
        if waits and recorder.timed:
            self.replica.memory.synchronize()
            recorder.skip()
        enqueues = waits and self.gradient_sum.enqueues
        if enqueues:
            self.replica.updates += 1
        self.replica.load(
            batch.x,
            batch.y,
            places=batch.places,
            samples=batch.samples,
            global_count=batch.global_count,
            step=batch.step,
            learning_rate=learning_rate,
            stop=stop,
            later=enqueues,
        )
        self._lap(self._load)
        sums = self._enqueue(batch) if enqueues else self._call(batch, learning_rate)
        # A step's time has room for what it waits for: the end of the one before.
        self._collect(AHEAD - 1 if waits else 0)
        time_ns = recorder.end(
            exposed_ns=self.gradient_sum.exposed_ns,
            hidden_ns=self.gradient_sum.hidden_ns,
            samples=len(batch.samples),
            global_count=batch.global_count,
        )
        recorder.note_moments(self.gradient_sum.calls, self.gradient_sum.spans)
        self._under_way.append(_UnderWay(sums, batch, learning_rate, time_ns))

    def results(self, *, wait: bool = False) -> list[StepResult]:
        """Steps that are done and were not told of before, in order.

        Args:
            wait: for all that were begun, so that parameters are those behind the last of them.
                Done in any case where a step found a wish to stop, of which the last result tells.
        """
        if wait or not self.replica.memory.asynchronous:
            self._collect(0)
        if any(result.stop for result in self._done):
            self._collect(0)
            self._done = [replace(r, stop=r is self._done[-1]) for r in self._done]
        results, self._done = self._done, []
        return results

    def _collect(self, ahead: int) -> None:
        """Wait for the results of all steps under way but the last `ahead`."""
        while len(self._under_way) > ahead:
            self._done.append(self._under_way.popleft().result(self.gradient_sum.world.timeout))

    def __enter__(self) -> Stepper:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Give back what ranks share if all are here: waiting for one that failed would hang."""
        self._programs.clear()
        if error is None or isinstance(error, AgreedError):
            self.gradient_sum.close()

    # Stages that are done when they return, or sums that go through the host.

    def _call(self, batch: Batch, learning_rate: float) -> Callable[[float], NDArray[np.float64]]:
        replica, recorder = self.replica, self.recorder
        if recorder.timed:
            replica.run(self._after_stage, in_order=True)
        else:
            self._program(batch, replica.run)()
            for number in range(len(self.gradient_sum.buckets)):
                self.gradient_sum.start(number)
        self.gradient_sum.finish()
        recorder.skip()
        replica.fetch_sums()
        sums = replica.sums.copy()
        if math.isfinite(sums[LOSS]):
            exposed_before = self.gradient_sum.exposed_ns
            self.gradient_sum.update(learning_rate)
            # Sending parameters back is communication, not update.
            self._lap(self._update, self.gradient_sum.exposed_ns - exposed_before)
        return lambda timeout: sums

    def _lap(self, stage: int, outside_ns: int = 0) -> None:
        if self.recorder.timed:
            self.replica.memory.synchronize()
        self.recorder.lap(stage, outside_ns)

    def _after_stage(self, stage: int) -> None:
        self._lap(stage)
        for bucket in self._due.get(stage, ()):
            self.gradient_sum.start(bucket)
        self.gradient_sum.poll()
        self.recorder.skip()

    # Everything enqueued at once.

    def _enqueue(self, batch: Batch) -> Callable[[float], NDArray[np.float64]]:
        timed = self.recorder.timed
        self._program(batch, self._start_timed if timed else self._start, self.replica.turn)()
        sums = self.replica.begun()
        if timed:
            sums(self.gradient_sum.world.timeout)
            self._note_times(self.replica.stamps())
        return sums

    def _program(
        self, batch: Batch, start: Callable[[], None], turn: int = 0
    ) -> Callable[[], None]:
        """The program for minibatches of this size, which decides the share of every rank."""
        timed = self.recorder.timed
        if timed and not self.captures_timed:
            return start
        key = batch.global_count, timed, turn
        if key not in self._programs:
            self._programs[key] = self.replica.memory.program(start)
        return self._programs[key]

    def _start(self) -> None:
        self.replica.take()
        alone = self.gradient_sum.alone
        self.replica.run(self._start_due, updating=alone)
        self.gradient_sum.finish()
        self.replica.tell()
        self.gradient_sum.apply_update(rest=alone)

    def _start_due(self, stage: int) -> None:
        for bucket in self._due.get(stage, ()):
            self.gradient_sum.start(bucket)

    def _start_timed(self) -> None:
        replica, last = self.replica, len(self._stages)
        replica.stamp(2 * last + 1)
        replica.take()
        replica.stamp(self._load)

        def after_stage(stage: int) -> None:
            replica.stamp(stage)
            for bucket in self._due.get(stage, ()):
                self.gradient_sum.start(bucket)
                self.gradient_sum.stamp(last + 1 + bucket)

        replica.run(after_stage, in_order=True)
        self.gradient_sum.finish()
        replica.stamp(last)
        self.gradient_sum.apply_update()
        replica.stamp(self._update)
        replica.tell()

    def _note_times(self, times: NDArray[np.int64]) -> None:
        """Give the recorder the stages' times, and what summing kept the device from computing.

        The device is done at present, so its clock's last time is this moment, but for the way
        that a result takes to the host.
        """
        sums, stages = self.gradient_sum, self._stages
        shift = time.perf_counter_ns() - int(times[self._update])
        clock = [int(moment) + shift for moment in times]
        before = clock[self._load]
        begun = clock[2 * len(stages) + 1]
        self.recorder.put(self._load, before - begun, before)
        for stage in stages[self._load + 1 : self._update]:
            end = clock[stage.index]
            self.recorder.put(stage.index, end - before, end)
            before = end
        summed, updated = clock[len(stages)], clock[self._update]
        self.recorder.put(self._update, updated - summed, updated)
        # One rank sums nothing; what lies between is a clock that was read.
        sums.exposed_ns, sums.calls = 0, []
        under_way = end = 0
        if sums.world.size > 1:
            sums.exposed_ns, sums.calls = summed - before, [(before, summed)]
            for stage_index, buckets in sorted(self._due.items()):
                for bucket in buckets:
                    begin = max(clock[stage_index], end)
                    end = clock[len(stages) + 1 + bucket]
                    sums.spans[bucket] = begin, end
                    under_way += end - begin
        sums.hidden_ns = max(under_way - sums.exposed_ns, 0)
