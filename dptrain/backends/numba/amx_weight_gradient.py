"""Weight gradient of a convolution of stride 1 on the AMX unit (`amx`).

Arguments are those of `direct_convolution`, with a `WeightGradientGeometry`. In
dw[r, s]ᵀ = Σ dz[i, j]ᵀ · x[i + r, j + s], pixels are the steps. dz is transposed, so that they are
adjacent; x is stored in pairs of pixels, (0, 1), (2, 3), … for even columns of the filter and
(1, 2), (3, 4), … for odd ones. Both have the pitch of padded x.

Each sample is summed in blocks of rows that stay in the L2 cache. These follow from the shape
alone. Blocks of `blocks` are ranges of tiles of filters, on which no sum depends.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dptrain.backends.numba.amx import (
    CACHE,
    LINE,
    PANEL,
    PARTS,
    SIDE,
    STEPS,
    WORDS,
    in_lines,
    multiply_tiles,
    split_pairs,
    words_in_lines,
)
from dptrain.backends.numba.fused_pooling import select_by_pool, unpool_rows
from dptrain.backends.numba.jit import inlined, kernel
from dptrain.backends.numba.microkernels import NO_LOWER_BOUND, multiply
from dptrain.backends.numba.planning import Algorithm, Shape, Work, units_per_item
from dptrain.backends.numba.vector import copy, transpose


def plan(shape: Shape, work: Work) -> Algorithm:
    """Return the algorithm of the weight gradient of a convolution of stride 1."""
    geometry = make_weight_gradient_geometry(shape.maps, shape.out, shape.window, shape.pads)
    blocks = units_per_item(work.rows, work.threads, -(-shape.out[2] // SIDE))
    scratch = int(geometry.scratch_size)
    return Algorithm(conv2d_backward_weight, geometry, scratch, blocks)


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
        block_rows: rows of dz that are summed together.
        dz_row: stride of the channels of transposed dz.
        dz_part: stride of the parts of transposed dz.
        x_part: stride of the parts of x.
        x_tile: stride of the column tiles of x.
        x_copy: stride of the even and odd copies of x.
        x_offset: start of packed x in scratch.
        table_offset: start of the offset tables in scratch.
        table_steps: steps of a block of rows.
        sum_offset: start of the sums of dw in scratch.
        padded_offset: start of padded x in scratch.
        transpose_offset: start of the memory in which dz is transposed.
        dz_offset: start of padded dz in scratch.
        bias_offset: start of the sums of db in scratch.
        rest_offset: start of sums that are not used in scratch.
        one_offset: start of the number 1, followed by an offset of 0, in scratch.
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
    block_rows: int
    dz_row: int
    dz_part: int
    x_part: int
    x_tile: int
    x_copy: int
    x_offset: int
    table_offset: int
    table_steps: int
    sum_offset: int
    padded_offset: int
    transpose_offset: int
    dz_offset: int
    bias_offset: int
    rest_offset: int
    one_offset: int
    scratch_size: int


def make_weight_gradient_geometry(
    maps: tuple[int, int, int],
    out: tuple[int, int, int],
    window: tuple[int, int],
    pads: tuple[int, int],
) -> WeightGradientGeometry:
    """Return the geometry of the weight gradient for x of `maps` and dy of `out`.

    A filter row of at most 16 elements is one column with that many channels.

    Args:
        window: (R, S).
        pads: rows of zeros above and columns of zeros to the left of the maps.
    """
    (_, _, c), (h_out, w_out, k), (r, s) = maps, out, window
    channels, columns = (s * c, 1) if s * c <= SIDE else (c, s)
    high, wide, copies = -(-k // SIDE), -(-channels // SIDE), min(2, columns)
    pitch = (w_out + s) // 2 * 2
    x_bytes = pitch * (4 * c + 2 * PARTS * copies * wide * SIDE)
    dz_bytes = pitch * (4 * k + 2 * PARTS * high * SIDE)
    rows = min(h_out, max(1, (CACHE - (r - 1) * x_bytes) // (x_bytes + dz_bytes)))
    rows = -(-h_out // -(-h_out // rows))
    steps = -(-rows * pitch // STEPS)
    # With an odd number of cache lines, the rows of a tile are in different cache sets.
    row = (steps | 1) * WORDS
    transposed = high * SIDE * row
    part = ((r - 1) * pitch + s + steps * STEPS) // 2 * WORDS
    tile = PARTS * part
    copy_size = wide * tile
    taps = r * columns * wide
    x = words_in_lines(PARTS * transposed)
    tables = x + words_in_lines(copies * copy_size)
    sums = tables + in_lines(2 * high + steps + 2 * taps)
    padded = sums + taps * high * SIDE * SIDE
    work = padded + in_lines(2 * part // WORDS * c + s * c)
    dz = work + high * PANEL // 2
    bias = dz + in_lines(rows * pitch * k)
    rest = bias + in_lines(k)
    one = rest + in_lines(k)
    return WeightGradientGeometry(
        *maps,
        *out,
        *window,
        *pads,
        channels,
        columns,
        pitch,
        rows,
        row,
        transposed,
        part,
        tile,
        copy_size,
        x,
        tables,
        steps,
        sums,
        padded,
        work,
        dz,
        bias,
        rest,
        one,
        one + LINE,
    )


@inlined
def _begin(geo, scratch):  # type: ignore[no-untyped-def]
    """Set the padding and the sums to zero, and fill the tables."""
    r, channels, columns = geo.r, geo.gemm_channels, geo.gemm_columns
    for q in range(np.uintp(geo.sum_offset), np.uintp(geo.scratch_size)):
        scratch[q] = 0
    scratch[geo.one_offset] = 1
    tables, table, steps = scratch.view(np.int32), geo.table_offset, geo.table_steps
    high, wide = -(-geo.k // SIDE), -(-channels // SIDE)
    for m in range(high):
        tables[table + m] = m * SIDE * geo.dz_row
        tables[table + high + m] = m * SIDE * wide * SIDE
    for t in range(steps):
        tables[table + 2 * high + t] = t * STEPS
    first, taps = table + 2 * high + steps, r * columns * wide
    # The inner loop is over filter rows, which share data in the cache.
    for q in range(wide):
        for j in range(columns):
            for i in range(r):
                entry = first + (q * columns + j) * r + i
                pair = (i * geo.pitch + j) // 2
                tables[entry] = j % 2 * geo.x_copy + q * geo.x_tile + pair * WORDS
                tables[taps + entry] = (i * columns + j) * high * SIDE * wide * SIDE + q * SIDE


@inlined
def _load_maps(geo, x, n, row, rows, scratch):  # type: ignore[no-untyped-def]
    """Pack the rows of sample n of x that belong to some rows of dz, in pairs of pixels."""
    c, pitch, part, width = geo.c, geo.pitch, geo.x_part, geo.width
    words, top = scratch.view(np.uint16), row - geo.pad_top
    size = min(width, pitch - geo.pad_left) * c
    for i in range(rows + geo.r - 1):
        target = geo.padded_offset + (i * pitch + geo.pad_left) * c
        if 0 <= top + i < geo.height:
            copy(x, (n * geo.height + top + i) * width * c, scratch, target, size)
        else:
            for q in range(np.uintp(target), np.uintp(target + size)):
                scratch[q] = 0
    pixels = 2 * part // WORDS
    for j in range(min(2, geo.gemm_columns)):
        split_pairs(
            (scratch, geo.padded_offset + j * c),
            c,
            (words, 2 * geo.x_offset + j * geo.x_copy),
            (pixels, pixels, geo.gemm_channels),
            (geo.x_tile, part, STEPS * SIDE),
        )


def _load_unpooled(pool, dy, argmax, maps, geo, n, row, rows, first, filters, scratch):  # type: ignore[no-untyped-def]
    unpool_rows(
        pool, dy, argmax, n, maps, (row, row + rows), scratch, geo.dz_offset, geo.pitch,
        (first, first + filters), scratch, geo.bias_offset, scratch[geo.rest_offset :],
    )  # fmt: skip


def _load_plain(pool, dy, argmax, maps, geo, n, row, rows, first, filters, scratch):  # type: ignore[no-untyped-def]
    k, w_out, one, tables = geo.k, geo.w_out, geo.one_offset, scratch.view(np.int32)
    start = (n * geo.h_out + row) * w_out * k
    for i in range(rows):
        target = geo.dz_offset + i * geo.pitch * k
        copy(dy, start + i * w_out * k, scratch, target, w_out * k)
    # db is the product of ones with dy.
    multiply(
        (scratch, one),
        (tables, one + 1, 0),
        (tables, one + 1, 0),
        (dy, start + first, k),
        (scratch, geo.bias_offset + first, 0),
        (scratch, geo.bias_offset + first),
        (tables, one + 1, 0),
        (1, rows * w_out, filters),
        NO_LOWER_BOUND,
    )


_load_gradients = select_by_pool(_load_unpooled, _load_plain)
"""Write rows of dz of sample n to scratch, and add `filters` filters from `first` on to db."""


@inlined
def _transpose_gradients(geo, rows, first, last, scratch):  # type: ignore[no-untyped-def]
    """Split rows of dz of tiles `first` to `last` of filters, so that pixels are adjacent."""
    k, work, words = geo.k, geo.transpose_offset, scratch.view(np.uint16)
    size, filters = rows * geo.pitch, min(geo.k, last * SIDE) - first * SIDE
    for p in range(0, size, STEPS):
        split_pairs(
            (scratch, geo.dz_offset + p * k + first * SIDE),
            k,
            (words, 2 * work),
            (min(STEPS, size - p), STEPS, filters),
            (PANEL, PANEL // PARTS, 0),
        )
        for m in range(last - first):
            for part in range(PARTS):
                # The transposition treats a pair of bfloat16 words as one element of 32 bits.
                transpose(
                    scratch,
                    work + (m * PARTS + part) * STEPS * SIDE // 2,
                    SIDE,
                    scratch,
                    (part * geo.dz_part + (first + m) * SIDE * geo.dz_row + p) // 2,
                    geo.dz_row // 2,
                    SIDE,
                    SIDE,
                )


@inlined
def _multiply(geo, rows, first, last, scratch):  # type: ignore[no-untyped-def]
    """Add the products of the loaded rows to dwᵀ of tiles `first` to `last` of filters."""
    words, tables, table = scratch.view(np.uint16), scratch.view(np.int32), geo.table_offset
    high, wide = -(-geo.k // SIDE), -(-geo.gemm_channels // SIDE)
    taps, row = geo.r * geo.gemm_columns * wide, wide * SIDE
    columns = table + 2 * high + geo.table_steps
    for m in range(first, last, 2):
        multiply_tiles(
            (words, 0, geo.dz_part),
            (tables, table + m, geo.dz_row),
            (tables, table + 2 * high),
            (words, 2 * geo.x_offset, geo.x_part, STEPS * SIDE),
            (tables, columns),
            (scratch, geo.sum_offset),
            (tables, table + high + m, row),
            (tables, columns + taps),
            (scratch, geo.sum_offset, row),
            (SIDE, min(2, last - m), -(-rows * geo.pitch // STEPS), taps, SIDE),
        )


@inlined
def _finish(geo, first, filters, scratch, sums):  # type: ignore[no-untyped-def]
    """Store dw (R, S, C, K) of `filters` filters from `first` on from its transposed sums."""
    k, channels = geo.k, geo.gemm_channels
    high, wide = -(-k // SIDE), -(-channels // SIDE)
    for tap in range(geo.r * geo.gemm_columns):
        source = geo.sum_offset + (tap * high * SIDE + first) * wide * SIDE
        transpose(
            scratch, source, wide * SIDE, sums, tap * channels * k + first, k, filters, channels
        )


@inlined
def _sum_samples(  # type: ignore[no-untyped-def]
    start, stop, x, dy, argmax, maps, pool, sums, geo, first, last, scratch
):
    """Write dw and db of samples `start` to `stop` to `sums`, of tiles `first` to `last`."""
    k, first_filter = geo.k, first * SIDE
    filters = min(k, last * SIDE) - first_filter
    _begin(geo, scratch)
    for n in range(start, stop):
        for row in range(0, geo.h_out, geo.block_rows):
            rows = min(geo.block_rows, geo.h_out - row)
            _load_maps(geo, x, n, row, rows, scratch)
            _load_gradients(
                pool, dy, argmax, maps, geo, n, row, rows, first_filter, filters, scratch
            )
            _transpose_gradients(geo, rows, first, last, scratch)
            _multiply(geo, rows, first, last, scratch)
    _finish(geo, first_filter, filters, scratch, sums)
    db = geo.r * geo.s * geo.c * k + first_filter
    copy(scratch, geo.bias_offset + first_filter, sums, db, filters)


@kernel
def conv2d_backward_weight(  # type: ignore[no-untyped-def]
    start, stop, thread, x, dy, argmax, partial, bounds, geo, blocks, pool, shared, scratch
):
    """Compute `direct_convolution.conv2d_backward_weight`."""
    tiles, (_, h_y, w_y, k) = -(-geo.k // SIDE), dy.shape
    dy_flat, argmax_flat = dy.reshape(-1), argmax.reshape(-1)
    for item in range(start, stop):
        row, block = item // blocks, item % blocks
        _sum_samples(
            bounds[row], bounds[row + 1], x, dy_flat, argmax_flat, (h_y, w_y, k), pool,
            partial[row], geo, tiles * block // blocks, tiles * (block + 1) // blocks,
            scratch[thread],
        )  # fmt: skip
