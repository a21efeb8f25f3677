"""Local response normalisation; items are pixels, arrays are (N·H·W, C).

Pixels are taken by the tile. Their channels, with `radius` zeros on both sides, lie one after the
other in one row of scratch memory, so that a single long loop works on all of them: three times as
fast as a loop for each pixel.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from dptrain.backends.numba.jit import inlined, kernel
from dptrain.backends.numba.vector import F32, I32

Array = NDArray[Any]

TERMS, EVEN, ODD, SUMS, POWERS = range(5)
"""Rows of scratch memory: what is summed, partial sums, sums (later 1 / s), s^−beta."""

TILE = 1024
"""Elements of a row, about: five rows of them fit the first cache."""


def scratch_shape(threads: int, channels: int, radius: int) -> tuple[int, int, int]:
    """Rows of a tile for each thread; a window's width of zeros stands behind the last pixel."""
    width = channels + 2 * radius
    return threads, 5, max(1, TILE // width) * width + 2 * radius + 1


@intrinsic
def _bits_of(typingctx, value):  # type: ignore[no-untyped-def]
    """The bits of a float32 as an int32."""
    return types.int32(types.float32), lambda context, builder, sig, args: builder.bitcast(
        args[0], I32
    )


@intrinsic
def _float_of(typingctx, bits):  # type: ignore[no-untyped-def]
    """The float32 of these bits."""
    return types.float32(types.int32), lambda context, builder, sig, args: builder.bitcast(
        args[0], F32
    )


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
    if window == 1:
        for i in range(np.uintp(count)):
            scratch[thread, SUMS, i] = scratch[thread, TERMS, i]
        return
    # The window's width is odd: TERMS itself is the first sum.
    source, target, span, done = TERMS, EVEN, 1, 1
    while done < window:
        for i in range(np.uintp(count + window - 2 * span)):
            scratch[thread, target, i] = (
                scratch[thread, source, i] + scratch[thread, source, i + np.uintp(span)]
            )
        source, target = target, (ODD if target == EVEN else EVEN)
        span *= 2
        if window & span:
            so_far = TERMS if done == 1 else SUMS
            for i in range(np.uintp(count)):
                scratch[thread, SUMS, i] = (
                    scratch[thread, so_far, i] + scratch[thread, source, i + np.uintp(done)]
                )
            done += span


@inlined
def _scale(
    scratch: Array, thread: int, x: Array, first: int, pixels: int, radius: int,
    bias: Any, alpha: Any, beta: Any,
) -> None:  # fmt: skip
    """SUMS = 1 / s with s = bias + alpha · Σ x², POWERS = s^−beta."""
    channels = x.shape[1]
    width = channels + 2 * radius
    for p in range(pixels):
        at = np.uintp(p * width)
        for c in range(np.uintp(channels)):
            scratch[thread, TERMS, at + np.uintp(radius) + c] = x[first + p, c] * x[first + p, c]
    _sum_windows(scratch, thread, pixels * width, 2 * radius + 1)
    if beta == np.float32(0.75):
        _three_quarters(scratch, thread, pixels * width, bias, alpha)
        return
    for i in range(np.uintp(pixels * width)):
        s = bias + alpha * scratch[thread, SUMS, i]
        scratch[thread, SUMS, i] = np.float32(1.0) / s
        scratch[thread, POWERS, i] = s**-beta


@inlined
def _three_quarters(scratch: Array, thread: int, count: int, bias: Any, alpha: Any) -> None:
    """`_scale` for the published exponent: q = s^−¼, 1 / s = q⁴, s^−¾ = q³.

    By Newton's method, q ← q + ¼ q (1 − s q⁴), since a division and two square roots take three
    times as long. Halving the exponent twice gives a start within 3.2%; the error then falls to
    0.25%, 1.5e-5 and rounding: at most 4 ε in s^−¾, where the roots leave 2 ε.
    """
    one, quarter, nothing = np.float32(1.0), np.float32(0.25), np.float32(np.nan)
    for i in range(np.uintp(count)):
        s = bias + alpha * scratch[thread, SUMS, i]
        q = _float_of(np.int32(0x4F584000) - (_bits_of(s) >> np.int32(2)))
        square = q * q
        q += quarter * q * (one - s * (square * square))
        square = q * q
        q += quarter * q * (one - s * (square * square))
        square = q * q
        q += quarter * q * (one - s * (square * square))
        square = q * q
        # Where s is not a positive number the method finds nothing of use.
        none = np.float32(0.0) if s == np.float32(np.inf) else nothing
        valid = np.float32(0.0) < s and s < np.float32(np.inf)
        scratch[thread, SUMS, i] = square * square if valid else none
        scratch[thread, POWERS, i] = square * q if valid else none


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
                inverse = scratch[thread, SUMS, at + c]
                term = dy[first + p, c] * x[first + p, c] * power * inverse
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
