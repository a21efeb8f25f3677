"""Dense layers as plain loops."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptrain.backends.numba.jit import kernel

Array = NDArray[Any]


def dense_scratch(*args: int) -> int:
    """Elements of scratch memory a thread."""
    return 1


@kernel
def dense_forward(
    start: int, stop: int, thread: int, x: Array, w: Array, b: Array, y: Array, relu: bool
) -> None:
    """y = x w + b, perhaps rectified, for rows start … stop − 1."""
    for n in range(start, stop):
        for k in range(y.shape[1]):
            y[n, k] = b[k]
        for c in range(x.shape[1]):
            for k in range(y.shape[1]):
                y[n, k] += x[n, c] * w[c, k]
        for k in range(y.shape[1]):
            if relu and y[n, k] <= 0.0:
                y[n, k] = 0.0


@kernel
def dense_backward_input(
    start: int, stop: int, thread: int, dy: Array, w: Array, dx: Array, scratch: Array
) -> None:
    """dx = dy wᵀ, for rows start … stop − 1."""
    for n in range(start, stop):
        for c in range(dx.shape[1]):
            value = np.float32(0.0)
            for k in range(dy.shape[1]):
                value += dy[n, k] * w[c, k]
            dx[n, c] = value


@kernel
def dense_backward_weight(
    start: int, stop: int, thread: int, x: Array, dy: Array, dw: Array, db: Array
) -> None:
    """dw = xᵀ dy for inputs start … stop − 1; the first thread also db = Σ dy."""
    for c in range(start, stop):
        for k in range(dy.shape[1]):
            dw[c, k] = 0.0
        for n in range(x.shape[0]):
            for k in range(dy.shape[1]):
                dw[c, k] += x[n, c] * dy[n, k]
    if thread == 0:
        for k in range(dy.shape[1]):
            db[k] = 0.0
        for n in range(dy.shape[0]):
            for k in range(dy.shape[1]):
                db[k] += dy[n, k]
