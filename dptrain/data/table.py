"""Tables: predict a column some rows ahead from the columns of a row and of earlier rows."""

from __future__ import annotations

import csv
import math
from array import array
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import TextIO

import numpy as np
from numpy.typing import NDArray

from dptrain.data.adaptation import adapt_request, class_names
from dptrain.data.assembly import RawSplit, make_dataset
from dptrain.data.base import Dataset
from dptrain.data.lags import lags_of
from dptrain.data.preprocessing import Preprocessing
from dptrain.data.rows import RowLayout, RowSamples
from dptrain.data.sensor_maps import positions_of, read_positions
from dptrain.data.spec import Request, existing
from dptrain.errors import UserError, shown, suggest
from dptrain.network.layers import Dense, Shape
from dptrain.network.losses import MeanSquaredError
from dptrain.network.network import Network

Choose = Callable[["Header", list[str]], tuple[str, ...]]
"""Function from the column names and the first row to the names of the columns to read."""


class Header:
    """Column names of a file, with constant-time look-up.

    Attributes:
        names: in the order of the file.
        path: of the file, for messages.
    """

    def __init__(self, names: Sequence[str], path: Path) -> None:
        self.names, self.path = list(names), path
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


def open_csv(request: Request) -> Dataset:
    """Open a CSV file whose first line contains column names.

    Sample i is row i; its target is column ``target`` in row i + ``horizon``. The inputs are the
    columns named in ``columns=A,B``, or all numeric columns except the target; ``columns=*`` is all
    numeric columns with the target. With ``lags=0,1,5`` the inputs are those columns in rows i,
    i − 1 and i − 5, and with ``window=N`` in the last N rows; see `RowLayout`. The first four
    fifths of the rows are for training, the others for the test. No row of a training sample, nor
    of its target, belongs to a test sample. Inputs are standardised, column by column, by the mean
    and the standard deviation of the training rows.

    With saved preprocessing (evaluation), target, horizon, columns, lags, mean and deviation are
    the model's own.
    """
    return _open_table(request, request.existing("file"), None)


def open_maps(request: Request) -> Dataset:
    """Open a CSV file as `open_csv` does, with the columns of sensors interpolated to maps.

    A second file has the positions of the sensors, see `read_positions`. The inputs are all sensors
    with a position, or those of ``columns=A,B``. Each row becomes a channel, (H, W) as the
    network's input, of the standardised numbers.

    Raises:
        UserError: as for `open_csv`, or a sensor has no position or no column.
    """
    parts = request.path.split(",")
    if len(parts) != 2:
        raise UserError(
            f"{request.text} names {len(parts)} files; expected maps:TABLE.csv,POSITIONS.csv"
        )
    table, positions = (existing(Path(part), "file") for part in parts)
    return _open_table(request, table, positions)


def _open_table(request: Request, path: Path, sensors: Path | None) -> Dataset:
    """Open a table.

    Args:
        request: from the user.
        path: of the table.
        sensors: table of the positions of sensors; None if rows do not become maps.
    """
    saved = request.preprocessing
    if saved is not None:
        check_takes_tables(saved, str(path))
    target, horizon, lags = _target(request, path), _horizon(request), lags_of(request)
    known = None if sensors is None else read_positions(sensors)
    reads_ahead = horizon + min(lags, default=0) > 0
    if saved is None:
        columns = request.options.get("columns")
        if known is not None and columns is None:
            columns = ",".join(name for name in known if reads_ahead or name != target)
        table, chosen = _read(path, lambda header, first: _choose(header, first, target, columns))
    else:
        table, chosen = _read(path, lambda header, first: (*saved.columns, target))
    inputs = chosen[:-1]
    positions = () if saved is None else saved.positions
    if known is not None and sensors is not None:
        positions = positions_of(known, inputs, sensors)
        if saved is not None and positions != saved.positions:
            raise UserError(
                f"{sensors} has other positions than the model was trained with; use csv:{path}, "
                "which is evaluated with those of the model"
            )
    if not reads_ahead and target in inputs:
        raise UserError(
            f"{path}: column {shown(target)} is its own input; expected a horizon of 1 or more, or "
            "lags without 0"
        )
    request = _adapt(request, table[horizon:, -1], len(inputs), lags, positions, str(path))
    layout = RowLayout(len(inputs), lags, request.network.input_shape, positions)
    names = [shown(name) for name in inputs]
    where = f"{path} ({len(names)} input columns: {list_some(names)}; target {shown(target)})"
    layout.check(where)
    spans = _spans(path, len(table), horizon, layout.depth, split=request.split)
    last = _first_test_row(len(table)) - horizon
    preprocessing = saved or _standardising(request, table[:last, :-1], inputs, target, layout)
    x = preprocessing.standardise(table[: len(table) - horizon, :-1])
    stored = x if layout.is_plain else RowSamples(x, layout)
    train, test = (RawSplit(stored, table[horizon:, -1], np.arange(*span)) for span in spans)
    rows = "" if layout.is_plain else f" of {layout}" if lags and not positions else f" as {layout}"
    return make_dataset(
        request,
        train,
        test,
        preprocessing=preprocessing,
        origin=f"{path}, {len(names)} columns{rows} standardised, {shown(target)} {horizon} rows "
        "ahead",
        where=where,
        has_split=False,
        gap=horizon + layout.depth or None,
    )


