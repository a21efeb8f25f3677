"""Times of a step on a device, from time stamps that kernels write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import perf_counter_ns

import numpy as np
from numpy.typing import NDArray

from dptrain.backends.device_replica import DeviceReplica, SummedStatistics
from dptrain.comm.statistics.statistics import StatisticsSum
from dptrain.comm.sums.base import GradientSum
from dptrain.measure.recorder import Step
from dptrain.measure.step_record import EXPOSED, Program


class DeviceTimes:
    """Time stamps of a timed step, which kernels write, and the accounts of its sums over ranks.

    Attributes:
        spans: begin and end of each bucket's sum in the last timed step.
    """

    def __init__(
        self,
        replica: DeviceReplica,
        gradient_sum: GradientSum,
        buckets_after: Mapping[int, Sequence[int]],
        statistics_sum: StatisticsSum | None = None,
    ) -> None:
        self._statistics_sum, self._num_statistics = statistics_sum, 0
        self._replica, self._sum, self._buckets_after = replica, gradient_sum, buckets_after
        self._stages = replica.plan.stages
        self._num_stages = len(self._stages)
        # The buckets of a single rank are not summed, and have no times.
        num_sums = len(gradient_sum.buckets) if gradient_sum.world.size > 1 else 0
        self.spans = [(0, 0)] * num_sums

    def record_begin(self) -> None:
        """Enqueue the time stamp of the begin of a pass."""
        self._num_statistics = 0
        self._replica.record_time(2 * self._num_stages + 1)

    def sum_statistics(self, statistics: SummedStatistics) -> None:
        """Enqueue a sum of batch statistics between two time stamps."""
        assert self._statistics_sum is not None
        index = self._first_statistics + 2 * self._num_statistics
        self._num_statistics += 1
        self._replica.record_time(index)
        self._statistics_sum.enqueue(statistics)
        self._replica.record_time(index + 1)

    @property
    def _first_statistics(self) -> int:
        """Index of the first time stamp of a sum of batch statistics."""
        return 2 * self._num_stages + 2

    def record_stage(self, stage: int) -> None:
        """Enqueue the time stamp of the end of a stage."""
        self._replica.record_time(stage)

    def record_bucket(self, bucket: int) -> None:
        """Enqueue the time stamp of the end of a bucket's sum, on the stream of the sums."""
        if not self._sum.is_identity:
            with self._sum.stream():
                self._replica.record_time(self._num_stages + 1 + bucket)

    def record_sum(self) -> None:
        """Enqueue the time stamp of the end of all sums."""
        self._replica.record_time(self._num_stages)

    def record(self, step: Step) -> None:
        """Report the times of the stages, and what the sum kept the device from computing.

        The device has just ended the pass, so its last time stamp is now, except for the time that
        the result takes to reach the host. A step has one pass, or several, whose times are added;
        gradients are summed over the ranks in the last one.
        """
        times: NDArray[np.int64] = self._replica.recorded_times()
        load, update = self._stages[0].index, self._stages[-1].index
        shift = perf_counter_ns() - int(times[update])
        clock = [int(time) + shift for time in times]
        step.add_stage(load, clock[2 * self._num_stages + 1], clock[load])
        stamps = clock[self._first_statistics :][: 2 * self._num_statistics]
        statistics = list(zip(stamps[::2], stamps[1::2], strict=True))
        indices = [stage.index for stage in self._stages[load + 1 : update]]
        ends = [clock[index] for index in indices]
        previous, summed, updated = clock[update - 1], clock[self._num_stages], clock[update]
        passed = Program(indices, lambda: ends, clock[load], statistics)
        for part, begin, end in passed.intervals():
            if isinstance(part, int):
                step.add_stage(part, begin, end)
            elif part == EXPOSED:
                step.add_exposed(begin, end, statistics=True)
        step.add_stage(update, summed, updated)
        # One rank sums nothing: the interval is the time that a time stamp takes.
        if self._sum.world.size > 1:
            step.add_exposed(previous, summed)
            if self._replica.context.part + 1 == self._replica.plan.passes:
                step.set_active(self._record_spans(clock))

    def _record_spans(self, clock: Sequence[int]) -> int:
        """Set begin and end of each bucket's sum; return for how long they were in progress."""
        active_ns = end = 0
        for stage_index, buckets in sorted(self._buckets_after.items()):
            for bucket in buckets:
                begin = max(clock[stage_index], end)
                end = clock[self._num_stages + 1 + bucket]
                self.spans[bucket] = begin, end
                active_ns += end - begin
        return active_ns
