"""Class labels: the check that data sets and replicas share."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptrain.errors import UserError
from dptrain.network.network import Network


def class_labels(y: NDArray[Any], network: Network, where: str) -> NDArray[Any]:
    """Return one label per sample, of a network whose loss compares with classes.

    Args:
        y: (n,) or (n, 1) labels, or (n, F) one-hot rows.
        network: has F outputs.
        where: name of the targets, for messages.

    Raises:
        UserError: wrong shape, labels that are not whole numbers, or not in [0, F).
    """
    width = network.num_outputs
    if y.ndim == 2 and y.shape[1] == width:
        if not (((y == 0) | (y == 1)).all() and (y.sum(axis=1) == 1).all()):
            raise UserError(
                f"{where}: targets have {width} columns but are not one-hot; expected one 1 and "
                "otherwise 0 in each row, or a vector of class labels"
            )
        return np.asarray(y.argmax(axis=1))
    if y.ndim not in (1, 2) or y.shape[1:] not in ((), (1,)):
        raise UserError(
            f"{where}: targets have shape {y.shape}; expected one class label per sample, "
            f"({len(y)},)"
        )
    if y.size and (y != np.floor(y)).any():
        raise UserError(
            f"{where}: targets are not whole numbers, but {network.label} distinguishes "
            "classes; use a network with mean_squared_error to predict values"
        )
    if y.size and (y.min() < 0 or y.max() >= width):
        raise UserError(
            f"{where}: labels from {int(y.min())} to {int(y.max())}, but {network.label} "
            f"has {width} outputs; expected labels 0 to {width - 1}"
        )
    return y.reshape(-1)
