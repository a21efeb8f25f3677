"""The running state of training: step number, loss, accuracy and throughput."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from dptrain.machine import process_age_s
from dptrain.training.engines import StepResult
from dptrain.training.evaluation.evaluation import Score
from dptrain.training.evaluation.quality import Quality
from dptrain.training.history import Record
from dptrain.training.selection import Selection
from dptrain.training.spec import JobSpec


@dataclass
class Progress:
    """Running sums over steps.

    Attributes:
        step: number of completed steps, including those before a resume.
        counts_correct: True if the network classifies, so that predictions are right or wrong.
        stopped: True if a rank requested a stop.
        first_step_s: age of the process in seconds when its first step was complete.
        loss: loss of the last minibatch.
        rate: learning rate of the last update.
        last_train_loss: mean loss over the present epoch, or over the one that has just ended.
        score: the latest evaluation on the validation data.
        scored_at: step of that evaluation.
        selection: the best evaluation on the validation data.
        test_score, test_quality: the evaluation on the test data, at the end of training.
        restored_step: step whose parameters training ended with, if it is not the last one.
    """

    step: int
    counts_correct: bool
    stopped: bool = False
    first_step_s: float | None = None
    loss: float = math.nan
    rate: float = math.nan
    score: Score | None = None
    scored_at: int = -1
    selection: Selection = field(default_factory=Selection)
    test_score: Score | None = None
    test_quality: Quality | None = None
    restored_step: int | None = None
    last_train_loss: float = math.nan
    _epoch_loss: float = 0.0
    _epoch_correct: int = 0
    _epoch_samples: int = 0
    _samples: int = 0
    _busy_ns: int = 0
    _step_ns: int = 0

    def add(self, result: StepResult) -> None:
        """Count a completed step."""
        if self.first_step_s is None:
            self.first_step_s = process_age_s()
        self.step += 1
        self.stopped = result.stop
        self.loss, self.rate = result.loss, result.learning_rate
        self._epoch_loss += result.loss * result.samples
        self._epoch_correct += result.correct
        self._epoch_samples += result.samples
        self._samples += result.samples
        self._busy_ns += result.time_ns
        self._step_ns = result.time_ns
        self.last_train_loss = self._epoch_loss / self._epoch_samples

    def add_score(self, score: Score, spec: JobSpec, between_ns: int) -> None:
        """Record an evaluation on the validation data.

        Args:
            score: its result.
            spec: the job.
            between_ns: time of the evaluations and checkpoints before this one.
        """
        self.score, self.scored_at = score, self.step
        self.selection.add(
            self.step,
            loss=score.loss,
            accuracy=score.accuracy,
            epochs=self.step / spec.epoch_steps,
            time_s=(self._busy_ns - between_ns) / 1e9,
        )

    @property
    def is_best(self) -> bool:
        """True if the parameters after the last completed step are the best ones so far."""
        return self.step == self.selection.best_step

    def begin_again(self) -> None:
        """Continue after the end, because the length of the run has been changed."""
        self.selection.begin_again()
        self.test_score = self.test_quality = self.restored_step = None

    def begin_epoch(self) -> None:
        """Reset the sums over the epoch."""
        self._epoch_loss, self._epoch_correct, self._epoch_samples = 0.0, 0, 0

    @property
    def samples_per_s(self) -> float:
        """Mean throughput of the steps of this process, over all ranks."""
        return self._samples / self._busy_ns * 1e9 if self._busy_ns else 0.0

    @property
    def train_accuracy(self) -> float | None:
        """Accuracy over the present epoch, before each update; None for a regression."""
        if not (self.counts_correct and self._epoch_samples):
            return None
        return self._epoch_correct / self._epoch_samples

    def record(self, spec: JobSpec) -> Record:
        """Return the record of the last step for ``metrics.jsonl``."""
        return {
            "step": self.step,
            "epoch": self.step / spec.epoch_steps,
            "loss": self.loss,
            "learning_rate": self.rate,
            "step_ms": self._step_ns / 1e6,
            "samples_per_s": self.samples_per_s,
        }

    def epoch_record(self, spec: JobSpec) -> Record:
        """Return the record of the present epoch for the history and for ``metrics.jsonl``."""
        score = self.score if self.scored_at == self.step else None
        return {
            "epoch": self.step / spec.epoch_steps,
            "step": self.step,
            "train_loss": self.last_train_loss,
            "train_accuracy": self.train_accuracy,
            "validation_loss": None if score is None else score.loss,
            "validation_accuracy": None if score is None else score.accuracy,
            **({} if score is None else _named("validation", score.metrics)),
            "learning_rate": self.rate,
            "samples_per_s": self.samples_per_s,
        }

    def test_record(self, spec: JobSpec) -> Record | None:
        """Return the record of the evaluation on the test data; None if there was none."""
        score = self.test_score
        if score is None:
            return None
        return {
            "step": self.step,
            "epoch": self.step / spec.epoch_steps,
            "test_loss": score.loss,
            "test_accuracy": score.accuracy,
            **self.test_results,
        }

    @property
    def test_results(self) -> Record:
        """Further results on the test data that are single numbers, by their key in records."""
        quality, score = self.test_quality, self.test_score
        found: Record = {} if quality is None else dict(quality.results())
        return _named("test", {**found, **({} if score is None else score.metrics)})

    def epoch_line(self, spec: JobSpec) -> str:
        """Return the line that is printed after an epoch."""
        parts = [
            f"epoch {math.ceil(self.step / spec.epoch_steps):>3}",
            f"step {self.step}/{spec.steps}",
            f"loss {self.last_train_loss:.4f}",
        ]
        if self.train_accuracy is not None:
            parts.append(f"train {self.train_accuracy:.1%}")
        if self.score is not None and self.scored_at == self.step:
            parts.append(f"validation {self.score}{' (best)' if self.is_best else ''}")
        parts.append(f"{self.samples_per_s:,.0f} samples/s")
        return "  ".join(parts)


def _named(split: str, results: Mapping[str, float | None]) -> Record:
    """Return results with the name of the split before theirs."""
    return {f"{split}_{name}": value for name, value in results.items()}
