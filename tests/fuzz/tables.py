"""CSV files: numbers in every notation, missing cells, text, lags, quotes and separators."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptrain.data import open_data
from dptrain.errors import UserError
from tests.fuzz.conversion import (
    Split,
    check_split,
    linear_network,
    read_split,
    write_linear_network,
)
from tests.fuzz.damage import damage_file
from tests.fuzz.outcome import ACCEPTED, COMPARED, Outcome, Result, call, expect, refused

NAMES = ("wind", "Température", "a b", 'say "x"', "p,q", "x_1", "MW", "7", "roof", "λ", "id")
"""Names of columns; those of inputs in a spec have no comma."""
NOT_NUMBERS = ("", "NA", "n/a", "True", "5%", "1,234", "0,5", "0x1F", "nan", "inf", "-", "1_000",
               "2026-01-01", "٣x", "1e999", "null")  # fmt: skip
"""Cells that make a column no input."""
WORDS = ("north", "south", "east", "", "2026-01-02 03:04", "ok", '"', "a\nb")
WRONG_OPTIONS = ("&target=wind", "&horizon=-1", "&horizon=x", "&horizon=99999", "&lags=1,1",
                 "&lags=", "&window=0", "&columns=", "&columns=absent", "&colums=a",
                 "&lags=0&window=2", "&horizon=1e3", "&window=9999999999999999999999",
                 "&columns=wind,wind")  # fmt: skip


@dataclass
class Case:
    """A table, how it is written, and what a network must receive.

    Attributes:
        header: names of the columns.
        cells: texts, rows of columns.
        values: float64 (rows, columns), NaN for text.
        target: name of the target.
        options: of the spec.
        shape: input of the network.
        kind, outputs: of the targets.
        inputs: names of the input columns.
        incomplete: names of columns that have numbers and other cells.
        is_valid: True if the table must be accepted.
        must_fail: True if the table must be refused.
    """

    header: list[str]
    cells: list[list[str]]
    values: NDArray[np.float64]
    target: str
    kind: str = "values"
    outputs: int = 1
    horizon: int = 0
    lags: tuple[int, ...] = ()
    options: str = ""
    shape: tuple[int, ...] = ()
    inputs: list[str] = field(default_factory=list)
    incomplete: list[str] = field(default_factory=list)
    is_valid: bool = True
    must_fail: bool = False


def trial(random: np.random.Generator, folder: Path) -> Outcome:
    """Open a table, and compare inputs, targets and splits."""
    case = make_case(random)
    path = folder / "table.csv"
    write(random, case, path)
    if random.random() < 0.12:
        damage_file(random, path)
        case.is_valid = case.must_fail = False
    spec = f"csv:{path}?target={case.target}{case.options}"
    network = folder / "linear.toml"
    write_linear_network(network, case.shape, case.outputs, case.kind)
    described = call("data", "describe", spec, "--network", network, "--json")
    try:
        dataset = open_data(spec, linear_network(case.shape, case.outputs, case.kind))
        splits = [read_split(dataset, part) for part in dataset.splits]
    except UserError as error:
        expect(described.code == 2, "`data describe` accepts what cannot be read")
        return refused(str(error), is_valid=case.is_valid)
    if described.code:
        return described.refusal(is_valid=case.is_valid)
    expect(not case.must_fail, "a column with numbers in some rows only is accepted")
    if not case.is_valid:
        return ACCEPTED
    compare(case, splits)
    for name in ("words", ""):
        expect(
            name not in case.header or "&columns=" in case.options or _is_named(name, described),
            f"column {name!r} is left out, and `data describe` does not name it",
        )
    sizes = [part["samples"] for part in json.loads(described.output)["splits"]]
    expect(sizes == [len(x) for x, _ in splits], f"{sizes} samples are described")
    return COMPARED


def _is_named(name: str, described: Result) -> bool:
    """Return True if `data describe` states that a column is left out."""
    notes = " ".join(json.loads(described.output).get("notes", ()))
    return (name or "without a name") in notes


def make_case(random: np.random.Generator) -> Case:
    """Return a random table."""
    names = list(random.permutation(NAMES))[: int(random.integers(2, 7))]
    rows = int(random.integers(12, 50))
    scales = 10.0 ** random.integers(-6, 9, len(names))
    values = random.standard_normal((rows, len(names))) * scales
    values += scales * random.integers(-3, 4, len(names))
    decimals = random.integers(0, 17, len(names))
    target = next(name for name in names if "," not in name)
    at = names.index(target)
    case = Case(names, [], values, target)
    chosen = random.random()
    if chosen < 0.35:
        case.kind, case.outputs = "classes", int(random.integers(2, 5))
        values[:, at] = random.permutation(np.arange(rows) % case.outputs)
    elif chosen < 0.5:
        case.kind = "binary"
        values[:, at] = np.arange(rows) % 2
    for column in range(len(names)):
        if column != at and random.random() < 0.06:
            values[:, column] = values[0, column]
    case.cells = [
        [_text(random, value, int(decimals[i])) for i, value in enumerate(row)] for row in values
    ]
    for row in range(rows):
        values[row] = [float(text) for text in case.cells[row]]
    _add_columns(random, case)
    _choose_options(random, case)
    if random.random() < 0.35:
        _spoil(random, case)
    return case


def _text(random: np.random.Generator, value: float, decimals: int) -> str:
    """Return a number in one of the notations that Python reads."""
    style = int(random.integers(20))
    text = repr(float(value)) if decimals > 8 else f"{value:.{decimals}f}"
    if float(text) == 0.0 != value:
        text = f"{value:.6e}"
    if value.is_integer() and style > 8:
        text = str(int(value))
    if style == 0:
        text = f"{float(text):.17g}"
    elif style == 1 and not text.startswith("-"):
        text = f"+{text}"
    elif style == 2:
        text = f" {text} "
    elif style == 3:
        text = f"{float(text):.16E}"
    return text


def _add_columns(random: np.random.Generator, case: Case) -> None:
    """Add columns of text, of an index and with some cells that are no numbers."""
    rows = len(case.cells)
    for kind in ("words", "index", "incomplete", "unnamed"):
        if random.random() > 0.2:
            continue
        name = "" if kind == "unnamed" else kind
        texts = [str(row) for row in range(rows)]
        if kind == "words":
            texts = [WORDS[int(random.integers(len(WORDS)))] for _ in range(rows)]
        elif kind == "incomplete":
            wrong = NOT_NUMBERS[int(random.integers(len(NOT_NUMBERS)))]
            first = 0 if random.random() < 0.5 else int(random.integers(rows))
            for row in {first, *random.integers(rows, size=int(random.integers(0, 3)))}:
                texts[row] = wrong
            case.incomplete.append(name)
        at = int(random.integers(len(case.header) + 1))
        case.header.insert(at, name)
        numbers = (
            [float(i) for i in range(rows)] if kind in ("index", "unnamed") else [np.nan] * rows
        )
        case.values = np.insert(case.values, at, numbers, axis=1)
        for row, text in zip(case.cells, texts, strict=True):
            row.insert(at, text)


def _choose_options(random: np.random.Generator, case: Case) -> None:
    # Columns of text and those without a name are left out.
    is_numeric = np.isfinite(case.values).all(axis=0)
    numeric = [
        name for name, is_one in zip(case.header, is_numeric, strict=True) if is_one and name
    ]
    case.inputs = [name for name in numeric if name != case.target]
    if random.random() < 0.4:
        case.horizon = int(random.integers(1, 3))
        case.options += f"&horizon={case.horizon}"
    lags = random.random()
    if lags < 0.2:
        case.lags = tuple(range(int(random.integers(1, 4)) - 1, -1, -1))
        case.options += f"&window={len(case.lags)}"
    elif lags < 0.35:
        case.lags = tuple(sorted(map(int, random.permutation(4)[: random.integers(1, 4)]))[::-1])
        case.options += f"&lags={','.join(map(str, case.lags))}"
    reads_ahead = case.horizon + min(case.lags, default=0) > 0
    listed = [name for name in case.inputs if "," not in name]
    if random.random() < 0.3 and listed:
        case.inputs = [str(name) for name in random.permutation(listed)][: random.integers(1, 4)]
        case.options += f"&columns={','.join(case.inputs)}"
        # The other columns do not matter.
        case.incomplete = []
    elif random.random() < 0.1:
        case.inputs, case.options = numeric, f"{case.options}&columns=*"
        case.is_valid &= reads_ahead
    # A column with numbers in some rows only is an error.
    case.must_fail = bool(case.incomplete)
    case.is_valid &= not case.must_fail
    length, width = max(len(case.lags), 1), len(case.inputs)
    shapes = [(length * width,)]
    if case.lags:
        shapes += [(1, length, width), (width, 1, length)]
    case.shape = shapes[int(random.integers(len(shapes)))]
    if not width or len(case.cells) < 5 * (case.horizon + max(case.lags, default=0) + 1):
        case.is_valid, case.shape = False, case.shape if width else (1,)


def _spoil(random: np.random.Generator, case: Case) -> None:
    """Make the table or the options wrong."""
    case.is_valid = False
    row = int(random.integers(len(case.cells)))
    at = case.header.index(case.target)
    match int(random.integers(9)):
        case 0:
            case.cells[row].append("1")
        case 1:
            case.cells[row].pop()
        case 2:
            case.cells[row][at] = NOT_NUMBERS[int(random.integers(len(NOT_NUMBERS)))]
        case 3:
            case.header[int(random.integers(len(case.header)))] = case.target
        case 4:
            case.options += WRONG_OPTIONS[int(random.integers(len(WRONG_OPTIONS)))]
        case 5:
            case.target = ("absent", "", "wind,roof", "Wind")[int(random.integers(4))]
        case 6:
            case.cells = case.cells[: int(random.integers(0, 3))]
        case 7:
            case.shape = (case.shape[0] + 1, *case.shape[1:])
        case _:
            for cells in case.cells:
                cells[at] = ("red", "green")[int(random.integers(2))]


def write(random: np.random.Generator, case: Case, path: Path) -> None:
    """Write the table in one of the forms that are read; other separators are refused."""
    text = io.StringIO()
    separator = ","
    if random.random() < 0.06:
        separator, case.is_valid = (";", "\t", "|")[int(random.integers(3))], False
    ends = ("\n", "\r\n")[int(random.integers(2))]
    quoting = (csv.QUOTE_MINIMAL, csv.QUOTE_ALL)[int(random.integers(2))]
    writer = csv.writer(text, delimiter=separator, lineterminator=ends, quoting=quoting)
    writer.writerow(case.header)
    for row in case.cells:
        writer.writerow(row)
        if random.random() < 0.01:
            text.write(ends)
    content = text.getvalue()
    if random.random() < 0.2:
        content = content.removesuffix(ends)
    encoding = "utf-8-sig" if random.random() < 0.15 else "utf-8"
    if random.random() < 0.03:
        encoding, case.is_valid = "utf-16", False
    path.write_bytes(content.encode(encoding))


def compare(case: Case, splits: list[Split]) -> None:
    """Compare the samples of both splits with those computed by hand."""
    for found, expected, name in zip(
        splits, expected_splits(case), ("training", "test"), strict=True
    ):
        scale = np.abs(expected[0]).max(initial=1.0)
        check_split(found, expected, 1e-5 * scale, name)


def expected_splits(case: Case) -> list[tuple[NDArray[Any], NDArray[Any]]]:
    """Return inputs and targets of the training and of the test split."""
    columns = [case.header.index(name) for name in case.inputs]
    x, y = case.values[:, columns], case.values[:, case.header.index(case.target)]
    rows, depth = len(x), max(case.lags, default=0)
    first_test = rows - rows // 5
    training = x[: first_test - case.horizon]
    mean, deviation = training.mean(axis=0), training.std(axis=0)
    is_constant = training.min(axis=0) == training.max(axis=0)
    x = (x - mean) / np.where(is_constant, 1.0, deviation)
    spans = [(depth, first_test - case.horizon), (first_test + depth, rows - case.horizon)]
    return [
        (np.stack([_sample(case, x, row) for row in range(*span)]),
         y[span[0] + case.horizon : span[1] + case.horizon])
        for span in spans
    ]  # fmt: skip


def _sample(case: Case, x: NDArray[np.float64], row: int) -> NDArray[np.float64]:
    parts = [x[row - lag] for lag in case.lags or (0,)]
    if len(case.shape) == 3 and case.shape == (len(case.inputs), 1, len(parts)):
        return np.stack(parts, axis=1)[:, None]
    return np.concatenate(parts).reshape(case.shape)
