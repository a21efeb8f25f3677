"""What evaluations on the validation data decide.

They decide which epoch is the best, when training ends, and the learning rate of schedule plateau.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dptrain.training.history import Record
from dptrain.training.spec import JobSpec


@dataclass(frozen=True)
class AccuracyReached:
    """The first evaluation with at least the requested accuracy.

    Attributes:
        accuracy: validation accuracy.
        epochs, steps: passes over the data and updates so far.
        time_s: time of the steps of this process in seconds, without evaluations and checkpoints;
            NaN if the run was resumed after it.
    """

    accuracy: float
    epochs: float
    steps: int
    time_s: float


@dataclass
class Selection:
    """The best evaluation so far.

    Every rank has the same values, because all ranks receive the same scores.

    Attributes:
        by: ``accuracy``, ``loss`` or ``none``.
        patience: evaluations without an improvement after which training ends; 0 for never.
        until_accuracy: accuracy at which training ends; 0 for never.
        best_loss, best_accuracy: of the best evaluation; None before the first, and if there is no
            accuracy.
        best_step: number of completed steps at that evaluation; -1 before the first.
        since_best: number of evaluations after it, or after the length of the run was changed.
        plateau: evaluations without an improvement after which the learning rate is reduced; 0 for
            never.
        reductions: of the learning rate so far.
        since_reduction: number of evaluations after the last reduction or improvement.
        reached: the first evaluation with at least `until_accuracy`; None before it.
    """

    by: str = "none"
    patience: int = 0
    until_accuracy: float = 0.0
    best_loss: float | None = None
    best_accuracy: float | None = None
    best_step: int = -1
    since_best: int = 0
    plateau: int = 0
    reductions: int = 0
    since_reduction: int = 0
    reached: AccuracyReached | None = None

    @classmethod
    def of(cls, spec: JobSpec, evaluations: Sequence[Record] = (), step: int = 0) -> Selection:
        """Return the state after the evaluations that a run made before it was resumed.

        Args:
            spec: the job; a resumed run may have another patience or another accuracy.
            evaluations: records with the keys step, validation_loss and validation_accuracy.
            step: number of completed steps; an accuracy that was reached before does not end the
                run, which was continued with another setting then.
        """
        found = cls(spec.best_by, spec.patience, spec.until_accuracy, plateau=spec.plateau_patience)
        step_before = 0
        for record in evaluations:
            if record["step"] > spec.schedule_start >= step_before:
                found.begin_again()
            step_before = record["step"]
            found.add(
                record["step"],
                loss=float(record["validation_loss"]),
                accuracy=record.get("validation_accuracy"),
                epochs=record["step"] / spec.epoch_steps,
            )
            if record["step"] != step:
                found.reached = None
        if spec.schedule_start >= step_before:
            found.begin_again()
        return found

    def begin_again(self) -> None:
        """Forget what ended training: the length of the run has been changed.

        A plateau does not depend on the length, and goes on.
        """
        self.since_best, self.reached = 0, None

    def forget_best(self) -> None:
        """Select among the evaluations from now on: the checkpoint of the best one was lost.

        The learning rate keeps its reductions.
        """
        self.best_loss = self.best_accuracy = self.reached = None
        self.best_step, self.since_best = -1, 0

    def add(
        self,
        step: int,
        *,
        loss: float,
        accuracy: float | None,
        epochs: float,
        time_s: float = math.nan,
    ) -> None:
        """Count an evaluation.

        Args:
            step: number of completed steps.
            loss, accuracy: its results; the accuracy is None if the network predicts values.
            epochs: passes over the data.
            time_s: as in `AccuracyReached`.
        """
        if accuracy is not None and 0 < self.until_accuracy <= accuracy and self.reached is None:
            self.reached = AccuracyReached(accuracy, epochs, step, time_s)
        if self.by == "none":
            return
        if self._is_improvement(loss, accuracy):
            self.best_loss, self.best_accuracy = loss, accuracy
            self.best_step, self.since_best, self.since_reduction = step, 0, 0
            return
        self.since_best += 1
        self.since_reduction += 1
        if self.since_reduction == self.plateau:
            self.reductions, self.since_reduction = self.reductions + 1, 0

    def _is_improvement(self, loss: float, accuracy: float | None) -> bool:
        if not math.isfinite(loss):
            return False
        if self.best_loss is None:
            return True
        if self.by == "loss" or accuracy is None or self.best_accuracy is None:
            return loss < self.best_loss
        return accuracy > self.best_accuracy

    @property
    def is_out_of_patience(self) -> bool:
        """True if the last `patience` evaluations were no improvement."""
        return 0 < self.patience <= self.since_best

    @property
    def ends_training(self) -> bool:
        """True if no step follows the last evaluation."""
        return self.reached is not None or self.is_out_of_patience

    def __str__(self) -> str:
        if self.by == "accuracy" and self.best_accuracy is not None:
            return f"validation accuracy {self.best_accuracy:.2%}"
        return "none" if self.best_loss is None else f"validation loss {self.best_loss:.4g}"
