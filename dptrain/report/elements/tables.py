"""Tables whose numbers refer to their source.

A table is built column by column, because the numbers of a column share their decimals. Each
number has its exact value and its path in the JSON file, so that a reader or a test can find it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from dptrain.measure.profile.profile import Spread
from dptrain.measure.statistics import Estimate
from dptrain.report.elements.numbers import decimals_for, fixed

MISSING = "–"


@dataclass(frozen=True)
class Number:
    """A number in a cell.

    Attributes:
        text: the rounded number.
        value: the exact number.
        source: path in the JSON file, such as ``points.3.step_ms.value``.
    """

    text: str
    value: float
    source: str


Cell = tuple[Number | str, ...]
"""The contents of a cell: numbers and the text between them."""


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        head: heading.
        unit: unit, or the meaning of the parentheses.
        cells: one cell per row.
        kind: ``number``, ``computed`` (numbers that no file contains), ``word`` (without line
            breaks) or ``prose``.
    """

    head: str
    unit: str
    cells: tuple[Cell, ...]
    kind: str = "number"


@dataclass(frozen=True)
class Table:
    """A table of columns of equal length.

    Attributes:
        name: identifier within a page.
        title: heading.
        file: JSON file of the sources of the numbers.
        columns: the columns.
        note: text below the title.
        folded: whether a reader opens it; in print, it is open.
    """

    name: str
    title: str
    file: str
    columns: tuple[Column, ...]
    note: str = ""
    folded: bool = False

    @property
    def rows(self) -> list[tuple[Cell, ...]]:
        """The cells by row."""
        return list(zip(*(column.cells for column in self.columns), strict=True))


def texts(head: str, found: Sequence[object], *, kind: str = "word") -> Column:
    """Return a column of words or of prose."""
    return Column(head, "", tuple((str(value),) for value in found), kind)


def counts(head: str, values: Sequence[int], sources: Sequence[str], unit: str = "") -> Column:
    """Return a column of integers."""
    return Column(
        head,
        unit,
        tuple(
            (Number(fixed(value, 0), value, source),)
            for value, source in zip(values, sources, strict=True)
        ),
    )


def values(
    head: str,
    unit: str,
    found: Sequence[float | None],
    sources: Sequence[str],
    *,
    decimals: int | None = None,
    scale: float = 1.0,
) -> Column:
    """Return a column of numbers with common decimals.

    Args:
        head: name of the quantity.
        unit: unit of the scaled numbers.
        found: the numbers; None results in a cell without a number.
        sources: path of each number in its file.
        decimals: number of decimals [default: from the largest number].
        scale: factor of the shown numbers, such as 100 for per cent.
    """
    known = [scale * value for value in found if value is not None]
    digits = decimals_for(known) if decimals is None else decimals
    return Column(
        head,
        unit,
        tuple(
            (MISSING,) if value is None else (Number(fixed(scale * value, digits), value, source),)
            for value, source in zip(found, sources, strict=True)
        ),
    )


def times(fields: Mapping[str, str], records: Sequence[object], at: Sequence[str]) -> list[Column]:
    """Return columns of milliseconds, which share their decimals so that they can be compared.

    Args:
        fields: heading → attribute of a record, such as ``parts.compute``.
        records: one record per row.
        at: paths of the records in their file.
    """
    found = {
        head: [attrgetter(path)(record) for record in records] for head, path in fields.items()
    }
    decimals = decimals_for([v for column in found.values() for v in column if v is not None])
    return [
        values(head, "ms", found[head], [f"{a}.{path}" for a in at], decimals=decimals)
        for head, path in fields.items()
    ]


def estimates(
    head: str,
    unit: str,
    found: Sequence[Estimate | None],
    sources: Sequence[str],
    *,
    decimals: int | None = None,
    scale: float = 1.0,
    centre: str = "value",
) -> Column:
    """Return a column of values with their 95% intervals, if these are finite.

    Args:
        head: name of the quantity.
        unit: unit of the scaled numbers; the heading adds the meaning of the parentheses.
        found: the estimates; None results in a cell without a number.
        sources: path of each estimate in its file.
        decimals: number of decimals [default: from the largest value].
        scale: factor of the shown numbers, such as 100 for per cent.
        centre: name of the value in the file.
    """
    digits = decimals_for([scale * e.value for e in found if e]) if decimals is None else decimals

    def cell(estimate: Estimate | None, source: str) -> Cell:
        if estimate is None:
            return (MISSING,)
        shown = fixed(scale * estimate.value, digits)
        value = Number(shown, estimate.value, f"{source}.{centre}")
        if not (math.isfinite(estimate.high) and math.isfinite(estimate.low)):
            return (value,)
        ends = estimate.low, estimate.high
        return (value, *_range(*ends, digits, source, ("low", "high"), scale=scale))

    cells = tuple(cell(e, s) for e, s in zip(found, sources, strict=True))
    has_interval = any(len(cell) > 1 for cell in cells)
    return Column(head, f"{unit} (95% interval)".strip() if has_interval else unit, cells)


def spreads(
    head: str, unit: str, found: Sequence[Spread], sources: Sequence[str], *, centre: str = "median"
) -> Column:
    """Return a column of medians, or of another attribute `centre`, with quartiles."""
    centres = [float(getattr(spread, centre)) for spread in found]
    decimals = decimals_for(centres)
    return Column(
        head,
        unit,
        tuple(
            (
                Number(fixed(value, decimals), value, f"{source}.{centre}"),
                *_range(spread.q1, spread.q3, decimals, source, ("q1", "q3")),
            )
            for value, spread, source in zip(centres, found, sources, strict=True)
        ),
    )


def _range(
    low: float, high: float, decimals: int, source: str, names: tuple[str, str], scale: float = 1.0
) -> tuple[Number | str, ...]:
    # A dash before or after a minus sign is hard to read.
    return (
        " (",
        Number(fixed(scale * low, decimals), low, f"{source}.{names[0]}"),
        " to " if low < 0 else "–",
        Number(fixed(scale * high, decimals), high, f"{source}.{names[1]}"),
        ")",
    )
