"""Engines make training steps: forward, backward, gradient sum, update.

`HostEngine` runs the stages of a step in order. `DeviceEngine` enqueues whole steps on a GPU, and
`HostSumDeviceEngine` is for GPUs whose gradients are summed by the host.
"""

from __future__ import annotations

from dptrain.backends.replica import Replica
from dptrain.comm.statistics.statistics import StatisticsSum
from dptrain.comm.sums.base import GradientSum
from dptrain.measure.recorder import StepRecorder
from dptrain.plan.buckets import Bucket
from dptrain.training.digests.replay import Replay
from dptrain.training.engines.base import Engine, StepResult
from dptrain.training.engines.device import FIRST_TIMED, DeviceEngine
from dptrain.training.engines.host import HostEngine
from dptrain.training.engines.host_sum import HostSumDeviceEngine


def make_engine(
    replica: Replica,
    gradient_sum: GradientSum,
    buckets: tuple[Bucket, ...],
    recorder: StepRecorder,
    statistics_sum: StatisticsSum | None = None,
    *,
    guards_state: bool = False,
    replay: Replay | None = None,
) -> Engine:
    """Return the engine for a replica's memory.

    Args:
        replica: the network.
        gradient_sum: sums its gradients over the ranks.
        buckets: of the flat gradient, as `gradient_sum` has them.
        recorder: receives the times of every step.
        statistics_sum: adds its batch statistics over the ranks; None if each rank uses its own.
        guards_state: True checks that state which has one copy does not change between updates, see
            `dptrain.training.digests.guard`. Engines of devices do not.
        replay: computes micro-shards again, on a host; None does not.
    """
    if not replica.memory.asynchronous:
        return HostEngine(
            replica, gradient_sum, buckets, recorder, statistics_sum,
            guards_state=guards_state, replay=replay,
        )  # fmt: skip
    engine = DeviceEngine if gradient_sum.enqueues else HostSumDeviceEngine
    return engine(replica, gradient_sum, buckets, recorder, statistics_sum)


__all__ = [
    "FIRST_TIMED",
    "DeviceEngine",
    "Engine",
    "HostEngine",
    "HostSumDeviceEngine",
    "StepResult",
    "make_engine",
]
