"""What the training loop knows of itself so far, and how it says so."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from dptrain.machine import process_age_s
from dptrain.training.engines import StepResult
from dptrain.training.evaluation import Score


@dataclass
class Progress:
    """Running sums; `step` counts steps done since the very start, resumed ones included.

    Attributes:
        has_answers: a prediction is right or wrong, not near or far.
        stopped: somebody asked to end early.
        first_step_s: age of the process when its first step was done.
        loss: of the last minibatch.
        rate: learning rate of the last update.
        last_train_loss: mean over the epoch under way, or the one that has just ended.
        score: latest look at the test split.
        scored_at: step of that look.
    """

    step: int
    has_answers: bool
    stopped: bool = False
    first_step_s: float | None = None
    loss: float = math.nan
    rate: float = math.nan
    score: Score | None = None
    scored_at: int = -1
    last_train_loss: float = math.nan
    _epoch_loss: float = 0.0
    _epoch_correct: int = 0
    _epoch_images: int = 0
    _images: int = 0
    _busy_ns: int = 0
    _step_ns: int = 0

    def add(self, result: StepResult) -> None:
        """Count a step that is done."""
        if self.first_step_s is None:
            self.first_step_s = process_age_s()
        self.step += 1
        self.stopped = result.stop
        self.loss, self.rate = result.loss, result.learning_rate
        self._epoch_loss += result.loss * result.samples
        self._epoch_correct += result.correct
        self._epoch_images += result.samples
        self._images += result.samples
        self._busy_ns += result.time_ns
        self._step_ns = result.time_ns
        self.last_train_loss = self._epoch_loss / self._epoch_images

    def begin_epoch(self) -> None:
        """Forget the sums of the epoch that has ended."""
        self._epoch_loss, self._epoch_correct, self._epoch_images = 0.0, 0, 0

    @property
    def samples_per_s(self) -> float:
        """Mean rate of the steps of this process, all ranks together."""
        return self._images / self._busy_ns * 1e9 if self._busy_ns else 0.0

    def record(self, epoch_steps: int) -> dict[str, Any]:
        """Line of ``metrics.jsonl`` about training."""
        return {
            "step": self.step,
            "epoch": self.step / epoch_steps,
            "loss": self.loss,
            "learning_rate": self.rate,
            "step_ms": self._step_ns / 1e6,
            "samples_per_s": self.samples_per_s,
        }

    def score_record(self) -> dict[str, Any]:
        """Line of ``metrics.jsonl`` about the test split."""
        assert self.score is not None
        return {
            "step": self.step,
            "test_loss": self.score.loss,
            "test_accuracy": self.score.accuracy,
        }

    def epoch_line(self, epoch_steps: int, last_step: int) -> str:
        """What is printed when an epoch ends."""
        parts = [f"epoch {math.ceil(self.step / epoch_steps):>3}", f"step {self.step}/{last_step}"]
        parts.append(f"loss {self.last_train_loss:.4f}")
        if self.has_answers:
            parts.append(f"train {self._epoch_correct / max(self._epoch_images, 1):.1%}")
        if self.score is not None and self.scored_at == self.step:
            parts.append(f"test {self.score}")
        parts.append(f"{self.samples_per_s:,.0f} samples/s")
        return "  ".join(parts)
