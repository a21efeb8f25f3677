"""The file of expected and predicted values: ``predicted.csv`` of an evaluation and of a run."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dptrain.errors import UserError, shown
from dptrain.files import MAX_TEXT_BYTES, csv_of_rows, read_regular
from dptrain.training.evaluation.quality import ValueQuality

FILE = "predicted.csv"
MOST_ROWS = 4000
"""Largest number of samples in the file of a run; of more, evenly spaced ones are kept."""
KINDS = ("expected", "predicted")


def values_text(quality: ValueQuality, most: int | None = None) -> str:
    """Return a line for each sample: its number, the expected values and the predicted ones.

    Args:
        quality: of the predictions.
        most: largest number of samples; of more, evenly spaced ones are kept. None keeps all.
    """
    count = len(quality.expected)
    stride = 1 if most is None else -(-count // most) or 1
    rows = np.hstack([quality.expected, quality.predicted])[::stride].tolist()
    numbered = ([index, *row] for index, row in zip(range(0, count, stride), rows, strict=True))
    return csv_of_rows([_head(quality.names), *numbered])


def _head(names: Sequence[str]) -> list[str]:
    return ["sample", *(f"{kind}_{name}" for kind in KINDS for name in names)]


def read_values(path: Path) -> ValueQuality | None:
    """Return the values in a file that `values_text` made; None if there is no file.

    Raises:
        UserError: the file cannot be read.
    """
    try:
        text = read_regular(path, MAX_TEXT_BYTES).decode()
        head, *rows = csv.reader(io.StringIO(text))
        names = tuple(name.removeprefix("expected_") for name in head[1 : 1 + len(head) // 2])
        if head != _head(names):
            raise ValueError("the first line is not sample, expected_…, predicted_…")
        numbers = np.array([[float(cell) for cell in row[1:]] for row in rows])
        table = numbers.reshape(len(rows), 2 * len(names))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, csv.Error) as error:
        raise UserError(
            f"{path} is damaged: {shown(str(error))}; remove it for a report without its plot"
        ) from None
    expected, predicted = np.hsplit(table, 2)
    return ValueQuality(names, expected, predicted)
