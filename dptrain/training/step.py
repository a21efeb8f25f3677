"""One training step on one rank: compute, sum with the others, update, and note the times.

Where stages return before they are done, on a GPU, a step is one program (`Memory.program`): all
that it does is enqueued at once, the sum over the ranks included if that can be, and its result is
asked for when some further steps are under way (`Replica.ahead`). Every `TIMED_EVERY`-th step is
run in order, with a clock read behind each stage, and waited for before the next one is begun.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from types import TracebackType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dptrain.backends.replica import Replica
from dptrain.comm.base import GradientSum
from dptrain.comm.world import AgreedError
from dptrain.data.loader import Batch
from dptrain.measure.recorder import Row, StepRecorder
from dptrain.plan.buckets import Bucket
from dptrain.plan.flat import CORRECT, LOSS, STOP
from dptrain.plan.lowering import Phase

TIMED_EVERY = 250
"""Where stages return before they are done, one step in so many is timed stage by stage. It runs in
order and is waited for, which takes 75 to 100 µs of an H200."""

FIRST_TIMED = 10
"""Steps before the first that is. In them both sorts of steps are started kernel by kernel once and
captured for each turn, of which there are up to four. Where some of them have a smaller minibatch
this takes longer, and so has the first one that is timed to wait."""

Wait = Callable[[float], Sequence[float]]
"""Gives a step's shared sums when they are there, having waited at most so many seconds."""


class StepResult(NamedTuple):
    """What all ranks know of a step that is done.

    Attributes:
        step: its number, from 0.
        loss: mean over the global minibatch. Where it is not finite, no update was made.
        correct: correct answers in it.
        stop: whether any rank wishes to stop.
        samples: size of the global minibatch.
        learning_rate: of its update.
        time_ns: of the step, what it waits for included. Where several are under way, from the end
            of the one before, or from its own beginning if that was later.
    """

    step: int
    loss: float
    correct: int
    stop: bool
    samples: int
    learning_rate: float
    time_ns: int


class _UnderWay(NamedTuple):
    """A step whose result is not known yet; `row` is the recorder's."""

    sums: Wait
    batch: Batch
    learning_rate: float
    begin_ns: int
    row: Row


@dataclass(slots=True)
class _Program:
    """A program (`Memory.program`), and in how many runs it is started as it is, or captured."""

    run: Callable[[], None]
    slow: int


