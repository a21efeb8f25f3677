"""Sums, products and concatenations of maps, and what is made of all pixels of a map."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptrain.backends.numba.vector import copy
from dptrain.native.jit import Items, kernel

Array = NDArray[Any]


@kernel
def add(items: Items, x: Array, x2: Array, y: Array, relu: bool) -> None:
    """y = x + x2, optionally max(x + x2, 0), for flat arrays; items are elements.

    Y may be x or x2. NaN passes through.
    """
    if relu:
        for i in range(np.uintp(items.start), np.uintp(items.stop)):
            value = x[i] + x2[i]
            y[i] = np.float32(0.0) if value <= 0.0 else value
    else:
        for i in range(np.uintp(items.start), np.uintp(items.stop)):
            y[i] = x[i] + x2[i]


@kernel
def multiply(items: Items, x: Array, factor: Array, y: Array, repeats: int) -> None:
    """y = x · factor for x and y (pixels, C); items are pixels.

    Row p of x is multiplied by row p // repeats of factor (rows, C) or (rows, 1).
    """
    channels = np.uintp(x.shape[1])
    for pixel in range(np.uintp(items.start), np.uintp(items.stop)):
        row, target, factors = x[pixel], y[pixel], factor[pixel // np.uintp(repeats)]
        if len(factors) == len(row):
            for c in range(channels):
                target[c] = row[c] * factors[c]
        else:
            scale = factors[0]
            for c in range(channels):
                target[c] = row[c] * scale


@kernel
def sum_products_of_pixels(items: Items, x: Array, x2: Array, y: Array) -> None:
    """y (N, C) = sum over the pixels of x · x2, both (N, H·W, C); items are samples."""
    channels = np.uintp(x.shape[2])
    for n in range(items.start, items.stop):
        total = y[n]
        for c in range(channels):
            total[c] = 0.0
        for p in range(x.shape[1]):
            row, other = x[n, p], x2[n, p]
            for c in range(channels):
                total[c] += row[c] * other[c]


@kernel
def sum_products_of_channels(items: Items, x: Array, x2: Array, y: Array) -> None:
    """y (pixels,) = sum over the channels of x · x2, both (pixels, C); items are pixels."""
    for pixel in range(items.start, items.stop):
        total, row, other = np.float32(0.0), x[pixel], x2[pixel]
        for c in range(len(row)):
            total += row[c] * other[c]
        y[pixel] = total


@kernel
def copy_channels(
    items: Items,
    source: Array, source_channel: int, target: Array, target_channel: int, channels: int,
) -> None:  # fmt: skip
    """Copy some channels of maps (pixels, channels); items are pixels."""
    source_flat, target_flat = source.reshape(-1), target.reshape(-1)
    for pixel in range(items.start, items.stop):
        copy(
            source_flat, pixel * source.shape[1] + source_channel,
            target_flat, pixel * target.shape[1] + target_channel, channels,
        )  # fmt: skip


@kernel
def select_channels(items: Items, x: Array, y: Array, first: int, groups: int) -> None:
    """y (pixels, K) = channels of x (pixels, C); items are pixels.

    Channel g + i · groups of y is channel first + g · K / groups + i of x, or 0 if there is none.
    """
    size = y.shape[1] // groups
    for pixel in range(items.start, items.stop):
        row, target = x[pixel], y[pixel]
        for g in range(groups):
            start = first + g * size
            before = min(max(-start, 0), size)
            after = max(min(len(row) - start, size), before)
            for i in range(before):
                target[i * groups + g] = 0.0
            for i in range(before, after):
                target[i * groups + g] = row[start + i]
            for i in range(after, size):
                target[i * groups + g] = 0.0


@kernel
def mean_of_pixels(items: Items, x: Array, y: Array) -> None:
    """y = mean over the pixels of x (N, H·W, C); items are samples."""
    pixels, channels = x.shape[1], np.uintp(x.shape[2])
    factor = np.float32(1.0 / pixels)
    for n in range(items.start, items.stop):
        total = y[n]
        for c in range(channels):
            total[c] = 0.0
        for p in range(pixels):
            row = x[n, p]
            for c in range(channels):
                total[c] += row[c]
        for c in range(channels):
            total[c] *= factor


@kernel
def max_of_pixels(items: Items, x: Array, y: Array, argmax: Array) -> None:
    """y and argmax = maximum over the pixels of x (N, H·W, C) and its pixel; items are samples.

    Of equal elements, the first one is the maximum. NaN is larger than all numbers.
    """
    pixels, channels = x.shape[1], np.uintp(x.shape[2])
    for n in range(items.start, items.stop):
        largest, chosen = y[n], argmax[n]
        for c in range(channels):
            largest[c] = x[n, 0, c]
            chosen[c] = 0
        for p in range(1, pixels):
            row = x[n, p]
            for c in range(channels):
                is_larger = not row[c] <= largest[c] and largest[c] == largest[c]
                largest[c] = row[c] if is_larger else largest[c]
                chosen[c] = p if is_larger else chosen[c]


@kernel
def max_of_pixels_backward(items: Items, dy: Array, dx: Array, argmax: Array) -> None:
    """dx (N, H·W, C) = dy at the pixels argmax (N, C), else 0; items are samples."""
    pixels, channels = dx.shape[1], np.uintp(dx.shape[2])
    for n in range(items.start, items.stop):
        gradient, chosen = dy[n], argmax[n]
        for p in range(pixels):
            row = dx[n, p]
            for c in range(channels):
                row[c] = gradient[c] if chosen[c] == p else np.float32(0.0)


@kernel
def mean_of_pixels_backward(items: Items, dy: Array, dx: Array) -> None:
    """dx (N, H·W, C) = dy / (H·W) at all pixels; items are samples."""
    pixels, channels = dx.shape[1], np.uintp(dx.shape[2])
    factor = np.float32(1.0 / pixels)
    for n in range(items.start, items.stop):
        gradient = dy[n]
        for p in range(pixels):
            row = dx[n, p]
            for c in range(channels):
                row[c] = gradient[c] * factor
