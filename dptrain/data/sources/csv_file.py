"""Numbers from CSV files: the columns that are chosen, or all that have a number in every row."""

from __future__ import annotations

import csv
import math
import re
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dptrain.data.preprocessing.names import same_form
from dptrain.data.spec import escape
from dptrain.errors import UserError, shown, suggest

_MOST_NAMED = 20
"""Columns that a message names."""
_NO_NAME = re.compile(r"(Unnamed: \d+)?")
"""Name of a column without one, also as pandas calls it after reading."""
Cell = tuple[int, str]
"""Number of a line, and the text of a cell in it."""


class Header:
    """Column names of a file, with constant-time look-up.

    Attributes:
        names: in the order of the file.
        path: of the file, for messages.
    """

    def __init__(self, names: Sequence[str], path: Path) -> None:
        self.names = [same_form(name.strip()) for name in names]
        self.path = path
        self._first: dict[str, int] = {}
        self._repeated: set[str] = set()
        for index, name in enumerate(self.names):
            if self._first.setdefault(name, index) != index:
                self._repeated.add(name)

    def index(self, name: str) -> int:
        """Return the position of a column; raise `UserError` unless exactly one has this name."""
        if name not in self._first:
            raise UserError(
                f"{self.path} has no column '{shown(name)}'; it has {list_some(self.names)}"
                + suggest(name, self.names)
            )
        if name in self._repeated:
            raise UserError(
                f"{self.path} has more than one column '{shown(name)}'; rename or remove one"
            )
        return self._first[name]


@dataclass(frozen=True)
class NumericColumns:
    """The columns of a table that have a number in every row.

    Attributes:
        names: in the order of the file.
        values: float64 (rows, columns).
        notes: a line for each kind of columns or rows that are left out, with their names.
    """

    names: tuple[str, ...]
    values: NDArray[np.float64]
    notes: tuple[str, ...]


@dataclass
class _Rows:
    """The rows of a file after its header.

    Attributes:
        lines: number of the line in which the present row ends.
        blank: blank lines before the last row.
    """

    header: Header
    lines: int = 0
    blank: int = 0
    rows: Iterator[list[str]] = field(default_factory=lambda: iter(()))


def read_header(path: Path) -> Header:
    """Return the names of the columns; raise `UserError` if the file has no rows or no commas."""
    with _opened(path) as rows:
        return rows.header


class Labels:
    """Labels of a column, which are text, as numbers in the order in which they appear.

    Attributes:
        found: the labels.
    """

    def __init__(self) -> None:
        self.found: dict[str, int] = {}

    def __call__(self, text: str) -> float:
        text = text.strip()
        if not text:
            raise ValueError
        return float(self.found.setdefault(text, len(self.found)))

    def texts(self, numbers: NDArray[np.float64]) -> NDArray[np.str_]:
        """Return the labels of numbers."""
        return np.array(list(self.found))[numbers.astype(np.int64)]


def has_text(path: Path, name: str) -> bool:
    """Return True if the first cell of a column is no number."""
    with _opened(path) as rows:
        index = rows.header.index(name)
        return not _is_number(next(rows.rows)[index])


def read_columns(
    path: Path, names: Sequence[str], labels: Labels | None = None
) -> NDArray[np.float64]:
    """Return columns of a CSV file by name, float64 (rows, columns).

    Args:
        path: of the file.
        names: of the columns.
        labels: converts the last column, which is text; None if it has numbers.

    Raises:
        UserError: the file is damaged, lacks a column, or a cell of these columns is no number.
    """
    values = array("d")
    with _opened(path) as rows:
        indices = [rows.header.index(name) for name in names]
        convert = [_number] * (len(indices) - 1) + [labels or _number]
        parts = list(zip(indices, convert, strict=True))
        for row in rows.rows:
            try:
                values.extend([number(row[index]) for index, number in parts])
            except ValueError:
                wrong = [i for i, number in parts if number is _number and not _is_number(row[i])]
                bad = [*wrong, indices[-1]][0]
                raise UserError(
                    f"{path}, line {rows.lines}, column {shown(rows.header.names[bad])} is "
                    f"'{shown(row[bad])}'; expected a finite number"
                ) from None
    return np.frombuffer(values, np.float64).reshape(-1, len(indices))


def read_numeric_columns(
    path: Path, targets: Sequence[str], labels: Labels | None = None
) -> NumericColumns:
    """Return all columns that have a number in every row.

    Columns without any number, and columns without a name except the targets, are left out.

    Args:
        path: of the file.
        targets: names of columns that must have numbers.
        labels: converts the only target, which is text; None if it has numbers.

    Raises:
        UserError: the file is damaged, or a column has numbers in some of its rows only.
    """
    values, bad, mixed = array("d"), dict[int, Cell](), set[int]()
    with _opened(path) as rows:
        header = rows.header
        own = {header.index(name) for name in targets}
        is_named = [_NO_NAME.fullmatch(name) is None for name in header.names]
        for index in own:
            is_named[index] = True
        used = [index for index, named in enumerate(is_named) if named]
        numeric, first = used, True
        convert = [_number] * len(header.names)
        if labels is not None:
            convert[min(own)] = labels
        for row in rows.rows:
            try:
                values.extend([convert[index](row[index]) for index in numeric])
            except ValueError:
                wrong = [index for index in numeric if not _converts(convert[index], row[index])]
                bad.update((index, (rows.lines, row[index])) for index in wrong)
                numeric = [index for index in numeric if index not in bad]
                if first:
                    values.extend([convert[index](row[index]) for index in numeric])
                else:
                    mixed.update(wrong)
            if len(bad) > len(mixed) and not first:
                mixed.update(i for i in bad.keys() - mixed if _is_number(row[i]))
            first = False
    if own & bad.keys() or mixed:
        raise _not_numeric(header, own & bad.keys() | mixed, bad, numeric, own)
    nameless = [index for index, named in enumerate(is_named) if not named]
    blank = f"{rows.blank:,} blank lines are left out" if rows.blank else ""
    notes = (_nameless_note(header, nameless), _text_note(header, bad), blank)
    table = np.frombuffer(values, np.float64).reshape(-1, len(numeric))
    names = tuple(header.names[index] for index in numeric)
    return NumericColumns(names, table, tuple(filter(None, notes)))


