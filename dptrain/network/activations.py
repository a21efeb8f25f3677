"""Descriptions of functions of single elements, in addition to ReLU and sigmoid.

The factors of `operations` count a function such as exp as one operation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from dptrain.errors import UserError
from dptrain.network.layers import Elementwise


@dataclass(frozen=True)
class LeakyReLU(Elementwise):
    """x if x > 0, else slope · x; the derivative at 0 is the slope.

    Attributes:
        slope: factor of negative numbers, at least 0 and less than 1.
    """

    kind: ClassVar[str] = "leaky_relu"

    slope: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= self.slope < 1.0:
            raise UserError(f"leaky_relu slope is {self.slope}; expected 0 ≤ slope < 1")


@dataclass(frozen=True)
class Tanh(Elementwise):
    """tanh(x); derivative 1 − tanh²(x)."""

    kind: ClassVar[str] = "tanh"
    operations: ClassVar[int] = 3


@dataclass(frozen=True)
class GELU(Elementwise):
    """x · Φ(x), with the distribution function Φ of the standard normal distribution.

    Source: Hendrycks and Gimpel, "Gaussian error linear units (GELUs)", 2016. This is the exact
    form with the error function, not its approximation with tanh.
    """

    kind: ClassVar[str] = "gelu"
    operations: ClassVar[int] = 5


@dataclass(frozen=True)
class SiLU(Elementwise):
    """x · σ(x), also called swish; derivative σ(x) · (1 + x · (1 − σ(x)))."""

    kind: ClassVar[str] = "silu"
    operations: ClassVar[int] = 5


SQRT_HALF = math.sqrt(0.5)
"""Φ(x) = ½ (1 + erf(x · SQRT_HALF))."""

NORMAL_DENSITY = 1.0 / math.sqrt(2.0 * math.pi)
"""The derivative of Φ at 0; at x it is this times exp(−x² / 2)."""
