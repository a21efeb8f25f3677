"""Local response normalisation; items are pixels, arrays are (N·H·W, C)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptrain.backends.numba.jit import inlined, kernel

Array = NDArray[Any]


def scratch_shape(threads: int, channels: int, radius: int) -> tuple[int, int, int]:
    """Three rows a thread; the outer ones have room for `radius` zeros on each side."""
    return threads, 3, channels + 2 * radius


@inlined
def _clear_margins(scratch: Array, thread: int, channels: int, radius: int) -> None:
    for c in range(radius):
        scratch[thread, 0, c] = 0.0
        scratch[thread, 0, channels + radius + c] = 0.0


@inlined
def _neighbours(scratch: Array, thread: int, channels: int, radius: int) -> None:
    """Row 1 = sums of 2·radius + 1 neighbours in row 0."""
    for c in range(channels):
        scratch[thread, 1, c] = scratch[thread, 0, c]
    for shift in range(1, 2 * radius + 1):
        for c in range(channels):
            scratch[thread, 1, c] += scratch[thread, 0, c + shift]


@inlined
def _powers(scratch: Array, thread: int, channels: int, bias: Any, alpha: Any, beta: Any) -> None:
    """Row 1: s = bias + alpha · row 1; row 2: s^−beta."""
    one = np.float32(1.0)
    if beta == np.float32(0.75):
        # The published value, by two square roots: they come sixteen at a time, powers do not.
        for c in range(channels):
            s = bias + alpha * scratch[thread, 1, c]
            scratch[thread, 1, c] = s
            root = np.sqrt(one / s)
            scratch[thread, 2, c] = root * np.sqrt(root)
    else:
        for c in range(channels):
            s = bias + alpha * scratch[thread, 1, c]
            scratch[thread, 1, c] = s
            scratch[thread, 2, c] = s**-beta


@inlined
def _scale(
    scratch: Array, thread: int, x: Array, pixel: int, radius: int, bias: Any, alpha: Any, beta: Any
) -> None:
    """Row 1 = s and row 2 = s^−beta of a pixel."""
    channels = x.shape[1]
    for c in range(channels):
        scratch[thread, 0, radius + c] = x[pixel, c] * x[pixel, c]
    _neighbours(scratch, thread, channels, radius)
    _powers(scratch, thread, channels, bias, alpha, beta)


@kernel
def lrn_forward(
    start: int, stop: int, thread: int,
    x: Array, y: Array, scratch: Array, radius: int, bias: float, alpha: float, beta: float,
) -> None:  # fmt: skip
    """Y = x · s^−beta with s = bias + alpha · Σ x² over neighbouring channels."""
    bias_, alpha_, beta_ = np.float32(bias), np.float32(alpha), np.float32(beta)
    channels = x.shape[1]
    _clear_margins(scratch, thread, channels, radius)
    for pixel in range(start, stop):
        _scale(scratch, thread, x, pixel, radius, bias_, alpha_, beta_)
        for c in range(channels):
            y[pixel, c] = x[pixel, c] * scratch[thread, 2, c]


@kernel
def lrn_backward(
    start: int, stop: int, thread: int,
    x: Array, dy: Array, dx: Array, scratch: Array,
    radius: int, bias: float, alpha: float, beta: float,
) -> None:  # fmt: skip
    """Dx = dy s^−β − 2αβ x Σ dy x s^(−β−1), the sum over neighbouring channels.

    s is computed again from x: that costs less than to have kept it.
    """
    bias_, alpha_, beta_ = np.float32(bias), np.float32(alpha), np.float32(beta)
    shared = np.float32(2.0 * alpha * beta)
    channels = x.shape[1]
    _clear_margins(scratch, thread, channels, radius)
    for pixel in range(start, stop):
        _scale(scratch, thread, x, pixel, radius, bias_, alpha_, beta_)
        for c in range(channels):
            power = scratch[thread, 2, c]
            s = scratch[thread, 1, c]
            scratch[thread, 0, radius + c] = dy[pixel, c] * x[pixel, c] * power / s
        _neighbours(scratch, thread, channels, radius)
        for c in range(channels):
            dx[pixel, c] = (
                dy[pixel, c] * scratch[thread, 2, c] - shared * x[pixel, c] * scratch[thread, 1, c]
            )
