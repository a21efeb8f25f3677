"""Tables as CSV with exact numbers, and as Markdown with the rounded ones."""

from __future__ import annotations

import re
from collections.abc import Sequence

from dptrain.files import csv_of_rows
from dptrain.tables.cells import Cell, Column, Number, cell_text, rows_of, texts_of

BAR = r"\|"
"""A bar in a cell of a table."""


def markdown(text: str, *, is_cell: bool = False) -> str:
    r"""Return a text in which only pairs of backticks and citations are markup, on one line.

    Args:
        text: the text.
        is_cell: True for a cell of a table, which a bar ends even between backticks.

    Example:
        >>> print(markdown("`batch_size` of a_b"))
        `batch_size` of a\_b
    """
    pieces = re.split("`([^`]+)`", " ".join(text.split()))
    return "".join(
        f"`{piece.replace('|', BAR) if is_cell else piece}`" if i % 2 else _escaped(piece)
        for i, piece in enumerate(pieces)
    )


def _escaped(text: str) -> str:
    """Return a text without markup: a citation begins with ``[@``, an entity ends with ``;``."""
    return re.sub(r"([\\*_<>|#$~`]|\[(?!@)|&(?=#?\w+;))", r"\\\1", text)


def markdown_text(title: str, columns: Sequence[Column], note: str) -> str:
    r"""Return a table in Markdown, with its title and its note.

    Example:
        >>> print(markdown_text("", [Column("host", "", (("a_b",),), "word")], ""))
        | host |
        |---|
        | a\_b |
        <BLANKLINE>
    """
    rule = "|".join("---:" if column.is_numeric else "---" for column in columns)
    heads, *rows = map(_markdown_row, texts_of(columns))
    lines = [heads, f"|{rule}|", *rows]
    below = ["", markdown(note)] if note else []
    above = [f"### {markdown(title)}", ""] if title else []
    return "\n".join([*above, *lines, *below]) + "\n"


def _markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(markdown(cell, is_cell=True) for cell in cells)} |"


def csv_text(columns: Sequence[Column]) -> str:
    """Return columns as CSV, see `dptrain.tables.Table.to_csv`."""
    parts = [(column, part) for column in columns for part in _parts(column)]
    names = _unique([_name(column, part) for column, part in parts])
    rows = [
        [_content(column.cells[i], part) for column, part in parts]
        for i in range(len(rows_of(columns)))
    ]
    return csv_of_rows([names, *rows])


def _parts(column: Column) -> list[str]:
    """Return what the numbers of a column are; [""] for a column of texts."""
    found = [part.part for cell in column.cells for part in cell if isinstance(part, Number)]
    return list(dict.fromkeys(found)) or [""]


def _name(column: Column, part: str) -> str:
    name = column.name or column.head.replace(" ", "_")
    return f"{name}.{part}" if part else name


def _unique(names: Sequence[str]) -> list[str]:
    """Return the names; one that occurs before has its number, from 2."""
    return [
        name if name not in names[:i] else f"{name}.{names[:i].count(name) + 1}"
        for i, name in enumerate(names)
    ]


def _content(cell: Cell, part: str) -> float | str | None:
    numbers = [each for each in cell if isinstance(each, Number)]
    if not numbers:
        return cell_text(cell) if not part else None
    return next((each.value for each in numbers if each.part == part), None)
