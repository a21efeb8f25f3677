"""Convolution of few input channels on the tile unit (`narrow_tiles`).

Arguments are those of `convolution` and `pooled_convolution`, with a `walk` instead of the
geometry. Two rows of the output are computed at a time, from a ring of rows of the input, and
pooled or rectified while they are in L1.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dptrain.backends.numba.jit import inlined, kernel
from dptrain.backends.numba.narrow_tiles import (
    PAIRS,
    PANEL,
    begin_rows,
    end_rows,
    lay_out_patches,
    lay_out_weights,
    multiply_rows,
)
from dptrain.backends.numba.patches import pool_row
from dptrain.backends.numba.tiles import SIDE
from dptrain.backends.numba.vector import copy

ROWS = 2
"""Rows of the output that are computed together."""


def forward_walk(
    maps: tuple[int, int, int],
    out: tuple[int, int, int],
    window: tuple[int, int],
    strides: tuple[int, int],
    pads: tuple[int, int],
    pool_height: int = 0,
) -> NDArray[np.int64] | None:
    """How to walk over a convolution from `maps` (H, W, C) to `out` (Ho, Wo, K).

    None where it does not fit: strides, filter rows of more elements than a vector or of an even
    number, columns that fill no tiles.

    Args:
        window: (R, S).
        strides: vertical, horizontal.
        pads: top, left.
        pool_height: height of the window of fused pooling; 0 where there is none.

    Returns:
        int64: H, W, C, Ho, Wo, K, R, S, rows above, columns before; lines of a patch's row;
        patches from one vector; vectors of a map's row; elements of a row laid out; tiles of a
        row; rows of a tile; rows of the band; where in scratch the numbers of pairs, tables,
        weights, bias and band begin; how long scratch is.
    """
    (_, _, c), (_, w_out, k), (r, s) = maps, out, window
    if strides != (1, 1) or s * c > SIDE or k % SIDE or r % 2 == 0 or w_out < SIDE // 2:
        return None
    lines = -(-PAIRS * s * c // SIDE)
    group = (SIDE - s * c) // c + 1
    vectors = -(-w_out // group)
    row = vectors * group * lines * SIDE
    across = -(-w_out // SIDE)
    height = -(-w_out // across)
    band_rows = pool_height + ROWS
    pairs = (r + 2 * ROWS - 1 + (r + ROWS - 1) % ROWS) * row
    tables = pairs + group * lines * SIDE
    weights = tables + -(-(r + ROWS - 1) // SIDE) * SIDE
    bias = weights + k // SIDE * r * lines * PANEL
    band = bias + k
    size = band + band_rows * w_out * k
    return np.array(
        [*maps, *out, *window, *pads, lines, group, vectors, row, across, height, band_rows,
         pairs, tables, weights, bias, band, -(-size // SIDE) * SIDE],
        np.int64,
    )  # fmt: skip


@inlined
def _prepare(walk, w, b, scratch):  # type: ignore[no-untyped-def]
    """Numbers of pairs, weights and bias."""
    c, k, r, s, lines = walk[2], walk[5], walk[6], walk[7], walk[10]
    patch = s * c
    numbers = scratch[walk[17] : walk[18]].view(np.int32)
    for i in range(len(numbers)):
        pixel, pair = i // (lines * SIDE), i % (lines * SIDE)
        # What lies behind a patch meets weights of zero; it is of the patch, should it be a NaN.
        element = pair // PAIRS if pair < PAIRS * patch else 0
        third = pair < PAIRS * patch and pair % PAIRS == PAIRS - 1
        numbers[i] = pixel * c + element + (SIDE if third else 0)
    weights = scratch[walk[19] : walk[20]].view(np.int32)
    weights[:] = 0
    for q in range(k // SIDE):
        for i in range(r):
            lay_out_weights(
                (w, i * patch * k + q * SIDE), k, (weights, (q * r + i) * lines * PANEL), patch
            )
    scratch[walk[20] : walk[21]] = b
    begin_rows(walk[15])


@inlined
def _ring(r):  # type: ignore[no-untyped-def]
    """Rows of the ring: those that a filter meets, in pairs, and two that come next."""
    return -(-(r + ROWS - 1) // ROWS) * ROWS + ROWS


@inlined
def _rows(walk, x_size, n, i, stop):  # type: ignore[no-untyped-def]
    """Rows i and i + 1 of sample n's padded map: where in x, how much of each, where in the ring.

    Of samples from `stop` on there is nothing.
    """
    height, row, r = walk[0], walk[1] * walk[2], walk[6]
    ring, p = _ring(r), i - walk[8]
    first = row if 0 <= p < height and n < stop else 0
    second = row if 0 <= p + 1 < height and n < stop else 0
    return n * x_size + p * row, first, second, i % ring * walk[13], (i + 1) % ring * walk[13]


@inlined
def _begin(walk, x, n, stop, scratch):  # type: ignore[no-untyped-def]
    """Lay out the first rows of a sample's map."""
    width, c, r, lines, group = walk[1], walk[2], walk[6], walk[10], walk[11]
    ring = scratch[: walk[17]].view(np.int32)
    lanes = scratch[walk[17] : walk[18]].view(np.int32)
    for i in range(0, r + ROWS - 1, ROWS):
        start, first, second, target, next_ = _rows(walk, walk[0] * width * c, n, i, stop)
        lay_out_patches(
            (x, start, width * c, -walk[9] * c), (first, second), (ring, target, ring, next_),
            (lanes, 0), (walk[12], group * c, group * lines),
        )  # fmt: skip


