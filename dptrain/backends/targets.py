"""Targets: the forms that users may pass, and the order in which a backend stores them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dptrain.errors import UserError
from dptrain.network.network import Network


def checked_targets(network: Network, y: ArrayLike) -> NDArray[Any]:
    """Return targets as the loss takes them: class indices (n,), or values (n, F).

    Args:
        network: has the loss.
        y: class indices (n,), one-hot rows (n, F), or values (n, F).

    Raises:
        UserError: wrong shape, or labels that are not class indices of this network.
    """
    array = np.asarray(y)
    loss, width = network.loss, network.num_outputs
    if loss.targets != "classes":
        if array.size != len(array) * width:
            raise UserError(f"y has shape {array.shape}; expected {width} values per sample")
        return array.reshape(len(array), width)
    return class_labels(array, network)


def class_labels(y: NDArray[Any], network: Network) -> NDArray[Any]:
    """Return one label per sample, of a network whose loss compares with classes.

    Args:
        y: (n,) or (n, 1) labels, or (n, F) one-hot rows.
        network: has F outputs.

    Raises:
        UserError: wrong shape, labels that are not whole numbers, or not in [0, F).
    """
    width = network.num_outputs
    if y.ndim == 2 and y.shape[1] == width:
        if not (((y == 0) | (y == 1)).all() and (y.sum(axis=1) == 1).all()):
            raise UserError(
                f"y: targets have {width} columns but are not one-hot; expected one 1 and "
                "otherwise 0 in each row, or a vector of class labels"
            )
        return np.asarray(y.argmax(axis=1))
    if y.ndim not in (1, 2) or y.shape[1:] not in ((), (1,)):
        raise UserError(
            f"y: targets have shape {y.shape}; expected one class label per sample, ({len(y)},)"
        )
    if y.size and (y != np.floor(y)).any():
        raise UserError(
            f"y: targets are not whole numbers, but {network.label} distinguishes "
            "classes; use a network with mean_squared_error to predict values"
        )
    if y.size and (y.min() < 0 or y.max() >= width):
        raise UserError(
            f"y: labels from {int(y.min())} to {int(y.max())}, but {network.label} "
            f"has {width} outputs; expected labels 0 to {width - 1}"
        )
    return y.reshape(-1)


def channels_last_targets(network: Network, y: NDArray[Any]) -> NDArray[Any]:
    """Return targets in the order H, W, C of the outputs, if these are flattened maps."""
    channels, height, width = network.nodes[-1].output_maps
    if channels == 1 or height * width == 1:
        return y
    indices = np.arange(channels * height * width).reshape(channels, height, width)
    order = indices.transpose(1, 2, 0).ravel()
    return np.argsort(order)[y] if y.ndim == 1 else y[:, order]
