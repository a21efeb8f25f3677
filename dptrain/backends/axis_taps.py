"""Taps of resampling layers as arrays, which kernels read."""

from __future__ import annotations

from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dptrain.network.maps.resampling import Resampling, Taps, transposed
from dptrain.network.network import Node


class AxisTaps(NamedTuple):
    """The taps of an axis: those of output i are elements starts[i] to starts[i + 1] − 1.

    Attributes:
        starts: int32 (outputs + 1,).
        sources: int32, positions of the input; one 0 at the end.
        weights: float32, their weights.
    """

    starts: NDArray[Any]
    sources: NDArray[Any]
    weights: NDArray[Any]

    @classmethod
    def of(cls, taps: Taps) -> AxisTaps:
        """Return the arrays of taps."""
        starts = list(accumulate(map(len, taps), initial=0))
        flat = [*(tap for read in taps for tap in read), (0, 0.0)]
        sources, weights = zip(*flat, strict=True)
        return cls(
            np.array(starts, np.int32), np.array(sources, np.int32), np.array(weights, np.float32)
        )


def axis_taps(node: Node, *, backward: bool) -> tuple[AxisTaps, AxisTaps]:
    """Return the taps of rows and columns of y, or of dx, which reads dy."""
    taps = node.layer_of(Resampling).taps(node.input_shape)
    if backward:
        sizes = node.input_shape[1:]
        taps = (transposed(taps[0], sizes[0]), transposed(taps[1], sizes[1]))
    return AxisTaps.of(taps[0]), AxisTaps.of(taps[1])
