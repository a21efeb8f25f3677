"""Tables of an evaluation for the screen: results of each class, and the confusion matrix."""

from __future__ import annotations

import math

from dptrain.tables import Table
from dptrain.training.evaluation.quality import ClassQuality, LabelQuality, Quality

MOST_CLASSES = 20
"""Largest number of classes whose confusion matrix is printed."""


def quality_tables(quality: Quality) -> list[Table | str]:
    """Return the tables of classes or of labels; none for values."""
    if isinstance(quality, ClassQuality):
        return class_tables(quality)
    return [label_table(quality)] if isinstance(quality, LabelQuality) else []


def label_table(quality: LabelQuality) -> Table:
    """Return the results of each label."""
    columns = ("label", "samples", "accuracy", "precision", "recall", "F1")
    numbers = zip(quality.accuracy, *quality.shares, strict=True)
    samples = quality.expected.sum(axis=0)
    rows = [
        (name, f"{count:,}", *map(_percent, values))
        for name, count, values in zip(quality.names, samples, numbers, strict=True)
    ]
    return Table("Labels", columns, ("label",), rows=rows)


def class_tables(quality: ClassQuality) -> list[Table | str]:
    """Return the results of each class, and the confusion matrix of up to 20 classes."""
    shares = zip(quality.precision, quality.recall, quality.f1, strict=True)
    rows = [
        (name, f"{samples:,}", *map(_percent, values))
        for name, samples, values in zip(quality.names, quality.samples, shares, strict=True)
    ]
    columns = ("class", "samples", "precision", "recall", "F1")
    tables: list[Table | str] = [Table("Classes", columns, ("class",), rows=rows)]
    if quality.num_unpredicted:
        tables.append(
            f"The outputs for {quality.num_unpredicted:,} samples contain NaN; they have no "
            "predicted class and count as wrong"
        )
    if len(quality.names) <= MOST_CLASSES:
        cells = zip(quality.names, quality.confusion.tolist(), strict=True)
        matrix = [(name, *(f"{n:,}" if n else "·" for n in row)) for name, row in cells]
        tables.append("Confusion matrix: a row for each class, a column for each prediction")
        # The first column has its own heading, which no class has.
        tables.append(Table("", ("", *quality.names), ("",), rows=matrix))
    return tables


def _percent(share: float) -> str:
    return f"{share:.1%}" if math.isfinite(share) else "–"
