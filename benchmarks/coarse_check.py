"""A coarse check that two programs compute the same, without PyTorch.

`benchmarks.check` compares with float64; this only verifies that the timed program is the checked
one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptrain.network import Network
from dptrain.network.normalization import Normalization

COARSE = 1e-4
"""Allowed difference relative to the norm of an array; 5e-6 was observed without flipped units."""

FLIPPED = 5e-3
"""The same for updates. If the input of a ReLU is 1e-8 in one program and -1e-8 in another, both
are right, but the gradient of one sample flows through the unit in only one of them. One such unit
changed 75 weights of the network "odd" by 2e-3 of their norm (batch size 32)."""

DEEP = 0.15
"""The same for networks with normalisations, in which a unit changes the gradients of all samples,
and dozens of layers follow. The gradients of ResNet-50 at batch 4 differ from those in float64 by
at most 2.9e-2 in PyTorch and 3.0e-2 in dptrain, both in float32 (medians over the arrays 2.1e-2 and
2.4e-2); with `channels_last` at batch 64, those of PyTorch differ by at most 9.5e-2 (median
6.2e-2)."""

Arrays = Mapping[str, NDArray[Any]]


class WrongResultError(Exception):
    """Two programs differ by more than rounding."""


def allowed_in_updates(network: Network) -> float:
    """Return the allowed difference of the updates of a network."""
    layers = (node.layer for node in network.nodes)
    return DEEP if any(isinstance(layer, Normalization) for layer in layers) else FLIPPED


def require_agreement(
    case: str, ours: Arrays, theirs: Arrays, peer: str = "PyTorch", allowed: float = COARSE
) -> float:
    """Compare arrays by name and return the largest difference, relative to the allowed one.

    Args:
        case: names network, batch size and task in the error message.
        ours, theirs: outputs, or loss and updates of a step.
        peer: the other program.
        allowed: difference relative to the norm of an array; that of a loss is `COARSE`.

    Raises:
        WrongResultError: an array is missing, has another shape, or differs by more.
    """
    if missing := sorted(ours.keys() ^ theirs.keys()):
        raise WrongResultError(f"{case}: only one of dptrain and {peer} has {missing[0]}")
    shares = []
    for name, value in theirs.items():
        own, exact = np.asarray(ours[name], np.float64), np.asarray(value, np.float64)
        if own.shape != exact.shape:
            raise WrongResultError(
                f"{case}: {name} has shape {own.shape} in dptrain and {exact.shape} in {peer}"
            )
        error = float(np.linalg.norm(own - exact) / (np.linalg.norm(exact) or 1.0))
        most = COARSE if name == "loss" else allowed
        if not error <= most:
            raise WrongResultError(
                f"{case}: dptrain and {peer} differ in {name} by {error:.1e} of its norm; rounding "
                f"explains at most {most:.0e}"
            )
        shares.append(error / most)
    return max(shares)
