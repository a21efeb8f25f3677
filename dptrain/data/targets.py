"""Bringing targets to what a network's loss compares with."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptrain.errors import UserError
from dptrain.network.network import Network


def targets_for(y: NDArray[Any], network: Network, where: str) -> NDArray[Any]:
    """Check targets and give them the type that the network's loss reads.

    Args:
        y: (n,), (n, 1) or (n, F); class numbers may be one-hot rows.
        network: its loss says what a target is.
        where: what the user named, for messages.

    Returns:
        int32 (n,) for ``classes``, else float32 (n, F).

    Raises:
        UserError: the wrong shape or type, labels out of range, values that are not finite.
    """
    if y.dtype.kind not in "biuf":
        raise UserError(f"{where}: targets are of type {y.dtype}; expected numbers")
    if not np.isfinite(y).all():
        row = int(np.argwhere(~np.isfinite(y))[0][0])
        raise UserError(f"{where}: the target of sample {row} is not a finite number")
    if network.loss.targets == "classes":
        return _classes(y, network, where)
    width = network.num_outputs
    if y.ndim > 2 or y.shape[1:] not in ((), (width,)) or (y.ndim == 1 and width != 1):
        raise UserError(
            f"{where}: targets have shape {y.shape}, but network {network.name} gives "
            f"{width} numbers a sample; expected ({len(y)}, {width})"
        )
    if network.loss.targets == "binary" and not ((y == 0) | (y == 1)).all():
        raise UserError(
            f"{where}: targets go from {y.min()} to {y.max()}, but a network that ends in "
            f"{network.loss.kind} takes 0 and 1; two classes, or another network"
        )
    largest = float(np.abs(y.astype(np.float64)).max(initial=0.0))
    if largest > float(np.finfo(np.float32).max):
        raise UserError(f"{where}: targets reach {largest:.3g}; expected numbers that fit float32")
    return y.reshape(len(y), width).astype(np.float32)


def _classes(y: NDArray[Any], network: Network, where: str) -> NDArray[np.int32]:
    width = network.num_outputs
    if y.ndim == 2 and y.shape[1] == width:
        if not (((y == 0) | (y == 1)).all() and (y.sum(axis=1) == 1).all()):
            raise UserError(f"{where}: targets have {width} columns but are not one-hot")
        return np.asarray(y.argmax(axis=1), dtype=np.int32)
    if y.ndim > 2 or y.shape[1:] not in ((), (1,)):
        raise UserError(f"{where}: targets have shape {y.shape}; expected one class number each")
    if y.size and (y != np.floor(y)).any():
        raise UserError(
            f"{where}: targets are not whole numbers, but network {network.name} tells classes "
            "apart; a network with mean_squared_error predicts values"
        )
    if y.size and (y.min() < 0 or y.max() >= width):
        raise UserError(
            f"{where}: labels go from {int(y.min())} to {int(y.max())}, but network "
            f"{network.name} has {width} outputs; expected labels 0 to {width - 1}"
        )
    return y.reshape(-1).astype(np.int32)


def labels_for(labels: NDArray[Any], network: Network, where: str) -> NDArray[Any]:
    """`targets_for` class numbers, which no network that predicts values can learn from."""
    if network.loss.targets == "values":
        raise UserError(
            f"{where} has classes, but network {network.name} predicts values; choose a network "
            "that ends in softmax_cross_entropy, or data with values"
        )
    return targets_for(labels, network, where)
