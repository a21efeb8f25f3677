"""Targets: what users may pass, and the order in which a backend stores them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dptrain.errors import UserError
from dptrain.network.network import Network
from dptrain.network.targets import class_labels


def checked_targets(network: Network, y: ArrayLike) -> NDArray[Any]:
    """What a loss may be given: class numbers (n,), also from one-hot rows, or values (n, F).

    Raises:
        UserError: wrong shape, or labels that are no class numbers of this network.
    """
    array = np.asarray(y)
    loss, width = network.loss, network.num_outputs
    if loss.targets != "classes":
        if array.size != len(array) * width:
            raise UserError(f"y has shape {array.shape}; this network gives {width} values")
        return array.reshape(len(array), width)
    return class_labels(array, network, "y")


def channels_last_targets(network: Network, y: NDArray[Any]) -> NDArray[Any]:
    """Targets in the order H, W, C of the outputs, which matters if these are flattened maps."""
    channels, height, width = network.nodes[-1].output_maps
    if channels == 1 or height * width == 1:
        return y
    indices = np.arange(channels * height * width).reshape(channels, height, width)
    order = indices.transpose(1, 2, 0).ravel()
    return np.argsort(order)[y] if y.ndim == 1 else y[:, order]
