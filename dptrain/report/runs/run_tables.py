"""The tables of a training run: epochs, scaling efficiency, settings, memory."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from dptrain.measure.statistics import share
from dptrain.report.elements.tables import MISSING, Column, Records, Table, texts
from dptrain.report.profiles.profile_tables import (
    efficiency_tables,
    memory_table,
    parts_table,
    stages_table,
)
from dptrain.report.runs.run_record import METRICS, TrainingRun
from dptrain.runs.names import SPANS, SUMMARY
from dptrain.runs.spans import changed_text, steps_text, value_text
from dptrain.training.evaluation.class_files import CONFUSION, LABELS
from dptrain.training.evaluation.quality import ClassQuality, LabelCounts

MOST_CLASSES = 60
"""Largest number of rows of the table of classes."""
MOST_EPOCHS = 60
"""Largest number of rows of the table of epochs."""
OPEN_EPOCHS = 12
"""Rows of the table of epochs from which it is folded."""


def epochs_table(run: TrainingRun) -> Table:
    """Return the results of each epoch; of every n-th if there are many."""
    stride = -(-len(run.epochs) // MOST_EPOCHS) or 1
    records = run.epochs[::-1][::stride][::-1]
    rows = Records([record.values for record in records], [str(record.index) for record in records])

    def column(
        head: str, name: str, unit: str = "", *, decimals: int | None = None
    ) -> list[Column]:
        known = any(value is not None for value in rows.found(name))
        return [rows.values(head, unit, name, decimals=decimals)] if known else []

    whole = all(float(record["epoch"]).is_integer() for record in records)
    columns = (
        *column("epoch", "epoch", decimals=0 if whole else 2),
        rows.counts("step", "step"),
        *column("training loss", "train_loss"),
        *column("training accuracy", "train_accuracy", "%"),
        *column("validation loss", "validation_loss"),
        *column("validation accuracy", "validation_accuracy", "%"),
        *column("learning rate", "learning_rate", decimals=5),
        *column("throughput", "samples_per_s", "samples/s", decimals=0),
    )
    start = " since the run was started or resumed" if run.spans.is_resumed else " so far"
    note = f"Throughput: samples by time{start}, with evaluation and checkpoints."
    note += run.interrupted_means
    if stride > 1:
        note += f" One of {stride} epochs is listed."
    return Table("epochs", "Epochs", METRICS, columns, note, folded=len(records) > OPEN_EPOCHS)


def classes_table(quality: ClassQuality) -> Table:
    """Return precision and recall of each class, with their intervals; of many, the worst."""
    confusion = quality.confusion
    counts = LabelCounts(
        quality.names, quality.samples, confusion.sum(axis=0), confusion.diagonal()
    )
    return _shares_table(counts, "class", "classes", CONFUSION)


def labels_table(counts: LabelCounts) -> Table:
    """Return precision and recall of each label, with their intervals; of many, the worst."""
    return _shares_table(counts, "label", "labels", LABELS)


def _shares_table(counts: LabelCounts, one: str, several: str, file: str) -> Table:
    """Return precision and recall of each class or label; of many, the worst.

    Args:
        counts: of classes or labels.
        one, several: name of one of them, and of several.
        file: that has the numbers.
    """
    recall = np.where(counts.samples > 0, counts.correct / np.maximum(counts.samples, 1), 2.0)
    chosen = sorted(np.argsort(recall, kind="stable")[:MOST_CLASSES].tolist())

    def shares(correct: NDArray[np.int64], of: NDArray[np.int64]) -> list[str]:
        found = []
        for i in chosen:
            n = int(of[i])
            estimate = share(int(correct[i]) / n, n) if n else None
            low_high = f" ({100 * estimate.low:.0f}–{100 * estimate.high:.0f})" if estimate else ""
            found.append(f"{100 * estimate.value:.1f}{low_high}" if estimate else MISSING)
        return found

    columns = (
        texts(one, [counts.names[i] for i in chosen]),
        texts("samples", [f"{counts.samples[i]:,}" for i in chosen], kind="computed"),
        replace(
            texts("recall", shares(counts.correct, counts.samples), kind="computed"),
            unit="% (95% interval)",
        ),
        replace(
            texts("precision", shares(counts.correct, counts.predicted), kind="computed"),
            unit="% (95% interval)",
        ),
    )
    note = f"Recall: share of the samples of a {one} that are recognised. Precision: share of the "
    note += f"predictions of a {one} that are correct."
    if len(chosen) < len(counts.names):
        note += f" The {len(chosen)} {several} with the lowest recall are listed."
    return Table(several, "Recall and precision", file, columns, note)


def time_tables(run: TrainingRun) -> list[Table]:
    """Return the tables of the time of a step, as far as it was measured."""
    tables = []
    if run.step_parts is not None and run.step_ms is not None:
        tables.append(parts_table("parts", SUMMARY, run.step_ms, run.step_parts))
    if run.pop is not None:
        tables += efficiency_tables("", SUMMARY, run.pop)
    if run.stages:
        several = int(run.summary["ranks"]) > 1
        tables.append(
            stages_table("stages", "Stages", SUMMARY, run.stages, "stages", several=several)
        )
    memory = run.summary.get("memory") or {}
    if memory:
        tables.append(memory_table("memory", SUMMARY, memory))
    return tables


def spans_table(run: TrainingRun) -> Table:
    """Return the steps that were made with equal settings, and where."""
    parts = run.spans.merged(int(run.summary["steps"]))
    changed = [
        "" if i == 0 else changed_text(span.changes_from(parts[i - 1][2]))
        for i, (_, _, span) in enumerate(parts)
    ]
    first = run.spans.items[0]
    begin = ", ".join(
        f"{name} {value_text(first.settings[name])}"
        for name in ("optimizer", "learning_rate", "schedule", "batch_size")
        if name in first.settings
    )
    columns = (
        texts("steps", [steps_text(start, end).partition(" ")[2] for start, end, _ in parts],
              kind="prose"),
        texts("settings", [begin, *changed[1:]], kind="prose"),
        texts("ranks", [value_text(span.value("ranks")) for _, _, span in parts], kind="prose"),
        texts("host", [value_text(span.value("host")) for _, _, span in parts], kind="prose"),
        texts("kept parameters", [
            f"step {run.selected_step}" if start <= run.selected_step <= (end or math.inf) else ""
            for start, end, _ in parts
        ], kind="prose"),
    )  # fmt: skip
    note = "The run was resumed. Settings of later steps are those that changed."
    return Table("spans", "Steps and their settings", SPANS, columns, note)


def settings_tables(run: TrainingRun) -> list[Table]:
    """Return the settings that were set with their origins, and those that have their default.

    A setting that changed has each value with the steps that it made, up to those of the kept
    parameters.
    """
    span = run.spans.of_step(run.selected_step)
    origins = run.specification.get("origins", {}) if span is None else span.origins
    given = [name for name in run.job if name in origins]
    others = [name for name in run.job if name not in origins]

    def columns(names: list[str]) -> tuple[Column, Column]:
        return (
            texts("setting", [name.replace("_", " ") for name in names], kind="prose"),
            texts("value", [run.setting(name) for name in names], kind="prose"),
        )

    origin = texts("origin", [origins.get(name, "") for name in given], kind="prose")
    title = f"{len(others)} settings with defaults, or derived from others"
    return [
        Table("settings", "Settings", SPANS, (*columns(given), origin)),
        Table("defaults", title, SPANS, columns(others), folded=True),
    ]


def setting_text(value: object) -> str:
    """Return a setting as a person would write it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)
