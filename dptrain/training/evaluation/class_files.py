"""The files of the predictions of classes: ``confusion.csv`` and, of images, ``mistakes.png``."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dptrain.data.base import Dataset
from dptrain.data.grid import image_grid
from dptrain.errors import UserError, shown
from dptrain.files import MAX_TEXT_BYTES, csv_of_rows, read_regular
from dptrain.training.evaluation.quality import ClassQuality

if TYPE_CHECKING:
    from PIL.Image import Image

CONFUSION, MISTAKES = "confusion.csv", "mistakes.png"
MOST_CLASSES = 200
"""Largest number of classes of which a run keeps the confusion matrix."""
MOST_BYTES = 1 << 24
"""Largest size of a file with images."""


def confusion_text(quality: ClassQuality) -> str:
    """Return the confusion matrix: a line for each class, a column for each predicted class."""
    rows = zip(quality.names, quality.confusion.tolist(), strict=True)
    return csv_of_rows([["class", *quality.names], *([name, *row] for name, row in rows)])


def read_confusion(path: Path) -> ClassQuality | None:
    """Return the matrix in a file that `confusion_text` made; None if there is no file.

    Raises:
        UserError: the file cannot be read.
    """
    try:
        (_, *names), *rows = csv.reader(io.StringIO(read_regular(path, MAX_TEXT_BYTES).decode()))
        confusion = np.array([[int(cell) for cell in row[1:]] for row in rows], np.int64)
        if [row[0] for row in rows] != names or confusion.shape != (len(names), len(names)):
            raise ValueError("its lines are not those of its columns")
        if (confusion < 0).any():
            raise ValueError("it has negative numbers")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, IndexError, OverflowError, csv.Error) as error:
        raise UserError(
            f"{path} is damaged: {shown(str(error))}; remove it for a report without it"
        ) from None
    return ClassQuality(tuple(names), confusion)


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
