"""Convolution of stride 1 on the tile unit (`tiles`), forward and backward.

Arguments are those of `convolution` and `pooled_convolution`. Every sample is split into parts in
scratch, zeros around it:

- forward and backward by the input, in the order of memory: what a row of a filter meets is one
  run of pixels and channels, 32 of which are a step; pixels of the output are a tile's rows. Tiles
  take row by row of the output, or all rows with the padding between them where that needs fewer;
- backward by the weights, dw[r, s]ᵀ = Σ dy[i, j]ᵀ · x[i + r, j + s]: pixels are the steps. dy is
  turned around, so that pixels lie side by side; x stands in pairs of pixels, (0, 1), (2, 3), … for
  even columns of the filter and (1, 2), (3, 4), … for odd ones. Both have the pitch of padded x.

Scratch is in lines of 64 bytes, which rows of a tile should not cross.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from dptrain.backends.numba.jit import inlined, kernel
from dptrain.backends.numba.microkernels import multiply
from dptrain.backends.numba.patches import NOTHING, pool_row, unpool
from dptrain.backends.numba.tiles import (
    PANEL,
    PARTS,
    SIDE,
    STEPS,
    multiply_tiles,
    split_pairs,
    split_rows,
)
from dptrain.backends.numba.vector import copy, transpose

LINE = 16
"""Float32 elements of a line."""
WORDS = 2 * LINE


def _lines(elements: int) -> int:
    """`elements` of float32, rounded up to whole lines."""
    return -(-elements // LINE) * LINE


def _words(elements: int) -> int:
    """Float32 elements that hold so many words, in whole lines."""
    return _lines(-(-elements // 2))


def correlation(
    maps: tuple[int, int, int],
    out: tuple[int, int, int],
    window: tuple[int, int],
    pads: tuple[int, int],
) -> NDArray[np.int64]:
    """How to walk over a correlation of `maps` (H, W, C) that gives `out` (Ho, Wo, K).

    Args:
        window: (R, S).
        pads: rows above and columns before the maps.

    Returns:
        int64: H, W, C, Ho, Wo, K, R, S, rows above, columns before; columns of the padded maps;
        elements of a part; steps of a filter row; runs of pixels, and of each the pixels and tiles;
        rows of a tile; pixels from row to row of the output; where tables, packed weights, the
        output and what is behind it begin in scratch; how long scratch is, if the larger of a
        sample's input and the weights comes there.
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
    return np.array(
        [*maps, *out, *window, *pads, columns, part, row_steps, runs, pixels, across, height,
         pitch, tables, panels, y, rest, rest + more],
        np.int64,
    )  # fmt: skip