class Stepper:
    """Runs the stages of a replica and hands each bucket on as soon as it is final.

    `take` makes a step of the next batch; `results` gives what is known so far. Use it as a context
    manager where ranks share more than MPI.

    Attributes:
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
        self._waits = replica.memory.asynchronous
        self._enqueues = self._waits and gradient_sum.enqueues
        self.captures_timed = True
        self._next: int | None = None
        if self._waits:
            self.time(FIRST_TIMED, TIMED_EVERY)
        else:
            self.time(0)
        self._largest = 0
        self._due: dict[int, list[int]] = {}
        for number, bucket in enumerate(buckets):
            self._due.setdefault(bucket.after, []).append(number)
        self._stages = replica.plan.stages
        self._load = next(s.index for s in self._stages if s.phase is Phase.LOAD)
        self._update = next(s.index for s in self._stages if s.phase is Phase.UPDATE)
        self._programs: dict[tuple[int, bool], dict[int, _Program]] = {}
        self._under_way: deque[_UnderWay] = deque()
        self._done: list[StepResult] = []
        self._stops = False
        self._last_end_ns = 0

    def time(self, first: int | None, every: int = 1) -> None:
        """Say which steps are timed stage by stage.

        Where stages are done when they return, one that is not runs without a listener, and its
        sums start when backward is over. Elsewhere the first ones of a kind run as those that are
        timed, and are not: the host, which starts their kernels one by one or captures them, would
        be timed with them.

        Args:
            first: number of the first, counted from the recorder's; None: none.
            every: and from it on one in so many; if that is not all, those that have a whole
                minibatch, and a program that the host has only to start.
        """
        self._next, self._every = first, every

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
        recorder, replica, sums = self.recorder, self.replica, self.gradient_sum
        number = recorder.steps
        recorder.timed = self._is_due(batch)
        if self._enqueues:
            replica.updates += 1
        elif self._waits and recorder.timed:
            replica.memory.synchronize()
            recorder.skip()
        replica.load(
            batch.x,
            batch.y,
            places=batch.places,
            samples=batch.samples,
            global_count=batch.global_count,
            step=batch.step,
            learning_rate=learning_rate,
            stop=stop,
            later=self._enqueues,
        )
        self._lap(self._load)
        wait = self._enqueue(batch) if self._enqueues else self._call(batch, learning_rate)
        self._collect(max(replica.ahead - 1, 0))
        row = recorder.end(
            exposed_ns=sums.exposed_ns,
            hidden_ns=sums.hidden_ns,
            samples=len(batch.samples),
            global_count=batch.global_count,
        )
        recorder.note_moments(sums.calls, sums.spans)
        begin = recorder.begin_ns
        self._under_way.append(_UnderWay(wait, batch, learning_rate, begin, row))
        if recorder.timed:
            self._collect(0)
            self._next = number + self._every

    def results(self, *, wait: bool = False) -> list[StepResult]:
        """Steps that are done and were not told of before, in order.

        Args:
            wait: for all that were begun, so that parameters are those behind the last of them.
                Done in any case where a step found a wish to stop, of which the last result tells.
        """
        if wait or self._stops or not self._enqueues:
            self._collect(0)
        results, self._done = self._done, []
        if self._stops:
            results = [result._replace(stop=result is results[-1]) for result in results]
        return results

    def _collect(self, ahead: int) -> None:
        """Wait for the results of all steps under way but the last `ahead`."""
        while len(self._under_way) > ahead:
            result = self._result(self._under_way.popleft())
            self._done.append(result)
            self._stops = self._stops or result.stop

    def _result(self, step: _UnderWay) -> StepResult:
        timeout = self.gradient_sum.world.timeout
        sums = step.sums(timeout)
        if math.isnan(sums[STOP]):  # A loss may be; a wish is a number, unless nobody knows it.
            raise TimeoutError(
                f"a sum over the ranks was given up after {timeout:.0f} s: another rank hangs, was "
                "stopped or has left"
            )
        if self._enqueues:
            end = perf_counter_ns()
            step.row.took(end - max(step.begin_ns, self._last_end_ns))
            self._last_end_ns = end
        return StepResult(
            step=step.batch.step,
            loss=sums[LOSS],
            correct=round(sums[CORRECT]),
            stop=sums[STOP] > 0,
            samples=step.batch.global_count,
            learning_rate=step.learning_rate,
            time_ns=step.row.time_ns,
        )

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

    def _is_due(self, batch: Batch) -> bool:
        """Whether a step is to be timed; the same on every rank."""
        self._largest = max(self._largest, batch.global_count)
        if self._next is None or self.recorder.steps < self._next:
            return False
        return self._every == 1 or batch.global_count == self._largest

    # Stages that are done when they return, or sums that go through the host.

    def _call(self, batch: Batch, learning_rate: float) -> Wait:
        replica, recorder = self.replica, self.recorder
        if recorder.timed:
            replica.run(self._after_stage, in_order=True)
        else:
            self._run(batch, replica.run)
            for number in range(len(self.gradient_sum.buckets)):
                self.gradient_sum.start(number)
        self.gradient_sum.finish()
        recorder.skip()
        replica.fetch_sums()
        sums: list[float] = replica.sums.tolist()
        if math.isfinite(sums[LOSS]):
            exposed_before = self.gradient_sum.exposed_ns
            self.gradient_sum.update(learning_rate)
            # Sending parameters back is communication, not update.
            self._lap(self._update, self.gradient_sum.exposed_ns - exposed_before)
        return lambda timeout: sums

    def _lap(self, stage: int, outside_ns: int = 0) -> None:
        if self.recorder.timed and not self._enqueues:
            self.replica.memory.synchronize()
        self.recorder.lap(stage, outside_ns)

    def _after_stage(self, stage: int) -> None:
        self._lap(stage)
        for bucket in self._due.get(stage, ()):
            self.gradient_sum.start(bucket)
        self.gradient_sum.poll()
        self.recorder.skip()

    # Everything enqueued at once.

    def _enqueue(self, batch: Batch) -> Wait:
        recorder, turn = self.recorder, self.replica.turn
        due = recorder.timed
        by_stage = due or self._rehearses(batch, turn)
        if due and not self._is_ready(batch, turn):
            self._collect(0)  # Or what the host does first would be in the times of those before.
            # Where few are timed a later one may be; where all are, so many were asked for.
            recorder.timed = self._every == 1
        start = self._start_timed if by_stage else self._start
        self._run(batch, start, by_stage=by_stage, turn=turn)
        sums = self.replica.begun()
        if recorder.timed:
            self._collect(0)  # Those before this one are done when they are, not when it is.
            sums(self.gradient_sum.world.timeout)
            self._note_times(self.replica.stamps())
        return sums

    def _rehearses(self, batch: Batch, turn: int) -> bool:
        """Whether a step that is not due runs as if it were: one a turn and one more, in time."""
        if self._next is None or self.recorder.steps < FIRST_TIMED - self.replica.ahead - 2:
            return False
        return batch.global_count == self._largest and not self._is_ready(batch, turn)

    def _is_ready(self, batch: Batch, turn: int) -> bool:
        """Whether a step that is timed would be timed without what the host does at first."""
        program = self._programs.get((batch.global_count, True), {}).get(turn)
        return not self.captures_timed or (program is not None and not program.slow)

    def _run(
        self, batch: Batch, start: Callable[[], None], *, by_stage: bool = False, turn: int = 0
    ) -> None:
        """Run the program for minibatches of this size, which decides the share of every rank."""
        if by_stage and not self.captures_timed:
            start()
            return
        turns = self._programs.setdefault((batch.global_count, by_stage), {})
        program = turns.get(turn)
        if program is None:
            captured = self.replica.memory.program(start, warm=bool(turns))
            # The very first runs as it is before it is captured.
            program = turns[turn] = _Program(captured, 1 if len(turns) else 2)
        program.run()
        program.slow -= program.slow > 0

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
        shift = perf_counter_ns() - int(times[self._update])
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
