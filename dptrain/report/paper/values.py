"""The numbers and sentences of a page, each with a key."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

from dptrain.numbers import THOUSANDS_SEPARATOR
from dptrain.report.elements.page import Page
from dptrain.tables import Cell, Column, Table, cell_text
from dptrain.tables.cells import INTERVAL
from dptrain.texts import without_folders

NO_INTERVAL = "no interval"
"""Text next to an estimate that has too few values for an interval."""


@dataclass(frozen=True)
class Value:
    """A number of a page as text.

    Attributes:
        key: ``TABLE.ROW.COLUMN``, such as ``points-weak.8.efficiency``.
        text: the number with its unit and its interval; "" if the page withholds it.
    """

    key: str
    text: str


@dataclass(frozen=True)
class Group:
    """The values of one table.

    Attributes:
        title: heading of the table.
        note: explanation of the numbers, such as the meaning of the intervals.
        values: the values in the order of the rows.
    """

    title: str
    note: str
    values: tuple[Value, ...]


@dataclass(frozen=True)
class Sentences:
    """Sentences about one subject; the key of the first one is ``NAME.1``."""

    name: str
    title: str
    items: tuple[str, ...]

    @property
    def values(self) -> tuple[Value, ...]:
        """The sentences with their keys."""
        return tuple(Value(f"{self.name}.{i}", text) for i, text in enumerate(self.items, 1))


def number_groups(page: Page) -> tuple[Group, ...]:
    """Return all numbers of a page: the key results, then the tables.

    The key results have the keys ``key.LABEL``. The page shows the same intervals.
    """
    labels = _numbered([_slug(key.label) for key in page.keys])
    results = [
        Value(f"key.{label}", _result(key.value, key.detail))
        for label, key in zip(labels, page.keys, strict=True)
    ]
    tables = [table for section in page.sections for table in section.tables]
    groups = [Group("Key results", "", tuple(results))]
    groups += [Group(t.title, t.note, tuple(_values_of(t))) for t in tables]
    return tuple(group for group in groups if group.values)


def sentence_groups(page: Page) -> tuple[Sentences, ...]:
    """Return the sentences of a page: the conclusion, those of sections, and the restrictions.

    Those about the environment belong to the methods.
    """
    found = [Sentences("conclusion", "Conclusion", (page.headline, *page.text))]
    for section in page.sections:
        if section.definitions or section.name in ("restrictions", "environment"):
            continue
        items = (
            *section.text,
            *(" ".join((intro, *each)).strip() for intro, each in section.lists),
        )
        found.append(Sentences(section.name, section.title, items))
    found.append(Sentences("restriction", "Restrictions", page.notes))
    # Absolute paths name the machine of the author.
    return tuple(
        Sentences(each.name, each.title, tuple(map(without_folders, each.items)))
        for each in found
        if each.items
    )


def _result(value: Cell, detail: Cell) -> str:
    about = cell_text(detail).strip()
    return f"{cell_text(value)} ({about})" if about else cell_text(value)


def _values_of(table: Table) -> Iterator[Value]:
    """Return the values of the columns that do not identify a row."""
    keys = _num_keys(table)
    rows = [".".join(_slug(cell_text(cell)) for cell in row[:keys]) for row in table.rows]
    rows = _numbered(rows)
    columns = table.columns[keys:]
    names = _column_names(columns)
    for i, row in enumerate(rows):
        for name, column in zip(names, columns, strict=True):
            if column.is_numeric:
                yield Value(f"{table.name}.{row}.{name}", _with_unit(column, column.cells[i]))


def _num_keys(table: Table) -> int:
    """Return the number of leading columns that identify a row: at least one."""
    marked = [i + 1 for i, column in enumerate(table.columns) if column.is_key]
    words = list(takewhile(lambda column: column.kind == "word", table.columns))
    return marked[-1] if marked else max(len(words), 1)


def _column_names(columns: Sequence[Column]) -> list[str]:
    """Return a name for each column: its heading, and its unit or number if that is not unique."""
    heads = [_slug(column.head) for column in columns]
    units = [_slug(_unit(column).replace("%", "percent")) for column in columns]
    names = [
        f"{head}-{unit}" if heads.count(head) > 1 else head
        for head, unit in zip(heads, units, strict=True)
    ]
    return _numbered(names)


def _numbered(names: Sequence[str]) -> list[str]:
    """Return the names; those that occur more than once with their number, from 1."""
    counts = Counter(names)
    return [f"{name}-{i}" if counts[name] > 1 else name for i, name in enumerate(names, 1)]


def _unit(column: Column) -> str:
    """Return the unit of the numbers; the word after ``%`` repeats the heading."""
    unit = re.sub(r" ?\(.*\)$", "", column.unit)
    return "%" if unit.startswith("%") else unit


def _with_unit(column: Column, cell: Cell) -> str:
    """Return ``1.97 ms (1.24–3.13 ms)``; "" for a cell without a number.

    The parentheses name what they contain, unless it is a 95% interval.
    """
    text, unit = cell_text(cell), _unit(column)
    if not any(map(str.isdigit, text)):
        return ""
    after = unit if unit in ("", "%") else THOUSANDS_SEPARATOR + unit
    number, _, inside = text.partition(" (")
    if inside:
        kind = column.unit.rpartition("(")[2].removesuffix(")") if "(" in column.unit else ""
        named = f"{kind} " if kind and kind != INTERVAL else ""
        return f"{number}{after} ({named}{inside.removesuffix(')')}{after})"
    return f"{number}{after} ({NO_INTERVAL})" if column.is_estimate else f"{number}{after}"


def _slug(text: str) -> str:
    """Return a text with the characters that a key may contain.

    Example:
        >>> _slug("Load balance, 2 × 4 ranks")
        'load-balance-2-x-4-ranks'
    """
    plain = text.lower().replace("×", "x").replace("−", "-")
    return re.sub(r"[^a-z0-9+.-]+", "-", plain).strip("-") or "none"
