"""Sums of batch statistics during the stages of a step, and the time that they take."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from dptrain.backends.device_replica import DeviceReplica, EnqueueStatisticsSum
from dptrain.comm.statistics.statistics import StatisticsSum


@contextmanager
def summing_statistics(
    replica: DeviceReplica,
    statistics_sum: StatisticsSum | None,
    enqueue: EnqueueStatisticsSum | None = None,
) -> Iterator[None]:
    """Let the stages of a replica on a device sum their statistics over the ranks in this context.

    Args:
        replica: sums nothing over ranks outside of the context.
        statistics_sum: None for one rank, or if each rank uses its own statistics.
        enqueue: enqueues a sum, so that it is timed; None leaves it to kernels or `statistics_sum`.
    """
    if statistics_sum is None:
        yield
        return
    before = replica.enqueue_statistics_sum, replica.statistics_ranks
    replica.enqueue_statistics_sum = enqueue or statistics_sum.enqueue
    replica.statistics_ranks = 0 if enqueue else statistics_sum.kernel_ranks
    try:
        yield
    finally:
        replica.enqueue_statistics_sum, replica.statistics_ranks = before


class StatisticsTimer:
    """The time of the sums of a step that the host makes; they interrupt stages.

    Args:
        statistics_sum: notes its calls; None if there are none.
    """

    def __init__(self, statistics_sum: StatisticsSum | None) -> None:
        self._sum, self._num_seen = statistics_sum, 0

    @property
    def calls(self) -> list[tuple[int, int]]:
        """Begin and end of each call of the step, on the clock `time.perf_counter_ns`."""
        return [] if self._sum is None else self._sum.calls

    @property
    def time_ns(self) -> int:
        """Time of all calls of the step."""
        return sum(end - begin for begin, end in self.calls)

    def begin_step(self) -> None:
        """Forget the calls of the step before."""
        self._num_seen = 0
        if self._sum is not None:
            self._sum.begin_step()

    def new_calls(self) -> list[tuple[int, int]]:
        """Return the calls since the last call of this method in the step."""
        calls = self.calls[self._num_seen :]
        self._num_seen += len(calls)
        return calls

    def lap_ns(self) -> int:
        """Return the time of `new_calls`."""
        return sum(end - begin for begin, end in self.new_calls())
