"""Dense layers on the AMX unit (`amx`), with the kernels and items of `matmul`.

Weights change in every step, so every pass splits them again. Each item splits its own block of w:
it reads w once, in the order of memory, in blocks that stay in the L2 cache while its samples use
them. If there are few samples for each thread, splitting takes longer than the AMX unit
saves, and the vector kernels are used.

An output is summed in the same order in every block. Its bits depend on the shape of the layer
alone, not on blocks, threads or other samples.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from dptrain.backends.numba.amx import PANEL, PARTS, SIDE, STEPS, available, multiply_tiles
from dptrain.backends.numba.amx_operands import pack_columns, pack_rows
from dptrain.backends.numba.dense_blocks import (
    CHUNKS,
    MAX_CHUNKED_OUTPUTS,
    Blocks,
)
from dptrain.backends.numba.jit import inlined, kernel
from dptrain.backends.numba.matmul import DenseKernel, sum_rows
from dptrain.backends.numba.vector import transpose
from dptrain.plan.lowering import Phase

_BLOCK = 256
"""Largest number of samples and of steps in one product."""
_WIDE = 640
"""Columns of w in a block: with `_BLOCK` split rows, the block stays in the L2 cache."""
_MIN_CHUNKED_INPUTS = 4096
"""Smallest number of inputs of a layer with chunks."""
_HIGH = 256
"""Rows of w in a block whose columns are steps."""
_SAMPLES = 64
"""Smallest batch size for which AMX is used for the weight gradient, which is stored once for every
256 samples: with 32 samples it is slower than with vectors unless dw is in the L2 cache."""
_SPLIT = 32
"""Multiply-adds of the AMX unit that take as long as splitting one element: 4.7 ns for 32 elements
at 430 GFLOP/s."""
_VECTORS = 2.4
"""Time of a multiply-add with vectors, relative to the AMX unit: 430 and 180 GFLOP/s."""
_MARGIN = 1.2
"""Estimated gain from which on AMX is used: with 32 samples, both took the same time."""
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


def choose(
    samples: int, threads: int, inputs: int, outputs: int, *, by_shape: bool = False
) -> Mapping[Phase, DenseKernel]:
    """Return the kernels that are faster than vectors.

    Args:
        samples: largest number of samples of a launch.
        threads: largest number of parts of a launch.
        inputs, outputs: shape of w.
        by_shape: True if the choice must follow from the shape alone, because bits must not depend
            on the number of samples and threads. Weight gradients then have other kernels.
    """
    if not available() or min(inputs, outputs) < 2 * SIDE:
        return {}
    chosen = {}
    rows = -(-inputs // threads)
    if not by_shape and samples >= _SAMPLES and _is_faster(rows, outputs, rows * outputs):
        weight = DenseKernel(dense_backward_weight, weight_scratch(outputs))
        chosen[Phase.BACKWARD_WEIGHT] = weight
    # With fewer steps the stores of the sums take too long.
    if inputs >= 4 * STEPS:
        forward = forward_blocks(samples, threads, inputs, outputs)
        share = samples * outputs * -(-inputs // forward.chunk) / threads
        if by_shape or _is_faster(forward.samples, forward.features, share):
            size = forward_scratch(forward)
            chosen[Phase.FORWARD] = DenseKernel(dense_forward, size, forward)
    backward = backward_input_blocks(samples, threads, inputs, outputs)
    if by_shape or _is_faster(backward.samples, backward.features, samples * inputs / threads):
        size = backward_input_scratch(backward)
        chosen[Phase.BACKWARD_INPUT] = DenseKernel(dense_backward_input, size, backward)
    return chosen


def _is_faster(high: int, wide: int, share: float) -> bool:
    """Return whether a product of high × wide outputs is faster than `share` outputs by vectors."""
    return _MARGIN * _cost(high, wide) < _VECTORS * share


def _cost(high: int, wide: int) -> int:
    """Return the time of a product, for each step, and of splitting its operands."""
    return high * wide + _SPLIT * (high + wide)


def forward_blocks(samples: int, threads: int, inputs: int, outputs: int) -> Blocks:
    """Return the blocks of `dense_forward`; the chunks follow from the shape."""
    chunk = inputs
    if inputs >= _MIN_CHUNKED_INPUTS and outputs <= MAX_CHUNKED_OUTPUTS:
        chunk = -(-inputs // (CHUNKS * _BLOCK)) * _BLOCK
    high, wide = _divide(samples, outputs, -(-threads // -(-inputs // chunk)))
    return Blocks(high, wide, chunk, _BLOCK)


def backward_input_blocks(samples: int, threads: int, inputs: int, outputs: int) -> Blocks:
    """Return the blocks of `dense_backward_input`."""
    high, wide = _divide(samples, inputs, threads)
    return Blocks(high, wide, outputs, _BLOCK)


def _divide(samples: int, features: int, threads: int) -> tuple[int, int]:
    """Return the samples and features of a block, so that one block for each thread is fastest."""

    def block(across: int) -> tuple[int, int]:
        parts = max(1, threads // across)
        return _part(samples, parts, SIDE), _part(features, across, 2 * SIDE)

    return min((block(across) for across in range(1, threads + 1)), key=lambda size: _cost(*size))


def _part(total: int, parts: int, unit: int) -> int:
    """Return the length of each of `parts` parts, a multiple of `unit`."""
    return -(-total // (parts * unit)) * unit


def forward_scratch(blocks: Blocks) -> int:
    """Return the scratch elements of a thread for `dense_forward`."""
    rows, wide = _tiles(min(blocks.samples, _BLOCK)), _tiles(min(blocks.features, _WIDE))
    return _TABLES + (rows + wide) * _TILE // 2


def backward_input_scratch(blocks: Blocks) -> int:
    """Return the scratch elements of a thread for `dense_backward_input`."""
    rows, high = _tiles(min(blocks.samples, _BLOCK)), _tiles(min(blocks.features, _HIGH))
    transposed = max(STEPS, high * SIDE) * rows * SIDE
    panels = -(-blocks.chunk // STEPS)
    return _TABLES + transposed + (rows * panels * PANEL + high * _TILE) // 2


def weight_scratch(outputs: int) -> int:
    """Return the scratch elements of a thread for `dense_backward_weight`."""
    written = _tiles(min(outputs, _WRITTEN)) + _GATHERED // SIDE
    return _TABLES + _GATHERED * _BLOCK + written * _TILE // 2


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
def dense_forward(  # type: ignore[no-untyped-def]
    start, stop, thread, x, w, b, y, relu, blocks, scratch, samples
):
    """Compute `matmul.dense_forward`."""
    inputs, outputs = w.shape
    mine = scratch[thread]
    tables = _tabulate(mine, _TILE, outputs)
    left = mine[_TABLES:].view(np.uint16)
    right = left[-(-min(blocks.samples, _BLOCK) // SIDE) * _TILE :]
    x_flat, w_flat = x.reshape(-1), w.reshape(-1)
    across, chunks = -(-outputs // blocks.features), -(-inputs // blocks.chunk)
    for item in range(start, stop):
        chunk = item // across % chunks
        first = item // (across * chunks) * blocks.samples
        i_first, o_first = chunk * blocks.chunk, item % across * blocks.features
        i_last = min(i_first + blocks.chunk, inputs)
        o_last = min(o_first + blocks.features, outputs)
        for n in range(first, min(first + blocks.samples, samples), _BLOCK):
            rows = min(_BLOCK, min(first + blocks.samples, samples) - n)
            _forward_block(
                x_flat, w_flat, b, y[chunk].reshape(-1), relu, (inputs, outputs), n, rows,
                (i_first, i_last), (o_first, o_last), tables, left, right,
            )  # fmt: skip


@inlined
def _forward_block(x, w, b, y, relu, shape, n, rows, own_inputs, own_outputs, tables, left, right):  # type: ignore[no-untyped-def]
    """Compute a block of outputs of `rows` samples from sample n on."""
    (inputs, outputs), (i_first, i_last), (o_first, o_last) = shape, own_inputs, own_outputs
    for i in range(i_first, i_last, _BLOCK):
        steps = min(_BLOCK, i_last - i)
        pack_rows((x, n * inputs + i), inputs, (left, 0), _TILE, (rows, steps))
        for o in range(o_first, o_last, _WIDE):
            columns, at = min(_WIDE, o_last - o), n * outputs + o
            pack_columns((w, i * outputs + o), outputs, (right, 0), _TILE, (steps, columns))
            d, size = (y, at, outputs), (rows, steps, columns)
            if i == i_first:
                d = (b, o, 0 if i == 0 else -1)
            _multiply(tables, left, right, 0, (y, at), outputs, d, size)
    if relu:
        for p in range(n, n + rows):
            for k in range(np.uintp(p * outputs + o_first), np.uintp(p * outputs + o_last)):
                y[k] = np.float32(0.0) if y[k] <= 0.0 else y[k]


@kernel
def dense_backward_input(  # type: ignore[no-untyped-def]
    start, stop, thread, dy, w, dx, blocks, scratch, samples
):
    """Compute `matmul.dense_backward_input`."""
    inputs, outputs = w.shape
    most = -(-min(blocks.samples, _BLOCK) // SIDE) * SIDE
    panels = -(-outputs // STEPS) * PANEL
    mine = scratch[thread]
    tables = _tabulate(mine, panels, most)
    block = mine[_TABLES:]
    right = block[max(STEPS, -(-min(blocks.features, _HIGH) // SIDE) * SIDE) * most :]
    right = right.view(np.uint16)
    left = right[most // SIDE * panels :]
    across = -(-inputs // blocks.features)
    for item in range(start, stop):
        first, i_first = item // across * blocks.samples, item % across * blocks.features
        i_last = min(i_first + blocks.features, inputs)
        for n in range(first, min(first + blocks.samples, samples), _BLOCK):
            count = min(_BLOCK, min(first + blocks.samples, samples) - n)
            _pack_gradients(dy.reshape(-1), n, count, outputs, block, most, right, panels)
            _backward_input_block(
                w.reshape(-1), dx.reshape(-1), (inputs, outputs), n, count, (i_first, i_last),
                tables, block, most, left, right,
            )  # fmt: skip


@inlined
def _pack_gradients(dy, n, count, outputs, block, most, right, panels):  # type: ignore[no-untyped-def]
    """Pack the transpose of `count` samples of dy from sample n on."""
    for o in range(0, outputs, STEPS):
        steps = min(STEPS, outputs - o)
        transpose(dy, n * outputs + o, outputs, block, 0, most, count, steps)
        panel = o // STEPS * PANEL
        pack_columns((block, 0), most, (right, panel), panels, (steps, count))


@inlined
def _backward_input_block(w, dx, shape, n, count, own_inputs, tables, block, most, left, right):  # type: ignore[no-untyped-def]
    """Compute a block of dx, transposed: the rows of w are the rows of A."""
    (inputs, outputs), (i_first, i_last) = shape, own_inputs
    for i in range(i_first, i_last, _HIGH):
        rows = min(_HIGH, i_last - i)
        for o in range(0, outputs, _BLOCK):
            steps = min(_BLOCK, outputs - o)
            pack_rows((w, i * outputs + o), outputs, (left, 0), _TILE, (rows, steps))
            d, size = (block, 0, -1 if o == 0 else most), (rows, steps, count)
            _multiply(tables, left, right, o // STEPS * PANEL, (block, 0), most, d, size)
        transpose(block, 0, most, dx, n * inputs + i, inputs, rows, count)


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
