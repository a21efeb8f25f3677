"""Convolution of stride 1 on the AMX unit (`amx`), forward and backward.

Arguments are those of `direct_convolution` and `direct_convolution_pool`, with the geometries of
this module. Every sample is zero-padded and split into bfloat16 parts in scratch:

- Forward and input gradient use the order of memory: the pixels and channels under one filter row
  are adjacent, and 32 of them are a step; output pixels are the rows of a tile. Tiles cover the
  output row by row, or all rows with the padding between them if that needs fewer tiles.
- Weight gradient, dw[r, s]ᵀ = Σ dy[i, j]ᵀ · x[i + r, j + s]: pixels are the steps. dy is
  transposed, so that pixels are adjacent; x is stored in pairs of pixels, (0, 1), (2, 3), … for
  even columns of the filter and (1, 2), (3, 4), … for odd ones. Both have the pitch of padded x.

Scratch is aligned to lines of 64 bytes, which rows of a tile should not cross.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from dptrain.backends.numba.amx import (
    PANEL,
    PARTS,
    SIDE,
    STEPS,
    multiply_tiles,
    split_pairs,
    split_rows,
)
from dptrain.backends.numba.im2col import pool_row, unpool
from dptrain.backends.numba.jit import inlined, kernel
from dptrain.backends.numba.microkernels import NO_LOWER_BOUND, multiply
from dptrain.backends.numba.vector import copy, transpose

LINE = 16
"""Float32 elements of a cache line."""
WORDS = 2 * LINE
"""16-bit words of a cache line."""


def _lines(elements: int) -> int:
    """Return `elements` of float32, rounded up to whole cache lines."""
    return -(-elements // LINE) * LINE


def _words(elements: int) -> int:
    """Return the float32 elements, in whole cache lines, that hold `elements` 16-bit words."""
    return _lines(-(-elements // 2))


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
        part_size: bfloat16 elements of one part of padded x.
        row_steps: steps of 32 for one filter row.
        runs: runs of adjacent pixels.
        run_pixels: pixels of a run.
        run_tiles: tiles of a run.
        tile_height: rows of an AMX tile.
        y_pitch: row stride of y, in pixels.
        table_offset: start of the offset tables in scratch.
        panel_offset: start of the packed weights in scratch.
        y_offset: start of one sample's y in scratch.
        work_offset: start of temporary memory in scratch.
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
    part_size: int
    row_steps: int
    runs: int
    run_pixels: int
    run_tiles: int
    tile_height: int
    y_pitch: int
    table_offset: int
    panel_offset: int
    y_offset: int
    work_offset: int
    scratch_size: int


def make_correlation_geometry(
    maps: tuple[int, int, int],
    out: tuple[int, int, int],
    window: tuple[int, int],
    pads: tuple[int, int],
) -> CorrelationGeometry:
    """Return the geometry of a correlation from `maps` (H, W, C) to `out` (Ho, Wo, K).

    Args:
        window: (R, S).
        pads: rows of zeros above and columns of zeros to the left of the maps.
    """
    (_, _, c), (h_out, w_out, k), (r, s) = maps, out, window
    columns = w_out + s - 1
    part = -(-((h_out + r - 1) * columns * c + STEPS) // WORDS) * WORDS
    row_steps = -(-s * c // STEPS)
    whole = (h_out - 1) * columns + w_out
    apart = h_out * -(-w_out // SIDE) <= -(-whole // SIDE)
    runs, pixels, pitch = (h_out, w_out, w_out) if apart else (1, whole, columns)
    across = -(-pixels // SIDE)
    height = -(-pixels // across) if apart else SIDE
    tables = _words(PARTS * part)
    panels = tables + _lines(2 * runs * across + r * row_steps + 2 * -(-k // SIDE))
    y = panels + _words(r * row_steps * -(-k // SIDE) * PANEL)
    rest = y + _lines(h_out * pitch * k)
    more = _lines(max(math.prod(maps) + c, r * s * c * k))
    return CorrelationGeometry(
        *maps,
        *out,
        *window,
        *pads,
        columns,
        part,
        row_steps,
        runs,
        pixels,
        across,
        height,
        pitch,
        tables,
        panels,
        y,
        rest,
        rest + more,
    )


@inlined
def _prepare(geo, w, start, scratch):  # type: ignore[no-untyped-def]
    """Zero the padding, fill the tables, and pack the weights (R, S, C, K) in panels."""
    c, k, r, s = geo.c, geo.k, geo.r, geo.s
    columns, row_steps, runs, across = geo.padded_width, geo.row_steps, geo.runs, geo.run_tiles
    words, tables, table = scratch.view(np.uint16), scratch.view(np.int32), geo.table_offset
    for q in range(table):
        scratch[q] = 0
    tiles = runs * across
    for i in range(runs):
        for j in range(across):
            # The last tile of a run overlaps the one before it, so that all of its rows exist.
            pixel = min(j * geo.tile_height, geo.run_pixels - geo.tile_height)
            tables[table + i * across + j] = (i * columns + pixel) * c
            tables[table + tiles + i * across + j] = (i * geo.y_pitch + pixel) * k
    for i in range(r):
        for t in range(row_steps):
            tables[table + 2 * tiles + i * row_steps + t] = i * columns * c + t * STEPS
        split_pairs(
            (w, start + i * s * c * k),
            k,
            (words, 2 * geo.panel_offset + i * row_steps * PANEL),
            (s * c, row_steps * STEPS, k),
            (r * row_steps * PANEL, PANEL // PARTS, PANEL),
        )
    wide = -(-k // SIDE)
    for j in range(wide):
        tables[table + 2 * tiles + r * row_steps + j] = j * r * row_steps * PANEL
        tables[table + 2 * tiles + r * row_steps + wide + j] = j * SIDE


@inlined
def _split(geo, maps, start, scratch):  # type: ignore[no-untyped-def]
    """Split one sample's maps into padded x."""
    height, width, c = geo.height, geo.width, geo.c
    above, before, columns, part = geo.pad_top, geo.pad_left, geo.padded_width, geo.part_size
    words = scratch.view(np.uint16)
    for i in range(height):
        row_start = ((i + above) * columns + before) * c
        split_rows((maps, start + i * width * c), (words, row_start), part, width * c)


