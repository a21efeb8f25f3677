"""Weights in the type that TMA copies for tensor cores; see ``kernels/operand_weights.cu``."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dptrain.backends.cuda.device import Array, Function
from dptrain.backends.cuda.hardware import VECTOR_BYTES
from dptrain.backends.cuda.launching import launch
from dptrain.backends.cuda.replica import PRECISIONS
from dptrain.backends.cuda.weighted import WeightedOperation

FILE = "operand_weights.cu"

TRANSPOSED_TILE, TRANSPOSING_THREADS = 32, 256
"""Rows and columns, and threads, of a block of ``transpose_weights``."""


def rounded_weights(
    operation: WeightedOperation, weight: Array, rounded: Array
) -> Callable[[], None]:
    """Return a function that enqueues the rounding of `weight` to the operand type."""
    function = _function(operation, "round_weights")
    packs = rounded.nbytes // VECTOR_BYTES
    return lambda: launch(function, packs, weight, rounded, np.int32(packs))


def transposed_weights(
    operation: WeightedOperation, weight: Array, transposed: Array
) -> Callable[[], None]:
    """Return a function that enqueues the transposition of (R, S, C, K) to (R, S, K, C)."""
    function = _function(operation, "transpose_weights")
    r, s, channels, filters = map(int, weight.shape)
    grid = filters // TRANSPOSED_TILE, channels // TRANSPOSED_TILE, r * s
    args = [weight, transposed, np.int32(channels), np.int32(filters)]
    return lambda: function(grid, (TRANSPOSING_THREADS, 1, 1), args)


def _function(operation: WeightedOperation, name: str) -> Function:
    return operation.device.function(
        FILE, name, PRECISION=PRECISIONS[operation.precision],
        PREFETCH_WEIGHTS=int(operation.prefetches_weights),
    )  # fmt: skip
