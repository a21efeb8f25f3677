"""The weights of classes in the loss."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from dptrain.data.base import Dataset
from dptrain.data.preprocessing.classes import Classes, listed
from dptrain.data.spec import unescape
from dptrain.errors import UserError, shown, suggest

BALANCED = "balanced"


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


def sample_weights(given: str, dataset: Dataset) -> NDArray[np.float64] | None:
    """Return the weight of each training sample, (samples,); None if all are equal.

    Args:
        given, dataset: as for `class_weights`.

    Raises:
        UserError: as `class_weights`.
    """
    weights = class_weights(given, dataset)
    return None if weights is None else weights[_labels(dataset)]


def class_weights_line(given: str, dataset: Dataset) -> str:
    """Return the line that shows the weights of the classes."""
    weights, classes = class_weights(given, dataset), dataset.class_list
    assert weights is not None
    assert classes is not None
    pairs = zip(classes.names, weights.tolist(), strict=True)
    return f"class weights: {listed([f'{name} {weight:.4g}' for name, weight in pairs])}"


def _labels(dataset: Dataset) -> NDArray[np.int64]:
    """Return the class of each training sample."""
    targets = dataset.train.known_targets()
    if targets is None:
        raise UserError(
            f"--class-weights needs the labels of all training samples, but {dataset.name} reads "
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
            wrong = "names a class twice" if index is not None else "names no class of the data"
            raise UserError(
                f"--class-weights '{shown(name or text)}' {wrong}; expected NAME=W with names of "
                f"{listed(classes.names)}{suggest(name, classes.names)}"
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
    if not 0.0 <= weight < math.inf:
        raise UserError(
            f"--class-weights is '{shown(given)}', but '{shown(text)}' is no weight; expected "
            f"finite numbers of at least 0, or {BALANCED}"
        )
    return weight
