"""Cells and columns: numbers have exact values, columns have units and definitions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dptrain.vocabulary.terms import Term

INTERVAL = "95% interval"
"""Contents of parentheses that the heading of a column names."""
MISSING = "–"
"""Cell of a number that does not exist or is withheld."""
UNKNOWN = "unknown"
"""Cell of what was not measured; it is not 0."""


@dataclass(frozen=True)
class Number:
    """A number in a cell.

    Attributes:
        text: the rounded number.
        value: the exact number.
        source: path in the file of the table, such as ``points.3.step_ms.value``; "" if the file
            does not contain the number.
        part: what it is of the quantity, such as ``low``; "" if the cell has one number.
    """

    text: str
    value: float
    source: str = ""
    part: str = ""


Cell = tuple[Number | str, ...]
"""The contents of a cell: numbers and the text between them."""


def cell_text(cell: Cell) -> str:
    """Return a cell as people read it."""
    return "".join(part.text if isinstance(part, Number) else part for part in cell)


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        head: heading.
        unit: unit, or the meaning of the parentheses.
        cells: one cell per row.
        kind: ``number``, ``computed`` (numbers that no file contains), ``word`` (without line
            breaks) or ``prose``.
        is_key: whether its numbers identify the row, with the columns before it.
        is_estimate: whether its numbers have intervals unless there are too few values.
        term: definition of the quantity; None for texts and for columns that explain themselves.
        name: name in CSV files [default: the heading].
        is_detail: whether terminals omit it, which are smaller than pages.
    """

    head: str
    unit: str
    cells: tuple[Cell, ...]
    kind: str = "number"
    is_key: bool = False
    is_estimate: bool = False
    term: Term | None = None
    name: str = ""
    is_detail: bool = False

    @property
    def heading(self) -> str:
        """The heading with the unit."""
        return f"{self.head} {self.unit}".strip()

    @property
    def is_numeric(self) -> bool:
        """Whether the cells contain numbers, which are right-aligned."""
        return self.kind in ("number", "computed")


def rows_of(columns: Sequence[Column]) -> list[tuple[Cell, ...]]:
    """Return the cells of columns by row."""
    return list(zip(*(column.cells for column in columns), strict=True))


def texts_of(columns: Sequence[Column]) -> list[list[str]]:
    """Return the headings, then the cells by row, as people read them."""
    rows = [[cell_text(cell) for cell in row] for row in rows_of(columns)]
    return [[column.heading for column in columns], *rows]


def texts(head: str, found: Sequence[object], *, kind: str = "word") -> Column:
    """Return a column of words or of prose."""
    return Column(head, "", tuple((str(value),) for value in found), kind)
