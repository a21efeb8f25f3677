"""The interface of an engine, which makes training steps."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter_ns
from types import TracebackType
from typing import NamedTuple

import numpy as np

from dptrain.backends.device_replica import DeviceReplica
from dptrain.backends.replica import Replica
from dptrain.batch import Batch
from dptrain.comm.statistics.statistics import StatisticsSum, largest_statistics
from dptrain.comm.sums.base import GradientSum
from dptrain.comm.world import AgreedError
from dptrain.measure.recorder import StepRecorder
from dptrain.measure.step_record import StepRecord
from dptrain.plan.buckets import Bucket
from dptrain.plan.flat import CORRECT, LOSS, STOP
from dptrain.plan.lowering import Phase


class StepResult(NamedTuple):
    """The result of a step, the same on all ranks except for the time.

    Attributes:
        step: number of the step, from 0.
        loss: mean over the global minibatch. If it is not finite, no update was made.
        correct: number of correct predictions in the global minibatch.
        stop: True if any rank requested a stop.
        samples: size of the global minibatch.
        learning_rate: of the update.
        time_ns: duration of the step on this rank: since the completion of the step before.
    """

    step: int
    loss: float
    correct: int
    stop: bool
    samples: int
    learning_rate: float
    time_ns: int


class Engine(ABC):
    """Makes training steps with a replica, and reports their results and times.

    Use an engine as a context manager: on exit it releases what the ranks share.

    Attributes:
        replica: the network.
        gradient_sum: sums the gradients over the ranks.
        recorder: receives the times of every step.
        statistics_sum: adds batch statistics over the ranks; None if each rank uses its own.
        loads_ahead: True if a minibatch is copied to the network's input during the step before.
        separates_sums: True if the times of every step contain how long sums over ranks blocked it;
            False if only steps that are timed stage by stage have this time.
        idles: True if other ranks have all samples.
        requires_guard: True guards the update of the next step, if the engine guards any.
        passes: number of passes for an update, `Plan.passes`. Each has a batch of its own.

    Example:
        >>> with engine:                                        # doctest: +SKIP
        ...     for step in range(100):
        ...         engine.step(loader, learning_rate=0.01)
        ...         for result in engine.results(wait=step == 99):
        ...             print(result.step, result.loss)
    """

    loads_ahead: bool = False
    separates_sums: bool = True
    idles: bool = False
    requires_guard: bool = False

    @property
    def max_steps_in_flight(self) -> int:
        """Steps that may be enqueued and not finished when the next one is made.

        0 if each step has ended when `step` returns.
        """
        return 0

    @property
    def upload_ms(self) -> float:
        """Time of the copy of a minibatch to a device, before the stage load."""
        return 0.0

    def __init__(
        self,
        replica: Replica,
        gradient_sum: GradientSum,
        buckets: tuple[Bucket, ...],
        recorder: StepRecorder,
        statistics_sum: StatisticsSum | None = None,
    ) -> None:
        self.replica, self.gradient_sum, self.recorder = replica, gradient_sum, recorder
        self.statistics_sum, self.passes = statistics_sum, replica.plan.passes
        stages = replica.plan.stages
        self._load_index = next(s.index for s in stages if s.phase is Phase.LOAD)
        self._update_index = next(s.index for s in stages if s.phase is Phase.UPDATE)
        self._buckets_after: dict[int, list[int]] = {}
        for number, bucket in enumerate(buckets):
            self._buckets_after.setdefault(bucket.after, []).append(number)
        self._done: list[StepResult] = []
        self._largest_count = 0
        self._next_timed: int | None = 0
        self._time_every = 1

    @abstractmethod
    def step(self, batches: Iterator[Batch], learning_rate: float, *, stop: bool = False) -> None:
        """Wait for the next minibatch and make a training step, or enqueue it.

        Args:
            batches: shards of this rank, one for each pass of a step.
            learning_rate: of the update, the same on every rank.
            stop: True if this rank requests a stop.
        """

    def results(self, *, wait: bool = False) -> list[StepResult]:
        """Return the results of steps that have ended since the last call, in order.

        Args:
            wait: True waits for all steps in flight, so that the parameters are those after the
                last step. This is done in any case once a result has a stop request; the last
                result then carries it.
        """
        results, self._done = self._done, []
        return results

    def time_stages(self, first: int | None, every: int = 1) -> None:
        """Select the steps that are timed stage by stage.

        Engines of devices time only steps with a whole minibatch, unless all are timed.

        Args:
            first: number of the first, counted from the recorder's first step; None for no step.
            every: from then on one step in so many.
        """
        self._next_timed, self._time_every = first, every

    def time_sum_alone(self, bucket: int) -> int:
        """Sum one bucket outside a step; all ranks call this.

        The gradients are undefined afterwards.

        Returns:
            Nanoseconds from when all ranks are ready until the sum is complete on this rank.
        """
        world = self.gradient_sum.world
        world.barrier()
        # Ranks leave the barrier at different times, up to one sleep interval apart, but a small
        # all-reduce almost simultaneously.
        world.all_reduce(np.zeros(1, np.float32))
        begin = perf_counter_ns()
        self._sum_alone(bucket)
        return perf_counter_ns() - begin

    def time_statistics_sum_alone(self) -> int:
        """Make the largest sum of batch statistics outside a step; all ranks call this.

        Returns:
            Nanoseconds from when all ranks are ready until the sum is complete on this rank.
        """
        world, run = self.gradient_sum.world, self._bind_statistics_sum()
        world.barrier()
        world.all_reduce(np.zeros(1, np.float32))  # As in `time_sum_alone`.
        begin = perf_counter_ns()
        run()
        return perf_counter_ns() - begin

    def _bind_statistics_sum(self) -> Callable[[], None]:
        """Return a function that makes the largest sum of statistics and waits for it."""
        statistics_sum, replica = self.statistics_sum, self.replica
        assert statistics_sum is not None
        if isinstance(replica, DeviceReplica):
            largest = max(replica.summed_statistics.values(), key=lambda each: each.array.size)

            def run() -> None:
                statistics_sum.enqueue(largest)
                replica.memory.synchronize()

            return run
        shards, size = replica.plan.micro_shards, largest_statistics(replica.plan)
        parts, totals = np.zeros((1 if shards is None else shards.count, size)), np.zeros(size)
        return lambda: statistics_sum(parts, totals)

    def _sum_alone(self, bucket: int) -> None:
        self.gradient_sum.sum_alone(bucket)

    def check_state(self) -> None:
        """Check that state which has one copy has not changed since the last update.

        Raises:
            CorruptedSliceError: it has, on this rank.
        """

    def release_programs(self) -> None:
        """Release captured graphs, which contain sums, before the sums are closed.

        Only engines of devices have any.
        """

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the sums if all ranks are here: waiting for a failed rank would hang."""
        self.release_programs()
        if error is None or isinstance(error, AgreedError):
            self.gradient_sum.close()
            if self.statistics_sum is not None:
                self.statistics_sum.close()

    def _add_stored_gradients(self, bucket: int) -> None:
        """Add the gradients of the earlier passes of a step to a bucket of the last pass."""
        assert self.replica.accumulation is not None, "a step has one pass"
        chosen = self.gradient_sum.buckets[bucket]
        self.replica.accumulation.add(slice(chosen.start, chosen.stop))

    def _store_gradients(self) -> None:
        """Store the gradients of a pass that is not the last one of a step."""
        assert self.replica.accumulation is not None, "a step has one pass"
        self.replica.accumulation.store(self.replica.context.part)

    def _is_timed(self, batch: Batch) -> bool:
        """Return whether this step is timed stage by stage; the same on every rank."""
        self._largest_count = max(self._largest_count, batch.global_count)
        if self._next_timed is None or self.recorder.steps < self._next_timed:
            return False
        return self._time_every == 1 or batch.global_count == self._largest_count

    def _result(
        self, batch: Batch, sums: Sequence[float], learning_rate: float, record: StepRecord
    ) -> StepResult:
        """Return the result of a step that has ended, from its loss sums over all ranks."""
        # A loss may be NaN. The number of stop requests is NaN only if a sum timed out.
        if math.isnan(sums[STOP]):
            world = self.gradient_sum.world
            world.activity.begin_wait()  # The device has waited.
            raise world.timeout_error("a gradient sum", world.timeout)
        return StepResult(
            step=batch.step,
            loss=sums[LOSS],
            correct=round(sums[CORRECT]),
            stop=sums[STOP] > 0,
            samples=batch.global_count,
            learning_rate=learning_rate,
            time_ns=record.time_ns,
        )
