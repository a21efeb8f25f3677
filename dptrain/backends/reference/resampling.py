"""Padding and resizing of maps."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptrain.backends.reference.operation import Operation
from dptrain.backends.replica import Context
from dptrain.network.maps.resampling import Resampling, Taps, transposed


class Resampled(Operation[Resampling]):
    """Sums of rows and of columns. The gradient has the transposed taps."""

    def forward(self, context: Context) -> None:
        a, n = self.arrays, context.n
        rows, columns = self.layer.taps(self.node.input_shape)
        a["y"][:n] = _sums(_sums(a["x"][:n], rows, axis=2), columns, axis=3)

    def backward(self, context: Context) -> None:
        a, n = self.arrays, context.n
        pairs = zip(self.layer.taps(self.node.input_shape), self.node.input_shape[1:], strict=True)
        rows, columns = (transposed(taps, size) for taps, size in pairs)
        a["dx"][:n] = _sums(_sums(a["dy"][:n], rows, axis=2), columns, axis=3)


def _sums(x: NDArray[Any], taps: Taps, axis: int) -> NDArray[Any]:
    """Return the weighted sums of positions of an axis."""
    lines, zero = np.moveaxis(x, axis, 0), np.zeros_like(x.take(0, axis))
    sums = [sum((weight * lines[source] for source, weight in read), zero) for read in taps]
    return np.stack(sums, axis)
