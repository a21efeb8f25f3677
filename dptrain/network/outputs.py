"""What the outputs of a network mean: probabilities, and the most probable classes."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

NO_CLASS = -1
"""The index of the most probable class of a sample whose outputs contain NaN."""


def sigmoid(z: NDArray[Any]) -> NDArray[Any]:
    """Return σ(z) = 1 / (1 + exp(−z)), whose relative error is that of exp for all z.

    Args:
        z: any shape, floating-point.

    Returns:
        Probabilities of the same shape and dtype.

    Examples:
        >>> print(f"{sigmoid(np.array([-30.0]))[0]:.6g}")
        9.35762e-14
    """
    power = np.exp(-np.abs(z))
    return np.asarray(np.where(z < 0, power, 1.0) / (1.0 + power), z.dtype)


def softmax(z: NDArray[Any]) -> NDArray[Any]:
    """Return exp(z) / Σ exp(z) over the last axis, computed in float64.

    Args:
        z: (n, F), floating-point. A row with NaN or +∞ becomes NaN, as in PyTorch.

    Returns:
        Probabilities of the same shape and dtype.
    """
    wide = np.asarray(z, np.float64)
    with np.errstate(invalid="ignore"):
        power = np.exp(wide - wide.max(axis=-1, keepdims=True))
        return np.asarray(power / power.sum(axis=-1, keepdims=True), z.dtype)


def most_probable(outputs: NDArray[Any]) -> NDArray[np.int64]:
    """Return the index of the most probable class of each sample, the first of equal ones.

    Args:
        outputs: (n, F), before or after softmax.

    Returns:
        int64 (n,); `NO_CLASS` for a sample whose outputs contain NaN.
    """
    return np.where(np.isnan(outputs).any(axis=1), NO_CLASS, outputs.argmax(axis=1))


def predicted_classes(probabilities: NDArray[Any]) -> NDArray[np.int64]:
    """Return the index of the predicted class of each sample.

    Args:
        probabilities: (n, F), one for each class; or (n, 1), that of the second of two classes,
            which is predicted above ½.

    Returns:
        int64 (n,); `NO_CLASS` for a sample whose probabilities contain NaN.
    """
    if probabilities.shape[1] > 1:
        return most_probable(probabilities)
    second = probabilities[:, 0]
    return np.where(np.isnan(second), NO_CLASS, second > 0.5).astype(np.int64)


def are_right(outputs: NDArray[Any], targets: NDArray[Any]) -> NDArray[np.bool_]:
    """Return whether all outputs of each sample are on the side of ½ of their targets.

    Args:
        outputs: (n, F), before sigmoid. NaN is on no side.
        targets: (n, F), between 0 and 1.

    Returns:
        bool (n,).
    """
    sides = (outputs > 0) == (targets > 0.5)
    return np.asarray((sides & ~np.isnan(outputs)).all(axis=1))


def are_among_most_probable(
    outputs: NDArray[Any], labels: NDArray[Any], count: int
) -> NDArray[np.bool_]:
    """Return whether the label of each sample is among the `count` most probable classes.

    Of equal outputs the first counts as the more probable, as in `most_probable`.

    Args:
        outputs: (n, F), before or after softmax.
        labels: integers (n,).
        count: number of classes, at least 1.

    Returns:
        bool (n,); False for a sample whose outputs contain NaN.
    """
    labels = np.asarray(labels, np.int64)
    own = outputs[np.arange(len(outputs)), labels][:, None]
    before = np.arange(outputs.shape[1]) < labels[:, None]
    rank = ((outputs > own) | ((outputs == own) & before)).sum(axis=1)
    return np.asarray((rank < count) & ~np.isnan(outputs).any(axis=1))
