"""Dense layers on the AMX unit (`amx`), with the kernels of `matmul`.

Weights change in every step, so every pass splits them again. It reads them once, in the order of
memory, in blocks that stay in the L2 cache while all samples use them. For small batches splitting
takes longer than the AMX unit saves, and the vector kernels are used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from dptrain.backends.numba.amx import PANEL, PARTS, SIDE, STEPS, available, multiply_tiles
from dptrain.backends.numba.amx_operands import pack_columns, pack_rows
from dptrain.backends.numba.jit import inlined, kernel
from dptrain.backends.numba.matmul import sum_rows
from dptrain.backends.numba.vector import transpose
from dptrain.plan.lowering import Phase

_BLOCK = 256
"""Largest number of samples and of steps in one product."""
_WIDE = 640
"""Columns of w in a block: with `_BLOCK` split rows, the block stays in the L2 cache."""
_HIGH = 256
"""Rows of w in a block whose columns are steps."""
_SAMPLES = 64
"""Smallest batch size for which the AMX unit is faster. With 32 samples, splitting w takes as long
as multiplying, and the weight gradient is slower than with vectors unless dw is in the L2 cache."""
_GATHERED = 64
"""Features of x that `dense_backward_weight` transposes at a time."""
_WRITTEN = 512
"""Columns of dw that `dense_backward_weight` writes at a time."""
_TILE = _BLOCK // STEPS * PANEL
"""16-bit words of 16 rows or columns of a block."""
_TILES = 64
"""Entries of a table: largest number of tiles of a block."""
_TABLES = 3 * _TILES
_STEP_AT = np.arange(_BLOCK // STEPS, dtype=np.int32) * PANEL
_COLUMN_AT = np.arange(_TILES, dtype=np.int32) * SIDE


def choose(samples: int, threads: int, inputs: int, outputs: int) -> Mapping[Phase, Any]:
    """Return the kernels that are faster than vectors, with their scratch elements per thread."""
    if not available() or min(inputs, outputs) < 2 * SIDE:
        return {}
    forward, weight, backward = scratch(samples, inputs, outputs)
    chosen = {}
    if samples >= _SAMPLES:
        chosen[Phase.BACKWARD_WEIGHT] = dense_backward_weight, weight
    # Every thread splits all of w for its own samples.
    if samples >= _SAMPLES * threads:
        chosen[Phase.BACKWARD_INPUT] = dense_backward_input, backward
        # With fewer steps the stores of the sums take too long.
        if inputs >= 4 * STEPS:
            chosen[Phase.FORWARD] = dense_forward, forward
    return chosen


def scratch(samples: int, inputs: int, outputs: int) -> tuple[int, int, int]:
    """Return the scratch elements of a thread: forward, weight gradient and input gradient."""
    rows, panels = _tiles(min(samples, _BLOCK)), -(-outputs // STEPS)
    wide, high = _tiles(min(outputs, _WIDE)), _tiles(min(inputs, _HIGH))
    written = _tiles(min(outputs, _WRITTEN)) + _GATHERED // SIDE
    transposed = max(STEPS, high * SIDE) * rows * SIDE
    return (
        _TABLES + (rows + wide) * _TILE // 2,
        _TABLES + _GATHERED * _BLOCK + written * _TILE // 2,
        _TABLES + transposed + (rows * panels * PANEL + high * _TILE) // 2,
    )


def _tiles(elements: int) -> int:
    return -(-elements // SIDE)


@inlined
def _tabulate(scratch, b_tile, c_row):  # type: ignore[no-untyped-def]
    """Return the tables of the starts of tiles of A, B and C."""
    tables = scratch[:_TABLES].view(np.int32)
    for i in range(_TILES):
        tables[i] = i * _TILE
        tables[_TILES + i] = i * b_tile
        tables[2 * _TILES + i] = i * SIDE * c_row
    return tables


@inlined
def _multiply(tables, left, right, right_start, c, c_row, d, shape):  # type: ignore[no-untyped-def]
    """Compute C = D + A·B from `left` and `right`, both packed.

    Args:
        c: (array, start).
        c_row: row stride.
        d: (array, start, row stride).
        shape: (rows, steps, columns).
    """
    rows, steps, columns = shape
    across, whole = -(-columns // SIDE), rows // SIDE
    last, deep = columns - (across - 1) * SIDE, -(-steps // STEPS)
    # All whole row tiles, then the remaining rows.
    for m, height, tiles in ((0, SIDE, whole), (whole, rows - whole * SIDE, 1)):
        if height > 0 and tiles > 0:
            multiply_tiles(
                (left, 0, PANEL // PARTS), (tables, m, STEPS), (_STEP_AT, 0),
                (right, right_start, PANEL // PARTS, PANEL), (tables, _TILES),
                c, (tables, 2 * _TILES + m, c_row), (_COLUMN_AT, 0),
                d, (height, tiles, deep, across, last),
            )  # fmt: skip


@kernel
def dense_forward(start, stop, thread, x, w, b, y, relu, scratch):  # type: ignore[no-untyped-def]
    """Compute `matmul.dense_forward`."""
    inputs, outputs = w.shape
    mine = scratch[thread]
    tables = _tabulate(mine, _TILE, outputs)
    left = mine[_TABLES:].view(np.uint16)
    right = left[-(-min(len(x), _BLOCK) // SIDE) * _TILE :]
    x_flat, w_flat, y_flat = x.reshape(-1), w.reshape(-1), y.reshape(-1)
    for n in range(start, stop, _BLOCK):
        rows = min(_BLOCK, stop - n)
        for i in range(0, inputs, _BLOCK):
            steps = min(_BLOCK, inputs - i)
            pack_rows((x_flat, n * inputs + i), inputs, (left, 0), _TILE, (rows, steps))
            for o in range(0, outputs, _WIDE):
                columns, at = min(_WIDE, outputs - o), n * outputs + o
                w_start = i * outputs + o
                pack_columns((w_flat, w_start), outputs, (right, 0), _TILE, (steps, columns))
                d = (b, o, 0) if i == 0 else (y_flat, at, outputs)
                shape = (rows, steps, columns)
                _multiply(tables, left, right, 0, (y_flat, at), outputs, d, shape)
        if relu:
            for k in range(np.uintp(n * outputs), np.uintp((n + rows) * outputs)):
                y_flat[k] = np.float32(0.0) if y_flat[k] <= 0.0 else y_flat[k]


@kernel
def dense_backward_input(start, stop, thread, dy, w, dx, scratch):  # type: ignore[no-untyped-def]
    """Compute `matmul.dense_backward_input`, transposed: the rows of w are the rows of A."""
    inputs, outputs = w.shape
    most = -(-min(len(dy), _BLOCK) // SIDE) * SIDE
    panels = -(-outputs // STEPS) * PANEL
    mine = scratch[thread]
    tables = _tabulate(mine, panels, most)
    block = mine[_TABLES:]
    right = block[max(STEPS, -(-min(inputs, _HIGH) // SIDE) * SIDE) * most :].view(np.uint16)
    left = right[most // SIDE * panels :]
    dy_flat, w_flat, dx_flat = dy.reshape(-1), w.reshape(-1), dx.reshape(-1)
    for n in range(start, stop, _BLOCK):
        samples = min(_BLOCK, stop - n)
        for o in range(0, outputs, STEPS):
            steps = min(STEPS, outputs - o)
            transpose(dy_flat, n * outputs + o, outputs, block, 0, most, samples, steps)
            panel = o // STEPS * PANEL
            pack_columns((block, 0), most, (right, panel), panels, (steps, samples))
        for i in range(0, inputs, _HIGH):
            rows = min(_HIGH, inputs - i)
            for o in range(0, outputs, _BLOCK):
                steps, w_start = min(_BLOCK, outputs - o), i * outputs + o
                pack_rows((w_flat, w_start), outputs, (left, 0), _TILE, (rows, steps))
                d, shape = (block, 0, -1 if o == 0 else most), (rows, steps, samples)
                panel = o // STEPS * PANEL
                _multiply(tables, left, right, panel, (block, 0), most, d, shape)
            transpose(block, 0, most, dx_flat, n * inputs + i, inputs, rows, samples)


@kernel
def dense_backward_weight(  # type: ignore[no-untyped-def]
    start, stop, thread, x, dy, dw, db, scratch, samples
):
    """Compute `matmul.dense_backward_weight`."""
    inputs, outputs = dw.shape
    mine = scratch[thread]
    tables = _tabulate(mine, _TILE, outputs)
    block = mine[_TABLES:]
    left = block[_GATHERED * _BLOCK :].view(np.uint16)
    right = left[_GATHERED // SIDE * _TILE :]
    x_flat, dy_flat, dw_flat = x.reshape(-1), dy.reshape(-1), dw.reshape(-1)
    if start == 0 < stop:
        sum_rows(dy_flat, samples, db)
    if samples == 0:
        dw[start:stop] = 0
    for n in range(0, samples, _BLOCK):
        steps = min(_BLOCK, samples - n)
        for o in range(0, outputs, _WRITTEN):
            columns, dy_start = min(_WRITTEN, outputs - o), n * outputs + o
            pack_columns((dy_flat, dy_start), outputs, (right, 0), _TILE, (steps, columns))
            for i in range(start, stop, _GATHERED):
                rows, at = min(_GATHERED, stop - i), i * outputs + o
                transpose(x_flat, n * inputs + i, inputs, block, 0, _BLOCK, steps, rows)
                pack_rows((block, 0), _BLOCK, (left, 0), _TILE, (rows, steps))
                d, shape = (dw_flat, at, -1 if n == 0 else outputs), (rows, steps, columns)
                _multiply(tables, left, right, 0, (dw_flat, at), outputs, d, shape)
