"""Functions of single elements and their derivatives."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from dptrain.backends.reference.operation import Operation
from dptrain.backends.replica import Context
from dptrain.network.activations import NORMAL_DENSITY, SQRT_HALF, LeakyReLU
from dptrain.network.outputs import sigmoid


class Rectifier(Operation):
    """max(x, 0)."""

    backward_reads: ClassVar[tuple[str, ...]] = ("x",)

    def forward(self, context: Context) -> None:
        a, n = self.arrays, context.n
        a["y"][:n] = np.maximum(a["x"][:n], 0.0)

    def backward(self, context: Context) -> None:
        a, n = self.arrays, context.n
        a["dx"][:n] = np.where(a["x"][:n] > 0.0, a["dy"][:n], 0.0)


class Logistic(Operation):
    """σ(x)."""

    backward_reads: ClassVar[tuple[str, ...]] = ("y",)

    def forward(self, context: Context) -> None:
        a, n = self.arrays, context.n
        a["y"][:n] = sigmoid(a["x"][:n])

    def backward(self, context: Context) -> None:
        a, n = self.arrays, context.n
        y = a["y"][:n]
        a["dx"][:n] = a["dy"][:n] * y * (1.0 - y)


class LeakyRectifier(Operation):
    """x if x > 0, else slope · x."""

    backward_reads: ClassVar[tuple[str, ...]] = ("x",)

    def _factor(self, x: NDArray[Any]) -> NDArray[Any]:
        layer = self.node.layer
        assert isinstance(layer, LeakyReLU)
        return np.where(x > 0.0, 1.0, layer.slope)

    def forward(self, context: Context) -> None:
        x = self.arrays["x"][: context.n]
        self.arrays["y"][: context.n] = x * self._factor(x)

    def backward(self, context: Context) -> None:
        a, n = self.arrays, context.n
        a["dx"][:n] = a["dy"][:n] * self._factor(a["x"][:n])


class TangentHyperbolic(Operation):
    """tanh(x)."""

    backward_reads: ClassVar[tuple[str, ...]] = ("y",)

    def forward(self, context: Context) -> None:
        a, n = self.arrays, context.n
        a["y"][:n] = np.tanh(a["x"][:n])

    def backward(self, context: Context) -> None:
        a, n = self.arrays, context.n
        a["dx"][:n] = a["dy"][:n] * (1.0 - a["y"][:n] ** 2)


_erf = np.vectorize(math.erf, otypes=[np.float64])
"""The error function, which NumPy does not have."""


class GaussianErrorLinear(Operation):
    """x · Φ(x) with Φ(x) = ½ (1 + erf(x / √2)); derivative Φ(x) + x · Φ'(x)."""

    backward_reads: ClassVar[tuple[str, ...]] = ("x",)

    @staticmethod
    def _distribution(x: NDArray[Any]) -> NDArray[Any]:
        return np.asarray(0.5 * (1.0 + _erf(x * SQRT_HALF)))

    def forward(self, context: Context) -> None:
        x = self.arrays["x"][: context.n]
        self.arrays["y"][: context.n] = x * self._distribution(x)

    def backward(self, context: Context) -> None:
        a, n = self.arrays, context.n
        x = a["x"][:n]
        slope = self._distribution(x) + x * NORMAL_DENSITY * np.exp(-0.5 * x * x)
        a["dx"][:n] = a["dy"][:n] * slope


class SigmoidLinear(Operation):
    """x · σ(x); derivative σ(x) · (1 + x · (1 − σ(x)))."""

    backward_reads: ClassVar[tuple[str, ...]] = ("x",)

    def forward(self, context: Context) -> None:
        x = self.arrays["x"][: context.n]
        self.arrays["y"][: context.n] = x * sigmoid(x)

    def backward(self, context: Context) -> None:
        a, n = self.arrays, context.n
        x = a["x"][:n]
        share = sigmoid(x)
        a["dx"][:n] = a["dy"][:n] * share * (1.0 + x * (1.0 - share))
