"""Gradient clipping by the global norm, in host memory.

The norm is that of the summed gradient of all parameters. If several ranks share the update, each
computes the squares of its slice; they add all squares in the same order, so that the factor does
not depend on the number of ranks and threads:

1. `Clipping.add_squares` stores the sum of squares of every 16 elements of a slice in float64.
2. The ranks that share these sums wait for each other (`GradientSum.share_squares`).
3. `clip_factor` adds all of them; `Clipping.scale` multiplies the slice.

A GPU does the same for the whole gradient in two kernels (``clipping.cu``).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dptrain.plan.flat import ALIGNMENT

SMALLEST_NORM = 1e-6
"""Added to the norm, as in PyTorch, so that a gradient of zeros is not divided by zero."""


class Clipping(NamedTuple):
    """The kernels that clip a slice of the gradient.

    Attributes:
        add_squares: stores the sums of squares of the slice.
        scale: multiplies the slice by a factor.
    """

    add_squares: Callable[[], None]
    scale: Callable[[float], None]


def numpy_clipping(gradient: NDArray[Any], squares: NDArray[np.float64]) -> Clipping:
    """Return the kernels by NumPy.

    Args:
        gradient: (n,), a slice of the flat gradient; n is a multiple of 16.
        squares: (n / 16,), receives the sums of squares.
    """

    def add_squares() -> None:
        rows = np.square(gradient, dtype=np.float64).reshape(-1, ALIGNMENT)
        np.sum(rows, axis=1, out=squares)

    def scale(factor: float) -> None:
        np.multiply(gradient, gradient.dtype.type(factor), out=gradient)

    return Clipping(add_squares, scale)


def clip_factor(squares: NDArray[np.float64], clip_norm: float) -> float:
    """Return the factor of the gradient, at most 1.

    Args:
        squares: sums of squares of the whole gradient; NumPy adds them in an order that depends on
            their number alone.
        clip_norm: the largest norm.
    """
    norm = math.sqrt(float(np.sum(squares)))
    return min(1.0, clip_norm / (norm + SMALLEST_NORM))
