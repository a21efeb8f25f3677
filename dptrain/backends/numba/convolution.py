"""Convolution as plain loops."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptrain.backends.numba.jit import inlined, kernel

Array = NDArray[Any]


def forward_scratch(*args: Any) -> int:
    """Elements of scratch memory a thread."""
    return 1


def backward_weight_scratch(*args: Any) -> int:
    """Elements of scratch memory a thread."""
    return 1


def backward_input_scratch(*args: Any) -> int:
    """Elements of scratch memory a thread."""
    return 1


@inlined
def _pixel(n: int, i: int, j: int, k: int, x: Array, w: Array, b: Array, geometry: Array) -> Any:
    value = b[k]
    for r in range(w.shape[0]):
        row = i * geometry[2] + r - geometry[0]
        if row < 0 or row >= x.shape[1]:
            continue
        for s in range(w.shape[1]):
            column = j * geometry[3] + s - geometry[1]
            if column < 0 or column >= x.shape[2]:
                continue
            for c in range(w.shape[2]):
                value += x[n, row, column, c] * w[r, s, c, k]
    return value


@kernel
def conv2d_forward(
    start: int, stop: int, thread: int,
    x: Array, w: Array, b: Array, y: Array, geometry: Array, relu: bool, scratch: Array,
) -> None:  # fmt: skip
    """y = x ⊛ w + b, perhaps rectified, for samples start … stop − 1."""
    for n in range(start, stop):
        for i in range(y.shape[1]):
            for j in range(y.shape[2]):
                for k in range(y.shape[3]):
                    value = _pixel(n, i, j, k, x, w, b, geometry)
                    y[n, i, j, k] = np.float32(0.0) if relu and value <= 0.0 else value


@kernel
def conv2d_relu_pool_forward(
    start: int, stop: int, thread: int,
    x: Array, w: Array, b: Array, y: Array, argmax: Array,
    geometry: Array, pool_geometry: Array, scratch: Array,
) -> None:  # fmt: skip
    """Max-pooled rectified convolution; argmax is the place in the window, 255 where y is 0."""
    top, left, vertical, horizontal, window_v, window_h, ho, wo = pool_geometry
    for n in range(start, stop):
        for i in range(y.shape[1]):
            for j in range(y.shape[2]):
                for k in range(y.shape[3]):
                    best, place = np.float32(0.0), 255
                    for p in range(window_v * window_h):
                        row = i * vertical + p // window_h - top
                        column = j * horizontal + p % window_h - left
                        if 0 <= row < ho and 0 <= column < wo:
                            value = _pixel(n, row, column, k, x, w, b, geometry)
                            if value > best or value != value:
                                best, place = value, p
                    y[n, i, j, k] = best
                    argmax[n, i, j, k] = place


@kernel
def conv2d_backward_input(
    start: int, stop: int, thread: int,
    dy: Array, w: Array, dx: Array, geometry: Array, scratch: Array,
) -> None:  # fmt: skip
    """dx = Σ dy w over the outputs that each input reaches."""
    for n in range(start, stop):
        dx[n] = 0.0
        for i in range(dy.shape[1]):
            for j in range(dy.shape[2]):
                for r in range(w.shape[0]):
                    row = i * geometry[2] + r - geometry[0]
                    if row < 0 or row >= dx.shape[1]:
                        continue
                    for s in range(w.shape[1]):
                        column = j * geometry[3] + s - geometry[1]
                        if column < 0 or column >= dx.shape[2]:
                            continue
                        for c in range(w.shape[2]):
                            value = np.float32(0.0)
                            for k in range(w.shape[3]):
                                value += dy[n, i, j, k] * w[r, s, c, k]
                            dx[n, row, column, c] += value


@kernel
def conv2d_backward_weight(
    start: int, stop: int, thread: int,
    x: Array, dy: Array, partial: Array, geometry: Array, window: Array, scratch: Array,
) -> None:  # fmt: skip
    """This thread's share of dw and, behind it, db."""
    filters, channels = dy.shape[3], x.shape[3]
    places, columns = window[0] * window[1], window[1]
    partial[thread] = 0.0
    for n in range(start, stop):
        for i in range(dy.shape[1]):
            for j in range(dy.shape[2]):
                for k in range(filters):
                    partial[thread, places * channels * filters + k] += dy[n, i, j, k]
                for p in range(places):
                    row = i * geometry[2] + p // columns - geometry[0]
                    column = j * geometry[3] + p % columns - geometry[1]
                    if row < 0 or row >= x.shape[1] or column < 0 or column >= x.shape[2]:
                        continue
                    for c in range(channels):
                        for k in range(filters):
                            partial[thread, (p * channels + c) * filters + k] += (
                                x[n, row, column, c] * dy[n, i, j, k]
                            )


@kernel
def reduce_partials(
    start: int, stop: int, thread: int, partial: Array, dw_flat: Array, db: Array
) -> None:
    """Sum over the threads, for elements start … stop − 1 of dw and db together."""
    for i in range(start, stop):
        value = partial[0, i]
        for t in range(1, partial.shape[0]):
            value += partial[t, i]
        if i < dw_flat.size:
            dw_flat[i] = value
        else:
            db[i - dw_flat.size] = value
