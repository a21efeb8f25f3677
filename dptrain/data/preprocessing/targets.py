"""Targets as a network's loss reads them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptrain.data.preprocessing.classes import check_numbers
from dptrain.errors import UserError
from dptrain.network.network import Network


def targets_for(y: NDArray[Any], network: Network, where: str) -> NDArray[Any]:
    """Check targets and convert them to the type that the network's loss reads.

    Args:
        y: (n,) classes as `Classes.indices` returns them, or values (n,), (n, 1) or (n, F).
        network: its loss determines the kind of the targets.
        where: name of the data, for messages.

    Returns:
        int32 (n,) for ``classes``, else float32 (n, F).

    Raises:
        UserError: the wrong shape or type, or values that are not finite.
    """
    if network.loss.targets == "classes":
        return y.astype(np.int32)
    check_numbers(y, where)
    width = network.num_outputs
    if y.ndim > 2 or y.shape[1:] not in ((), (width,)) or (y.ndim == 1 and width != 1):
        raise UserError(
            f"{where}: targets have shape {y.shape}, but {network.label} has {width} "
            f"outputs; expected ({len(y)}, {width})"
        )
    if network.loss.targets == "binary" and not ((y == 0) | (y == 1)).all():
        raise UserError(
            f"{where}: targets range from {y.min()} to {y.max()}, but {network.label} ends "
            f"in {network.loss.kind}, which expects 0 and 1; use data with two classes, or another "
            "network"
        )
    largest = float(np.abs(y.astype(np.float64)).max(initial=0.0))
    if largest > float(np.finfo(np.float32).max):
        raise UserError(f"{where}: targets reach {largest:.3g}; expected numbers that fit float32")
    return y.reshape(len(y), width).astype(np.float32)
