"""Convolution of stride 1 on the tile unit (`tiles`), forward and backward.

Arguments are those of `convolution` and `pooled_convolution`. Every sample is split into parts in
scratch, zeros around it:

- forward and backward by the input, a pixel's channels side by side: a row of a filter meets one
  run of them, 32 of which are one step of the unit; pixels of a row of the output are a tile's rows;
- backward by the weights, channel by channel: there pixels are the steps, filter elements the rows.
  Neighbouring filter columns meet pixels that differ by one, so each has its own copy without the
  pixels that it does not meet: then all copies have the pitch of the output.

Scratch is in lines of 64 bytes, which rows of a tile should not cross.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dptrain.backends.numba.jit import expanded, inlined, kernel
from dptrain.backends.numba.microkernels import multiply
from dptrain.backends.numba.patches import NOTHING, pack_flipped, pool_row, unpool
from dptrain.backends.numba.tiles import (
    MOST_COPIES,
    PANEL,
    PARTS,
    SIDE,
    STEPS,
    available,
    multiply_tiles,
    split_panels,
    split_rows,
    split_turned,
)

LINE = 16
"""Float32 elements of a line."""
WORDS = 2 * LINE
CHUNK = 3
"""Steps of backward by the weights whose operands stay in L1 for all filter elements."""


def _lines(elements: int) -> int:
    """`elements` of float32, rounded up to whole lines."""
    return -(-elements // LINE) * LINE


def _words(elements: int) -> int:
    """Float32 elements that hold so many words, in whole lines."""
    return _lines(-(-elements // 2))


def correlation(
    maps: tuple[int, int, int], out: tuple[int, int, int], window: tuple[int, int], pads: tuple[int, int]
) -> NDArray[np.int64]:
    """How to walk over a correlation of `maps` (H, W, C) that gives `out` (Ho, Wo, K).

    Args:
        window: (R, S).
        pads: rows above and columns before the maps.

    Returns:
        int64: H, W, C, Ho, Wo, K, R, S, rows above, columns before; columns of the padded maps;
        elements of a part; steps of a filter row; rows of a tile; tiles of a row; where tables,
        packed weights and what follows them begin in scratch.
    """
    (_, _, c), (h_out, w_out, k), (r, s) = maps, out, window
    columns = w_out + s - 1
    part = -(-((h_out + r - 1) * columns * c + STEPS) // WORDS) * WORDS
    row_steps = -(-s * c // STEPS)
    across = -(-w_out // SIDE)
    height = -(-w_out // across)
    tables = _words(PARTS * part)
    panels = tables + _lines(2 * h_out * across + r * row_steps)
    rest = panels + _words(r * row_steps * -(-k // SIDE) * PANEL)
    return np.array(
        [*maps, *out, *window, *pads, columns, part, row_steps, height, across, tables, panels, rest],
        np.int64,
    )  # fmt: skip


@inlined
def _prepare(walk, w, start, scratch):  # type: ignore[no-untyped-def]
    """Zeros for the padding, tables, and the weights (R, S, C, K) in panels."""
    _, _, c, h_out, w_out, k, r, s = walk[:8]
    columns, row_steps, height, across = walk[10], walk[12], walk[13], walk[14]
    scratch[: walk[15]] = 0
    tables = scratch[walk[15] : walk[16]].view(np.int32)
    tiles = h_out * across
    for i in range(h_out):
        for j in range(across):
            # The last tile of a row begins where it still has all of its rows.
            column = min(j * height, w_out - height)
            tables[i * across + j] = (i * columns + column) * c
            tables[tiles + i * across + j] = (i * w_out + column) * k
    panels = scratch[walk[16] : walk[17]].view(np.uint16)
    for i in range(r):
        for t in range(row_steps):
            tables[2 * tiles + i * row_steps + t] = i * columns * c + t * STEPS
        split_panels(
            (w, start + i * s * c * k), k, (panels, i * row_steps * PANEL),
            (s * c, k, r * row_steps * PANEL),
        )  # fmt: skip


@inlined
def _split(walk, maps, start, scratch):  # type: ignore[no-untyped-def]
    """One sample's maps, split and padded."""
    height, width, c = walk[0], walk[1], walk[2]
    above, before, columns, part = walk[8], walk[9], walk[10], walk[11]
    words = scratch[: walk[15]].view(np.uint16)
    for i in range(height):
        place = ((i + above) * columns + before) * c
        split_rows((maps, start + i * width * c), (words, place), part, width * c)


@inlined
def _correlate(walk, scratch, d, d_row, y, y_start):  # type: ignore[no-untyped-def]
    """One sample's output (Ho, Wo, K) from its split maps."""
    c, h_out, k, r = walk[2], walk[3], walk[5], walk[6]
    part, row_steps, height, across = walk[11], walk[12], walk[13], walk[14]
    words = scratch[: walk[15]].view(np.uint16)
    tables = scratch[walk[15] : walk[16]].view(np.int32)
    panels = scratch[walk[16] : walk[17]].view(np.uint16)
    tiles = h_out * across
    multiply_tiles(
        (words, 0), part, (tables, 0), c, (tables, 2 * tiles), (panels, 0),
        (y, y_start), (tables, tiles), k, (d, 0), d_row, (height, tiles, r * row_steps, k),
    )  # fmt: skip