@inlined
def _prepare(walk, w, start, scratch):  # type: ignore[no-untyped-def]
    """Zeros for the padding, tables, and the weights (R, S, C, K) in panels."""
    c, k, r, s = walk[2], walk[5], walk[6], walk[7]
    columns, row_steps, runs, across = walk[10], walk[12], walk[13], walk[15]
    words, tables, table = scratch.view(np.uint16), scratch.view(np.int32), walk[18]
    for q in range(table):
        scratch[q] = 0
    tiles = runs * across
    for i in range(runs):
        for j in range(across):
            # The last tile of a run begins where it still has all of its rows.
            pixel = min(j * walk[16], walk[14] - walk[16])
            tables[table + i * across + j] = (i * columns + pixel) * c
            tables[table + tiles + i * across + j] = (i * walk[17] + pixel) * k
    for i in range(r):
        for t in range(row_steps):
            tables[table + 2 * tiles + i * row_steps + t] = i * columns * c + t * STEPS
        split_pairs(
            (w, start + i * s * c * k), k, (words, 2 * walk[19] + i * row_steps * PANEL),
            (s * c, row_steps * STEPS, k), (r * row_steps * PANEL, PANEL // PARTS, PANEL),
        )  # fmt: skip
    wide = -(-k // SIDE)
    for j in range(wide):
        tables[table + 2 * tiles + r * row_steps + j] = j * r * row_steps * PANEL
        tables[table + 2 * tiles + r * row_steps + wide + j] = j * SIDE


@inlined
def _split(walk, maps, start, scratch):  # type: ignore[no-untyped-def]
    """One sample's maps, split and padded."""
    height, width, c = walk[0], walk[1], walk[2]
    above, before, columns, part = walk[8], walk[9], walk[10], walk[11]
    words = scratch.view(np.uint16)
    for i in range(height):
        place = ((i + above) * columns + before) * c
        split_rows((maps, start + i * width * c), (words, place), part, width * c)


@inlined
def _correlate(walk, scratch, d, d_row, y, y_start):  # type: ignore[no-untyped-def]
    """One sample's output from its split maps, `walk[17]` pixels from row to row."""
    c, k, r = walk[2], walk[5], walk[6]
    part, row_steps, tiles = walk[11], walk[12], walk[13] * walk[15]
    words, tables, table = scratch.view(np.uint16), scratch.view(np.int32), walk[18]
    steps, wide = r * row_steps, -(-k // SIDE)
    more = table + 2 * tiles
    multiply_tiles(
        (words, 0, part), (tables, table, c), (tables, more),
        (words, 2 * walk[19], PANEL // PARTS, PANEL), (tables, more + steps),
        (y, y_start), (tables, table + tiles, k), (tables, more + steps + wide),
        (d, 0, d_row), (walk[16], tiles, steps, wide, k - (wide - 1) * SIDE),
    )  # fmt: skip


@inlined
def _write(walk, scratch, d, d_row, floor, y, y_start):  # type: ignore[no-untyped-def]
    """One sample's output (Ho, Wo, K), not below `floor`, from its split maps."""
    h_out, row, pitch, band = walk[3], walk[4] * walk[5], walk[17] * walk[5], walk[20]
    _correlate(walk, scratch, d, d_row, scratch, band)
    for i in range(h_out):
        for q in range(np.uintp(row)):
            value = scratch[band + i * pitch + q]
            # Written so that a NaN passes: it must reach the loss to be noticed.
            y[y_start + i * row + q] = floor if value < floor else value


@kernel
def conv2d_forward(start, stop, thread, x, w, b, y, walk, relu, scratch):  # type: ignore[no-untyped-def]
    """As `convolution.conv2d_forward`."""
    mine, y_flat = scratch[thread], y.reshape(-1)
    x_size, y_size = walk[0] * walk[1] * walk[2], walk[3] * walk[4] * walk[5]
    floor = np.float32(0) if relu else NOTHING
    _prepare(walk, w, 0, mine)
    for n in range(start, stop):
        _split(walk, x, n * x_size, mine)
        _write(walk, mine, b, 0, floor, y_flat, n * y_size)


@kernel
def conv2d_relu_pool_forward(start, stop, thread, x, w, b, y, argmax, walk, pool, scratch):  # type: ignore[no-untyped-def]
    """As `pooled_convolution.conv2d_relu_pool_forward`."""
    _, h_pool, w_pool, k = y.shape
    h_out, w_out, pitch = walk[3], walk[4], walk[17]
    mine, band = scratch[thread], walk[20]
    _prepare(walk, w, 0, mine)
    for n in range(start, stop):
        _split(walk, x, n * walk[0] * walk[1] * walk[2], mine)
        _correlate(walk, mine, b, 0, mine, band)
        for i in range(h_pool):
            above = i * pool[2] - pool[0]
            first, last = max(0, above), min(h_out, above + pool[4])
            pool_row(
                mine, band + above * pitch * k, first - above, last - above, w_out, pitch, w_pool,
                k, pool, y, argmax, (n * h_pool + i) * w_pool * k,
            )  # fmt: skip


@inlined
def _prepare_flipped(walk, w, scratch):  # type: ignore[no-untyped-def]
    """As `_prepare`, with weights (R, S, K, C) as backward by the input meets them."""
    k, c, taps, flipped = walk[2], walk[5], walk[6] * walk[7], walk[21]
    for tap in range(taps):
        transpose(w, (taps - 1 - tap) * c * k, k, scratch, flipped + tap * c * k, c, c, k)
    _prepare(walk, scratch, flipped, scratch)


@kernel
def conv2d_backward_input(start, stop, thread, dy, w, dx, walk, scratch):  # type: ignore[no-untyped-def]
    """As `convolution.conv2d_backward_input`; `walk` goes from dy to dx."""
    mine, dx_flat, dx_size = scratch[thread], dx.reshape(-1), walk[3] * walk[4] * walk[5]
    _prepare_flipped(walk, w.reshape(-1), mine)
    for n in range(start, stop):
        _split(walk, dy, n * walk[0] * walk[1] * walk[2], mine)
        _write(walk, mine, mine, -1, NOTHING, dx_flat, n * dx_size)


@kernel
def conv2d_relu_pool_backward_input(  # type: ignore[no-untyped-def]
    start, stop, thread, dy, argmax, w, dx, walk, pool, scratch
):
    """As `pooled_convolution.conv2d_relu_pool_backward_input`."""
    _, h_pool, w_pool, k = dy.shape
    mine, dx_flat, dx_size = scratch[thread], dx.reshape(-1), walk[3] * walk[4] * walk[5]
    dz = mine[walk[21] :]
    sums = dz[walk[0] * walk[1] * k :]
    _prepare_flipped(walk, w.reshape(-1), mine)
    dz[:] = 0
    for n in range(start, stop):
        unpool(
            dy, argmax, n * h_pool * w_pool * k, h_pool, w_pool, k, pool, dz, walk[1], 0, 0, sums
        )
        _split(walk, dz, 0, mine)
        _write(walk, mine, mine, -1, NOTHING, dx_flat, n * dx_size)


def accumulation(
    maps: tuple[int, int, int],
    out: tuple[int, int, int],
    window: tuple[int, int],
    pads: tuple[int, int],
) -> NDArray[np.int64]:
    """How to walk over backward by the weights, for x of `maps` and dy of `out`.

    A filter whose rows have at most 16 elements is one of a single column with that many channels.

    Returns:
        int64: H, W, C, Ho, Wo, K, R, S; rows above, columns before; channels and filter columns as
        walked; pitch of rows; steps; distances of dy's channels and parts, of x's parts, column
        tiles and copies, in words; where x, tables, sums, padded x, what turns dy and padded dy
        begin, and what is behind it.
    """
    (_, _, c), (h_out, w_out, k), (r, s) = maps, out, window
    channels, columns = (s * c, 1) if s * c <= SIDE else (c, s)
    high, wide = -(-k // SIDE), -(-channels // SIDE)
    pitch = (w_out + s) // 2 * 2
    steps = -(-h_out * pitch // STEPS)
    # An odd number of lines, so that the rows of a tile lie in different sets of the cache.
    row = (steps | 1) * WORDS
    turned = high * SIDE * row
    part = ((r - 1) * pitch + s + steps * STEPS) // 2 * WORDS
    tile = PARTS * part
    copy = wide * tile
    taps = r * columns * wide
    x = _words(PARTS * turned)
    tables = x + _words(min(2, columns) * copy)
    sums = tables + _lines(2 * high + steps + 2 * taps)
    padded = sums + taps * high * SIDE * SIDE
    work = padded + _lines(2 * part // WORDS * c + s * c)
    dz = work + high * PANEL // 2
    size = dz + _lines(h_out * pitch * k)
    return np.array(
        [*maps, *out, *window, *pads, channels, columns, pitch, steps, row, turned, part, tile,
         copy, x, tables, sums, padded, work, dz, size, size + LINE],
        np.int64,
    )  # fmt: skip


@inlined
def _prepare_sums(walk, scratch):  # type: ignore[no-untyped-def]
    """Zeros for the padding and the sums, and tables."""
    k, r = walk[5], walk[6]
    channels, columns, pitch, steps, row = walk[10], walk[11], walk[12], walk[13], walk[14]
    scratch[:] = 0
    tables, table = scratch.view(np.int32), walk[20]
    high, wide = -(-k // SIDE), -(-channels // SIDE)
    for m in range(high):
        tables[table + m] = m * SIDE * row
        tables[table + high + m] = m * SIDE * wide * SIDE
    for t in range(steps):
        tables[table + 2 * high + t] = t * STEPS
    first = table + 2 * high + steps
    taps = r * columns * wide
    # Filter rows inside, which share what they meet in the cache.
    for q in range(wide):
        for j in range(columns):
            for i in range(r):
                place = first + (q * columns + j) * r + i
                pair = (i * pitch + j) // 2
                tables[place] = j % 2 * walk[18] + q * walk[17] + pair * WORDS
                tables[taps + place] = (i * columns + j) * high * SIDE * wide * SIDE + q * SIDE


@inlined
def _turn(walk, dz, dz_start, scratch):  # type: ignore[no-untyped-def]
    """One sample's padded dy (Ho, pitch, K) split, channel by channel."""
    h_out, k, pitch, row, turned = walk[3], walk[5], walk[12], walk[14], walk[15]
    words, work = scratch.view(np.uint16), walk[23]
    size, high = h_out * pitch, -(-k // SIDE)
    for p in range(0, size, STEPS):
        few = min(STEPS, size - p)
        split_pairs(
            (dz, dz_start + p * k),
            k,
            (words, 2 * work),
            (few, STEPS, k),
            (PANEL, PANEL // PARTS, 0),
        )
        for m in range(high):
            for part in range(PARTS):
                # Pairs of words are elements of 32 bits, which is all that turning asks for.
                transpose(
                    scratch, work + (m * PARTS + part) * STEPS * SIDE // 2, SIDE,
                    scratch, (part * turned + m * SIDE * row + p) // 2, row // 2, SIDE, SIDE,
                )  # fmt: skip


@inlined
def _pair(walk, scratch):  # type: ignore[no-untyped-def]
    """One sample's padded maps as pairs of pixels."""
    c, channels, columns, part = walk[2], walk[10], walk[11], walk[16]
    words = scratch.view(np.uint16)
    pixels = 2 * part // WORDS
    for j in range(min(2, columns)):
        split_pairs(
            (scratch, walk[22] + j * c), c, (words, 2 * walk[19] + j * walk[18]),
            (pixels, pixels, channels), (walk[17], part, STEPS * SIDE),
        )  # fmt: skip


@inlined
def _accumulate(walk, x, x_start, dz, dz_start, scratch):  # type: ignore[no-untyped-def]
    """Add one sample's dwᵀ to the sums."""
    height, width, c, h_out, k, r = walk[0], walk[1], walk[2], walk[3], walk[5], walk[6]
    channels, columns, pitch, steps = walk[10], walk[11], walk[12], walk[13]
    first, last = max(0, -walk[9]), min(width, pitch - walk[9])
    for i in range(max(0, -walk[8]), min(height, h_out + r - 1 - walk[8])):
        row = walk[22] + ((i + walk[8]) * pitch + first + walk[9]) * c
        copy(x, x_start + (i * width + first) * c, scratch, row, (last - first) * c)
    _turn(walk, dz, dz_start, scratch)
    _pair(walk, scratch)
    words, tables, table, sums = scratch.view(np.uint16), scratch.view(np.int32), walk[20], walk[21]
    high, wide = -(-k // SIDE), -(-channels // SIDE)
    taps, row = r * columns * wide, wide * SIDE
    first = table + 2 * high + steps
    for m in range(0, high, 2):
        multiply_tiles(
            (words, 0, walk[15]), (tables, table + m, walk[14]), (tables, table + 2 * high),
            (words, 2 * walk[19], walk[16], STEPS * SIDE), (tables, first),
            (scratch, sums), (tables, table + high + m, row), (tables, first + taps),
            (scratch, sums, row), (SIDE, min(2, high - m), steps, taps, SIDE),
        )  # fmt: skip


@inlined
def _finish_sums(walk, scratch, dw):  # type: ignore[no-untyped-def]
    """Dw (R, S, C, K) from its transposed sums."""
    k, r, channels, columns = walk[5], walk[6], walk[10], walk[11]
    high, wide = -(-k // SIDE), -(-channels // SIDE)
    for tap in range(r * columns):
        transpose(
            scratch, walk[21] + tap * high * SIDE * wide * SIDE, wide * SIDE,
            dw, tap * channels * k, k, k, channels,
        )  # fmt: skip


@kernel
def conv2d_backward_weight(start, stop, thread, x, dy, partial, walk, scratch):  # type: ignore[no-untyped-def]
    """As `convolution.conv2d_backward_weight`."""
    c, h_out, row, k = walk[2], walk[3], walk[4] * walk[5], walk[5]
    patch, pitch = walk[6] * walk[7] * c, walk[12] * k
    mine, sums, dz, one = scratch[thread], partial[thread], walk[24], walk[25]
    ramp = mine.view(np.int32)
    sums[:] = 0
    _prepare_sums(walk, mine)
    mine[one] = 1
    for n in range(start, stop):
        for i in range(h_out):
            copy(dy, (n * h_out + i) * row, mine, dz + i * pitch, row)
        _accumulate(walk, x, n * walk[0] * walk[1] * c, mine, dz, mine)
        # db is the product of dy with ones.
        multiply(
            (mine, one), (ramp, one + 1, 0), (ramp, one + 1, 0), (dy, n * h_out * row, k),
            (sums, patch * k, 0), (sums, patch * k), (ramp, one + 1, 0), (1, h_out * walk[4], k),
            NOTHING,
        )  # fmt: skip
    _finish_sums(walk, mine, sums)


@kernel
def conv2d_relu_pool_backward_weight(  # type: ignore[no-untyped-def]
    start, stop, thread, x, dy, argmax, partial, walk, pool, scratch
):
    """As `pooled_convolution.conv2d_relu_pool_backward_weight`."""
    _, h_pool, w_pool, k = dy.shape
    mine, sums = scratch[thread], partial[thread]
    dz, c = mine[walk[24] :], walk[2]
    db = sums[walk[6] * walk[7] * c * k :]
    sums[:] = 0
    _prepare_sums(walk, mine)
    for n in range(start, stop):
        unpool(dy, argmax, n * h_pool * w_pool * k, h_pool, w_pool, k, pool, dz, walk[12], 0, 0, db)
        _accumulate(walk, x, n * walk[0] * walk[1] * c, dz, 0, mine)
    _finish_sums(walk, mine, sums)
