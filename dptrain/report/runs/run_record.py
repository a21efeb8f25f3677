"""The files of a training run that a report needs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from dptrain.errors import UserError, shown
from dptrain.files import read_regular
from dptrain.forms import COUNT, NUMBER, SHARE, Form, Optional, check_form
from dptrain.measure.metrics import MetricsFile
from dptrain.measure.profile.pop import Pop
from dptrain.measure.profile.profile import Spread, StageProfile, StepParts
from dptrain.measure.statistics import Estimate, share
from dptrain.records import from_values
from dptrain.runs.files import read_file
from dptrain.runs.incidents import Incident, read_incidents
from dptrain.runs.names import ENVIRONMENT, FAILURE, SPECIFICATION, SUMMARY
from dptrain.runs.spans import Spans, steps_text
from dptrain.texts import command_line
from dptrain.training.evaluation.class_files import (
    CONFUSION,
    LABELS,
    MISTAKES,
    read_confusion,
    read_labels,
    read_mistakes,
)
from dptrain.training.evaluation.predicted_values import FILE as PREDICTED
from dptrain.training.evaluation.predicted_values import read_values
from dptrain.training.evaluation.quality import ClassQuality, LabelCounts, ValueQuality
from dptrain.training.persistence.rundir import LAST_CHECKPOINT

METRICS = "metrics.jsonl"

ACCURACIES = ("train_accuracy", "validation_accuracy", "test_accuracy")
NUMBERS = (
    *ACCURACIES,
    "loss",
    "train_loss",
    "validation_loss",
    "learning_rate",
    "step_ms",
    "samples_per_s",
)
"""Values of ``metrics.jsonl`` that plots and tables show; each may be missing."""
LINE: Mapping[str, Form] = {
    "step": COUNT,
    "epoch": NUMBER,
    **dict.fromkeys(NUMBERS, Optional(NUMBER)),
    **dict.fromkeys(ACCURACIES, Optional(SHARE)),
}

MOST_OF_MESSAGE = 1000
"""Characters of the message of a run that diverged."""


@dataclass(frozen=True)
class Record:
    """A line of ``metrics.jsonl``: its index, from 0, and its values."""

    index: int
    values: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.values.get(name)


@dataclass(frozen=True)
class TrainingRun:
    """A training run that has ended.

    Attributes:
        folder: its run directory.
        summary: contents of ``summary.json``.
        specification: contents of ``spec.json``.
        environment: contents of ``env.json``.
        steps: records of single steps, in order.
        epochs: records of epochs, in order.
        spans: which settings made which steps.
        predicted: expected and predicted values of test samples; None for classes.
        classes: the confusion matrix of the test data; None for values, and for many classes.
        mistakes: a PNG file of the most confident mistakes; None without one.
        labels: of the test data; None if a sample has not several labels.
        incidents: faults after which the ranks were started again.
    """

    folder: Path
    summary: Mapping[str, Any]
    specification: Mapping[str, Any]
    environment: Mapping[str, Any]
    steps: tuple[Record, ...]
    epochs: tuple[Record, ...]
    spans: Spans = Spans()
    predicted: ValueQuality | None = None
    classes: ClassQuality | None = None
    mistakes: bytes | None = None
    labels: LabelCounts | None = None
    incidents: tuple[Incident, ...] = ()

    @classmethod
    def read(cls, folder: Path) -> TrainingRun:
        """Read the files of a run directory.

        Raises:
            UserError: the run has not ended, or a file is missing or damaged.
        """
        if not (folder / SUMMARY).exists():
            raise UserError(_unfinished(folder))
        if not (folder / METRICS).exists():
            raise UserError(f"there is no {folder / METRICS}; restore the file or make it again")
        records = [Record(i, r) for i, r in enumerate(MetricsFile(folder / METRICS).read())]
        run = cls(
            folder,
            read_file(folder, SUMMARY),
            read_file(folder, SPECIFICATION),
            read_file(folder, ENVIRONMENT),
            tuple(r for r in records if "loss" in r.values),
            tuple(r for r in records if "train_loss" in r.values),
            Spans.read(folder),
            read_values(folder / PREDICTED),
            read_confusion(folder / CONFUSION),
            read_mistakes(folder / MISTAKES),
            read_labels(folder / LABELS),
            tuple(read_incidents(folder)),
        )
        run._check()
        return run

    def _check(self) -> None:
        """Refuse files that lack what the report needs, or have wrong values."""
        for record in (*self.steps, *self.epochs):
            check_form(
                record.values, LINE, f"{self.folder / METRICS}, line {record.index + 1}", ": "
            )
        try:
            _ = self.job, self.planned_steps, self.timed_steps
            _ = self.accuracy, self.step_ms, self.step_parts, self.stages, self.pop
        except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise UserError(
                f"{self.folder} is not a run directory of this version of dptrain "
                f"({type(error).__name__}: {shown(error)}); train again"
            ) from None

    @property
    def job(self) -> dict[str, Any]:
        """The settings that made the last step of the kept parameters; see `Spans`."""
        span = self.spans.of_step(self.selected_step)
        return dict(self.specification["job"] if span is None else span.settings)

    @property
    def interrupted_means(self) -> str:
        """What means of an epoch contain that was interrupted, to follow a text; "" if none was."""
        if not self.spans.begin_within_epochs(int(self.job["epoch_steps"])):
            return ""
        return " Training loss and accuracy of an interrupted epoch are means since the resume."

    @property
    def selected_step(self) -> int:
        """Number of updates that made the parameters with which training ended."""
        return int(self.summary.get("selected_step") or self.summary["steps"])

    @property
    def planned_steps(self) -> int:
        """Number of steps after which training ends."""
        last = self.spans.of_step(None)
        return int(self.job["steps"] if last is None else last.settings["steps"])

    @property
    def timed_steps(self) -> str:
        """The steps whose times the summary has, ``steps 145–216``; empty if they are all."""
        found = self.summary.get("timed_steps")
        if not (self.spans.is_resumed and isinstance(found, list) and len(found) == 2):
            return ""
        return steps_text(*found)

    def setting(self, name: str) -> str:
        """Return a setting of the kept parameters; each value with its steps if it changed."""
        return self.spans.value_text(name, self.selected_step)

    @property
    def num_test_samples(self) -> int:
        """Number of test samples."""
        return int(self.specification["data"]["test_samples"])

    @property
    def num_training_samples(self) -> int:
        """Number of training samples."""
        return int(self.specification["data"]["train_samples"])

    @property
    def accuracy(self) -> Estimate | None:
        """Test accuracy with its interval over test samples; None for a regression."""
        found = self.summary["test_accuracy"]
        return None if found is None else share(float(found), self.num_test_samples)

    @property
    def step_ms(self) -> Spread | None:
        """Distribution of the steps; None if none was measured."""
        found = self.summary["step_ms"]
        return None if found is None else from_values(Spread, found)

    @property
    def step(self) -> Estimate | None:
        """Median of the steps with its interval, which is infinite for a short run."""
        found = self.step_ms
        return None if found is None else found.estimate

    @property
    def step_parts(self) -> StepParts | None:
        """Parts of a step; None if no step was timed by stage."""
        found = self.summary["step_parts"]
        return None if found is None else from_values(StepParts, found)

    @property
    def stages(self) -> tuple[StageProfile, ...]:
        """Times of the stages; empty if no step was timed by stage."""
        return from_values(tuple[StageProfile, ...], self.summary["stages"])

    @property
    def pop(self) -> Pop | None:
        """Parallel efficiency; None for one rank, and in runs of older versions."""
        found = self.summary.get("pop")
        return None if found is None else from_values(Pop, found)

    @property
    def num_epochs(self) -> float:
        """Passes over the training data."""
        return float(self.summary["steps"]) / float(self.job["epoch_steps"])

    def column(self, name: str) -> tuple[list[float], list[float]]:
        """Return (epochs, values) of a column of the epochs, without missing values."""
        return _column(self.epochs, name)

    def seconds(self) -> list[float] | None:
        """Return the training time until each record of an epoch, with evaluation and checkpoints.

        It follows from the mean throughput so far, so it is None if the run was resumed.
        """
        found = []
        for record in self.epochs:
            rate = record["samples_per_s"]
            if not rate:
                return None
            found.append(float(record["epoch"]) * self.num_training_samples / float(rate))
        increasing = all(later > earlier for earlier, later in pairwise(found))
        return found if found and increasing else None


def _column(records: Sequence[Record], name: str) -> tuple[list[float], list[float]]:
    pairs = [(r["epoch"], r[name]) for r in records]
    # A loss that overflows is no number that an axis can show.
    known = [(float(x), float(y)) for x, y in pairs if y is not None and math.isfinite(float(y))]
    return [x for x, _ in known], [y for _, y in known]


def step_column(run: TrainingRun, name: str) -> tuple[list[float], list[float]]:
    """Return (epochs, values) of a column of single steps, without missing values."""
    return _column(run.steps, name)


def _unfinished(folder: Path) -> str:
    """Return why a run without a summary has no report."""
    last = folder / LAST_CHECKPOINT
    after = ""
    with suppress(OSError, ValueError):
        after = f", its last checkpoint is that of step {int(read_regular(last, 100))}"
    if (folder / FAILURE).exists():
        message = shown(read_file(folder, FAILURE)["message"], MOST_OF_MESSAGE)
        return f"the training run in {folder} has no results{after}: {message}"
    return (
        f"the training run in {folder} has not ended: it has no {SUMMARY}{after}; wait until it "
        f"ends, or continue it with: {command_line('train', '--resume', folder)}"
    )