def read_texts(path: Path, name: str) -> list[str] | None:
    """Return the cells of a column; None if the file has no such column."""
    with _opened(path) as rows:
        if name not in rows.header.names:
            return None
        column = rows.header.names.index(name)
        return [row[column].strip() for row in rows.rows]


def list_some(names: Sequence[str]) -> str:
    """Return the first of some names for a message."""
    return ", ".join(shown(name, 40) for name in names[:3]) + (
        f", {shown(names[3], 40)}" if len(names) == 4 else ", …" if len(names) > 4 else ""
    )


@contextmanager
def _opened(path: Path) -> Iterator[_Rows]:
    """Open a file; its header is read."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file)
            names = next((row for row in reader if row), [])
            if not names:
                raise _no_rows(path)
            _refuse_other_separators(names, path)
            found = _Rows(Header(names, path))
            found.rows = _checked_rows(reader, found)
            yield found
    except (csv.Error, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read as csv ({error}); expected UTF-8 text") from None


def _checked_rows(reader: Iterator[list[str]], found: _Rows) -> Iterator[list[str]]:
    """Yield the rows that are not blank; raise `UserError` if there is none."""
    width, blank, has_rows = len(found.header.names), 0, False
    for row in reader:
        if not row:
            blank += 1
            continue
        found.lines, has_rows = reader.line_num, True  # type: ignore[attr-defined]
        found.blank += blank
        blank = 0
        if len(row) != width:
            raise UserError(
                f"{found.header.path}, line {found.lines} has {len(row)} fields; expected {width} "
                "as in line 1"
            )
        yield row
    if not has_rows:
        raise _no_rows(found.header.path)


def _no_rows(path: Path) -> UserError:
    return UserError(f"{path} has no rows; expected column names, then one line for each row")


def _refuse_other_separators(names: Sequence[str], path: Path) -> None:
    """Raise `UserError` if a header has more semicolons or tabs than commas."""
    text, commas = "".join(names), len(names) - 1
    for mark, name in ((";", "semicolons"), ("\t", "tabs")):
        if text.count(mark) > commas:
            raise UserError(
                f"{path}, line 1 has {text.count(mark)} {name} and {commas} commas; expected "
                "columns that are separated by commas, and decimal points; convert the file, for "
                f"example with pandas.read_csv(FILE, sep={mark!r}, decimal=',')"
            )


def _not_numeric(
    header: Header, wrong: set[int], bad: dict[int, Cell], numeric: Sequence[int], own: set[int]
) -> UserError:
    """Return the error for columns that have numbers in some rows only, or for targets."""
    found = [
        f"line {bad[index][0]}, column {shown(header.names[index], 40)} is "
        f"'{shown(bad[index][1], 40)}'"
        for index in sorted(wrong)
    ]
    more = f" and {len(found) - 4} more columns" if len(found) > 4 else ""
    names = [header.names[index] for index in numeric if index not in own]
    hint, written = "", (escape(name, ampersands=True) for name in names)
    if 0 < len(names) <= _MOST_NAMED and not own & wrong:
        hint = f", or leave out these columns with columns={','.join(written)}"
    return UserError(
        f"{header.path}, {'; '.join(found[:4])}{more}; expected a finite number in every row{hint}"
    )


def _nameless_note(header: Header, indices: Sequence[int]) -> str:
    if not indices:
        return ""
    numbers = ", ".join(str(index + 1) for index in indices[:_MOST_NAMED])
    name = header.names[indices[0]]
    return (
        f"columns without a name are left out: number {numbers}"
        + (f" ({shown(name, 40)})" if name else "")
        + "; pandas writes its index as such a column"
    )


def _text_note(header: Header, bad: dict[int, Cell]) -> str:
    if not bad:
        return ""
    found = [
        f"{shown(header.names[index], 40)} ('{shown(text, 40)}' in line {line})"
        for index, (line, text) in sorted(bad.items())
    ]
    more = f" and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
    return f"columns without numbers are left out: {', '.join(found[:_MOST_NAMED])}{more}"


def _number(text: str) -> float:
    """Return a finite number; raise `ValueError` for other text, also for Python's 1_000."""
    value = float(text)
    if "_" in text or not math.isfinite(value):
        raise ValueError
    return value


def _is_number(text: str) -> bool:
    return _converts(_number, text)


def _converts(convert: Callable[[str], float], text: str) -> bool:
    try:
        convert(text)
    except ValueError:
        return False
    return True