def _adapt(
    request: Request,
    targets: NDArray[np.float64],
    columns: int,
    lags: Sequence[int],
    positions: Sequence[float],
    where: str,
) -> Request:
    """Return the request for a network with the input of the table's samples, see `RowLayout`."""
    rows, shape = len(lags) or 1, request.network.input_shape
    sample: Shape = (rows * columns,)
    if positions and len(shape) == 3:
        sample = (rows, *shape[1:])
    elif lags and len(shape) == 3 and request.network.family is not None:
        sample = (1, rows, columns)
    return adapt_request(request, sample, [targets], where)


def linear_network(request: Request) -> Network:
    """Return a linear network whose input has the shape of the samples of a table."""
    path = request.existing("file")
    target, columns = _target(request, path), request.options.get("columns")
    found: list[str] = []

    def choose(header: Header, first: list[str]) -> tuple[str, ...]:
        found.extend(_choose(header, first, target, columns)[:-1])
        return ()

    _read(path, choose)
    layout = RowLayout(len(found), lags_of(request), ())
    width = layout.num_rows * layout.num_columns
    return Network((width,), [Dense(1)], loss=MeanSquaredError(), name="linear")


def check_takes_tables(preprocessing: Preprocessing, where: str) -> None:
    """Raise `UserError` if a network was not trained on named columns."""
    if preprocessing.kind != "table":
        raise UserError(
            f"{where} has named columns, but the network was trained on "
            f"{preprocessing.trained_on}, which has none; save the numbers as .npy"
        )


def read_columns(path: Path, names: Sequence[str]) -> NDArray[np.float64]:
    """Return columns of a CSV file by name, float64 (rows, columns)."""
    return _read(path, lambda header, first: tuple(names))[0]


def read_targets(path: Path, target: str, horizon: int) -> list[str] | None:
    """Return the target of each row as text, empty if it is after the end of the file.

    Args:
        path: of the file.
        target: name of the column.
        horizon: number of rows from inputs to target.

    Returns:
        None if the file has no such column.
    """
    with path.open(newline="", encoding="utf-8-sig") as file:
        rows = (row for row in csv.reader(file) if row)
        names = [name.strip() for name in next(rows, [])]
        if target not in names:
            return None
        column = names.index(target)
        texts = [row[column].strip() for row in rows]
    ahead = texts[horizon:]
    return ahead + [""] * (len(texts) - len(ahead))


def _spans(
    path: Path, rows: int, horizon: int, depth: int, *, split: bool
) -> list[tuple[int, int]]:
    """Return the first and the last row, exclusive, of the training and of the test samples.

    Args:
        path: of the table, for messages.
        rows: of the table.
        horizon: rows from a sample to its target.
        depth: rows before a sample that belong to it.
        split: False if both are all samples.
    """
    needed = horizon + depth
    earlier = f" and lags of up to {depth} rows" if depth else ""
    if not split:
        if rows <= needed:
            raise UserError(
                f"{path} has {rows} rows; expected more than {needed} for a horizon of {horizon}"
                f"{earlier}"
            )
        return [(depth, rows - horizon)] * 2
    cut = _first_test_row(rows)
    if cut <= needed or rows - cut <= needed:
        raise UserError(
            f"{path} has {rows} rows, too few for a horizon of {horizon}{earlier}; expected at "
            f"least {5 * (needed + 1)}"
        )
    return [(depth, cut - horizon), (cut + depth, rows - horizon)]


def _standardising(
    request: Request,
    rows: NDArray[np.float64],
    inputs: tuple[str, ...],
    target: str,
    layout: RowLayout,
) -> Preprocessing:
    """Return preprocessing that standardises by the training rows, (n, F)."""
    with np.errstate(over="ignore", invalid="ignore"):
        mean, deviation = rows.mean(axis=0), rows.std(axis=0)
    if not np.isfinite(deviation).all():
        name = inputs[int(np.argmin(np.isfinite(deviation)))]
        raise UserError(
            f"{request.path}, column {shown(name)} has numbers too large to standardise; scale them"
        )
    # By rounding, the deviation of a constant column is tiny but not zero.
    varies = (rows.min(axis=0) < rows.max(axis=0)) & (deviation > 0.0)
    network = request.network
    return Preprocessing(
        kind="table",
        input_shape=network.input_shape,
        stored_shape=layout.stored_shape,
        stored_dtype="float64",
        columns=inputs,
        mean=tuple(mean.tolist()),
        deviation=tuple(np.where(varies, deviation, 1.0).tolist()),
        target=target,
        horizon=_horizon(request),
        lags=layout.lags,
        positions=layout.positions,
        classes=class_names(request),
        source=request.text,
    )


