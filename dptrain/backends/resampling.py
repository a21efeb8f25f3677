"""Sparse matrices of resampling layers as arrays, in every backend."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dptrain.network.layers import Shape
from dptrain.network.rearranging import Resampling, Taps, transposed


class TapArrays(NamedTuple):
    """The terms of an axis: those of output i are `first[i]` to `first[i + 1]` − 1.

    Attributes:
        first: int32 (outputs + 1,).
        source: int32 (terms,), positions in the input.
        weight: float32 (terms,).
    """

    first: NDArray[np.int32]
    source: NDArray[np.int32]
    weight: NDArray[np.float32]


def tap_arrays(
    layer: Resampling, input_shape: Shape, *, backward: bool
) -> tuple[TapArrays, TapArrays]:
    """Return the terms of rows and columns: of y in x, or of dx in dy.

    Args:
        layer: of the maps.
        input_shape: (C, H, W) of x.
        backward: True returns those of dx in dy.
    """
    sizes = input_shape[1], input_shape[2]
    rows, columns = layer.taps(sizes)
    if backward:
        rows, columns = transposed(rows, sizes[0]), transposed(columns, sizes[1])
    return _arrays(rows), _arrays(columns)


def _arrays(taps: Taps) -> TapArrays:
    terms = [term for each in taps for term in each]
    # Kernels receive at least one term.
    source, weight = zip(*terms or [(0, 0.0)], strict=True)
    return TapArrays(
        np.cumsum([0, *map(len, taps)], dtype=np.int32),
        np.array(source, np.int32),
        np.array(weight, np.float32),
    )
