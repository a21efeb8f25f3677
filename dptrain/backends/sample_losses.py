"""The loss of each sample, in float64, for evaluations that do not depend on the batch size."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dptrain.network.losses import Loss
from dptrain.network.outputs import are_right, most_probable


def sample_losses(
    loss: Loss, z: NDArray[np.generic], y: NDArray[np.generic]
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return the loss of each sample, and whether its prediction is correct.

    The numbers of a sample do not depend on the other samples.

    Args:
        loss: the loss of the network.
        z: (n, F), outputs of the network.
        y: class indices (n,), or (n, F).

    Returns:
        float64 (n,) and bool (n,).
    """
    outputs = np.asarray(z, np.float64)
    if loss.targets == "classes":
        rows = np.arange(len(outputs))
        with np.errstate(invalid="ignore"):  # Infinite outputs have no loss.
            shifted = outputs - outputs.max(axis=1, keepdims=True)
            losses = np.log(np.exp(shifted).sum(axis=1)) - shifted[rows, y]
        return losses, most_probable(outputs) == y
    targets = np.asarray(y, np.float64).reshape(outputs.shape)
    if loss.targets == "binary":
        with np.errstate(invalid="ignore"):
            each = np.maximum(outputs, 0) - outputs * targets + np.log1p(np.exp(-np.abs(outputs)))
        return each.mean(axis=1), are_right(outputs, targets)
    return ((outputs - targets) ** 2).mean(axis=1), np.zeros(len(outputs), np.bool_)
