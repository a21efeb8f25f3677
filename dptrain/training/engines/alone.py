"""Engines for minibatches of which one rank has all samples, while the other ranks are idle.

The rank with the samples makes steps as if it were the only one, without gradient sums. The others
receive the results of its steps, and the parameters, when something reads the parameters on all
ranks, when a stop is requested, and when a loss is not finite. If the ranks of a node share the
parameters, the rank with the samples then waits until all of them begin the next step: until then
they read the parameters, for example for a checkpoint.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from time import monotonic
from typing import Any

from dptrain.backends.replica import Replica
from dptrain.batch import Batch
from dptrain.comm import make_gradient_sum
from dptrain.comm.sums.base import GradientSum
from dptrain.comm.sums.none import NoSum
from dptrain.comm.world import World
from dptrain.measure.recorder import StepRecorder
from dptrain.plan.buckets import Bucket
from dptrain.training.engines import make_engine
from dptrain.training.engines.base import Engine, StepResult
from dptrain.training.resources import share_state

REPORT_EVERY_S = 2.0
"""Time between two reports of results, in which the other ranks can request a stop."""
REPORTS_PER_TIMEOUT = 4
"""Fewest reports in the longest time that the other ranks wait."""


class _AloneEngine(Engine):
    """What the engines of the rank with all samples and of the other ranks have in common.

    Args:
        replica, gradient_sum, recorder: as for `Engine`.
        world: the ranks.
        leader: the rank with the samples.
        mixed: True if ranks have different backends.
    """

    def __init__(
        self,
        replica: Replica,
        gradient_sum: GradientSum,
        recorder: StepRecorder,
        world: World,
        leader: int,
        *,
        mixed: bool,
    ) -> None:
        super().__init__(replica, gradient_sum, (), recorder)
        self._world, self._leader, self._mixed = world, leader, mixed
        self._requests_stop = False
        self._has_shared_arrays = self._are_read = replica.arrays.is_shared

    def _share_state(self) -> None:
        """Copy the state of the rank with the samples to all ranks, which read it afterwards."""
        share_state(self._world, self.replica, self._leader, mixed=self._mixed)
        self._are_read = self._has_shared_arrays

    def _wait_for_readers(self) -> None:
        """Wait until no rank of the node reads the shared parameters; all of them call this."""
        if self._are_read:
            self._world.node_barrier()
            self._are_read = False


class LoneEngine(_AloneEngine):
    """The engine of the rank with all samples.

    Args:
        engine: makes the steps, without sums over ranks.
        world: the ranks.
        mixed: True if ranks have different backends.
    """

    def __init__(self, engine: Engine, world: World, *, mixed: bool) -> None:
        super().__init__(
            engine.replica, engine.gradient_sum, engine.recorder, world, world.rank, mixed=mixed
        )
        self._engine = engine
        self.loads_ahead = engine.loads_ahead
        self._results: list[StepResult] = []
        self._report_every_s = min(REPORT_EVERY_S, world.timeout / REPORTS_PER_TIMEOUT)
        self._reported = monotonic()

    @property
    def max_steps_in_flight(self) -> int:
        return self._engine.max_steps_in_flight

    @property
    def upload_ms(self) -> float:
        return self._engine.upload_ms

    def step(self, batches: Iterator[Batch], learning_rate: float, *, stop: bool = False) -> None:
        self._wait_for_readers()
        self._engine.step(batches, learning_rate, stop=stop or self._requests_stop)

    def results(self, *, wait: bool = False) -> list[StepResult]:
        results = self._engine.results(wait=wait)
        self._results += results
        if wait or any(result.stop or not math.isfinite(result.loss) for result in results):
            stops = self._report(is_last=True)
            if stops and results:
                results[-1] = results[-1]._replace(stop=True)
        elif monotonic() - self._reported > self._report_every_s:
            # The next step carries a request, so that its result stops all ranks.
            self._requests_stop = self._report(is_last=False)
        return results

    def _report(self, *, is_last: bool) -> bool:
        """Send the results since the last report; return whether any rank requests a stop."""
        reports = self._world.all_gather_json(
            {"results": self._results, "is_last": is_last, "stop": False}
        )
        self._results, self._reported = [], monotonic()
        if is_last:
            self._share_state()
        return any(report["stop"] for report in reports)

    def release_programs(self) -> None:
        self._engine.release_programs()


class IdleEngine(_AloneEngine):
    """The engine of a rank without samples.

    The recorder receives the times of the rank with the samples, as time of waiting.

    Args:
        replica: receives the parameters.
        buckets: of its gradient.
        recorder: of this rank.
        world: the ranks.
        leader: the rank with the samples.
        mixed: True if ranks have different backends.
    """

    idles = True

    def __init__(
        self,
        replica: Replica,
        buckets: tuple[Bucket, ...],
        recorder: StepRecorder,
        world: World,
        leader: int,
        *,
        mixed: bool,
    ) -> None:
        gradient_sum = NoSum(world, replica.flat_gradients, replica.plan.trained.size, buckets)
        super().__init__(replica, gradient_sum, recorder, world, leader, mixed=mixed)
        self._global_counts: deque[int] = deque()

    def step(self, batches: Iterator[Batch], learning_rate: float, *, stop: bool = False) -> None:
        self._wait_for_readers()
        self._global_counts.append(next(batches).global_count)
        self._requests_stop = self._requests_stop or stop

    def results(self, *, wait: bool = False) -> list[StepResult]:
        results: list[StepResult] = []
        is_last = not wait
        while not is_last:
            own = {"results": [], "is_last": False, "stop": self._requests_stop}
            reports = self._world.all_gather_json(own)
            report = reports[self._leader]
            results += [self._record(values) for values in report["results"]]
            is_last = report["is_last"]
            if is_last:
                self._share_state()
                if any(other["stop"] for other in reports) and results:
                    results[-1] = results[-1]._replace(stop=True)
        return results

    def _record(self, values: list[Any]) -> StepResult:
        """Record a step of the rank with the samples."""
        result = StepResult(*values)
        with self.recorder.step as step:
            step.timed = False
            record = step.end(samples=0, global_count=self._global_counts.popleft())
        record.exposed_ns = record.time_ns = result.time_ns
        return result


def make_alone_engine(
    world: World,
    replica: Replica,
    buckets: tuple[Bucket, ...],
    recorder: StepRecorder,
    leader: int,
    *,
    mixed: bool,
) -> Engine:
    """Return the engine of this rank if rank `leader` has all samples.

    Args:
        world: the ranks.
        replica, buckets, recorder: of this rank.
        leader: the rank with the samples.
        mixed: True if ranks have different backends.
    """
    if world.rank != leader:
        return IdleEngine(replica, buckets, recorder, world, leader, mixed=mixed)
    gradient_sum = make_gradient_sum("mirrored", World.single(), replica, buckets)
    return LoneEngine(make_engine(replica, gradient_sum, buckets, recorder), world, mixed=mixed)
