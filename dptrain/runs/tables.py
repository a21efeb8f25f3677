"""Tables of runs for terminals."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dptrain.runs.comparison import Comparison
from dptrain.runs.records import Record
from dptrain.tables import Table

COLUMNS = (
    "run", "state", "network", "data", "ranks", "batch_size", "seed", "steps",
    "validation_accuracy", "test_accuracy", "test_loss", "resumed_after",
    "tags",
)  # fmt: skip
"""Columns of the list of runs; those without a value are left out."""

TEXT = {
    "run", "started", "state", "resumed_after", "incidents", "tags", "note", "network", "data",
    "backend",
    "precision", "optimizer", "schedule", "strategy", "transport", "version", "commit", "digest",
    "data_digest", "host", "cpu", "weights", "step_at", "batch_norm",
}  # fmt: skip
"""Columns that contain text."""


def runs_table(records: Sequence[Record], columns: Sequence[str] = ()) -> Table:
    """Return a table with a row for each run.

    Args:
        records: of the runs.
        columns: names of further values.
    """
    shown = [
        name for name in COLUMNS if any(record.get(name) not in (None, "") for record in records)
    ]
    shown += [name for name in columns if name not in shown]
    rows = [[_cell(name, record.get(name)) for name in shown] for record in records]
    heads = [_heading(name) for name in shown]
    count = f"{len(records)} run{'s' if len(records) != 1 else ''}"
    return Table.of_rows(count, heads, rows, text=[_heading(n) for n in shown if n in TEXT])


def resume_lines(records: Sequence[Record]) -> list[str]:
    """Return a line for each run that was resumed: after which steps, and what changed then.

    If faults were the reason, it states what they have cost.
    """
    return [
        f"{record['run']} was resumed {record['resumed']}"
        + (f"; {record['incidents']}" if record["incidents"] else "")
        for record in records
        if record["resumed"] or record["incidents"]
    ]


def comparison_tables(found: Comparison) -> list[Table]:
    """Return a table of the settings that differ, if any does, and one of the results."""
    names = [Path(run).name for run in found.runs]
    heads = ["", *(names if len(set(names)) == len(names) else found.runs)]
    parts = (
        ("Settings that differ", found.settings, "not set"),
        ("Results", found.results, "none"),
    )
    return [
        Table.of_rows(title, heads, _rows(values, absent), text=heads)
        for title, values, absent in parts
        if values
    ]


def _rows(values: dict[str, tuple[Any, ...]], absent: str) -> list[list[str]]:
    """Return a row for each value; `absent` is the text of one that a run lacks."""
    return [
        [_heading(name), *(_cell(name, value) or absent for value in row)]
        for name, row in values.items()
    ]


def _heading(name: str) -> str:
    return name.replace("_", " ")


def _cell(name: str, value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float):
        if name.endswith("accuracy"):
            return f"{value:.2%}"
        return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"
    return str(value)
