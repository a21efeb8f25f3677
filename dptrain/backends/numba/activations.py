"""Activations other than ReLU and sigmoid, and their derivatives. Items are elements.

Arrays are flat. NaN passes through all kernels.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptrain.backends.numba.jit import inlined, kernel
from dptrain.network.activations import NORMAL_DENSITY, SQRT_HALF

Array = NDArray[Any]


@kernel
def leaky_relu_forward(
    start: int, stop: int, thread: int, x: Array, y: Array, slope: float
) -> None:
    """y = x if x > 0, else slope · x."""
    factor = np.float32(slope)
    for i in range(np.uintp(start), np.uintp(stop)):
        y[i] = x[i] if x[i] > 0.0 else factor * x[i]


@kernel
def leaky_relu_backward(
    start: int, stop: int, thread: int, dy: Array, y: Array, dx: Array, slope: float
) -> None:
    """dx = dy if y > 0, else slope · dy. The slope is not negative, so y has the sign of x."""
    factor = np.float32(slope)
    for i in range(np.uintp(start), np.uintp(stop)):
        dx[i] = dy[i] if y[i] > 0.0 else factor * dy[i]


@kernel
def tanh_forward(start: int, stop: int, thread: int, x: Array, y: Array) -> None:
    """y = tanh(x)."""
    for i in range(np.uintp(start), np.uintp(stop)):
        y[i] = np.tanh(x[i])


@kernel
def tanh_backward(start: int, stop: int, thread: int, dy: Array, y: Array, dx: Array) -> None:
    """dx = dy (1 − y²)."""
    for i in range(np.uintp(start), np.uintp(stop)):
        dx[i] = dy[i] * (np.float32(1.0) - y[i] * y[i])


@inlined
def _normal_distribution(x):  # type: ignore[no-untyped-def]
    """Return Φ(x) in float64. The complementary error function has no cancellation at x < 0."""
    return 0.5 * math.erfc(-SQRT_HALF * x)


@kernel
def gelu_forward(start: int, stop: int, thread: int, x: Array, y: Array) -> None:
    """y = x Φ(x)."""
    for i in range(np.uintp(start), np.uintp(stop)):
        value = np.float64(x[i])
        y[i] = value * _normal_distribution(value)


@kernel
def gelu_backward(start: int, stop: int, thread: int, dy: Array, x: Array, dx: Array) -> None:
    """dx = dy (Φ(x) + x φ(x)), with the density φ."""
    for i in range(np.uintp(start), np.uintp(stop)):
        value = np.float64(x[i])
        density = NORMAL_DENSITY * math.exp(-0.5 * value * value)
        dx[i] = np.float64(dy[i]) * (_normal_distribution(value) + value * density)


@inlined
def _sigmoid(x):  # type: ignore[no-untyped-def]
    """Return σ(x). At x < −88 the exponential overflows to infinity, and the result is 0."""
    return np.float32(1.0) / (np.float32(1.0) + math.exp(-x))


@kernel
def silu_forward(start: int, stop: int, thread: int, x: Array, y: Array) -> None:
    """y = x σ(x)."""
    for i in range(np.uintp(start), np.uintp(stop)):
        y[i] = x[i] * _sigmoid(x[i])


@kernel
def silu_backward(start: int, stop: int, thread: int, dy: Array, x: Array, dx: Array) -> None:
    """dx = dy σ(x) (1 + x (1 − σ(x)))."""
    one = np.float32(1.0)
    for i in range(np.uintp(start), np.uintp(stop)):
        sigmoid = _sigmoid(x[i])
        dx[i] = dy[i] * sigmoid * (one + x[i] * (one - sigmoid))