@inlined
def _multiply(walk, x, n, i, scratch, c, c_start):  # type: ignore[no-untyped-def]
    """Rows i and i + 1 of a sample's output; rows before i have been computed."""
    width, w_out, k, r, lines, group = walk[1], walk[4], walk[5], walk[6], walk[10], walk[11]
    met = r + ROWS - 1
    ring = scratch[: walk[17]].view(np.int32)
    lanes = scratch[walk[17] : walk[18]].view(np.int32)
    table = scratch[walk[18] : walk[19]].view(np.int32)
    for p in range(met):
        table[p] = (i + p) % _ring(r) * walk[13]
    ahead = i + met + met % ROWS
    start, first, second, target, next_ = _rows(walk, walk[0] * width * walk[2], n, ahead, n + 1)
    vectors = walk[12] if i + ROWS < walk[3] else 0
    products = met * lines * (-(-walk[14] // 2)) * (k // SIDE)
    multiply_rows(
        (ring, 0), (table, 0), (scratch[walk[19] :].view(np.int32), 0),
        (c, c_start), k, (scratch, walk[20]),
        (walk[15], walk[14], w_out, r, lines, k, -(-2 * vectors // products)),
        (x, start, width * walk[2], -walk[9] * walk[2]), (first, second),
        (ring, target, ring, next_), (lanes, 0), (vectors, group * walk[2], group * lines),
    )  # fmt: skip


@kernel
def conv2d_forward(start, stop, thread, x, w, b, y, walk, relu, scratch):  # type: ignore[no-untyped-def]
    """As `convolution.conv2d_forward`."""
    mine, x_flat, y_flat = scratch[thread], x.reshape(-1), y.reshape(-1)
    h_out, row = walk[3], walk[4] * walk[5]
    y_size = h_out * row
    band = mine[walk[21] :]
    _prepare(walk, w.reshape(-1), b, mine)
    floor = np.float32(0) if relu else np.float32(-np.inf)
    for n in range(start, stop):
        _begin(walk, x_flat, n, stop, mine)
        for i in range(0, h_out, ROWS):
            _multiply(walk, x_flat, n, i, mine, band, 0)
            place = np.uintp(n * y_size + i * row)
            for p in range(np.uintp(min(ROWS, h_out - i) * row)):
                value = band[p]
                # Written so that a NaN passes: it must reach the loss to be noticed.
                y_flat[place + p] = floor if value < floor else value
    end_rows()


@kernel
def conv2d_relu_pool_forward(start, stop, thread, x, w, b, y, argmax, walk, pool, scratch):  # type: ignore[no-untyped-def]
    """As `pooled_convolution.conv2d_relu_pool_forward`."""
    _, h_pool, w_pool, k = y.shape
    h_out, w_out = walk[3], walk[4]
    mine, x_flat = scratch[thread], x.reshape(-1)
    row = w_out * k
    y_flat, argmax_flat, band = y.reshape(-1), argmax.reshape(-1), mine[walk[21] :]
    _prepare(walk, w.reshape(-1), b, mine)
    for n in range(start, stop):
        # The band holds rows from `top` to `ready`.
        top, ready = 0, 0
        _begin(walk, x_flat, n, stop, mine)
        for i in range(h_pool):
            above = i * pool[2] - pool[0]
            first, last = max(0, above), min(h_out, above + pool[4])
            while ready < last:
                if ready + ROWS - top > walk[16]:
                    kept = min(first, ready)
                    for p in range(kept, ready):
                        copy(band, (p - top) * row, band, (p - kept) * row, row)
                    top = kept
                _multiply(walk, x_flat, n, ready, mine, band, (ready - top) * row)
                ready += ROWS
            pool_row(
                band, (above - top) * row, first - above, last - above, w_out, w_out, w_pool, k,
                pool, y_flat, argmax_flat, (n * h_pool + i) * w_pool * k,
            )  # fmt: skip
    end_rows()
