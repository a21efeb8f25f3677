"""Tables of an evaluation: results of each class or label, and the confusion matrix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from dptrain.measure.statistics import Estimate, share
from dptrain.tables import Column, Records, Table, computed, texts
from dptrain.training.evaluation.class_files import CONFUSION, LABELS
from dptrain.training.evaluation.quality import ClassQuality, LabelCounts, LabelQuality, Quality
from dptrain.vocabulary import find_term

MOST_CLASSES = 20
"""Largest number of classes whose confusion matrix is printed."""


def quality_tables(quality: Quality) -> list[Table | str]:
    """Return the tables of classes or of labels; none for values."""
    if isinstance(quality, ClassQuality):
        return class_tables(quality)
    if isinstance(quality, LabelQuality):
        table = labels_table(quality.counts)
        accuracy = computed(
            "accuracy", "%", quality.accuracy.tolist(), term=find_term("test_label_accuracy")
        )
        return [replace(table, columns=(*table.columns, accuracy))]
    return []


def class_tables(quality: ClassQuality) -> list[Table | str]:
    """Return the results of each class, and the confusion matrix of up to 20 classes."""
    tables: list[Table | str] = [classes_table(quality)]
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
        tables.append(Table.of_rows("", ("", *quality.names), matrix, text=("",)))
    return tables


def classes_table(quality: ClassQuality, *, most: int | None = None) -> Table:
    """Return precision, recall and F1 of each class, with intervals.

    Args:
        quality: the results.
        most: largest number of rows, those with the lowest recall; None lists all.
    """
    confusion = quality.confusion
    counts = LabelCounts(
        quality.names, quality.samples, confusion.sum(axis=0), confusion.diagonal()
    )
    return _shares_table(counts, "class", "classes", CONFUSION, most)


def labels_table(counts: LabelCounts, *, most: int | None = None) -> Table:
    """Return precision, recall and F1 of each label, as `classes_table`."""
    return _shares_table(counts, "label", "labels", LABELS, most)


def _shares_table(
    counts: LabelCounts, one: str, several: str, file: str, most: int | None
) -> Table:
    """Return precision and recall of each class or label.

    Args:
        counts: of classes or labels.
        one, several: name of one of them, and of several.
        file: that has the numbers.
        most: as for `classes_table`.
    """
    recall = np.where(counts.samples > 0, counts.correct / np.maximum(counts.samples, 1), 2.0)
    chosen = sorted(np.argsort(recall, kind="stable")[:most].tolist())
    samples, predicted, correct = (
        [int(values[i]) for i in chosen]
        for values in (counts.samples, counts.predicted, counts.correct)
    )
    f1 = [
        2 * hits / (n + found) if n + found else None
        for hits, n, found in zip(correct, samples, predicted, strict=True)
    ]
    columns = (
        texts(one, [counts.names[i] for i in chosen]),
        computed("samples", "", samples, decimals=0, term=find_term("class.samples")),
        _shares("precision", correct, predicted),
        _shares("recall", correct, samples),
        computed("F1", "%", f1, term=find_term("class.f1")),
    )
    note = f"Recall: share of the samples of a {one} that are recognised. Precision: share of the "
    note += f"predictions of a {one} that are correct. F1: their harmonic mean."
    if len(chosen) < len(counts.names):
        note += f" The {len(chosen)} {several} with the lowest recall are listed."
    return Table("Recall and precision", columns, note, several, file)


def _shares(name: str, correct: Sequence[int], of: Sequence[int]) -> Column:
    """Return a column of shares with their intervals; a dash for a share of nothing."""
    found: list[Estimate | None] = [
        share(hits / n, n) if n else None for hits, n in zip(correct, of, strict=True)
    ]
    column = Records(found, [""] * len(found)).estimates("", name, "%")
    return replace(column, kind="computed", term=find_term(f"class.{name}"), name=name)