@kernel
def conv2d_forward(start, stop, thread, x, w, b, y, walk, relu, scratch):  # type: ignore[no-untyped-def]
    """As `convolution.conv2d_forward`."""
    mine, x_flat, y_flat = scratch[thread], x.reshape(-1), y.reshape(-1)
    x_size, y_size = walk[0] * walk[1] * walk[2], walk[3] * walk[4] * walk[5]
    _prepare(walk, w.reshape(-1), 0, mine)
    for n in range(start, stop):
        _split(walk, x_flat, n * x_size, mine)
        _correlate(walk, mine, b, 0, y_flat, n * y_size)
        if relu:
            for i in range(np.uintp(n * y_size), np.uintp((n + 1) * y_size)):
                y_flat[i] = np.float32(0.0) if y_flat[i] <= 0.0 else y_flat[i]


@kernel
def conv2d_relu_pool_forward(start, stop, thread, x, w, b, y, argmax, walk, pool, scratch):  # type: ignore[no-untyped-def]
    """As `pooled_convolution.conv2d_relu_pool_forward`."""
    _, h_pool, w_pool, k = y.shape
    h_out, w_out = walk[3], walk[4]
    mine, x_flat = scratch[thread], x.reshape(-1)
    y_flat, argmax_flat = y.reshape(-1), argmax.reshape(-1)
    band = mine[walk[17] :]
    _prepare(walk, w.reshape(-1), 0, mine)
    for n in range(start, stop):
        _split(walk, x_flat, n * walk[0] * walk[1] * walk[2], mine)
        _correlate(walk, mine, b, 0, band, 0)
        for i in range(h_pool):
            above = i * pool[2] - pool[0]
            first, last = max(0, above), min(h_out, above + pool[4])
            pool_row(
                *(band, above * w_out * k, first - above, last - above, w_out, w_pool, k, pool),
                *(y_flat, argmax_flat, (n * h_pool + i) * w_pool * k),
            )


@inlined
def _prepare_flipped(walk, w, scratch):  # type: ignore[no-untyped-def]
    """As `_prepare`, with weights (R, S, K, C) as backward by the input meets them."""
    flipped = scratch[walk[17] :][: w.size]
    ones = np.array([0, 0, 1, 1, walk[6], walk[7]])
    pack_flipped(w.reshape(-1), w.shape, ones, flipped)
    _prepare(walk, flipped, 0, scratch)


@kernel
def conv2d_backward_input(start, stop, thread, dy, w, dx, walk, scratch):  # type: ignore[no-untyped-def]
    """As `convolution.conv2d_backward_input`; `walk` goes from dy to dx."""
    mine, dy_flat, dx_flat = scratch[thread], dy.reshape(-1), dx.reshape(-1)
    _prepare_flipped(walk, w, mine)
    for n in range(start, stop):
        _split(walk, dy_flat, n * walk[0] * walk[1] * walk[2], mine)
        _correlate(walk, mine, mine, -1, dx_flat, n * walk[3] * walk[4] * walk[5])


@kernel
def conv2d_relu_pool_backward_input(  # type: ignore[no-untyped-def]
    start, stop, thread, dy, argmax, w, dx, walk, pool, scratch
):
    """As `pooled_convolution.conv2d_relu_pool_backward_input`."""
    _, h_pool, w_pool, k = dy.shape
    mine, dx_flat = scratch[thread], dx.reshape(-1)
    dy_flat, argmax_flat = dy.reshape(-1), argmax.reshape(-1)
    dz = mine[walk[17] :][: walk[0] * walk[1] * k]
    sums = mine[walk[17] :][walk[0] * walk[1] * k :]
    _prepare_flipped(walk, w, mine)
    dz[:] = 0
    sums[:k] = 0
    for n in range(start, stop):
        unpool(
            *(dy_flat, argmax_flat, n * h_pool * w_pool * k, h_pool, w_pool, k, pool),
            *(dz, walk[1], 0, 0, sums),
        )
        _split(walk, dz, 0, mine)
        _correlate(walk, mine, mine, -1, dx_flat, n * walk[3] * walk[4] * walk[5])


