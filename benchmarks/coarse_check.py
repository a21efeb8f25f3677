"""A coarse check that two programs compute the same, without PyTorch.

`benchmarks.check` compares with float64; this only verifies that the timed program is the checked
one. Gradients may also differ by `benchmarks.kinks`: units that rounding decides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

COARSE = 1e-4
"""Allowed difference relative to the norm of an array; 5e-6 was observed without flipped units."""

DEEP = 0.15
"""The same for networks whose flipped units are not known one by one: with a batch normalisation a
unit changes the gradients of all samples, and dozens of layers follow. The gradients of ResNet-50
at batch 4 differ from those in float64 by at most 2.9e-2 in PyTorch and 3.0e-2 in dptrain, both in
float32 (medians over the arrays 2.1e-2 and 2.4e-2); with `channels_last` at batch 64, those of
PyTorch differ by at most 9.5e-2 (median 6.2e-2)."""

Arrays = Mapping[str, NDArray[Any]]


class WrongResultError(Exception):
    """Two programs differ by more than rounding."""


def require_agreement(
    case: str,
    ours: Arrays,
    theirs: Arrays,
    peer: str = "PyTorch",
    flips: Callable[[], Sequence[Arrays] | None] | None = None,
) -> float:
    """Compare arrays by name and return the largest difference, relative to the allowed one.

    Args:
        case: names network, batch size and task in the error message.
        ours, theirs: outputs, or loss and updates of a step.
        peer: the other program.
        flips: returns the change of the arrays for each unit that rounding can decide. Each unit
            may be decided differently, but it has to be decided completely. None if they are not
            known; then the arrays may differ by `DEEP`.

    Raises:
        WrongResultError: an array is missing, has another shape, or differs by more than `COARSE`
            or `DEEP`.
    """
    if missing := sorted(ours.keys() ^ theirs.keys()):
        raise WrongResultError(f"{case}: only one of dptrain and {peer} has {missing[0]}")
    exact = {name: np.asarray(value, np.float64) for name, value in theirs.items()}
    differences = {}
    for name, value in exact.items():
        own = np.asarray(ours[name], np.float64)
        if own.shape != value.shape:
            raise WrongResultError(
                f"{case}: {name} has shape {own.shape} in dptrain and {value.shape} in {peer}"
            )
        differences[name] = own - value
    sizes = {name: float(np.linalg.norm(value)) for name, value in exact.items()}
    errors = _errors(differences, sizes)
    allowed = COARSE
    if flips is not None and not max(errors.values()) <= COARSE:
        units = flips()
        if units is None:
            allowed = DEEP
        else:
            errors = _errors(_without_flips(differences, sizes, units), sizes)
    for name, error in errors.items():
        if not error <= allowed:
            raise WrongResultError(
                f"{case}: dptrain and {peer} differ in {name} by {error:.1e} of its norm; rounding "
                f"explains at most {allowed:.0e}"
            )
    return max(errors.values()) / allowed


def _errors(differences: Arrays, sizes: Mapping[str, float]) -> dict[str, float]:
    return {
        name: float(np.linalg.norm(value) / (sizes[name] or 1.0))
        for name, value in differences.items()
    }


def _without_flips(
    differences: Arrays, sizes: Mapping[str, float], flips: Sequence[Arrays]
) -> Arrays:
    """Subtract or add the changes of units one by one, as long as this makes the rest smaller."""

    def product(a: Arrays, b: Arrays) -> float:
        return sum(float(np.vdot(a[n], b[n])) / (sizes[n] or 1.0) ** 2 for n in a.keys() & b.keys())

    rest, left = dict(differences), [(flip, product(flip, flip)) for flip in flips]
    while left:
        # |r − s·f|² = |r|² − gain with the better sign s of each flip f.
        products = [product(rest, flip) for flip, _ in left]
        gains = [2 * abs(p) - square for p, (_, square) in zip(products, left, strict=True)]
        best = int(np.argmax(gains))
        if not gains[best] > 0:
            break
        for name, change in left.pop(best)[0].items():
            rest[name] = rest[name] - np.sign(products[best]) * change
    return rest