@inlined
def _correlate(geo, scratch, d, d_row, y, y_start):  # type: ignore[no-untyped-def]
    """Compute one sample's output from its split maps, with a row stride of `geo.y_pitch`."""
    c, k, r = geo.c, geo.k, geo.r
    part, row_steps, tiles = geo.part_size, geo.row_steps, geo.runs * geo.run_tiles
    words, tables, table = scratch.view(np.uint16), scratch.view(np.int32), geo.table_offset
    steps, wide = r * row_steps, -(-k // SIDE)
    more = table + 2 * tiles
    multiply_tiles(
        (words, 0, part),
        (tables, table, c),
        (tables, more),
        (words, 2 * geo.panel_offset, PANEL // PARTS, PANEL),
        (tables, more + steps),
        (y, y_start),
        (tables, table + tiles, k),
        (tables, more + steps + wide),
        (d, 0, d_row),
        (geo.tile_height, tiles, steps, wide, k - (wide - 1) * SIDE),
    )


@inlined
def _write(geo, scratch, d, d_row, lower_bound, y, y_start):  # type: ignore[no-untyped-def]
    """Compute one sample's output (Ho, Wo, K), at least `lower_bound`, from its split maps."""
    h_out, row, pitch, band = geo.h_out, geo.w_out * geo.k, geo.y_pitch * geo.k, geo.y_offset
    _correlate(geo, scratch, d, d_row, scratch, band)
    for i in range(h_out):
        for q in range(np.uintp(row)):
            value = scratch[band + i * pitch + q]
            # This comparison keeps a NaN, which has to reach the loss to be detected.
            y[y_start + i * row + q] = lower_bound if value < lower_bound else value


@kernel
def conv2d_forward(start, stop, thread, x, w, b, y, geo, relu, scratch):  # type: ignore[no-untyped-def]
    """Compute `direct_convolution.conv2d_forward`."""
    mine, y_flat = scratch[thread], y.reshape(-1)
    x_size, y_size = geo.height * geo.width * geo.c, geo.h_out * geo.w_out * geo.k
    lower_bound = np.float32(0) if relu else NO_LOWER_BOUND
    _prepare(geo, w, 0, mine)
    for n in range(start, stop):
        _split(geo, x, n * x_size, mine)
        _write(geo, mine, b, 0, lower_bound, y_flat, n * y_size)


@kernel
def conv2d_relu_pool_forward(start, stop, thread, x, w, b, y, argmax, geo, pool, scratch):  # type: ignore[no-untyped-def]
    """Compute `direct_convolution_pool.conv2d_relu_pool_forward`."""
    _, h_pool, w_pool, k = y.shape
    h_out, w_out, pitch = geo.h_out, geo.w_out, geo.y_pitch
    mine, band = scratch[thread], geo.y_offset
    _prepare(geo, w, 0, mine)
    for n in range(start, stop):
        _split(geo, x, n * geo.height * geo.width * geo.c, mine)
        _correlate(geo, mine, b, 0, mine, band)
        for i in range(h_pool):
            above = i * pool.stride_v - pool.pad_top
            first, last = max(0, above), min(h_out, above + pool.window_v)
            pool_row(
                mine,
                band + above * pitch * k,
                first - above,
                last - above,
                w_out,
                pitch,
                w_pool,
                k,
                pool,
                y,
                argmax,
                (n * h_pool + i) * w_pool * k,
            )


@inlined
def _prepare_flipped(geo, w, scratch):  # type: ignore[no-untyped-def]
    """Call `_prepare` with rotated weights (R, S, K, C), as the input gradient needs them."""
    k, c, taps, flipped = geo.c, geo.k, geo.r * geo.s, geo.work_offset
    for tap in range(taps):
        transpose(w, (taps - 1 - tap) * c * k, k, scratch, flipped + tap * c * k, c, c, k)
    _prepare(geo, scratch, flipped, scratch)


@kernel
def conv2d_backward_input(start, stop, thread, dy, w, dx, geo, scratch):  # type: ignore[no-untyped-def]
    """Compute `direct_convolution.conv2d_backward_input`; the geometry maps dy to dx."""
    mine, dx_flat, dx_size = scratch[thread], dx.reshape(-1), geo.h_out * geo.w_out * geo.k
    _prepare_flipped(geo, w.reshape(-1), mine)
    for n in range(start, stop):
        _split(geo, dy, n * geo.height * geo.width * geo.c, mine)
        _write(geo, mine, mine, -1, NO_LOWER_BOUND, dx_flat, n * dx_size)


@kernel
def conv2d_relu_pool_backward_input(  # type: ignore[no-untyped-def]
    start, stop, thread, dy, argmax, w, dx, geo, pool, scratch
):
    """Compute `direct_convolution_pool.conv2d_relu_pool_backward_input`."""
    _, h_pool, w_pool, k = dy.shape
    mine, dx_flat, dx_size = scratch[thread], dx.reshape(-1), geo.h_out * geo.w_out * geo.k
    dz = mine[geo.work_offset :]
    sums = dz[geo.height * geo.width * k :]
    _prepare_flipped(geo, w.reshape(-1), mine)
    dz[:] = 0
    for n in range(start, stop):
        unpool(
            dy, argmax, n * h_pool * w_pool * k, h_pool, w_pool, k, pool, dz, geo.width, 0, 0, sums
        )
        _split(geo, dz, 0, mine)
        _write(geo, mine, mine, -1, NO_LOWER_BOUND, dx_flat, n * dx_size)


class WeightGradientGeometry(NamedTuple):
    """Sizes of the weight gradient for x (N, H, W, C) and dz (N, Ho, Wo, K) on AMX tiles.

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
        gemm_channels: channels of the matrix product.
        gemm_columns: filter columns of the matrix product.
        pitch: row stride, in pixels.
        steps: steps of 32 pixels.
        dz_row: stride of the channels of transposed dz.
        dz_part: stride of the parts of transposed dz.
        x_part: stride of the parts of x.
        x_tile: stride of the column tiles of x.
        x_copy: stride of the even and odd copies of x.
        x_offset: start of packed x in scratch.
        table_offset: start of the offset tables in scratch.
        sum_offset: start of the sums of dw in scratch.
        padded_offset: start of padded x in scratch.
        transpose_offset: start of the memory in which dz is transposed.
        dz_offset: start of padded dz in scratch.
        work_offset: start of temporary memory in scratch.
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
    gemm_channels: int
    gemm_columns: int
    pitch: int
    steps: int
    dz_row: int
    dz_part: int
    x_part: int
    x_tile: int
    x_copy: int
    x_offset: int
    table_offset: int
    sum_offset: int
    padded_offset: int
    transpose_offset: int
    dz_offset: int
    work_offset: int
    scratch_size: int


def make_weight_gradient_geometry(
    maps: tuple[int, int, int],
    out: tuple[int, int, int],
    window: tuple[int, int],
    pads: tuple[int, int],
) -> WeightGradientGeometry:
    """Return the geometry of the weight gradient for x of `maps` and dy of `out`.

    A filter row of at most 16 elements is one column with that many channels.
    """
    (_, _, c), (h_out, w_out, k), (r, s) = maps, out, window
    channels, columns = (s * c, 1) if s * c <= SIDE else (c, s)
    high, wide = -(-k // SIDE), -(-channels // SIDE)
    pitch = (w_out + s) // 2 * 2
    steps = -(-h_out * pitch // STEPS)
    # With an odd number of cache lines, the rows of a tile are in different cache sets.
    row = (steps | 1) * WORDS
    transposed = high * SIDE * row
    part = ((r - 1) * pitch + s + steps * STEPS) // 2 * WORDS
    tile = PARTS * part
    copy = wide * tile
    taps = r * columns * wide
    x = _words(PARTS * transposed)
    tables = x + _words(min(2, columns) * copy)
    sums = tables + _lines(2 * high + steps + 2 * taps)
    padded = sums + taps * high * SIDE * SIDE
    work = padded + _lines(2 * part // WORDS * c + s * c)
    dz = work + high * PANEL // 2
    size = dz + _lines(h_out * pitch * k)
    return WeightGradientGeometry(
        *maps,
        *out,
        *window,
        *pads,
        channels,
        columns,
        pitch,
        steps,
        row,
        transposed,
        part,
        tile,
        copy,
        x,
        tables,
        sums,
        padded,
        work,
        dz,
        size,
        size + LINE,
    )


@inlined
def _prepare_sums(geo, scratch):  # type: ignore[no-untyped-def]
    """Zero the padding and the sums, and fill the tables."""
    k, r = geo.k, geo.r
    channels, columns, pitch, steps, row = (
        geo.gemm_channels,
        geo.gemm_columns,
        geo.pitch,
        geo.steps,
        geo.dz_row,
    )
    scratch[:] = 0
    tables, table = scratch.view(np.int32), geo.table_offset
    high, wide = -(-k // SIDE), -(-channels // SIDE)
    for m in range(high):
        tables[table + m] = m * SIDE * row
        tables[table + high + m] = m * SIDE * wide * SIDE
    for t in range(steps):
        tables[table + 2 * high + t] = t * STEPS
    first = table + 2 * high + steps
    taps = r * columns * wide
    # The inner loop is over filter rows, which share data in the cache.
    for q in range(wide):
        for j in range(columns):
            for i in range(r):
                entry = first + (q * columns + j) * r + i
                pair = (i * pitch + j) // 2
                tables[entry] = j % 2 * geo.x_copy + q * geo.x_tile + pair * WORDS
                tables[taps + entry] = (i * columns + j) * high * SIDE * wide * SIDE + q * SIDE


@inlined
def _split_transposed(geo, dz, dz_start, scratch):  # type: ignore[no-untyped-def]
    """Split one sample's padded dy (Ho, pitch, K), transposed so that pixels are adjacent."""
    h_out, k, pitch, row, transposed = geo.h_out, geo.k, geo.pitch, geo.dz_row, geo.dz_part
    words, work = scratch.view(np.uint16), geo.transpose_offset
    size, high = h_out * pitch, -(-k // SIDE)
    for p in range(0, size, STEPS):
        pixels = min(STEPS, size - p)
        split_pairs(
            (dz, dz_start + p * k),
            k,
            (words, 2 * work),
            (pixels, STEPS, k),
            (PANEL, PANEL // PARTS, 0),
        )
        for m in range(high):
            for part in range(PARTS):
                # The transposition treats a pair of bfloat16 words as one element of 32 bits.
                transpose(
                    scratch,
                    work + (m * PARTS + part) * STEPS * SIDE // 2,
                    SIDE,
                    scratch,
                    (part * transposed + m * SIDE * row + p) // 2,
                    row // 2,
                    SIDE,
                    SIDE,
                )


@inlined
def _pair(geo, scratch):  # type: ignore[no-untyped-def]
    """Pack one sample's padded maps in pairs of pixels."""
    c, channels, columns, part = geo.c, geo.gemm_channels, geo.gemm_columns, geo.x_part
    words = scratch.view(np.uint16)
    pixels = 2 * part // WORDS
    for j in range(min(2, columns)):
        split_pairs(
            (scratch, geo.padded_offset + j * c),
            c,
            (words, 2 * geo.x_offset + j * geo.x_copy),
            (pixels, pixels, channels),
            (geo.x_tile, part, STEPS * SIDE),
        )


@inlined
def _accumulate(geo, x, x_start, dz, dz_start, scratch):  # type: ignore[no-untyped-def]
    """Add one sample's dwᵀ to the sums."""
    height, width, c, h_out, k, r = geo.height, geo.width, geo.c, geo.h_out, geo.k, geo.r
    channels, columns, pitch, steps = geo.gemm_channels, geo.gemm_columns, geo.pitch, geo.steps
    first, last = max(0, -geo.pad_left), min(width, pitch - geo.pad_left)
    for i in range(max(0, -geo.pad_top), min(height, h_out + r - 1 - geo.pad_top)):
        row = geo.padded_offset + ((i + geo.pad_top) * pitch + first + geo.pad_left) * c
        copy(x, x_start + (i * width + first) * c, scratch, row, (last - first) * c)
    _split_transposed(geo, dz, dz_start, scratch)
    _pair(geo, scratch)
    words, tables, table, sums = (
        scratch.view(np.uint16),
        scratch.view(np.int32),
        geo.table_offset,
        geo.sum_offset,
    )
    high, wide = -(-k // SIDE), -(-channels // SIDE)
    taps, row = r * columns * wide, wide * SIDE
    first = table + 2 * high + steps
    for m in range(0, high, 2):
        multiply_tiles(
            (words, 0, geo.dz_part),
            (tables, table + m, geo.dz_row),
            (tables, table + 2 * high),
            (words, 2 * geo.x_offset, geo.x_part, STEPS * SIDE),
            (tables, first),
            (scratch, sums),
            (tables, table + high + m, row),
            (tables, first + taps),
            (scratch, sums, row),
            (SIDE, min(2, high - m), steps, taps, SIDE),
        )


@inlined
def _finish_sums(geo, scratch, dw):  # type: ignore[no-untyped-def]
    """Store dw (R, S, C, K) from its transposed sums."""
    k, r, channels, columns = geo.k, geo.r, geo.gemm_channels, geo.gemm_columns
    high, wide = -(-k // SIDE), -(-channels // SIDE)
    for tap in range(r * columns):
        transpose(
            scratch,
            geo.sum_offset + tap * high * SIDE * wide * SIDE,
            wide * SIDE,
            dw,
            tap * channels * k,
            k,
            k,
            channels,
        )


@kernel
def conv2d_backward_weight(start, stop, thread, x, dy, partial, geo, scratch):  # type: ignore[no-untyped-def]
    """Compute `direct_convolution.conv2d_backward_weight`."""
    c, h_out, row, k = geo.c, geo.h_out, geo.w_out * geo.k, geo.k
    patch, pitch = geo.r * geo.s * c, geo.pitch * k
    mine, sums, dz, one = scratch[thread], partial[thread], geo.dz_offset, geo.work_offset
    ramp = mine.view(np.int32)
    sums[:] = 0
    _prepare_sums(geo, mine)
    mine[one] = 1
    for n in range(start, stop):
        for i in range(h_out):
            copy(dy, (n * h_out + i) * row, mine, dz + i * pitch, row)
        _accumulate(geo, x, n * geo.height * geo.width * c, mine, dz, mine)
        # db is the product of dy with ones.
        multiply(
            (mine, one),
            (ramp, one + 1, 0),
            (ramp, one + 1, 0),
            (dy, n * h_out * row, k),
            (sums, patch * k, 0),
            (sums, patch * k),
            (ramp, one + 1, 0),
            (1, h_out * geo.w_out, k),
            NO_LOWER_BOUND,
        )
    _finish_sums(geo, mine, sums)


@kernel
def conv2d_relu_pool_backward_weight(  # type: ignore[no-untyped-def]
    start, stop, thread, x, dy, argmax, partial, geo, pool, scratch
):
    """Compute `direct_convolution_pool.conv2d_relu_pool_backward_weight`."""
    _, h_pool, w_pool, k = dy.shape
    mine, sums = scratch[thread], partial[thread]
    dz, c = mine[geo.dz_offset :], geo.c
    db = sums[geo.r * geo.s * c * k :]
    sums[:] = 0
    _prepare_sums(geo, mine)
    for n in range(start, stop):
        unpool(
            dy, argmax, n * h_pool * w_pool * k, h_pool, w_pool, k, pool, dz, geo.pitch, 0, 0, db
        )
        _accumulate(geo, x, n * geo.height * geo.width * c, dz, 0, mine)
    _finish_sums(geo, mine, sums)
