"""One training step on one rank: compute, sum with the others, update, and note the times."""

from __future__ import annotations

from dataclasses import dataclass

from dptrain.backends.base import Replica
from dptrain.comm.base import GradientSum
from dptrain.data.loader import Batch
from dptrain.measure.recorder import StepRecorder
from dptrain.plan.buckets import Bucket
from dptrain.plan.flat import SUMS
from dptrain.plan.lowering import Phase

STOP = SUMS.index("stop")

TIMED_EVERY = 10
"""Where stages return before they are done, one step in so many waits for each, to time it."""


@dataclass(frozen=True)
class StepResult:
    """What all ranks know after the gradients were summed.

    Attributes:
        loss: mean over the global minibatch.
        correct: correct answers in it.
        stop: whether any rank wishes to stop.
        samples: size of the global minibatch.
    """

    loss: float
    correct: int
    stop: bool
    samples: int


class Stepper:
    """Runs the stages of a replica and hands each bucket on as soon as it is final."""

    def __init__(
        self,
        replica: Replica,
        gradient_sum: GradientSum,
        buckets: tuple[Bucket, ...],
        recorder: StepRecorder,
    ) -> None:
        self.replica, self.gradient_sum, self.recorder = replica, gradient_sum, recorder
        self._due: dict[int, list[int]] = {}
        for number, bucket in enumerate(buckets):
            self._due.setdefault(bucket.after, []).append(number)
        stages = replica.plan.stages
        self._load = next(s.index for s in stages if s.phase is Phase.LOAD)
        self._update = next(s.index for s in stages if s.phase is Phase.UPDATE)

    def _lap(self, stage: int, outside_ns: int = 0) -> None:
        if self.recorder.timed:
            self.replica.memory.synchronize()
        self.recorder.lap(stage, outside_ns)

    def _after_stage(self, stage: int) -> None:
        self._lap(stage)
        for bucket in self._due.get(stage, ()):
            self.gradient_sum.start(bucket)
        self.gradient_sum.poll()
        self.recorder.skip()

    def compute(self, batch: Batch, *, stop: bool) -> StepResult:
        """Forward, loss, backward, and the sum of gradients over the ranks.

        Parameters are as before; `update` is the other half of the step. `stop` tells the other
        ranks that this one was asked to end.
        """
        replica, steps = self.replica, self.recorder.steps
        self.recorder.timed = (
            not replica.memory.asynchronous or steps % TIMED_EVERY == TIMED_EVERY - 1
        )
        replica.load(
            batch.x,
            batch.y,
            samples=batch.samples,
            global_count=batch.global_count,
            step=batch.step,
        )
        replica.sums[STOP] = float(stop)
        self._lap(self._load)
        replica.run(self._after_stage)
        self.gradient_sum.finish()
        self.recorder.skip()
        loss, correct, stopping = (float(value) for value in replica.sums)
        return StepResult(loss, round(correct), stopping > 0, batch.global_count)

    def update(self, learning_rate: float) -> None:
        """The same update on every rank."""
        exposed_before = self.gradient_sum.exposed_ns
        self.gradient_sum.update(learning_rate)
        # Sending parameters back is communication, not update.
        self._lap(self._update, self.gradient_sum.exposed_ns - exposed_before)

    def end(self, batch: Batch) -> int:
        """Close the step's record; nanoseconds of the step."""
        return self.recorder.end(
            exposed_ns=self.gradient_sum.exposed_ns,
            hidden_ns=self.gradient_sum.hidden_ns,
            samples=len(batch.samples),
            global_count=batch.global_count,
        )
