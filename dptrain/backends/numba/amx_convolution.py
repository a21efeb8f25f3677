"""Convolution of stride 1 on the AMX unit (`amx`): forward and input gradient.

Arguments are those of `direct_convolution`, with a `CorrelationGeometry`. `pack_weights` and
`pack_flipped_weights` pack the weights once for all threads; `amx_weight_gradient` computes the
third phase.

A band is a range of rows of y, or of pooled rows. It is computed in blocks of rows that stay in the
L2 cache. The rows of x under a block are zero-padded and split into bfloat16 parts in scratch. The
pixels and channels under one filter row are adjacent there, and 32 of them are a step; output
pixels are the rows of a tile. Tiles cover the output row by row, or all rows of a block with the
padding between them if that needs fewer tiles. Each output is summed in the same order in every
tile, so results do not depend on bands and blocks.

Scratch is aligned to lines of 64 bytes, which rows of a tile should not cross.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dptrain.backends.numba import amx_weight_gradient
from dptrain.backends.numba.amx import (
    CACHE,
    PANEL,
    PARTS,
    SIDE,
    STEPS,
    WORDS,
    in_lines,
    multiply_tiles,
    split_pairs,
    split_rows,
    words_in_lines,
)
from dptrain.backends.numba.fused_pooling import (
    lower_bound,
    pool_rows,
    select_by_pool,
    unpool_rows,
)
from dptrain.backends.numba.jit import inlined, kernel
from dptrain.backends.numba.microkernels import NO_LOWER_BOUND
from dptrain.backends.numba.planning import Algorithm, Shape, Work, units_per_item
from dptrain.backends.numba.vector import transpose
from dptrain.plan.lowering import Phase


def plan(shape: Shape, phase: Phase, work: Work) -> Algorithm:
    """Return the AMX algorithm of a phase of a convolution of stride 1."""
    if phase is Phase.BACKWARD_WEIGHT:
        return amx_weight_gradient.plan(shape, work)
    maps, out, pads = shape.maps, shape.out, shape.pads
    if phase is Phase.BACKWARD_INPUT:
        maps, out, pads = shape.out, shape.maps, shape.dy_pads
    pooled = shape.pool_height if phase is Phase.FORWARD else 0
    # A band of pooled rows needs at least as many rows as a window.
    bands = units_per_item(work.batch_size, work.threads, out[0] // max(1, pooled))
    rows = out[0] if pooled else -(-out[0] // bands)
    geometry = make_correlation_geometry(
        maps, out, shape.window, pads, pool_height=pooled, most_rows=rows
    )
    kernels = (conv2d_forward, pack_weights)
    if phase is Phase.BACKWARD_INPUT:
        kernels = (conv2d_backward_input, pack_flipped_weights)
    kernel, prepare = kernels
    panels = int(geometry.panels)
    packed = words_in_lines(panels * geometry.row_steps * PANEL)
    flipped = panels * geometry.s * geometry.c * SIDE if phase is Phase.BACKWARD_INPUT else 0
    shared, scratch = packed + flipped, int(geometry.scratch_size)
    return Algorithm(kernel, geometry, scratch, bands, prepare, panels, shared)


class CorrelationGeometry(NamedTuple):
    """Sizes of an AMX correlation from x (N, H, W, C) to y (N, Ho, Wo, K).

    Attributes:
        height: rows of x.
        width: columns of x.
        c: channels of x.
        h_out: rows of y.
        w_out: columns of y.
        k: channels of y.
        r: rows of a filter.
        s: columns of a filter.
        pad_top: rows of zeros above x.
        pad_left: columns of zeros to the left of x.
        padded_width: columns of padded x.
        block_rows: largest number of rows of y in a block.
        part_size: bfloat16 elements of one part of the padded rows of a block.
        row_steps: steps of 32 for one filter row.
        panels: filter rows times column tiles: parts of the packed weights.
        tiles_across: tiles of a row of y; 0 if tiles cover the padding between rows.
        tile_height: rows of an AMX tile.
        y_pitch: row stride of y in scratch, in pixels.
        table_offset: start of the offset tables in scratch.
        table_tiles: tiles of a block.
        y_offset: start of a block of y in scratch.
        work_offset: start of rows of x before pooling in scratch.
        rest_offset: start of sums that are not used in scratch.
        scratch_size: float32 elements of scratch that a thread needs.
    """

    height: int
    width: int
    c: int
    h_out: int
    w_out: int
    k: int
    r: int
    s: int
    pad_top: int
    pad_left: int
    padded_width: int
    block_rows: int
    part_size: int
    row_steps: int
    panels: int
    tiles_across: int
    tile_height: int
    y_pitch: int
    table_offset: int
    table_tiles: int
    y_offset: int
    work_offset: int
    rest_offset: int
    scratch_size: int


def make_correlation_geometry(
    maps: tuple[int, int, int],
    out: tuple[int, int, int],
    window: tuple[int, int],
    pads: tuple[int, int],
    *,
    pool_height: int = 0,
    most_rows: int | None = None,
) -> CorrelationGeometry:
    """Return the geometry of a correlation from `maps` (H, W, C) to `out` (Ho, Wo, K).

    Args:
        window: (R, S).
        pads: rows of zeros above and columns of zeros to the left of the maps.
        pool_height: height of the windows of fused pooling of y; 0 without pooling.
        most_rows: largest number of rows of y in a band; None for all.
    """
    (_, width, c), (h_out, w_out, k), (r, s) = maps, out, window
    columns = w_out + s - 1
    row_size = 2 * PARTS * columns * c
    rows = (CACHE - (r - 1) * row_size) // (row_size + 4 * (width * c + columns * k))
    rows = max(1, min(rows, h_out, most_rows or h_out))
    rows = max(pool_height, -(-h_out // -(-h_out // rows)))
    across = -(-w_out // SIDE)
    between = -(-((rows - 1) * columns + w_out) // SIDE)
    apart = rows * across <= between
    tiles = rows * across if apart else between
    part = -(-((rows + r - 1) * columns * c + STEPS + SIDE * c) // WORDS) * WORDS
    row_steps = -(-s * c // STEPS)
    wide = -(-k // SIDE)
    tables = words_in_lines(PARTS * part)
    y = tables + in_lines(2 * tiles + r * row_steps + 2 * wide)
    work = y + in_lines((rows * w_out if apart else tiles * SIDE) * k)
    rest = work + in_lines((rows + r - 1) * width * c)
    return CorrelationGeometry(
        *maps,
        *out,
        *window,
        *pads,
        columns,
        rows,
        part,
        row_steps,
        r * wide,
        across if apart else 0,
        -(-w_out // across) if apart else SIDE,
        w_out if apart else columns,
        tables,
        tiles,
        y,
        work,
        rest,
        rest + in_lines(c),
    )


@inlined
def _pack(geo, w, w_start, w_row, panel, shared):  # type: ignore[no-untyped-def]
    """Pack the weights of one filter row (S · C, ≤ 16) for one column tile."""
    tile, columns = panel // geo.r, geo.row_steps * STEPS
    split_pairs(
        (w, w_start),
        w_row,
        (shared.view(np.uint16), panel * geo.row_steps * PANEL),
        (geo.s * geo.c, columns, min(SIDE, geo.k - tile * SIDE)),
        (0, PANEL // PARTS, PANEL),
    )


@kernel
def pack_weights(start, stop, thread, w, geo, shared):  # type: ignore[no-untyped-def]
    """Pack the weights (R, S, C, K); items are filter rows of column tiles."""
    for panel in range(start, stop):
        tile, i = panel // geo.r, panel % geo.r
        _pack(geo, w, i * geo.s * geo.c * geo.k + tile * SIDE, geo.k, panel, shared)


@kernel
def pack_flipped_weights(start, stop, thread, w, geo, shared):  # type: ignore[no-untyped-def]
    """Pack rotated weights (R, S, K, C), as the input gradient needs them, of w (R, S, C, K)."""
    # The geometry maps dy to dx: K is `geo.c`.
    k, c, taps, w_flat = geo.c, geo.k, geo.r * geo.s, w.reshape(-1)
    size = geo.s * k * SIDE
    flipped = shared[geo.panels * geo.row_steps * PANEL // 2 :]
    for panel in range(start, stop):
        tile, i = panel // geo.r, panel % geo.r
        for j in range(geo.s):
            source = ((taps - 1 - i * geo.s - j) * c + tile * SIDE) * k
            target, channels = panel * size + j * k * SIDE, min(SIDE, c - tile * SIDE)
            transpose(w_flat, source, k, flipped, target, SIDE, channels, k)
        _pack(geo, flipped, panel * size, SIDE, panel, shared)


@inlined
def _fill_tables(geo, scratch):  # type: ignore[no-untyped-def]
    """Fill the offsets of the tiles of x and y, of the steps, and of the column tiles."""
    c, k, r, columns, row_steps = geo.c, geo.k, geo.r, geo.padded_width, geo.row_steps
    tables, table, tiles, across = (
        scratch.view(np.int32), geo.table_offset, geo.table_tiles, geo.tiles_across,
    )  # fmt: skip
    for t in range(tiles):
        row, pixel = 0, t * SIDE
        if across > 0:
            # The last tile of a row overlaps the one before it, so that all of its rows exist.
            row, pixel = t // across, min(t % across * geo.tile_height, geo.w_out - geo.tile_height)
        tables[table + t] = (row * columns + pixel) * c
        tables[table + tiles + t] = (row * geo.y_pitch + pixel) * k
    steps = table + 2 * tiles
    for i in range(r):
        for t in range(row_steps):
            tables[steps + i * row_steps + t] = i * columns * c + t * STEPS
    wide, first = -(-k // SIDE), steps + r * row_steps
    for j in range(wide):
        tables[first + j] = j * r * row_steps * PANEL
        tables[first + wide + j] = j * SIDE


@inlined
def _zero(words, part, start, count):  # type: ignore[no-untyped-def]
    """Set elements of all parts to zero."""
    for p in range(PARTS):
        for q in range(np.uintp(start + p * part), np.uintp(start + p * part + count)):
            words[q] = 0


@inlined
def _split_rows(geo, source, source_start, first, last, top, high, words):  # type: ignore[no-untyped-def]
    """Split rows `first` to `last` of x, of which `source` has the first one at `source_start`.

    They are padded to `high` rows from row `top` on.
    """
    c, part, row_size, size = geo.c, geo.part_size, geo.padded_width * geo.c, geo.width * geo.c
    before = geo.pad_left * c
    for i in range(high):
        start = i * row_size
        if first <= top + i < last:
            _zero(words, part, start, before)
            row = source_start + (top + i - first) * size
            split_rows((source, row), (words, start + before), part, size)
            _zero(words, part, start + before + size, row_size - before - size)
        else:
            _zero(words, part, start, row_size)
    # The steps of the last filter row end in these elements.
    _zero(words, part, high * row_size, STEPS)


@inlined
def _needed_rows(geo, row, rows):  # type: ignore[no-untyped-def]
    """Return the rows of x under some rows of y: first, last, and those with padding."""
    top, high = row - geo.pad_top, rows + geo.r - 1
    first = max(0, top)
    return first, max(first, min(geo.height, top + high)), top, high


@inlined
def _split_maps(geo, x, n, row, rows, scratch):  # type: ignore[no-untyped-def]
    """Split the rows of sample n of x that rows `row` to `row` + `rows` of y need."""
    first, last, top, high = _needed_rows(geo, row, rows)
    start = (n * geo.height + first) * geo.width * geo.c
    _split_rows(geo, x, start, first, last, top, high, scratch.view(np.uint16))


def _split_unpooled(pool, dy, argmax, maps, geo, n, row, rows, scratch):  # type: ignore[no-untyped-def]
    first, last, top, high = _needed_rows(geo, row, rows)
    start, rest = geo.work_offset, scratch[geo.rest_offset :]
    unpool_rows(
        pool, dy, argmax, n, maps, (first, last), scratch, start, geo.width, (0, geo.c), rest, 0,
        rest,
    )  # fmt: skip
    _split_rows(geo, scratch, start, first, last, top, high, scratch.view(np.uint16))


def _split_plain(pool, dy, argmax, maps, geo, n, row, rows, scratch):  # type: ignore[no-untyped-def]
    _split_maps(geo, dy, n, row, rows, scratch)


_split_gradient = select_by_pool(_split_unpooled, _split_plain)
"""Split the rows of sample n of dz that rows `row` to `row` + `rows` of dx need."""


@inlined
def _multiply(geo, rows, panels, d, d_row, scratch):  # type: ignore[no-untyped-def]
    """Compute rows of y in scratch from the split rows of x."""
    table, tiles = geo.table_offset, geo.table_tiles
    words, tables = scratch.view(np.uint16), scratch.view(np.int32)
    steps, wide, more = geo.r * geo.row_steps, -(-geo.k // SIDE), table + 2 * tiles
    count = rows * geo.tiles_across
    if count == 0:
        count = -(-((rows - 1) * geo.padded_width + geo.w_out) // SIDE)
    multiply_tiles(
        (words, 0, geo.part_size),
        (tables, table, geo.c),
        (tables, more),
        (panels, 0, PANEL // PARTS, PANEL),
        (tables, more + steps),
        (scratch, geo.y_offset),
        (tables, table + tiles, geo.k),
        (tables, more + steps + wide),
        (d, 0, d_row),
        (geo.tile_height, count, steps, wide, geo.k - (wide - 1) * SIDE),
    )


@inlined
def _store(geo, scratch, n, row, rows, bound, y):  # type: ignore[no-untyped-def]
    """Store rows of y that are at least `bound`."""
    size, pitch, start = geo.w_out * geo.k, geo.y_pitch * geo.k, n * geo.h_out + row
    for i in range(rows):
        target, source = np.uintp((start + i) * size), np.uintp(geo.y_offset + i * pitch)
        for q in range(np.uintp(size)):
            value = scratch[source + q]
            # This comparison keeps a NaN, which has to reach the loss to be detected.
            y[target + q] = bound if value < bound else value


def _plain_block(pool, x, b, y, argmax, maps, panels, geo, n, row, last, scratch):  # type: ignore[no-untyped-def]
    rows = min(geo.block_rows, last - row)
    _split_maps(geo, x, n, row, rows, scratch)
    _multiply(geo, rows, panels, b, 0, scratch)
    _store(geo, scratch, n, row, rows, lower_bound(pool), y)
    return row + rows


def _pooled_block(pool, x, b, y, argmax, maps, panels, geo, n, p, last, scratch):  # type: ignore[no-untyped-def]
    (h_pool, w_pool, k), down, high = maps, pool.stride_v, pool.window_v
    # As many rows of windows as fit, and at least one.
    stop = min(last, p + 1 + max(0, geo.block_rows - high) // down)
    row = max(0, p * down - pool.pad_top)
    rows = min(geo.h_out, (stop - 1) * down - pool.pad_top + high) - row
    _split_maps(geo, x, n, row, rows, scratch)
    _multiply(geo, rows, panels, b, 0, scratch)
    for i in range(p, stop):
        above = i * down - pool.pad_top
        existing = max(0, -above), min(high, geo.h_out - above)
        start = geo.y_offset + (above - row) * geo.y_pitch * k
        pool_rows(
            pool, scratch, start, existing, geo.y_pitch, y, argmax, (n * h_pool + i) * w_pool * k,
            w_pool, k, (0, k),
        )  # fmt: skip
    return stop


_compute_block = select_by_pool(_pooled_block, _plain_block)
"""Compute as many of the rows `row` to `last` of y as fit a block; return the next row."""


@kernel
def conv2d_forward(  # type: ignore[no-untyped-def]
    start, stop, thread, x, w, b, y, argmax, geo, bands, pool, shared, scratch
):
    """Compute `direct_convolution.conv2d_forward`."""
    mine, panels, (_, h_y, w_y, k) = scratch[thread], shared.view(np.uint16), y.shape
    y_flat, argmax_flat = y.reshape(-1), argmax.reshape(-1)
    _fill_tables(geo, mine)
    for item in range(start, stop):
        n, band = item // bands, item % bands
        row, last = h_y * band // bands, h_y * (band + 1) // bands
        while row < last:
            row = _compute_block(
                pool, x, b, y_flat, argmax_flat, (h_y, w_y, k), panels, geo, n, row, last, mine
            )


@kernel
def conv2d_backward_input(  # type: ignore[no-untyped-def]
    start, stop, thread, dy, argmax, w, dx, geo, bands, pool, shared, scratch
):
    """Compute `direct_convolution.conv2d_backward_input`; the geometry maps dz to dx."""
    mine, panels, (_, h_y, w_y, k) = scratch[thread], shared.view(np.uint16), dy.shape
    dy_flat, argmax_flat, dx_flat = dy.reshape(-1), argmax.reshape(-1), dx.reshape(-1)
    _fill_tables(geo, mine)
    for item in range(start, stop):
        n, band = item // bands, item % bands
        row, last = geo.h_out * band // bands, geo.h_out * (band + 1) // bands
        while row < last:
            rows = min(geo.block_rows, last - row)
            _split_gradient(pool, dy_flat, argmax_flat, (h_y, w_y, k), geo, n, row, rows, mine)
            _multiply(geo, rows, panels, mine, -1, mine)
            _store(geo, mine, n, row, rows, NO_LOWER_BOUND, dx_flat)
            row += rows
