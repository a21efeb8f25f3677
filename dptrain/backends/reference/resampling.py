"""Resampling of maps: y = R x Cᵀ, and dx = Rᵀ dy C."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptrain.backends.reference.operation import Operation
from dptrain.backends.replica import Context
from dptrain.network.rearranging import Resampling, Taps


def _matrix(taps: Taps, size: int) -> NDArray[np.float64]:
    """Return a matrix (outputs, size)."""
    found = np.zeros((len(taps), size))
    for row, terms in zip(found, taps, strict=True):
        for source, weight in terms:
            row[source] += weight
    return found


class ResamplingOperation(Operation[Resampling]):
    """Padding, resizing and parts of maps."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        _, height, width = self.node.input_shape
        rows, columns = self.layer.taps((height, width))
        self.rows, self.columns = _matrix(rows, height), _matrix(columns, width)

    def forward(self, context: Context) -> None:
        a, n = self.arrays, context.n
        a["y"][:n] = self.rows @ a["x"][:n] @ self.columns.T

    def backward(self, context: Context) -> None:
        a, n = self.arrays, context.n
        a["dx"][:n] = self.rows.T @ a["dy"][:n] @ self.columns
