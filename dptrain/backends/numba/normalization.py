"""Local response normalisation; items are pixels, arrays are (N·H·W, C).

Pixels are taken by the tile. Their channels, with `radius` zeros on both sides, lie one after the
other in one row of scratch memory, so that a single long loop works on all of them: three times as
fast as a loop for each pixel.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptrain.backends.numba.jit import inlined, kernel

Array = NDArray[Any]

TERMS, EVEN, ODD, SUMS, POWERS = range(5)
"""Rows of scratch memory: what is summed, partial sums, sums (later s), s^−beta."""

TILE = 1024
"""Elements of a row, about: five rows of them fit the first cache."""


def scratch_shape(threads: int, channels: int, radius: int) -> tuple[int, int, int]:
    """Rows of a tile for each thread; a window's width of zeros stands behind the last pixel."""
    width = channels + 2 * radius
    return threads, 5, max(1, TILE // width) * width + 2 * radius + 1


@inlined
def _clear(scratch: Array, thread: int) -> None:
    for i in range(np.uintp(scratch.shape[2])):
        scratch[thread, TERMS, i] = 0.0


@inlined
def _sum_windows(scratch: Array, thread: int, count: int, window: int) -> None:
    """SUMS[i] = TERMS[i] + … + TERMS[i + window − 1] for i below `count`.

    Sums of 1, 2, 4, … terms are made from each other; those that the binary digits of `window`
    name add up to it: four passes for a window of 9.
    """
    source, target, span, done = TERMS, EVEN, 1, 0
    while True:
        if window & span:
            if done:
                for i in range(np.uintp(count)):
                    scratch[thread, SUMS, i] += scratch[thread, source, i + np.uintp(done)]
            else:
                for i in range(np.uintp(count)):
                    scratch[thread, SUMS, i] = scratch[thread, source, i]
            done += span
        if done == window:
            return
        for i in range(np.uintp(count + window - 2 * span)):
            scratch[thread, target, i] = (
                scratch[thread, source, i] + scratch[thread, source, i + np.uintp(span)]
            )
        source, target = target, (ODD if target == EVEN else EVEN)
        span *= 2


@inlined
def _scale(
    scratch: Array, thread: int, x: Array, first: int, pixels: int, radius: int,
    bias: Any, alpha: Any, beta: Any,
) -> None:  # fmt: skip
    """SUMS = s = bias + alpha · Σ x², POWERS = s^−beta."""
    channels, one = x.shape[1], np.float32(1.0)
    width = channels + 2 * radius
    for p in range(pixels):
        at = np.uintp(p * width)
        for c in range(np.uintp(channels)):
            scratch[thread, TERMS, at + np.uintp(radius) + c] = x[first + p, c] * x[first + p, c]
    _sum_windows(scratch, thread, pixels * width, 2 * radius + 1)
    if beta == np.float32(0.75):
        # The published value, by two square roots: they come sixteen at a time, powers do not.
        for i in range(np.uintp(pixels * width)):
            s = bias + alpha * scratch[thread, SUMS, i]
            scratch[thread, SUMS, i] = s
            root = np.sqrt(one / s)
            scratch[thread, POWERS, i] = root * np.sqrt(root)
    else:
        for i in range(np.uintp(pixels * width)):
            s = bias + alpha * scratch[thread, SUMS, i]
            scratch[thread, SUMS, i] = s
            scratch[thread, POWERS, i] = s**-beta


@kernel
def lrn_forward(
    start: int, stop: int, thread: int,
    x: Array, y: Array, scratch: Array, radius: int, bias: float, alpha: float, beta: float,
) -> None:  # fmt: skip
    """Normalise: y = x · s^−beta with s = bias + alpha · Σ x² over neighbouring channels."""
    bias_, alpha_, beta_ = np.float32(bias), np.float32(alpha), np.float32(beta)
    channels = x.shape[1]
    width = channels + 2 * radius
    tile = scratch.shape[2] // width
    _clear(scratch, thread)
    for first in range(start, stop, tile):
        pixels = min(tile, stop - first)
        _scale(scratch, thread, x, first, pixels, radius, bias_, alpha_, beta_)
        for p in range(pixels):
            at = np.uintp(p * width)
            for c in range(np.uintp(channels)):
                y[first + p, c] = x[first + p, c] * scratch[thread, POWERS, at + c]


@kernel
def lrn_backward(
    start: int, stop: int, thread: int,
    x: Array, dy: Array, dx: Array, scratch: Array,
    radius: int, bias: float, alpha: float, beta: float,
) -> None:  # fmt: skip
    """Its gradient: dx = dy s^−β − 2αβ x Σ dy x s^(−β−1), the sum over neighbouring channels.

    s is computed again from x: that costs less than to have kept it.
    """
    bias_, alpha_, beta_ = np.float32(bias), np.float32(alpha), np.float32(beta)
    shared = np.float32(2.0 * alpha * beta)
    channels = x.shape[1]
    width = channels + 2 * radius
    tile = scratch.shape[2] // width
    _clear(scratch, thread)
    for first in range(start, stop, tile):
        pixels = min(tile, stop - first)
        _scale(scratch, thread, x, first, pixels, radius, bias_, alpha_, beta_)
        for p in range(pixels):
            at = np.uintp(p * width)
            for c in range(np.uintp(channels)):
                power = scratch[thread, POWERS, at + c]
                s = scratch[thread, SUMS, at + c]
                term = dy[first + p, c] * x[first + p, c] * power / s
                scratch[thread, TERMS, at + np.uintp(radius) + c] = term
        _sum_windows(scratch, thread, pixels * width, 2 * radius + 1)
        for p in range(pixels):
            at = np.uintp(p * width)
            for c in range(np.uintp(channels)):
                power, total = (
                    scratch[thread, POWERS, at + c],
                    scratch[thread, SUMS, at + c],
                )
                dx[first + p, c] = dy[first + p, c] * power - shared * x[first + p, c] * total
