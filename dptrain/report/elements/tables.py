"""Tables whose numbers refer to their source.

A table is built column by column, because the numbers of a column share their decimals. Each
number has its exact value and its path in the JSON file, so that a reader or a test can find it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dptrain.measure.statistics import Estimate
from dptrain.report.elements.numbers import decimals_for, fixed

MISSING = "–"

FACTORS = {"%": 100.0, "KB": 1e-3, "MB": 1e-6}
"""Factors from the shares and bytes of a file to the numbers of a column, by the first word of its
unit.
"""


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
        is_key: whether its numbers identify the row, with the columns before it.
        is_estimate: whether its numbers have intervals unless there are too few values.
    """

    head: str
    unit: str
    cells: tuple[Cell, ...]
    kind: str = "number"
    is_key: bool = False
    is_estimate: bool = False


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


@dataclass(frozen=True)
class Records:
    """Records of a file, of which each is a row of a table.

    A column shows a value of each record. Its path in the record, such as ``parts.compute``, is
    also the end of its path in the file; "" is the record itself.

    Attributes:
        items: the records: objects, mappings, sequences or numbers.
        at: path of each record in the file.
    """

    items: Sequence[Any]
    at: Sequence[str]

    @classmethod
    def of(cls, items: Sequence[Any], path: str = "") -> Records:
        """Return all records of the list that has this path in the file."""
        return cls(items, [f"{path}.{i}" if path else str(i) for i in range(len(items))])

    def found(self, path: str) -> list[Any]:
        """Return the value of each record; None if a mapping does not have it."""
        return [_value(item, path) for item in self.items]

    def sources(self, path: str) -> list[str]:
        """Return the path of the value of each record in the file."""
        return [f"{at}.{path}" if path else at for at in self.at]

    def texts(self, head: str, path: str, *, kind: str = "word") -> Column:
        """Return a column of words or of prose."""
        return texts(head, self.found(path), kind=kind)

    def counts(self, head: str, path: str, unit: str = "", *, is_key: bool = False) -> Column:
        """Return a column of integers, which may identify the rows."""
        return replace(self.values(head, unit, path, decimals=0), is_key=is_key)

    def values(self, head: str, unit: str, path: str, *, decimals: int | None = None) -> Column:
        """Return a column of numbers with common decimals.

        Args:
            head: name of the quantity.
            unit: unit of the shown numbers, see `FACTORS`.
            path: path in a record; None results in a cell without a number.
            decimals: number of decimals [default: one for per cent, else by the largest number].
        """
        found, scale = self.found(path), _factor(unit)
        known = [scale * value for value in found if value is not None]
        digits = _decimals(known, unit, decimals)
        return Column(
            head,
            unit,
            tuple(
                (MISSING,)
                if value is None
                else (Number(fixed(scale * value, digits), value, source),)
                for value, source in zip(found, self.sources(path), strict=True)
            ),
        )

    def times(self, paths: Mapping[str, str]) -> list[Column]:
        """Return columns of milliseconds, which share their decimals so that they can be compared.

        Args:
            paths: heading → path in a record.
        """
        found = [value for path in paths.values() for value in self.found(path)]
        decimals = decimals_for([value for value in found if value is not None])
        return [self.values(head, "ms", path, decimals=decimals) for head, path in paths.items()]

    def estimates(
        self,
        head: str,
        unit: str,
        path: str,
        *,
        decimals: int | None = None,
        shown: Callable[[Estimate], Estimate | None] = lambda estimate: estimate,
        centre: str = "value",
    ) -> Column:
        """Return a column of values with their 95% intervals, if these are finite.

        Args:
            head: name of the quantity.
            unit: as in `values`; the heading adds the meaning of the parentheses.
            path: path of an `Estimate` in a record; None results in a cell without a number.
            decimals: as in `values`.
            shown: returns what is shown of an estimate.
            centre: name of the value in the file.
        """
        found = [value if value is None else shown(value) for value in self.found(path)]
        scale = _factor(unit)
        digits = _decimals([scale * e.value for e in found if e], unit, decimals)

        def cell(estimate: Estimate | None, source: str) -> Cell:
            if estimate is None:
                return (MISSING,)
            text = fixed(scale * estimate.value, digits)
            value = Number(text, estimate.value, f"{source}.{centre}")
            if not (math.isfinite(estimate.high) and math.isfinite(estimate.low)):
                return (value,)
            ends = estimate.low, estimate.high
            return (value, *_range(*ends, digits, source, ("low", "high"), scale=scale))

        cells = tuple(cell(e, s) for e, s in zip(found, self.sources(path), strict=True))
        has_interval = any(len(cell) > 1 for cell in cells)
        shown_unit = f"{unit} (95% interval)".strip() if has_interval else unit
        return Column(head, shown_unit, cells, is_estimate=True)

    def spreads(self, head: str, unit: str, path: str) -> Column:
        """Return a column of the medians of a `Spread` with its quartiles."""
        found = self.found(path)
        decimals = decimals_for([spread.median for spread in found])
        return Column(
            head,
            unit,
            tuple(
                (
                    Number(fixed(spread.median, decimals), spread.median, f"{source}.median"),
                    *_range(spread.q1, spread.q3, decimals, source, ("q1", "q3")),
                )
                for spread, source in zip(found, self.sources(path), strict=True)
            ),
        )


def _value(record: Any, path: str) -> Any:
    for name in path.split(".") if path else ():
        if isinstance(record, Mapping):
            record = record.get(name)
        else:
            record = record[int(name)] if name.isdigit() else getattr(record, name)
    return record


def _factor(unit: str) -> float:
    return FACTORS.get(unit.partition(" ")[0], 1.0)


def _decimals(shown: Sequence[float], unit: str, decimals: int | None) -> int:
    if decimals is not None:
        return decimals
    return 1 if unit.startswith("%") else decimals_for(shown)


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
