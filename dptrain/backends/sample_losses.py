"""The loss of each sample, in float64, for evaluations that do not depend on the batch size."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dptrain.network.expressions import evaluate
from dptrain.network.losses import ElementwiseLoss, Loss, SoftmaxSquaredError
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
    if isinstance(loss, ElementwiseLoss):
        targets = np.asarray(y, np.float64).reshape(outputs.shape)
        each = np.broadcast_to(evaluate(loss.value, {"z": outputs, "y": targets}), outputs.shape)
        counts = loss.targets == "binary"
        right = are_right(outputs, targets) if counts else np.zeros(len(outputs), np.bool_)
        return each.mean(axis=1), right
    rows = np.arange(len(outputs))
    with np.errstate(invalid="ignore"):  # Infinite outputs have no loss.
        shifted = outputs - outputs.max(axis=1, keepdims=True)
        powers = np.exp(shifted)
    if isinstance(loss, SoftmaxSquaredError):
        differences = powers / powers.sum(axis=1, keepdims=True)
        differences[rows, y] -= 1.0
        losses = np.square(differences).mean(axis=1)
    else:
        losses = np.log(powers.sum(axis=1)) - shifted[rows, y]
    return losses, most_probable(outputs) == y
