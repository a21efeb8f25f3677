"""Tables: predict a column some rows ahead from the columns of one row."""

from __future__ import annotations

import csv
import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

from dptrain.data.base import Dataset
from dptrain.data.images import Adapter
from dptrain.data.spec import Request
from dptrain.data.stored import StoredSamples, make_dataset
from dptrain.data.targets import targets_for
from dptrain.errors import UserError, suggest

Choose = Callable[[list[str], list[str]], tuple[str, ...]]
"""From the column names and the first row to the names of the columns to read."""


@dataclass(frozen=True)
class Columns:
    """Input columns in their order, and what standardises them.

    Attributes:
        names: of the columns.
        mean, deviation: float64 (F,), of the training rows; a constant column has deviation 1.
    """

    names: tuple[str, ...]
    mean: NDArray[np.float64]
    deviation: NDArray[np.float64]

    def standardise(self, rows: NDArray[Any]) -> NDArray[np.float32]:
        """Network inputs from numbers as they stand in the table, (n, F)."""
        # What is too large becomes infinite, and is refused with its sample's number.
        with np.errstate(over="ignore", invalid="ignore"):
            return np.asarray((rows - self.mean) / self.deviation, dtype=np.float32)

    def read(self, path: Path) -> NDArray[np.float64]:
        """The same columns of another table, float64 (rows, F)."""
        return _read(path, lambda header, first: self.names)[0]


def open_csv(request: Request) -> Dataset:
    """A table with a line of column names.

    Sample i is row i; its target is column ``target`` in row i + ``horizon``. The first four fifths
    of the rows are for training, the others for the test, and no training target lies in the test
    rows. Inputs are standardised, column by column, by the training rows.
    """
    table, columns = read_training(request)
    rows, names = len(table), columns.names
    path, target, horizon = request.path, request.options["target"], _horizon(request)
    cut = _cut(rows)
    y = targets_for(table[horizon:, -1], request.network, f"{path}, column {target}")
    x = columns.standardise(table[: rows - horizon, :-1])
    adapter = Adapter((len(names),), request.network.input_shape)
    train, test = (
        StoredSamples(x, y, np.arange(*span), adapter)
        for span in ((0, cut - horizon), (cut, rows - horizon))
    )
    where = f"{path} ({len(names)} input columns: {_some(names)})"
    origin = f"{path}, {len(names)} columns standardised, {target} {horizon} rows ahead"
    return make_dataset(request, train, test, origin=origin, where=where)


def read_training(request: Request) -> tuple[NDArray[np.float64], Columns]:
    """Input columns and, last, the target column, float64 (rows, F + 1); what standardises them."""
    path, target, horizon = request.existing("file"), request.options["target"], _horizon(request)
    asked = request.options.get("columns")
    table, chosen = _read(path, lambda header, first: _choose(header, first, path, target, asked))
    inputs = chosen[:-1]
    if horizon == 0 and target in inputs:
        raise UserError(
            f"{path}: column {target} is its own input; expected a horizon of 1 or more"
        )
    rows, cut = len(table), _cut(len(table))
    if cut - horizon < 1 or rows - cut - horizon < 1:
        raise UserError(
            f"{path} has {rows} rows, too few for a horizon of {horizon}; expected at least "
            f"{5 * (horizon + 1)}"
        )
    seen = table[: cut - horizon, :-1]
    with np.errstate(over="ignore", invalid="ignore"):
        mean, deviation = seen.mean(axis=0), seen.std(axis=0)
    if not np.isfinite(deviation).all():
        name = inputs[int(np.argmin(np.isfinite(deviation)))]
        raise UserError(f"{path}, column {name} has numbers too large to standardise; scale them")
    # Rounding gives a constant column a deviation that is tiny but not zero.
    varies = (seen.min(axis=0) < seen.max(axis=0)) & (deviation > 0.0)
    return table, Columns(inputs, mean, np.where(varies, deviation, 1.0))


def _horizon(request: Request) -> int:
    return request.number("horizon", 0, minimum=0)


def _cut(rows: int) -> int:
    """First row of the test."""
    return rows - rows // 5


def _some(names: Sequence[str]) -> str:
    return ", ".join(names if len(names) <= 4 else [*names[:3], "…"])


def _read(path: Path, choose: Choose) -> tuple[NDArray[np.float64], tuple[str, ...]]:
    """The chosen columns, float64 (rows, columns), and their names."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            return _read_lines(file, path, choose)
    except (csv.Error, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read as csv ({error}); expected UTF-8 text") from None


def _read_lines(
    file: TextIO, path: Path, choose: Choose
) -> tuple[NDArray[np.float64], tuple[str, ...]]:
    reader = csv.reader(file)
    rows = (row for row in reader if row)
    header = [name.strip() for name in next(rows, [])]
    first = next(rows, None)
    if first is None:
        raise UserError(f"{path} has no rows; expected column names, then one line a row")
    chosen = choose(header, first)
    places = [_place(name, header, path) for name in chosen]
    values = array("d")
    for row in chain([first], rows):
        line = reader.line_num
        if len(row) != len(header):
            raise UserError(
                f"{path}, line {line} has {len(row)} fields; expected {len(header)} as in line 1"
            )
        values.extend(_number(row[place], path, line, header[place]) for place in places)
    return np.frombuffer(values, dtype=np.float64).reshape(-1, len(places)), chosen


def _place(name: str, header: list[str], path: Path) -> int:
    """Where a column stands."""
    if name not in header:
        raise UserError(
            f"{path} has no column '{name}'; it has {_some(header)}" + suggest(name, header)
        )
    if header.count(name) > 1:
        raise UserError(f"{path} has more than one column '{name}'; rename or remove one")
    return header.index(name)


def _choose(
    header: list[str], first: list[str], path: Path, target: str, columns: str | None
) -> tuple[str, ...]:
    """Input columns, those asked for or all numeric ones but the target; then the target."""
    _place(target, header, path)
    if columns is None or columns == "*":
        numeric = [name for name, text in zip(header, first, strict=False) if _is_number(text)]
        wanted = [name for name in numeric if columns or name != target]
    else:
        wanted = [name.strip() for name in columns.split(",")]
    if not wanted:
        raise UserError(f"{path} has no numeric column besides {target}; expected at least one")
    return (*wanted, target)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _number(text: str, path: Path, line: int, column: str) -> float:
    value = float(text) if _is_number(text) else math.nan
    if not math.isfinite(value):
        raise UserError(
            f"{path}, line {line}, column {column} is '{text}'; expected a finite number"
        )
    return value
