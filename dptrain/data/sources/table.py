"""Tables: predict a column some rows ahead from the columns of a row and of earlier rows."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptrain.data.adaptation import adapt_request, class_names, classifier_for, loss_for
from dptrain.data.assembly import RawSplit, make_dataset, with_target_unit
from dptrain.data.base import Dataset
from dptrain.data.loading.sharding import epoch_order
from dptrain.data.preprocessing.classes import coded_labels
from dptrain.data.preprocessing.names import same_form
from dptrain.data.preprocessing.preprocessing import Preprocessing
from dptrain.data.preprocessing.rows import RowLayout, RowSamples
from dptrain.data.preprocessing.sensor_maps import positions_of, read_positions
from dptrain.data.sources.arrays import all_names
from dptrain.data.sources.csv_file import (
    Header,
    Labels,
    has_text,
    list_some,
    read_columns,
    read_header,
    read_numeric_columns,
    read_texts,
)
from dptrain.data.sources.lags import lags_of
from dptrain.data.spec import Request, escape, existing, unescape
from dptrain.data.weights import checked_weights
from dptrain.errors import UserError, shown
from dptrain.network.layers import Shape
from dptrain.network.losses import Loss, MeanSquaredError
from dptrain.notes import show_notes

_STREAM = 2**62
"""Number of the random order of columns, which no epoch of training has."""


def open_csv(request: Request) -> Dataset:
    """Open a CSV file whose first line contains column names.

    Sample i is row i; its target is column ``target`` in row i + ``horizon``. The inputs are the
    columns named in ``columns=A,B``, or all numeric columns except the target; ``columns=*`` is all
    numeric columns with the target. A column is numeric if it has a number in every row. Columns
    without numbers, and columns without a name, are left out and named in the notes; a column with
    numbers in some rows only is an error. With ``lags=0,1,5`` the inputs are those columns in rows
    i, i − 1 and i − 5, and with ``window=N`` in the last N rows; see `RowLayout`. The first four
    fifths of the rows are for training, the others for the test. No row of a training sample, nor
    of its target, belongs to a test sample. Inputs are standardised, column by column, by the mean
    and the standard deviation of the training rows.

    The number in column ``weight`` of row i is the weight of sample i. With ``max_features=N``, N
    of the inputs are chosen at random, by the seed of the run.

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
    parts = request.paths
    if len(parts) != 2:
        raise UserError(
            f"{request.text} names {len(parts)} files; expected maps:TABLE.csv,POSITIONS.csv; "
            "write a comma in a path as %2C"
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
    targets, horizon, lags = _targets(request, path), _horizon(request), lags_of(request)
    described, weights = ", ".join(map(shown, targets)), _weights(request, path)
    known, others = None if sensors is None else read_positions(sensors), list[str]()
    reads_ahead = horizon + min(lags, default=0) > 0
    inputs = _chosen_columns(request) if saved is None else saved.columns
    if known is not None and inputs is None and "columns" not in request.options:
        inputs = tuple(name for name in known if reads_ahead or name not in targets)
        kept = {*known, *targets, *_no_inputs(request, targets)}
        others = [name for name in read_header(path).names if name not in kept]
    texts, predicts_values = None, request.network.loss.targets == "values"
    if len(targets) == 1 and not predicts_values and has_text(path, targets[0]):
        texts = Labels()
    outputs = _no_inputs(request, targets)
    try:
        inputs, table, notes = _read_table(path, targets, inputs, outputs, texts)
    except UserError as error:
        if predicts_values and any(has_text(path, name) for name in targets):
            better = classifier_for(request.network)
            raise UserError(f"{error}; to predict classes, use {better}") from None
        raise
    width = len(targets)
    if saved is None and "max_features" in request.options:
        inputs, table = _with_max_features(request, inputs, table)
        notes = (*notes, f"the inputs are {len(inputs)} random columns: {', '.join(inputs)}")
    y: NDArray[Any] = table[horizon:, -1] if width == 1 else table[horizon:, -width:]
    if texts is not None:
        request, y = _with_names(request, texts.texts(y), str(path))
    positions = () if saved is None else saved.positions
    if known is not None and sensors is not None:
        positions = positions_of(known, inputs, sensors)
        if saved is not None and positions != saved.positions:
            raise UserError(
                f"{sensors} has other positions than the model was trained with; use "
                f"csv:{escape(str(path), commas=False)}, which is evaluated with those of the model"
            )
    own = next((name for name in targets if name in inputs), None)
    if texts is not None and own is not None:
        raise UserError(f"{path}: column {shown(own)} is text and cannot be an input")
    if not reads_ahead and own is not None:
        raise UserError(
            f"{path}: column {shown(own)} is its own input; expected a horizon of 1 or more, or "
            "lags without 0"
        )
    request = _adapt(request, y, len(inputs), lags, positions, str(path))
    layout = RowLayout(len(inputs), lags, request.network.input_shape, positions)
    names = [shown(name) for name in inputs]
    where = f"{path} ({len(names)} input columns: {list_some(names)}; target {described})"
    layout.check(where)
    spans = _spans(path, len(table), horizon, layout.depth, split=request.split)
    last = _first_test_row(len(table)) - horizon
    preprocessing = saved or with_target_unit(
        request,
        _standardising(request, table[:last, :-width], inputs, targets, layout),
        y[slice(*spans[0])],
        where,
    )
    x = preprocessing.standardise(table[: len(table) - horizon, :-width])
    stored = x if layout.is_plain else RowSamples(x, layout)
    train, test = (RawSplit(stored, y, np.arange(*span), weights) for span in spans)
    rows = "" if layout.is_plain else f" of {layout}" if lags and not positions else f" as {layout}"
    ahead = f" {horizon} rows ahead" if horizon else ""
    return make_dataset(
        request,
        train,
        test,
        preprocessing=preprocessing,
        origin=f"{path}, {len(names)} columns{rows} standardised, {described}{ahead}",
        where=where,
        has_split=False,
        gap=horizon + layout.depth or None,
        notes=(*notes, *_unplaced_notes(others)),
    )


def _with_names(request: Request, texts: NDArray[Any], where: str) -> tuple[Request, NDArray[Any]]:
    """Return the request with the names of labels that are text, and the labels as integers."""
    (y,), names = coded_labels([texts], all_names(request, None), where)
    return replace(request, names=names), y


def _adapt(
    request: Request,
    targets: NDArray[Any],
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


def _unplaced_notes(names: Sequence[str]) -> list[str]:
    """Return a note about the columns of a table that have no position on a map."""
    some = ", ".join(shown(name, 40) for name in names[:20]) + (", …" if len(names) > 20 else "")
    return [f"columns without a position are left out: {some}"] if names else []


def probed_table(request: Request) -> tuple[int, Loss]:
    """Return the number of inputs of a sample of a table, and the loss that fits its targets.

    Predictions of later rows, and those from earlier rows, are values unless the target is text.
    """
    path = request.existing("file")
    targets, lags = _targets(request, path), lags_of(request)
    texts = Labels() if len(targets) == 1 and has_text(path, targets[0]) else None
    no_inputs, chosen = _no_inputs(request, targets), _chosen_columns(request)
    inputs, table, _ = _read_table(path, targets, chosen, no_inputs, texts)
    layout, y = RowLayout(len(_features(request, inputs)), lags, ()), table[:, -len(targets) :]
    loss: Loss = MeanSquaredError()
    if texts is not None or not (lags or _horizon(request)):
        loss = loss_for(y, has_names=texts is not None or request.names is not None)
        if loss.targets == "classes" and texts is None and request.names is None:
            count, name = len(np.unique(y)), shown(targets[0], 40)
            found = f"the {count} whole numbers in {name} are classes"
            if count == 1:
                found = f"{name} is the same class in all rows"
            one = f"{found}; --network mlp-64-32 predicts values"
            show_notes([one if len(targets) == 1 else "the targets are one-hot rows of classes"])
    return layout.num_rows * layout.num_columns, loss


def _features(request: Request, inputs: Sequence[str]) -> list[int]:
    """Return which input columns are used: all, or as many as the user chooses, at random."""
    count = request.number("max_features", len(inputs))
    if count > len(inputs):
        raise UserError(
            f"{request.text}: max_features is {count}, but there are {len(inputs)} input columns; "
            f"use at most {len(inputs)}"
        )
    found: list[int] = np.sort(epoch_order(len(inputs), request.seed, _STREAM)[:count]).tolist()
    return found


def _with_max_features(
    request: Request, inputs: tuple[str, ...], table: NDArray[np.float64]
) -> tuple[tuple[str, ...], NDArray[np.float64]]:
    """Return the names of the columns of `_features`, and the table with these and the targets."""
    chosen = _features(request, inputs)
    columns = [*chosen, *range(len(inputs), table.shape[1])]
    return tuple(inputs[i] for i in chosen), table[:, columns]


def _no_inputs(request: Request, targets: Sequence[str]) -> set[str]:
    """Return the numeric columns that are no inputs unless the user names them."""
    outputs = set() if request.options.get("columns") == "*" else set(targets)
    return outputs | (
        {_column(request.options["weight"])} if "weight" in request.options else set()
    )


def _column(option: str) -> str:
    """Return the name of a column as files have it."""
    return same_form(unescape(option).strip())


def _weights(request: Request, path: Path) -> NDArray[np.float64] | None:
    """Return the weight of each row; None if the user names no column of weights."""
    if "weight" not in request.options:
        return None
    name = _column(request.options["weight"])
    read_header(path).index(name)
    try:
        found = read_columns(path, [name])[:, 0]
    except UserError as error:
        raise UserError(f"{error}; the weight 0 leaves a row out of the loss") from None
    return checked_weights(found, len(found), f"{path}, column {shown(name)}")


def _chosen_columns(request: Request) -> tuple[str, ...] | None:
    """Return the input columns that the user named; None if they are all numeric ones."""
    columns = request.options.get("columns", "*")
    if columns == "*":
        return None
    names = [_column(name) for name in columns.split(",")]
    for name in names:
        if names.count(name) > 1:
            raise UserError(
                f"{request.text}: columns={shown(columns)} has '{shown(name)}' more than once; "
                "expected different columns"
            )
    return tuple(names)


def _read_table(
    path: Path,
    targets: Sequence[str],
    inputs: tuple[str, ...] | None,
    no_inputs: Collection[str],
    labels: Labels | None = None,
) -> tuple[tuple[str, ...], NDArray[np.float64], tuple[str, ...]]:
    """Return the names of the input columns, their numbers and those of the targets, and notes.

    Args:
        path: of the table.
        targets: names of the predicted columns.
        inputs: names of the input columns; None for all numeric ones.
        no_inputs: numeric columns that are not among all numeric ones.
        labels: converts the only target, which is text; None if it has numbers.

    Returns:
        The numbers are float64 (rows, columns), and those of the targets are the last columns.
    """
    if inputs is not None:
        return inputs, read_columns(path, (*inputs, *targets), labels), ()
    found = read_numeric_columns(path, targets, labels)
    inputs = tuple(name for name in found.names if name not in no_inputs)
    header = Header(found.names, path)
    if not inputs:
        notes = "".join(f"; {note}" for note in found.notes)
        named = ", ".join(map(shown, targets))
        raise UserError(
            f"{path} has no numeric column except {named}; expected at least one{notes}"
        )
    values = found.values[:, [header.index(name) for name in (*inputs, *targets)]]
    return inputs, values, (*found.notes, *_counting_notes(inputs, values))


def _counting_notes(inputs: Sequence[str], values: NDArray[np.float64]) -> list[str]:
    """Return a note for each input column that numbers the rows."""
    rows = np.arange(len(values), dtype=np.float64)
    return [
        f"the input column {shown(name, 40)} numbers the rows; columns= leaves it out"
        for index, name in enumerate(inputs)
        if (values[:, index] == values[0, index] + rows).all()
    ]


def check_takes_tables(preprocessing: Preprocessing, where: str) -> None:
    """Raise `UserError` if a network was not trained on named columns."""
    if preprocessing.kind != "table":
        raise UserError(
            f"{where} has named columns, but the network was trained on "
            f"{preprocessing.trained_on}, which has none; expected {preprocessing.expected}"
        )


def read_targets(path: Path, target: str, horizon: int) -> list[str] | None:
    """Return the target of each row as text, empty if it is after the end of the file.

    Args:
        path: of the file.
        target: name of the column.
        horizon: number of rows from inputs to target.

    Returns:
        None if the file has no such column.
    """
    texts = read_texts(path, target)
    if texts is None:
        return None
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
    targets: tuple[str, ...],
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
        target=targets[0] if len(targets) == 1 else "",
        targets=targets if len(targets) > 1 else (),
        horizon=_horizon(request),
        lags=layout.lags,
        positions=layout.positions,
        classes=class_names(request),
        source=request.text,
    )


def _targets(request: Request, path: Path) -> tuple[str, ...]:
    """Return the names of the target columns: from the options, else from the model."""
    saved, option = request.preprocessing, request.options.get("target")
    if option is None and saved is not None:
        return saved.target_names
    if option is None:
        names = read_header(path).names
        raise UserError(
            f"{request.text} names no column to predict; expected {request.text}?target=COLUMN, "
            f"with one of {', '.join(shown(name, 40) for name in names[:20])}"
            + (f" and {len(names) - 20} more columns" if len(names) > 20 else "")
        )
    given = tuple(_column(name) for name in option.split(","))
    for name in given:
        if given.count(name) > 1:
            raise UserError(f"{request.text}: target has '{shown(name)}' more than once")
    if saved is not None and saved.target_names not in (("",), given):
        raise UserError(
            f"{request.text}: target is '{shown(', '.join(given))}', but the network was trained "
            f"to predict '{shown(', '.join(saved.target_names))}'; leave it out"
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
