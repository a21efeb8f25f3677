"""A coarse check that two programs compute the same, without PyTorch.

`benchmarks.check` compares precisely; this only verifies that the timed program is the checked one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

COARSE = 1e-3
"""Allowed difference relative to the norm of an array; 1e-5 was observed."""


class WrongResultError(Exception):
    """Two programs differ by more than rounding."""


def require_agreement(
    case: str,
    ours: Mapping[str, NDArray[Any]],
    theirs: Mapping[str, NDArray[Any]],
    peer: str = "PyTorch",
) -> float:
    """Compare arrays by name and return the largest relative difference.

    Args:
        case: names network, batch size and task in the error message.
        ours, theirs: outputs, or loss and updates of a step.
        peer: the other program.

    Raises:
        WrongResultError: an array is missing, has another shape, or differs by more than `COARSE`.
    """
    largest = 0.0
    if missing := sorted(ours.keys() ^ theirs.keys()):
        raise WrongResultError(f"{case}: only one of dptrain and {peer} has {missing[0]}")
    for name, value in theirs.items():
        exact, own = np.asarray(value, np.float64), np.asarray(ours[name], np.float64)
        if own.shape != exact.shape:
            raise WrongResultError(
                f"{case}: {name} has shape {own.shape} in dptrain and {exact.shape} in {peer}"
            )
        distance, size = np.linalg.norm(own - exact), np.linalg.norm(exact)
        if not distance <= COARSE * size:
            raise WrongResultError(
                f"{case}: dptrain and {peer} differ in {name} by {distance / (size or 1.0):.1e} of "
                f"its norm; rounding explains at most {COARSE:.0e}"
            )
        largest = max(largest, float(distance / size) if size else 0.0)
    return largest
