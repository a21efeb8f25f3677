"""Columns of a table from the records of a file.

A table is built column by column, because the numbers of a column share their decimals. Each
number has its exact value and its path in the file, so that a reader or a test can find it. The
heading, the unit and the definition come from the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from dptrain.numbers import decimals_for, fixed, value_text
from dptrain.tables.cells import INTERVAL, MISSING, Cell, Column, Number, texts
from dptrain.vocabulary import find_term
from dptrain.vocabulary.terms import Term

FACTORS = {"%": 100.0, "KB": 1e-3, "MB": 1e-6, "MFLOP": 1e-6}
"""Factors from the shares, bytes and operations of a file to the numbers of a column, by unit."""
PARTS = {"0": "low", "1": "high"}
"""Names of the ends of an interval that is a list in its file."""


class Interval(Protocol):
    """A value with its 95% interval, which is infinite if there is none."""

    @property
    def value(self) -> float: ...
    @property
    def low(self) -> float: ...
    @property
    def high(self) -> float: ...


@dataclass(frozen=True)
class Records:
    """Records of a file, of which each is a row of a table.

    A column shows a value of each record. Its path in the record, such as ``parts.compute``, is
    also the end of its path in the file; "" is the record itself. The vocabulary defines the path:
    its term is the heading, unless `head` and `unit` replace it.

    Attributes:
        items: the records: objects, mappings, sequences or numbers.
        at: path of each record in the file.

    Example:
        >>> points = Records.of([{"step_ms": 2.0}, {"step_ms": 12.5}], "points")
        >>> column = points.values("step_ms")
        >>> column.head, column.unit, [number.text for number, in column.cells]
        ('step', 'ms', ['2.00', '12.50'])
    """

    items: Sequence[Any]
    at: Sequence[str]

    @classmethod
    def of(cls, items: Sequence[Any], path: str = "") -> Records:
        """Return all records of the list that has this path in the file."""
        return cls(items, [f"{path}.{i}" if path else str(i) for i in range(len(items))])

    def having(self, path: str) -> Records:
        """Return the records whose value is not None."""
        known = [i for i, value in enumerate(self.found(path)) if value is not None]
        return Records([self.items[i] for i in known], [self.at[i] for i in known])

    def found(self, path: str) -> list[Any]:
        """Return the value of each record; None if a mapping does not have it."""
        return [_value(item, path) for item in self.items]

    def sources(self, path: str) -> list[str]:
        """Return the path of the value of each record in the file."""
        return [f"{at}.{path}" if path and at else at or path for at in self.at]

    def texts(self, path: str, head: str | None = None, *, kind: str = "word") -> Column:
        """Return a column of words or of prose."""
        name = self._empty(path, head, "").head
        return replace(texts(name, self.found(path), kind=kind), name=path)

    def plain(self, path: str, head: str | None = None, unit: str | None = None) -> Column:
        """Return a column of values of any type; None and an empty text are empty cells.

        Whole numbers have grouped digits, numbers with a term common decimals. Others are texts, as
        a person writes settings.
        """
        found = [None if value == "" else value for value in self.found(path)]
        known = [value for value in found if value is not None]
        column = self._empty(path, head, unit)
        if known and all(type(value) is int for value in known) and column.unit not in FACTORS:
            return self.values(path, head, unit, decimals=0, missing="")
        if known and unit is None and column.term and all(type(v) in (int, float) for v in known):
            return self.values(path, head, missing="")
        shown = ["" if value is None else value_text(value) for value in found]
        return replace(column, cells=tuple((text,) for text in shown), kind="word")

    def counts(
        self, path: str, head: str | None = None, unit: str | None = None, *, is_key: bool = False
    ) -> Column:
        """Return a column of integers, which may identify the rows."""
        return replace(self.values(path, head, unit, decimals=0), is_key=is_key)

    def values(
        self,
        path: str = "",
        head: str | None = None,
        unit: str | None = None,
        *,
        decimals: int | None = None,
        missing: str = MISSING,
    ) -> Column:
        """Return a column of numbers with common decimals.

        Args:
            path: path in a record; None results in a cell without a number.
            head: name of the quantity [default: the label of its term].
            unit: unit of the shown numbers, see `FACTORS` [default: that of its term].
            decimals: number of decimals [default: one for per cent, else by the largest number].
            missing: text of a cell without a number.
        """
        column = self._empty(path, head, unit)
        found, scale = self.found(path), FACTORS.get(column.unit.partition(" ")[0], 1.0)
        known = [scale * value for value in found if value is not None]
        digits = _decimals(known, column.unit, decimals)
        cells: tuple[Cell, ...] = tuple(
            (missing if value is None else Number(fixed(scale * value, digits), value, source),)
            for value, source in zip(found, self.sources(path), strict=True)
        )
        return replace(column, cells=cells)

    def times(self, paths: Iterable[str], *, missing: str = MISSING) -> list[Column]:
        """Return columns that share their decimals so that their numbers can be compared."""
        paths = list(paths)
        found = [value for path in paths for value in self.found(path)]
        decimals = decimals_for([value for value in found if value is not None])
        return [self.values(path, decimals=decimals, missing=missing) for path in paths]

    def estimates(
        self,
        path: str = "",
        head: str | None = None,
        unit: str | None = None,
        *,
        decimals: int | None = None,
        shown: Callable[[Any], Interval | str | None] = lambda estimate: estimate,
        missing: str = MISSING,
        centre: str = "value",
    ) -> Column:
        """Return a column of values with their 95% intervals, if these are finite.

        Args:
            path: path of an estimate in a record; None results in a cell without a number.
            head, decimals, missing: as in `values`.
            unit: as in `values`; the heading adds the meaning of the parentheses.
            shown: returns what is shown of an estimate, or a text in place of it.
            centre: name of the value in the file.
        """
        column = self._empty(path, head, unit)
        found = [value if value is None else shown(value) for value in self.found(path)]
        scale = FACTORS.get(column.unit.partition(" ")[0], 1.0)
        known = [scale * e.value for e in found if e is not None and not isinstance(e, str)]
        digits = _decimals(known, column.unit, decimals)

        def cell(estimate: Interval | str | None, source: str) -> Cell:
            if estimate is None or isinstance(estimate, str):
                return (estimate or missing,)
            text = fixed(scale * estimate.value, digits)
            value = Number(text, estimate.value, source and f"{source}.{centre}", centre)
            if not (math.isfinite(estimate.high) and math.isfinite(estimate.low)):
                return (value,)
            ends = estimate.low, estimate.high
            return (value, *bounds(*ends, digits, source, ("low", "high"), scale=scale))

        cells = tuple(cell(e, s) for e, s in zip(found, self.sources(path), strict=True))
        has_interval = any(len(cell) > 1 for cell in cells)
        shown_unit = f"{column.unit} ({INTERVAL})".strip() if has_interval else column.unit
        return replace(column, unit=shown_unit, cells=cells, is_estimate=True)

    def spreads(self, path: str, head: str | None = None, unit: str = "ms (quartiles)") -> Column:
        """Return a column of medians with their quartiles."""
        found = self.found(path)
        decimals = decimals_for([spread.median for spread in found])
        cells = tuple(
            (
                Number(fixed(spread.median, decimals), spread.median, f"{source}.median", "median"),
                *bounds(spread.q1, spread.q3, decimals, source, ("q1", "q3")),
            )
            for spread, source in zip(found, self.sources(path), strict=True)
        )
        return replace(self._empty(path, head, unit), cells=cells)

    def _empty(self, path: str, head: str | None, unit: str | None) -> Column:
        """Return a column without cells, with the heading, unit and definition of its term."""
        source = self.sources(path)[0] if self.at else path
        term = find_term(*(name for name in source.split(".") if not name.isdigit()))
        label, shown, name = (term.label, term.shown_unit, term.name) if term else (path, "", "")
        head, unit = label if head is None else head, shown if unit is None else unit
        return Column(head, unit, (), term=term, name=path or name)


def computed(
    head: str,
    unit: str,
    values: Sequence[float | None],
    *,
    decimals: int | None = None,
    term: Term | None = None,
    missing: str = MISSING,
) -> Column:
    """Return a column of numbers that no file contains, such as sums, with common decimals.

    Args:
        head, unit, term: heading, unit and definition.
        values: the numbers, in the unit of files: shares, bytes.
        decimals, missing: as for `Records.values`.
    """
    records = Records(values, [""] * len(values))
    column = records.values("", head, unit, decimals=decimals, missing=missing)
    return replace(column, kind="computed", term=term)


def bounds(
    low: float, high: float, decimals: int, source: str, names: tuple[str, str], scale: float = 1.0
) -> Cell:
    """Return the ends of an interval in parentheses.

    Args:
        low, high: the ends; infinite ones are not allowed.
        decimals: number of decimals.
        source: path of the record with both ends; "" if no file contains them.
        names: names of the ends in the record.
        scale: factor of the shown numbers.
    """
    paths = [f"{source}.{name}" if source else "" for name in names]
    # A dash before or after a minus sign is hard to read.
    return (
        " (",
        Number(fixed(scale * low, decimals), low, paths[0], PARTS.get(names[0], names[0])),
        " to " if low < 0 else "–",
        Number(fixed(scale * high, decimals), high, paths[1], PARTS.get(names[1], names[1])),
        ")",
    )


def _value(record: Any, path: str) -> Any:
    for name in path.split(".") if path else ():
        if isinstance(record, Mapping):
            record = record.get(name)
        else:
            record = record[int(name)] if name.isdigit() else getattr(record, name)
    return record


def _decimals(shown: Sequence[float], unit: str, decimals: int | None) -> int:
    if decimals is not None:
        return decimals
    return 1 if unit.startswith("%") else decimals_for(shown)
