"""Tables of runs for terminals."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dptrain.runs.comparison import MEASURED, Comparison
from dptrain.runs.records import Record
from dptrain.tables import Column, Records, Table, texts
from dptrain.vocabulary import label_of

COLUMNS = (
    "run", "state", "network", "data", "ranks", "batch_size", "seed", "steps",
    "validation_accuracy", "test_accuracy", "test_loss", "resumed_after",
    "tags",
)  # fmt: skip
"""Columns of the list of runs; those without a value are left out."""


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
    found = Records.of(records)
    count = f"{len(records)} run{'s' if len(records) != 1 else ''}"
    return Table(count, tuple(_column(found, name) for name in shown))


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
    heads = names if len(set(names)) == len(names) else found.runs
    parts = (
        ("Settings that differ", found.settings, "not set"),
        ("Results", found.results, "none"),
    )
    return [_side_by_side(title, heads, values, absent) for title, values, absent in parts
            if values]  # fmt: skip


def _side_by_side(
    title: str, heads: Sequence[str], values: dict[str, tuple[Any, ...]], absent: str
) -> Table:
    """Return a table with a row for each value; `absent` is the text of one that a run lacks."""
    rows = [_column(Records.of([{name: value} for value in own]), name)
            for name, own in values.items()]  # fmt: skip
    columns = [
        Column(head, "", tuple(row.cells[i] if any(row.cells[i]) else (absent,) for row in rows),
               "prose")
        for i, head in enumerate(heads)
    ]  # fmt: skip
    return Table(title, (texts("", [row.heading for row in rows], kind="prose"), *columns))


def _column(records: Records, name: str) -> Column:
    """Return a column of results, with their unit, or of a setting."""
    if name in MEASURED:
        return records.plain(name, label_of(name))
    return records.plain(name, name.replace("_", " "), "")
