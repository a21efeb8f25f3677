"""Tables: predict a column some rows ahead from the columns of one row."""

from __future__ import annotations

import csv
import math
from array import array
from itertools import chain
from pathlib import Path
from typing import TextIO

import numpy as np
from numpy.typing import NDArray

from dptrain.data.base import Dataset
from dptrain.data.images import Adapter
from dptrain.data.spec import Request
from dptrain.data.stored import StoredSamples, make_dataset
from dptrain.data.targets import targets_for
from dptrain.errors import UserError, suggest


def open_csv(request: Request) -> Dataset:
    """A table with a line of column names.

    Sample i is row i; its target is column ``target`` in row i + ``horizon``. The first four fifths
    of the rows are for training, the others for the test, and no training target lies in the test
    rows. Inputs are standardised, column by column, by the training rows.
    """
    path = request.existing("file")
    horizon = request.number("horizon", 0, minimum=0)
    target = request.options["target"]
    table, inputs = _read(path, target, request.options.get("columns"))
    if horizon == 0 and target in inputs:
        raise UserError(
            f"{path}: column {target} is its own input; expected a horizon of 1 or more"
        )
    rows = len(table)
    cut = rows - rows // 5
    if cut - horizon < 1 or rows - cut - horizon < 1:
        raise UserError(
            f"{path} has {rows} rows, too few for a horizon of {horizon}; expected at least "
            f"{5 * (horizon + 1)}"
        )
    y = targets_for(table[horizon:, -1], request.network, f"{path}, column {target}")
    x = table[: rows - horizon, :-1]
    seen = x[: cut - horizon]
    deviation = seen.std(axis=0)
    x = ((x - seen.mean(axis=0)) / np.where(deviation > 0.0, deviation, 1.0)).astype(np.float32)
    adapter = Adapter((len(inputs),), request.network.input_shape)
    train, test = (
        StoredSamples(x, y, np.arange(*span), adapter)
        for span in ((0, cut - horizon), (cut, rows - horizon))
    )
    where = f"{path} ({len(inputs)} input columns: {_some(inputs)})"
    origin = f"{path}, {len(inputs)} columns standardised, {target} {horizon} rows ahead"
    return make_dataset(request, train, test, origin=origin, where=where)


def _some(names: list[str]) -> str:
    return ", ".join(names if len(names) <= 4 else [*names[:3], "…"])


def _read(path: Path, target: str, columns: str | None) -> tuple[NDArray[np.float64], list[str]]:
    """Input columns and, last, the target column, float64 (rows, F + 1); names of the inputs."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            return _read_lines(file, path, target, columns)
    except (csv.Error, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read as csv ({error}); expected UTF-8 text") from None


def _read_lines(
    file: TextIO, path: Path, target: str, columns: str | None
) -> tuple[NDArray[np.float64], list[str]]:
    reader = csv.reader(file)
    rows = (row for row in reader if row)
    header = [name.strip() for name in next(rows, [])]
    first = next(rows, None)
    if first is None:
        raise UserError(f"{path} has no rows; expected column names, then one line a row")
    inputs = _inputs(header, first, path, target, columns)
    places = [header.index(name) for name in (*inputs, target)]
    values = array("d")
    for row in chain([first], rows):
        line = reader.line_num
        if len(row) != len(header):
            raise UserError(
                f"{path}, line {line} has {len(row)} fields; expected {len(header)} as in line 1"
            )
        values.extend(_number(row[place], path, line, header[place]) for place in places)
    return np.frombuffer(values, dtype=np.float64).reshape(-1, len(places)), inputs


def _inputs(
    header: list[str], first: list[str], path: Path, target: str, columns: str | None
) -> list[str]:
    """Names of the input columns: those asked for, or all numeric ones but the target."""
    if columns == "*":
        wanted = [name for name, text in zip(header, first, strict=False) if _is_number(text)]
    elif columns is not None:
        wanted = columns.split(",")
    else:
        numeric = (name for name, text in zip(header, first, strict=False) if _is_number(text))
        wanted = [name for name in numeric if name != target]
    for name in (target, *wanted):
        if header.count(name) != 1:
            times = "no" if name not in header else "more than one"
            raise UserError(
                f"{path} has {times} column '{name}'; it has {_some(header)}"
                + suggest(name, header)
            )
    if not wanted:
        raise UserError(f"{path} has no numeric column besides {target}; expected at least one")
    return wanted


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
