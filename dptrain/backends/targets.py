"""Targets: the forms that users may pass, and the order in which a backend stores them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dptrain.errors import UserError
from dptrain.network.network import Network
from dptrain.network.targets import class_labels


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
    return class_labels(array, network, "y")


def channels_last_targets(network: Network, y: NDArray[Any]) -> NDArray[Any]:
    """Return targets in the order H, W, C of the outputs, if these are flattened maps."""
    channels, height, width = network.nodes[-1].output_maps
    if channels == 1 or height * width == 1:
        return y
    indices = np.arange(channels * height * width).reshape(channels, height, width)
    order = indices.transpose(1, 2, 0).ravel()
    return np.argsort(order)[y] if y.ndim == 1 else y[:, order]
