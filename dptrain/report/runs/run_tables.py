"""The tables of a training run: epochs, scaling efficiency, settings, memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from dptrain.measure.profile.tables import busy_table, memory_table, parts_table, stages_table
from dptrain.numbers import value_text
from dptrain.report.profiles.profile_page import efficiency_tables
from dptrain.report.runs.run_record import METRICS, TrainingRun
from dptrain.runs.incidents import summary_line
from dptrain.runs.names import INCIDENTS, SPANS, SUMMARY
from dptrain.runs.spans import changed_text, steps_text
from dptrain.tables import Column, Records, Table, texts
from dptrain.vocabulary import find_term

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

    def column(name: str, *, decimals: int | None = None) -> list[Column]:
        known = any(value is not None for value in rows.found(name))
        return [rows.values(name, decimals=decimals)] if known else []

    whole = all(float(record["epoch"]).is_integer() for record in records)
    columns = (
        *column("epoch", decimals=0 if whole else 2),
        replace(rows.counts("step", unit=""), term=find_term("metrics", "step")),
        *column("train_loss"),
        *column("train_accuracy"),
        *column("validation_loss"),
        *column("validation_accuracy"),
        *column("learning_rate", decimals=5),
        *column("samples_per_s", decimals=0),
    )
    start = " since the run was started or resumed" if run.spans.is_resumed else " so far"
    note = f"Throughput: samples by time{start}, with evaluation and checkpoints."
    note += run.interrupted_means
    if stride > 1:
        note += f" One of {stride} epochs is listed."
    return Table("Epochs", columns, note, "epochs", METRICS, folded=len(records) > OPEN_EPOCHS)


def time_tables(run: TrainingRun) -> Iterator[Table]:
    """Yield the tables of the time of a step, as far as it was measured."""
    several = int(run.summary["ranks"]) > 1
    if run.step_parts is not None and run.step_ms is not None:
        step, parts = run.step_ms, run.step_parts
        yield parts_table(step, parts, several=several, name="parts", file=SUMMARY)
    if run.pop is not None:
        yield from efficiency_tables(run.pop, SUMMARY)
        yield busy_table(run.pop, name="pop-ranks", file=SUMMARY)
    if run.stages:
        table = stages_table(run.stages, "stages", several=several, name="stages", file=SUMMARY)
        yield replace(table, folded=True)
    if memory := run.summary.get("memory"):
        yield memory_table(memory, name="memory", file=SUMMARY)


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
    return Table("Steps and their settings", columns, note, "spans", SPANS)


def incidents_table(run: TrainingRun) -> Table:
    """Return the faults after which the ranks were started again."""
    rows = run.incidents
    columns = (
        texts("time", [each.time for each in rows]),
        texts("rank", ["" if each.rank is None else each.rank for each in rows]),
        texts("host", [each.host or "" for each in rows]),
        texts("cause", [each.cause for each in rows], kind="prose"),
        texts("after step", ["" if each.step is None else each.step for each in rows]),
        texts("ranks", [
            f"{each.ranks}" if each.ranks == each.ranks_after
            else f"{each.ranks}, then {each.ranks_after}" for each in rows
        ]),
        texts("steps made again", [each.steps_lost for each in rows]),
        texts("time lost (s)", [f"{each.seconds_lost:.1f}" for each in rows]),
    )  # fmt: skip
    note = f"{summary_line(rows)}: from the last complete step before a fault to the next one."
    return Table("Restarts after faults", columns, note, "incidents", INCIDENTS)


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
        Table("Settings", (*columns(given), origin), "", "settings", SPANS),
        Table(title, columns(others), "", "defaults", SPANS, folded=True),
    ]
