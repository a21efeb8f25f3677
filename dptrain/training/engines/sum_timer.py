"""The time that a gradient sum takes, measured around its calls."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter_ns

from dptrain.comm.sums.base import GradientSum, UpdateSlice
from dptrain.measure.recorder import LONG_NS, RUN_DELAY, SUM_DELAY, UPDATE_DELAY, StepRecorder


class SumTimer:
    """Calls a gradient sum and measures what its calls take from the computing thread.

    Args:
        gradient_sum: the sum.
        recorder: receives the run delays of the calls.

    Attributes, of the last step:
        exposed_ns: time that the calls took, updates excluded.
        hidden_ns: time during which a sum was in progress while this rank computed.
        calls: begin and end of each call, on the clock `time.perf_counter_ns`.
        spans: begin and end of each bucket's sum, as far as they were observed.

    The attribute `before_update` replaces that of the sum; its time is no part of `exposed_ns`.
    """

    def __init__(self, gradient_sum: GradientSum, recorder: StepRecorder) -> None:
        self._sum, self._recorder, self._delay = gradient_sum, recorder, SUM_DELAY
        gradient_sum.on_bucket_summed = self._end_span
        self.before_update: Callable[[], None] | None = None
        self.calls: list[tuple[int, int]] = []
        self.spans = [(0, 0)] * len(gradient_sum.buckets)
        self.exposed_ns = self.hidden_ns = 0
        self._num_active = self._active_since = self._active_ns = 0

    def start(self, bucket: int) -> None:
        """Start the sum of a bucket."""
        begin = perf_counter_ns()
        if bucket == 0:
            self.calls.clear()
            self.exposed_ns = self._num_active = self._active_ns = 0
            self._delay = SUM_DELAY
        if not self._num_active:
            self._active_since = begin
        self._num_active += 1
        self.spans[bucket] = begin, begin
        self._sum.start(bucket)
        self._add_call(begin, perf_counter_ns())

    def poll(self) -> None:
        """Let sums progress."""
        if self._num_active:
            begin = perf_counter_ns()
            self._sum.poll()
            self._add_call(begin, perf_counter_ns())

    def finish_and_update(self, update_slice: UpdateSlice, learning_rate: float) -> None:
        """Finish the sum and update the parameters."""
        self._recorder.mark(RUN_DELAY)
        begin, before_update = perf_counter_ns(), self.before_update

        def timed_update(elements: slice, learning_rate: float) -> None:
            nonlocal begin
            self._add_call(begin, perf_counter_ns())
            self._delay = UPDATE_DELAY
            update_slice(elements, learning_rate)
            begin = perf_counter_ns()

        def timed_before_update() -> None:
            nonlocal begin
            assert before_update is not None
            self._add_call(begin, perf_counter_ns())
            before_update()
            begin = perf_counter_ns()

        self._sum.before_update = None if before_update is None else timed_before_update
        self._sum.finish_and_update(timed_update, learning_rate)
        self._add_call(begin, perf_counter_ns())
        hidden_ns = self._active_ns - self.exposed_ns if self._sum.overlaps else 0
        self.hidden_ns = max(hidden_ns, 0)

    def _add_call(self, begin: int, end: int) -> None:
        self.exposed_ns += end - begin
        self.calls.append((begin, end))
        if end - begin >= LONG_NS:
            self._recorder.mark(self._delay, end - begin)

    def _end_span(self, bucket: int) -> None:
        now = perf_counter_ns()
        self.spans[bucket] = self.spans[bucket][0], now
        self._num_active -= 1
        if not self._num_active:
            self._active_ns += now - self._active_since
