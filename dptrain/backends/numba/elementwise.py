"""Elementwise kernels. Items are elements unless a docstring states otherwise.

Arrays are flat, so that the compiler sees one long loop. NaN passes through all of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptrain.backends.numba.vector import copy, interleave, transpose
from dptrain.native.jit import Items, kernel

Array = NDArray[Any]

BAND = 4096
"""Pixels that `channels_last` transposes in an item: 2 to 3 µs for three channels."""


@kernel
def scale_samples(items: Items, x: Array, y: Array, factors: Array) -> None:
    """y = x · factor of the sample for x and y (N, elements); items are samples.

    Y may be x. A product with 0 keeps a NaN.
    """
    for n in range(items.start, items.stop):
        row, result, factor = x[n], y[n], factors[n]
        for i in range(np.uintp(x.shape[1])):
            result[i] = row[i] * factor


@kernel
def channels_last(items: Items, target: Array, source: Array) -> None:
    """Transpose source (N, C, H·W) to target (N, H·W, C); items are `num_bands` of each sample."""
    channels, pixels = source.shape[1], source.shape[2]
    bands = -(-pixels // BAND)
    for item in range(items.start, items.stop):
        n, first = item // bands, item % bands * BAND
        count = min(BAND, pixels - first)
        at = n * channels * pixels
        if channels == 1 or pixels == 1:
            copy(source, at + first, target, at + first * channels, count * channels)
        elif channels == 3:
            interleave(source, at + first, pixels, target, at + first * channels, count)
        else:
            transpose(
                source.reshape(-1), at + first, pixels, target.reshape(-1), at + first * channels,
                channels, channels, count,
            )  # fmt: skip


def num_bands(pixels: int) -> int:
    """Return the number of items of each sample in `channels_last`."""
    return -(-pixels // BAND)


@kernel
def assign(items: Items, x: Array, y: Array) -> None:
    """y = x."""
    for i in range(np.uintp(items.start), np.uintp(items.stop)):
        y[i] = x[i]


@kernel
def add_bias(items: Items, x: Array, bias: Array, y: Array) -> None:
    """y = x + bias; x and y (pixels, C), bias (C,). Items are pixels."""
    channels = np.uintp(len(bias))
    for pixel in range(np.uintp(items.start), np.uintp(items.stop)):
        for c in range(channels):
            y[pixel, c] = x[pixel, c] + bias[c]


@kernel
def relu_mask(items: Items, dy: Array, y: Array, factor: float) -> None:
    """Multiply dy in place by `factor` if y > 0, else by 0.

    If y is the output of ReLU and dropout, this is the gradient of both, because dropped outputs
    are 0.
    """
    scale = np.float32(factor)
    for i in range(np.uintp(items.start), np.uintp(items.stop)):
        dy[i] = dy[i] * scale if y[i] > 0.0 else np.float32(0.0)