def _target(request: Request, path: Path) -> str:
    """Return the name of the target column: from the options, else from the model."""
    saved = request.preprocessing
    given = request.options.get("target")
    if given is None and saved is not None:
        return saved.target
    if given is None:
        names = _read_header(path)
        raise UserError(
            f"{request.text} names no column to predict; expected {request.text}?target=COLUMN, "
            f"with one of {', '.join(shown(name, 40) for name in names[:20])}"
            + (f" and {len(names) - 20} more columns" if len(names) > 20 else "")
        )
    if saved is not None and saved.target not in ("", given):
        raise UserError(
            f"{request.text}: target is '{shown(given)}', but the network was trained to predict "
            f"'{shown(saved.target)}'; leave it out"
        )
    return given


def _horizon(request: Request) -> int:
    saved = request.preprocessing
    horizon = request.number("horizon", 0 if saved is None else saved.horizon, minimum=0)
    if saved is not None and horizon != saved.horizon:
        raise UserError(
            f"{request.text}: horizon is {horizon}, but the network was trained with "
            f"{saved.horizon}; leave it out"
        )
    return horizon


def _first_test_row(rows: int) -> int:
    return rows - rows // 5


def list_some(names: Sequence[str]) -> str:
    """Return the first of some names for a message."""
    return ", ".join(shown(name, 40) for name in names[:3]) + (
        f", {shown(names[3], 40)}" if len(names) == 4 else ", …" if len(names) > 4 else ""
    )


def _read_header(path: Path) -> list[str]:
    header: list[str] = []

    def choose(found: Header, first: list[str]) -> tuple[str, ...]:
        header.extend(found.names)
        return ()

    _read(path, choose)
    return header


def _read(path: Path, choose: Choose) -> tuple[NDArray[np.float64], tuple[str, ...]]:
    """Return the chosen columns, float64 (rows, columns), and their names."""
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
    header = Header([name.strip() for name in next(rows, [])], path)
    first = next(rows, None)
    if first is None:
        raise UserError(f"{path} has no rows; expected column names, then one line for each row")
    chosen = choose(header, first)
    if not chosen:
        return np.zeros((0, 0)), chosen
    indices = [header.index(name) for name in chosen]
    values, width = array("d"), len(header.names)
    for row in chain([first], rows):
        if len(row) != width:
            raise UserError(
                f"{path}, line {reader.line_num} has {len(row)} fields; expected {width} as in "
                "line 1"
            )
        try:
            values.extend([_number(row[index]) for index in indices])
        except ValueError:
            bad = next(index for index in indices if not _is_finite_number(row[index]))
            raise UserError(
                f"{path}, line {reader.line_num}, column {shown(header.names[bad])} is "
                f"'{shown(row[bad])}'; expected a finite number"
            ) from None
    return np.frombuffer(values, dtype=np.float64).reshape(-1, len(indices)), chosen


def _choose(header: Header, first: list[str], target: str, columns: str | None) -> tuple[str, ...]:
    """Return the input columns, those given or all numeric ones but the target; then the target."""
    header.index(target)
    if columns is None or columns == "*":
        numeric = [
            name for name, text in zip(header.names, first, strict=False) if _is_number(text)
        ]
        wanted = [name for name in numeric if columns or name != target]
    else:
        wanted = [name.strip() for name in columns.split(",")]
        for name in wanted:
            if wanted.count(name) > 1:
                raise UserError(
                    f"{header.path}: columns={shown(columns)} has '{shown(name)}' more than once; "
                    "expected different columns"
                )
    if not wanted:
        raise UserError(
            f"{header.path} has no numeric column except {shown(target)}; expected at least one"
        )
    return (*wanted, target)


def _number(text: str) -> float:
    """Return a finite number; raise `ValueError` for other text, also for Python's 1_000."""
    value = float(text)
    if "_" in text or not math.isfinite(value):
        raise ValueError
    return value


def _is_finite_number(text: str) -> bool:
    try:
        _number(text)
    except ValueError:
        return False
    return True


def _is_number(text: str) -> bool:
    """Return True for a number, also for one that is infinite or NaN."""
    try:
        float(text)
    except ValueError:
        return False
    return "_" not in text
