"""Operands in the type and order that TMA copies; see ``wgmma_operands.cu``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dptrain.backends.cuda.dense.gemm_tiles import ceil_div
from dptrain.backends.cuda.device.device import Array, Function
from dptrain.backends.cuda.device.hardware import VECTOR_BYTES
from dptrain.backends.cuda.device.launching import launch
from dptrain.backends.cuda.replica import PRECISIONS
from dptrain.backends.cuda.weighted import WeightedOperation

FILE = "wgmma_operands.cu"

WEIGHT_ROWS, GRADIENT_ROWS = 32, 128
"""Rows of a block of ``transpose``. On an H200, weight gradients of ResNet-18 (32×32) for 1024
samples took 1 to 3% longer with 64 rows of the gradient than with 128."""

TILE_COLUMNS, THREADS = 32, 256
"""Columns and threads of a block of ``transpose``."""

PITCH_TERMS = 4
"""Rows of a transposed matrix are padded to a multiple of this: 16 bytes of float32."""


def padded_pitch(terms: int) -> int:
    """Return the length of a row of a transposed matrix with a number of terms."""
    return ceil_div(max(terms, 1), PITCH_TERMS) * PITCH_TERMS


def rounded_weights(
    operation: WeightedOperation[Any], weight: Array, rounded: Array
) -> Callable[[], None]:
    """Return a function that enqueues the rounding of `weight` to the operand type."""
    function = _function(operation, "round_weights", weights=True)
    packs = rounded.nbytes // VECTOR_BYTES
    return lambda: launch(function, packs, weight, rounded, np.int32(packs))


def transposed_weights(
    operation: WeightedOperation[Any], weight: Array, transposed: Array
) -> Callable[[], None]:
    """Return a function that enqueues the transposition of (R, S, C, K) to (R, S, K, C)."""
    enqueue = _transposition(operation, WEIGHT_ROWS, weights=True)
    r, s, channels, filters = map(int, weight.shape)
    return lambda: enqueue(weight, transposed, (r * s, channels, filters), channels)


def transposed_rows(
    operation: WeightedOperation[Any], matrix: Array, transposed: Array, columns: int
) -> Callable[[int], None]:
    """Return a function that enqueues the transposition of the first rows of a matrix.

    Args:
        operation: has the device.
        matrix: (rows, columns).
        transposed: (columns, `padded_pitch` of the rows), which is 0 beyond the rows.
        columns: of the matrix, a multiple of `TILE_COLUMNS`.
    """
    enqueue = _transposition(operation, GRADIENT_ROWS, weights=False)
    return lambda rows: enqueue(matrix, transposed, (1, rows, columns), padded_pitch(rows))


def _transposition(
    operation: WeightedOperation[Any], block_rows: int, *, weights: bool
) -> Callable[[Array, Array, tuple[int, int, int], int], None]:
    """Return a function that enqueues ``transpose``: arrays, (batch, rows, columns), pitch."""
    function = _function(operation, "transpose", weights=weights, TRANSPOSED_ROWS=block_rows)

    def enqueue(source: Array, target: Array, shape: tuple[int, int, int], pitch: int) -> None:
        batch, rows, columns = shape
        grid = columns // TILE_COLUMNS, ceil_div(pitch, block_rows), batch
        sizes = map(np.int32, (rows, columns, pitch))
        function(grid, (THREADS, 1, 1), [source, target, *sizes])

    return enqueue


def _function(
    operation: WeightedOperation[Any], name: str, *, weights: bool, **defines: int
) -> Function:
    return operation.device.function(
        FILE, name, PRECISION=PRECISIONS[operation.setting.precision],
        PREFETCH_WEIGHTS=int(weights and operation.prefetches_weights), **defines,
    )  # fmt: skip
