"""Padding and resizing: weighted sums of rows and columns of maps."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptrain.backends.axis_taps import AxisTaps
from dptrain.native.jit import Items, kernel

Array = NDArray[Any]


@kernel
def resample(items: Items, x: Array, y: Array, rows: AxisTaps, columns: AxisTaps) -> None:
    """y (N, Ho, Wo, C) = sums of pixels of x (N, H, W, C) by taps; items are rows of y."""
    height, width, channels = y.shape[1], y.shape[2], np.uintp(y.shape[3])
    for item in range(items.start, items.stop):
        n, i = item // height, item % height
        for j in range(width):
            total = y[n, i, j]
            for c in range(channels):
                total[c] = 0.0
            for a in range(rows.starts[i], rows.starts[i + 1]):
                for b in range(columns.starts[j], columns.starts[j + 1]):
                    pixel = x[n, rows.sources[a], columns.sources[b]]
                    weight = rows.weights[a] * columns.weights[b]
                    for c in range(channels):
                        total[c] += weight * pixel[c]
