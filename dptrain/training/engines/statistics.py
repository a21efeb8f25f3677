"""Sums of batch statistics during the stages of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dptrain.backends.device_replica import DeviceReplica, EnqueueStatisticsSum
from dptrain.comm.statistics.statistics import StatisticsSum


@contextmanager
def summing_statistics(
    replica: DeviceReplica,
    statistics_sum: StatisticsSum | None,
    enqueue: EnqueueStatisticsSum | None = None,
    after_call: Callable[[int, int], None] | None = None,
) -> Iterator[None]:
    """Let the stages of a replica on a device sum their statistics over the ranks in this context.

    Args:
        replica: sums nothing over ranks outside of the context.
        statistics_sum: None for one rank, or if each rank uses its own statistics.
        enqueue: enqueues a sum, so that it is timed; None leaves it to kernels or `statistics_sum`.
        after_call: receives begin and end of each sum that the host makes.
    """
    if statistics_sum is None:
        yield
        return
    statistics_sum.after_call = after_call
    before = replica.enqueue_statistics_sum, replica.statistics_ranks
    replica.enqueue_statistics_sum = enqueue or statistics_sum.enqueue
    replica.statistics_ranks = 0 if enqueue else statistics_sum.kernel_ranks
    try:
        yield
    finally:
        statistics_sum.after_call = None
        replica.enqueue_statistics_sum, replica.statistics_ranks = before