def accumulation(
    maps: tuple[int, int, int], out: tuple[int, int, int], window: tuple[int, int], pads: tuple[int, int]
) -> NDArray[np.int64]:
    """How to walk over backward by the weights, for x of `maps` and dy of `out`.

    Returns:
        int64: H, W, C, Ho, Wo, K, R, S, rows above, columns before; distances of channels, parts
        and copies of x; steps; where tables, panels and what follows them begin in scratch.
    """
    (_, _, c), (h_out, w_out, k), (r, s) = maps, out, window
    steps = -(-h_out * w_out // STEPS)
    # An odd number of lines, so that the rows of a tile lie in different sets of the cache.
    channel = (-(-((r - 1) * w_out + steps * STEPS) // WORDS) | 1) * WORDS
    part = c * channel
    copy = PARTS * part
    tables = _words(s * copy)
    panels = tables + _lines(2 * r * s * -(-c // SIDE) + steps)
    rest = panels + _words(min(CHUNK, steps) * -(-k // SIDE) * PANEL)
    return np.array(
        [*maps, *out, *window, *pads, channel, part, copy, steps, tables, panels, rest], np.int64
    )


@inlined
def _prepare_sums(walk, scratch):  # type: ignore[no-untyped-def]
    """Zeros for the padding, and tables."""
    c, w_out, k, r, s, channel, copy = walk[2], walk[4], walk[5], walk[6], walk[7], walk[10], walk[12]
    scratch[: walk[14]] = 0
    tables = scratch[walk[14] : walk[15]].view(np.int32)
    high = c // SIDE
    tiles = r * s * high
    for i in range(r):
        for j in range(s):
            for q in range(high):
                m = (i * s + j) * high + q
                tables[m] = j * copy + i * w_out + q * SIDE * channel
                tables[tiles + m] = ((i * s + j) * c + q * SIDE) * k
    for t in range(walk[13]):
        tables[2 * tiles + t] = t * STEPS


@inlined
def _accumulate(walk, x, x_start, dz, dz_start, sums, scratch):  # type: ignore[no-untyped-def]
    """Add one sample's dw to sums (R·S·C, K)."""
    height, width, c, h_out, w_out, k, r, s = walk[:8]
    above, before, channel, part, copy, steps = walk[8:14]
    words = scratch[: walk[14]].view(np.uint16)
    tables = scratch[walk[14] : walk[15]].view(np.int32)
    panels = scratch[walk[15] : walk[16]].view(np.uint16)
    for i in range(height):
        for j in range(0, width, SIDE):
            for q in range(0, c, SIDE):
                split_turned(
                    (x, x_start + (i * width + j) * c + q), c,
                    (words, q * channel + (i + above) * w_out),
                    (min(SIDE, width - j), channel, part, copy, s, w_out), j + before,
                )  # fmt: skip
    tiles = r * s * (c // SIDE)
    pixels = h_out * w_out
    for t in range(0, steps, CHUNK):
        few, p = min(CHUNK, steps - t), t * STEPS
        shape = min(few * STEPS, pixels - p), k, few * PANEL
        split_panels((dz, dz_start + p * k), k, (panels, 0), shape)
        multiply_tiles(
            (words, 0), part, (tables, 0), channel, (tables, 2 * tiles + t), (panels, 0),
            (sums, 0), (tables, tiles), k, (sums, 0), k, (SIDE, tiles, few, k),
        )  # fmt: skip


@kernel
def conv2d_backward_weight(start, stop, thread, x, dy, partial, walk, scratch):  # type: ignore[no-untyped-def]
    """As `convolution.conv2d_backward_weight`."""
    c, k = walk[2], walk[5]
    patch, pixels = walk[6] * walk[7] * c, walk[3] * walk[4]
    mine, sums = scratch[thread], partial[thread]
    x_flat, dy_flat = x.reshape(-1), dy.reshape(-1)
    sums[:] = 0
    _prepare_sums(walk, mine)
    for n in range(start, stop):
        _accumulate(
            *(walk, x_flat, n * walk[0] * walk[1] * c, dy_flat, n * pixels * k, sums, mine)
        )
        for p in range(n * pixels, (n + 1) * pixels):
            for q in range(np.uintp(k)):
                sums[patch * k + q] += dy_flat[p * k + q]


@kernel
def conv2d_relu_pool_backward_weight(  # type: ignore[no-untyped-def]
    start, stop, thread, x, dy, argmax, partial, walk, pool, scratch
):
    """As `pooled_convolution.conv2d_relu_pool_backward_weight`."""
    _, h_pool, w_pool, k = dy.shape
    c, w_out = walk[2], walk[4]
    patch = walk[6] * walk[7] * c
    mine, sums = scratch[thread], partial[thread]
    x_flat, dy_flat, argmax_flat = x.reshape(-1), dy.reshape(-1), argmax.reshape(-1)
    dz = mine[walk[16] :][: walk[3] * w_out * k]
    sums[:] = 0
    dz[:] = 0
    _prepare_sums(walk, mine)
    for n in range(start, stop):
        unpool(
            *(dy_flat, argmax_flat, n * h_pool * w_pool * k, h_pool, w_pool, k, pool),
            *(dz, w_out, 0, 0, sums[patch * k :]),
        )
        _accumulate(walk, x_flat, n * walk[0] * walk[1] * c, dz, 0, sums, mine)
