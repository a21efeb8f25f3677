"""The files of the predictions of classes: ``confusion.csv`` and, of images, ``mistakes.png``.

That of several labels of a sample is ``labels.csv``.
"""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dptrain.data.base import Dataset
from dptrain.data.grid import image_grid
from dptrain.errors import UserError, shown
from dptrain.files import MAX_TEXT_BYTES, csv_of_rows, read_regular
from dptrain.training.evaluation.quality import ClassQuality, LabelCounts, LabelQuality

if TYPE_CHECKING:
    from PIL.Image import Image

CONFUSION, MISTAKES, LABELS = "confusion.csv", "mistakes.png", "labels.csv"
LABEL_COLUMNS = ("label", "samples", "predicted", "correct")
MOST_CLASSES = 200
"""Largest number of classes of which a run keeps the confusion matrix."""
MOST_BYTES = 1 << 24
"""Largest size of a file with images."""


def confusion_text(quality: ClassQuality) -> str:
    """Return the confusion matrix: a line for each class, a column for each predicted class."""
    rows = zip(quality.names, quality.confusion.tolist(), strict=True)
    return csv_of_rows([["class", *quality.names], *([name, *row] for name, row in rows)])


def labels_text(quality: LabelQuality) -> str:
    """Return a line for each label: its samples, how often it is predicted, how often correctly."""
    counts = quality.counts
    columns = (counts.samples, counts.predicted, counts.correct)
    rows = zip(counts.names, *(column.tolist() for column in columns), strict=True)
    return csv_of_rows([LABEL_COLUMNS, *rows])


def read_labels(path: Path) -> LabelCounts | None:
    """Return the numbers in a file that `labels_text` made; None if there is no file.

    Raises:
        UserError: the file cannot be read.
    """
    found = _read_counts(path)
    if found is None:
        return None
    columns, names, counts = found
    if columns != LABEL_COLUMNS[1:] or (counts[:, 2:] > counts[:, :2]).any():
        raise _damaged(path, "its columns are not those of labels")
    return LabelCounts(names, *counts.T)


def read_confusion(path: Path) -> ClassQuality | None:
    """Return the matrix in a file that `confusion_text` made; None if there is no file.

    Raises:
        UserError: the file cannot be read.
    """
    found = _read_counts(path)
    if found is None:
        return None
    columns, names, confusion = found
    if names != columns:
        raise _damaged(path, "its lines are not those of its columns")
    return ClassQuality(names, confusion)


def _read_counts(path: Path) -> tuple[tuple[str, ...], tuple[str, ...], NDArray[np.int64]] | None:
    """Return the names of the columns and of the lines of a file, and its numbers.

    Returns:
        None if there is no file.
    """
    try:
        (_, *columns), *rows = csv.reader(io.StringIO(read_regular(path, MAX_TEXT_BYTES).decode()))
        counts = np.array([[int(cell) for cell in row[1:]] for row in rows], np.int64)
        if counts.shape != (len(rows), len(columns)):
            raise ValueError("its lines are not those of its columns")
        if (counts < 0).any():
            raise ValueError("it has negative numbers")
        return tuple(columns), tuple(row[0] for row in rows), counts
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, IndexError, OverflowError, csv.Error) as error:
        raise _damaged(path, str(error)) from None


def _damaged(path: Path, why: str) -> UserError:
    return UserError(f"{path} is damaged: {shown(why)}; remove it for a report without it")


def mistakes_image(quality: ClassQuality, dataset: Dataset) -> Image | None:
    """Return images of the most confident mistakes on the test data, as the network sees them.

    Below each one are its class, and the predicted class with its probability.

    Returns:
        None if the samples are no images, or there are no mistakes.
    """
    if len(dataset.input_shape) != 3 or not quality.mistakes:
        return None
    captions = [
        f"class {quality.names[found.expected]}\n"
        f"{quality.names[found.predicted]}: {found.probability:.0%}"
        for found in quality.mistakes
    ]
    return image_grid(dataset, dataset.test, [m.sample for m in quality.mistakes], captions)


def read_mistakes(path: Path) -> bytes | None:
    """Return the file of `mistakes_image`; None if there is none, or it is no PNG file."""
    try:
        found = read_regular(path, MOST_BYTES)
    except OSError:
        return None
    return found if found.startswith(b"\x89PNG") else None
