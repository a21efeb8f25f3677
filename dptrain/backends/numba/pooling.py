"""Pooling kernels over NHWC maps; items are samples.

Pool geometry is an int64 array (pad_top, pad_left, stride_v, stride_h, win_v, win_h, H, W).
Window positions outside the map take no part. The inner loops run over channels, which lie side
by side.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptrain.backends.numba.jit import inlined, kernel

Array = NDArray[Any]


@kernel
def max_forward(
    start: int, stop: int, thread: int, x: Array, y: Array, argmax: Array, pool_geometry: Array
) -> None:
    """Y = largest of each window, argmax (int32) = its place; the first, among equals."""
    top, left, vertical, horizontal, window_v, window_h, height, width = pool_geometry
    channels = x.shape[3]
    for n in range(start, stop):
        for i in range(y.shape[1]):
            for j in range(y.shape[2]):
                first = True
                for p in range(window_v * window_h):
                    row = i * vertical + p // window_h - top
                    column = j * horizontal + p % window_h - left
                    if row < 0 or row >= height or column < 0 or column >= width:
                        continue
                    if first:
                        for c in range(channels):
                            y[n, i, j, c] = x[n, row, column, c]
                            argmax[n, i, j, c] = p
                        first = False
                        continue
                    for c in range(channels):
                        value, best = x[n, row, column, c], y[n, i, j, c]
                        # A NaN is larger than all, and stays.
                        larger = value > best or value != value
                        y[n, i, j, c] = value if larger else best
                        argmax[n, i, j, c] = np.int32(p) if larger else argmax[n, i, j, c]


@kernel
def max_backward(
    start: int, stop: int, thread: int, dy: Array, argmax: Array, dx: Array, pool_geometry: Array
) -> None:
    """Gradient: dx = sum over the windows that hold an element of dy where argmax names it."""
    top, left, vertical, horizontal, window_v, window_h, height, width = pool_geometry
    channels = dx.shape[3]
    for n in range(start, stop):
        for row in range(height):
            for column in range(width):
                for c in range(channels):
                    dx[n, row, column, c] = 0.0
        for i in range(dy.shape[1]):
            for j in range(dy.shape[2]):
                for p in range(window_v * window_h):
                    row = i * vertical + p // window_h - top
                    column = j * horizontal + p % window_h - left
                    if 0 <= row < height and 0 <= column < width:
                        for c in range(channels):
                            here = argmax[n, i, j, c] == p
                            dx[n, row, column, c] += dy[n, i, j, c] if here else np.float32(0.0)


@inlined
def _weight(i: int, j: int, pool_geometry: Array, average: bool) -> Any:
    """What a window's sum is multiplied with: 1, or 1 / (its elements inside the map)."""
    if not average:
        return np.float32(1.0)
    top, left, vertical, horizontal, window_v, window_h, height, width = pool_geometry
    row, column = i * vertical - top, j * horizontal - left
    rows = min(row + window_v, height) - max(row, 0)
    columns = min(column + window_h, width) - max(column, 0)
    return np.float32(1.0) / np.float32(rows * columns)


@kernel
def sum_forward(
    start: int, stop: int, thread: int, x: Array, y: Array, pool_geometry: Array, average: bool
) -> None:
    """Y = sum, or mean, of each window."""
    top, left, vertical, horizontal, window_v, window_h, height, width = pool_geometry
    channels = x.shape[3]
    for n in range(start, stop):
        for i in range(y.shape[1]):
            for j in range(y.shape[2]):
                for c in range(channels):
                    y[n, i, j, c] = 0.0
                for p in range(window_v * window_h):
                    row = i * vertical + p // window_h - top
                    column = j * horizontal + p % window_h - left
                    if 0 <= row < height and 0 <= column < width:
                        for c in range(channels):
                            y[n, i, j, c] += x[n, row, column, c]
                weight = _weight(i, j, pool_geometry, average)
                for c in range(channels):
                    y[n, i, j, c] *= weight


@kernel
def sum_backward(
    start: int, stop: int, thread: int, dy: Array, dx: Array, pool_geometry: Array, average: bool
) -> None:
    """Dx = sum over the windows that hold an element of dy, over their size where averaged."""
    top, left, vertical, horizontal, window_v, window_h, height, width = pool_geometry
    channels = dx.shape[3]
    for n in range(start, stop):
        for row in range(height):
            for column in range(width):
                for c in range(channels):
                    dx[n, row, column, c] = 0.0
        for i in range(dy.shape[1]):
            for j in range(dy.shape[2]):
                weight = _weight(i, j, pool_geometry, average)
                for p in range(window_v * window_h):
                    row = i * vertical + p // window_h - top
                    column = j * horizontal + p % window_h - left
                    if 0 <= row < height and 0 <= column < width:
                        for c in range(channels):
                            dx[n, row, column, c] += weight * dy[n, i, j, c]
