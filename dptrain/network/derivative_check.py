"""Checks of functions of single elements: their derivative, and their values in float32."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptrain.errors import UserError
from dptrain.network.elementwise import Formula
from dptrain.network.expressions import evaluate

STEP = 1e-5
"""Step of the central differences. Their error is STEP² times a third derivative, and 1e-11 times
the value by rounding."""

TOLERANCE = 1e-6


def check_points() -> NDArray[np.float64]:
    """Return numbers of all magnitudes at which derivatives are compared; none is a simple one."""
    small = np.geomspace(1.7e-4, 97.3, 60)
    dense = np.linspace(-8.13, 8.37, 331)
    return np.concatenate([-small, small, dense])


def check_derivative(formula: Formula, kind: str) -> None:
    """Compare the derivative with central differences of the function, in float64.

    Points at which the function has a kink, or is not finite, do not count.

    Raises:
        UserError: the derivative is another one, or the function has few finite values, or it is
            NaN in float32 at a number for which it has a value.
    """
    with np.errstate(all="ignore"):
        _check_differences(formula, kind)
        _check_single_precision(formula, kind)


def _check_differences(formula: Formula, kind: str) -> None:
    x = check_points()
    before, y, after = (_output(formula, x + step) for step in (-STEP, 0.0, STEP))
    counts = np.isfinite(before) & np.isfinite(y) & np.isfinite(after)
    if counts.sum() < 0.25 * len(x):
        raise UserError(f"{kind} is finite for {counts.sum()} of {len(x)} numbers; expected most")
    left, right = (y - before) / STEP, (after - y) / STEP
    scale = 1.0 + np.abs(left) + np.abs(right) + 1e-4 * np.abs(y)
    is_smooth = counts & (np.abs(right - left) <= 1e-3 * scale)
    slope = np.broadcast_to(evaluate(formula.slope, {"x": x, "y": y, **formula.values}), x.shape)
    difference = (after - before) / (2.0 * STEP)
    is_wrong = is_smooth & ~(np.abs(slope - difference) <= TOLERANCE * scale)
    if is_wrong.any():
        at = np.flatnonzero(is_wrong)[0]
        raise UserError(
            f"the derivative of {kind} is {slope[at]:.6g} at x = {x[at]:.6g}; finite differences "
            f"of {kind} are {difference[at]:.6g}"
        )


def _output(formula: Formula, x: NDArray[Any]) -> NDArray[Any]:
    y = evaluate(formula.forward, {"x": x, **formula.values})
    return np.broadcast_to(np.asarray(y, x.dtype), x.shape)


def _check_single_precision(formula: Formula, kind: str) -> None:
    """Refuse forms that overflow to NaN in float32, such as exp(x) / (1 + exp(x))."""
    x = np.array([-1e4, -104.0, -30.0, -1.0, 0.0, 1.0, 30.0, 104.0, 1e4])
    wide = {"x": x, "y": _output(formula, x), **formula.values}
    single = {key: np.asarray(value, np.float32) for key, value in wide.items()}
    for tree, what in ((formula.forward, kind), (formula.slope, f"the derivative of {kind}")):
        expected = np.broadcast_to(evaluate(tree, wide), x.shape)
        found = np.broadcast_to(evaluate(tree, single), x.shape)
        is_lost = np.isfinite(expected) & np.isnan(found)
        if is_lost.any():
            at = np.flatnonzero(is_lost)[0]
            raise UserError(
                f"{what} overflows to NaN in float32 at x = {x[at]:g}, where it is "
                f"{expected[at]:.6g}; use sigmoid, softplus, tanh or expm1, which do not overflow"
            )
