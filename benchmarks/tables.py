"""Tables, documents and file names of reports."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dptrain.tables import Table


def make_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Return rows of text under a title; all but the first column are right-aligned."""
    return Table.of_rows(title, columns, rows, text=columns[:1])


def with_spread(median: float, ends: Sequence[float]) -> str:
    """Format a median with its quartiles or range."""
    return f"{median:.3g} ({ends[0]:.3g}–{ends[1]:.3g})"


def document(title: str, about: Mapping[str, Any], summary: str, tables: Iterable[Table]) -> str:
    """Return a report in Markdown: conditions and summary as lists, then tables."""
    conditions = "\n".join(f"- {key}: {_plain(value)}" for key, value in about.items())
    lines = "\n".join(f"- {line}" for line in summary.splitlines())
    bodies = "\n".join(table.to_markdown() for table in tables)
    return f"# {title}\n\n{conditions}\n\n{lines}\n\n{bodies}"


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def new_files(folder: Path, kind: str, date: str) -> tuple[Path, Path]:
    """Return unused paths for JSON and Markdown, named by date with a suffix -2, -3, … if needed.

    Args:
        folder: created if it does not exist.
        kind: prefix of the names.
        date: in ISO format; only the day is used.
    """
    folder.mkdir(parents=True, exist_ok=True)
    day, number = f"{kind}-{date.partition('T')[0]}", 1
    name = day
    while (folder / f"{name}.json").exists():
        number += 1
        name = f"{day}-{number}"
    return folder / f"{name}.json", folder / f"{name}.md"
