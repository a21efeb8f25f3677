"""The time that a gradient sum takes, measured around its calls."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter_ns

from dptrain.comm.sums.base import GradientSum, UpdateSlice
from dptrain.measure.recorder import Step
from dptrain.measure.step_record import SUM_DELAY, UPDATE_DELAY


class SumTimer:
    """Calls a gradient sum and assigns what its calls take from the computing thread.

    Args:
        gradient_sum: the sum.
        step: the step in progress; receives the time of the calls, updates excluded.

    Attributes:
        spans: begin and end of each bucket's sum in the last step, as far as they were observed.
        before_update: replaces that of the sum; its time does not count as communication.
    """

    def __init__(self, gradient_sum: GradientSum, step: Step) -> None:
        self._sum, self._step, self._delay = gradient_sum, step, SUM_DELAY
        gradient_sum.on_bucket_summed = self._end_span
        self.before_update: Callable[[], None] | None = None
        self.spans = [(0, 0)] * len(gradient_sum.buckets)
        self._num_active = self._active_since = self._active_ns = 0

    def start(self, bucket: int) -> None:
        """Start the sum of a bucket."""
        begin = self._step.other()
        if bucket == 0:
            self._num_active = self._active_ns = 0
            self._delay = SUM_DELAY
        if not self._num_active:
            self._active_since = begin
        self._num_active += 1
        self.spans[bucket] = begin, begin
        self._sum.start(bucket)
        self._step.exposed(self._delay)

    def poll(self) -> None:
        """Let sums progress."""
        if self._num_active:
            self._step.other()
            self._sum.poll()
            self._step.exposed(self._delay)

    def finish_and_update(self, update_slice: UpdateSlice, learning_rate: float) -> None:
        """Finish the sum and update the parameters."""
        step, before_update = self._step, self.before_update
        step.mark_stages()

        def timed_update(elements: slice, learning_rate: float) -> None:
            step.exposed(self._delay)
            self._delay = UPDATE_DELAY
            update_slice(elements, learning_rate)
            step.other()

        def timed_before_update() -> None:
            assert before_update is not None
            step.exposed(self._delay)
            before_update()
            step.other()

        self._sum.before_update = None if before_update is None else timed_before_update
        self._sum.finish_and_update(timed_update, learning_rate)
        step.exposed(self._delay)
        step.set_active(self._active_ns if self._sum.overlaps else 0)

    def _end_span(self, bucket: int) -> None:
        now = perf_counter_ns()
        self.spans[bucket] = self.spans[bucket][0], now
        self._num_active -= 1
        if not self._num_active:
            self._active_ns += now - self._active_since
