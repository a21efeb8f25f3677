"""The weights of samples and of classes in the loss."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptrain.data.base import Dataset
from dptrain.data.preprocessing.classes import Classes, listed
from dptrain.data.preprocessing.layout import as_numbers
from dptrain.data.spec import unescape
from dptrain.errors import UserError, shown, suggest

BALANCED = "balanced"

SMALLEST, LARGEST = 1e-100, 1e100
"""Limits of weights other than 0. Sums and products of weights, and factors that divide by them,
are then finite and not 0."""

_EXPECTED = f"expected 0, or numbers from {SMALLEST:g} to {LARGEST:g}"


def class_weights(given: str, dataset: Dataset) -> NDArray[np.float64] | None:
    """Return the weight of each class; None if all are equal.

    Args:
        given: the setting `class_weights`; "" for none.
        dataset: its training split has the samples that `balanced` counts.

    Raises:
        UserError: the weights do not match the classes, or the data has none.
    """
    if not given:
        return None
    classes = dataset.class_list
    if classes is None:
        raise UserError(
            f"--class-weights is '{shown(given)}', but {dataset.name} has no classes: the network "
            "predicts values, or several labels for a sample; remove it"
        )
    if given.strip() == BALANCED:
        labels = _labels(dataset)
        counts = np.bincount(labels, minlength=len(classes.names))
        weights = len(labels) / (len(counts) * np.maximum(counts, 1))
    else:
        weights = _parsed(given, classes)
    if not weights.any():
        raise UserError(f"--class-weights is '{shown(given)}'; expected a weight above 0")
    return weights


def sampled_labels(dataset: Dataset) -> NDArray[np.int64]:
    """Return the class of each training sample, (samples,), for balanced sampling.

    Raises:
        UserError: the data has no classes, or its labels are read with the samples.
    """
    if dataset.class_list is None:
        raise UserError(
            f"--sampling is balanced, but {dataset.name} has no classes: the network predicts "
            "values, or several labels for a sample; remove it"
        )
    return _labels(dataset, "--sampling balanced")


def sample_weights(given: str, dataset: Dataset) -> NDArray[np.float64] | None:
    """Return the weight of each training sample, (samples,); None if all are equal.

    It is the weight that the data states times that of the class.

    Args:
        given, dataset: as for `class_weights`.

    Raises:
        UserError: as `class_weights`, or every weight is 0.
    """
    by_class, own = class_weights(given, dataset), dataset.train.known_weights()
    if by_class is None:
        weights = own
    else:
        of_samples = by_class[_labels(dataset)]
        weights = of_samples if own is None else of_samples * own
    if weights is not None and not weights.any():
        raise UserError(
            f"every training sample of {dataset.name} has the weight 0; expected a weight above 0"
        )
    return weights


def weight_lines(given: str, dataset: Dataset) -> Iterator[str]:
    """Yield the lines that show the weights of classes and of samples, if there are any."""
    weights, classes = class_weights(given, dataset), dataset.class_list
    if weights is not None and classes is not None:
        pairs = zip(classes.names, weights.tolist(), strict=True)
        yield f"class weights: {listed([f'{name} {weight:.4g}' for name, weight in pairs])}"
    own = dataset.train.known_weights()
    if own is not None:
        yield (
            f"sample weights: {own.min():.4g} to {own.max():.4g}, mean {own.mean():.4g}, of "
            f"{len(own):,} training samples"
        )


def checked_weights(weights: Any, count: int, where: str) -> NDArray[np.float64]:
    """Return weights of samples, float64 (count,).

    Args:
        weights: an object that NumPy converts to an array.
        count: number of samples.
        where: name of the weights, for messages.

    Raises:
        UserError: they are not `count` numbers that are 0, or from `SMALLEST` to `LARGEST`.

    Example:
        >>> checked_weights([1, 0.5], 2, "sample_weight")
        array([1. , 0.5])
    """
    found = np.asarray(as_numbers(weights, where), np.float64)
    if found.shape not in ((count,), (count, 1)):
        raise UserError(
            f"{where} has shape {found.shape}; expected ({count},), a number for each sample"
        )
    found = found.reshape(count)
    wrong = np.flatnonzero(~_are_weights(found))
    if len(wrong):
        raise UserError(f"{where} is {found[wrong[0]]:g} for sample {wrong[0]}; {_EXPECTED}")
    return found


def _are_weights(values: Any) -> NDArray[np.bool_]:
    """Return which numbers are weights."""
    return np.asarray((values == 0.0) | ((values >= SMALLEST) & (values <= LARGEST)))


def _labels(dataset: Dataset, user: str = "--class-weights") -> NDArray[np.int64]:
    """Return the class of each training sample."""
    targets = dataset.train.known_targets()
    if targets is None:
        raise UserError(
            f"{user} needs the labels of all training samples, but {dataset.name} reads "
            "them with the samples; remove it, or pass arrays"
        )
    return targets.reshape(-1).astype(np.int64)


def _parsed(given: str, classes: Classes) -> NDArray[np.float64]:
    """Return the weights in a text: numbers in the order of the classes, or numbers by name."""
    parts, count = [part.strip() for part in given.split(",")], len(classes.names)
    named = [part.rpartition("=") for part in parts]
    if not any(equals for _, equals, _ in named):
        if len(parts) != count:
            raise UserError(
                f"--class-weights has {len(parts)} number{'s' * (len(parts) != 1)}; expected "
                f"{count}, one for each class: {listed(classes.names)}; or {BALANCED}, or NAME=W"
            )
        return np.array([_weight(text, given) for text in parts])
    weights, known = np.ones(count), set[int]()
    for name, equals, text in named:
        index = classes.find(unescape(name)) if equals else None
        if index is None or index in known:
            is_repeated = index is not None
            wrong = "names a class twice" if is_repeated else "names no class of the data"
            hint = "" if is_repeated else suggest(name, classes.names)
            raise UserError(
                f"--class-weights '{shown(name or text)}' {wrong}; expected NAME=W with names of "
                f"{listed(classes.names)}{hint}"
            )
        known.add(index)
        weights[index] = _weight(text, given)
    return weights


def _weight(text: str, given: str) -> float:
    """Return a weight; raise `UserError` if it is none."""
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if not _are_weights(weight):
        raise UserError(
            f"--class-weights is '{shown(given)}', but '{shown(text)}' is no weight; {_EXPECTED}, "
            f"or {BALANCED}"
        )
    return weight
