"""Tables of numbers that know where they come from.

A table is built column by column, because a column shares its decimals. Each number keeps its
exact value and its place in the JSON file, so that a reader, or a test, can look it up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from dptrain.measure.profile import Spread
from dptrain.measure.statistics import Estimate
from dptrain.scaling.report.numbers import decimals_for, fixed

MISSING = "–"


@dataclass(frozen=True)
class Number:
    """A number in a cell: as it is read, as it is, and where: ``points.3.step_ms.value``."""

    text: str
    value: float
    source: str


Cell = tuple[Number | str, ...]
"""What stands in a cell, piece by piece."""


@dataclass(frozen=True)
class Column:
    """A heading, its unit or what the brackets mean, and a cell a row.

    Attributes:
        kind: ``number``, ``word`` (which stays on a line) or ``prose``.
    """

    head: str
    unit: str
    cells: tuple[Cell, ...]
    kind: str = "number"


@dataclass(frozen=True)
class Table:
    """Columns of equal length.

    Attributes:
        name: within a page.
        file: that sources refer to.
        note: below the title.
    """

    name: str
    title: str
    file: str
    columns: tuple[Column, ...]
    note: str = ""

    @property
    def rows(self) -> list[tuple[Cell, ...]]:
        """Cells row by row."""
        return list(zip(*(column.cells for column in self.columns), strict=True))


def texts(head: str, found: Sequence[object], *, kind: str = "word") -> Column:
    """A column of words, or of prose."""
    return Column(head, "", tuple((str(value),) for value in found), kind)


def counts(head: str, values: Sequence[int], sources: Sequence[str], unit: str = "") -> Column:
    """A column of whole numbers."""
    return Column(head, unit, tuple(
        (Number(fixed(value, 0), value, source),)
        for value, source in zip(values, sources, strict=True)
    ))  # fmt: skip


def values(
    head: str,
    unit: str,
    found: Sequence[float | None],
    sources: Sequence[str],
    *,
    decimals: int | None = None,
    scale: float = 1.0,
) -> Column:
    """A column of numbers with common decimals.

    Args:
        head: name of the quantity.
        unit: below it.
        found: None leaves a cell without a number.
        sources: place of each in its file.
        decimals: by the largest number where left out.
        scale: shown is the number times that; 100 for per cent.
    """
    known = [scale * value for value in found if value is not None]
    places = decimals_for(known) if decimals is None else decimals
    return Column(head, unit, tuple(
        (MISSING,) if value is None else (Number(fixed(scale * value, places), value, source),)
        for value, source in zip(found, sources, strict=True)
    ))  # fmt: skip


def times(fields: Mapping[str, str], records: Sequence[object], at: Sequence[str]) -> list[Column]:
    """Columns of milliseconds, which share their decimals so that they can be compared.

    Args:
        fields: heading → where a record has the time, ``parts.compute``.
        records: one a row.
        at: places of the records in their file.
    """
    found = {
        head: [attrgetter(path)(record) for record in records] for head, path in fields.items()
    }
    places = decimals_for([v for column in found.values() for v in column if v is not None])
    return [
        values(head, "ms", found[head], [f"{a}.{path}" for a in at], decimals=places)
        for head, path in fields.items()
    ]


def estimates(
    head: str,
    unit: str,
    found: Sequence[Estimate | None],
    sources: Sequence[str],
    *,
    decimals: int | None = None,
) -> Column:
    """A column of values with their 95% intervals; none where there was a single launch."""
    known = [e.value for e in found if e is not None]
    places = decimals_for(known) if decimals is None else decimals

    def cell(estimate: Estimate | None, source: str) -> Cell:
        if estimate is None:
            return (MISSING,)
        value = Number(fixed(estimate.value, places), estimate.value, f"{source}.value")
        if not math.isfinite(estimate.high):
            return (value,)
        return (value, *_range(estimate.low, estimate.high, places, source, ("low", "high")))

    return Column(head, unit, tuple(cell(e, s) for e, s in zip(found, sources, strict=True)))


def spreads(
    head: str, unit: str, found: Sequence[Spread], sources: Sequence[str], *, centre: str = "median"
) -> Column:
    """A column of medians, or of what else is the `centre`, with quartiles."""
    centres = [float(getattr(spread, centre)) for spread in found]
    places = decimals_for(centres)
    return Column(head, unit, tuple(
        (
            Number(fixed(value, places), value, f"{source}.{centre}"),
            *_range(spread.q1, spread.q3, places, source, ("q1", "q3")),
        )
        for value, spread, source in zip(centres, found, sources, strict=True)
    ))  # fmt: skip


def _range(
    low: float, high: float, places: int, source: str, names: tuple[str, str]
) -> tuple[Number | str, ...]:
    return (
        " (", Number(fixed(low, places), low, f"{source}.{names[0]}"),
        "–", Number(fixed(high, places), high, f"{source}.{names[1]}"), ")",
    )  # fmt: skip
