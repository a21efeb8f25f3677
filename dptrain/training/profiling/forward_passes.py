"""Forward passes of a replica, timed stage by stage by its own clock."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from itertools import pairwise
from time import perf_counter_ns

from dptrain.backends.device_replica import DeviceReplica
from dptrain.backends.replica import Replica
from dptrain.batch import Batch
from dptrain.measure.recorder import Step, StepRecorder
from dptrain.native.threads import threads_of
from dptrain.plan.lowering import Phase

SLOT = 0
"""Staging slot of passes that are timed by stage; their captured program is valid for one only."""


class ForwardPasses(ABC):
    """Makes forward passes, whose outputs are copied to the host, as for a user.

    Args:
        replica: makes them.
        recorder: records their times.

    Attributes:
        warm_up: number of passes that are timed by stage before the first whose times count.
    """

    warm_up = 0

    def __init__(self, replica: Replica, recorder: StepRecorder) -> None:
        self._recorder = recorder
        self._kernels = [
            (stage.index, kernel)
            for stage, kernel in replica.stages
            if stage.phase is Phase.FORWARD
        ]

    @staticmethod
    def of(replica: Replica, recorder: StepRecorder, *, timeout: float) -> ForwardPasses:
        """Return the passes of a replica; on a device one takes at most `timeout` seconds."""
        if isinstance(replica, DeviceReplica):
            return _DevicePasses(replica, recorder, timeout)
        return _HostPasses(replica, recorder)

    def make(self, batches: Iterator[Batch], *, by_stage: bool) -> None:
        """Make one pass.

        Args:
            batches: its minibatch is the next one.
            by_stage: time each stage. On a host every pass is timed so.
        """
        with self._recorder.step as step:
            batch = next(batches)._replace(y=None)  # No loss is computed.
            step.data_wait()
            self._make(step, batch, by_stage=by_stage)
            step.end(samples=len(batch.samples), global_count=batch.global_count)

    @abstractmethod
    def _make(self, step: Step, batch: Batch, *, by_stage: bool) -> None:
        """Load the minibatch, run the stages and copy the outputs to the host."""


class _HostPasses(ForwardPasses):
    """Passes of a replica whose stages return when they have run."""

    def __init__(self, replica: Replica, recorder: StepRecorder) -> None:
        super().__init__(replica, recorder)
        self._replica, pool = replica, threads_of(replica)
        recorder.watch(tuple if pool is None else pool.native_ids)

    def _make(self, step: Step, batch: Batch, *, by_stage: bool) -> None:
        replica = self._replica
        replica.load(batch, training=False)
        step.stage(0)
        for index, kernel in self._kernels:
            kernel(replica.context)
            step.stage(index)
        replica.output()


class _DevicePasses(ForwardPasses):
    """Passes of a replica on a device, where kernels write time stamps between the stages.

    A pass that is timed by stage is one captured program, so that the times contain neither
    launches nor synchronisation by the host. The other passes run as for a user, without time
    stamps.
    """

    warm_up = 2  # The first one runs uncaptured, the second is captured.

    def __init__(self, replica: DeviceReplica, recorder: StepRecorder, timeout: float) -> None:
        super().__init__(replica, recorder)
        self._replica, self._timeout = replica, timeout
        self._timed = replica.memory.program(self._enqueue_timed)
        # Stages have the indices from 1 on; the loading of the minibatch has index 0.
        self._begin = len(replica.plan.stages)

    def _make(self, step: Step, batch: Batch, *, by_stage: bool) -> None:
        replica = self._replica
        step.timed = by_stage
        if not by_stage:
            replica.load(batch, training=False)
            replica.run_forward(loss=False)
            replica.output()
            return
        replica.stage_batch(batch, training=False, slot=SLOT)
        self._timed()
        replica.sums_future()(self._timeout)
        self._record(step)
        replica.output()

    def _enqueue_timed(self) -> None:
        """Enqueue a pass, with a time stamp after each stage."""
        replica = self._replica
        replica.record_time(self._begin)
        replica.unpack_staged_batch()
        replica.record_time(0)
        for index, kernel in self._kernels:
            kernel(replica.context)
            replica.record_time(index)

    def _record(self, step: Step) -> None:
        """Report the times of the stages of a pass that has just ended."""
        times = self._replica.recorded_times()
        order = [self._begin, 0, *(index for index, _ in self._kernels)]
        shift = perf_counter_ns() - int(times[order[-1]])
        for before, stage in pairwise(order):
            step.add_stage(stage, int(times[before]) + shift, int(times[stage]) + shift)
