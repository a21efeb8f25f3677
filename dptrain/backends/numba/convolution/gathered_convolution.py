"""Convolution with many weights and small maps: products of gathered pixels, forward and backward.

`direct_convolution` reads all weights once for every sample. With 512 → 512 channels on 14 × 14
maps and a stride of 2, these are 9 MB for 49 pixels, and reading them takes as long as the
products. Here, a block of pixels of several samples is multiplied with all weights, as in
`pointwise_convolution`: for each position of the filters, the pixels of the input under those of
the output are copied next to each other and multiplied with the packed weights of this position,
and the products are added to those of the positions before.

The input gradient is computed for one *phase* of the pixels of x after another: the remainders of
their row and column, each plus the padding, by the stride. All pixels of a phase are computed from
the same positions.

Arguments are those of `direct_convolution`, with a `GatheredGeometry`. Items are bands of samples,
or these for some of the columns. The order of a sum follows from the shape: positions, then
channels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from dptrain.backends.numba.convolution.fused_pooling import lower_bound
from dptrain.backends.numba.convolution.im2col import maps_of, taps
from dptrain.backends.numba.convolution.microkernels import NO_LOWER_BOUND
from dptrain.backends.numba.convolution.planning import (
    Case,
    KernelPlan,
    Shape,
    Work,
    units_per_item,
)
from dptrain.backends.numba.convolution.pointwise_convolution import (
    BLOCK,
    MOST_ROWS,
    PANEL,
    TILE,
    block_rows,
    item_range,
    multiply_block,
    pixel_range,
    prepare_backward_input,
    prepare_forward,
    tile_of,
)
from dptrain.backends.numba.vector import LINE, copy
from dptrain.native.jit import inlined, kernel
from dptrain.plan.lowering import Phase
from dptrain.plan.selection import alone

FEWEST_WEIGHTS, MOST_PIXELS = 1 << 19, 128
"""Smallest number of weights, 2 MB, and largest number of outputs of a sample in one channel. With
295 K weights and 64 outputs, the direct forward pass is 8% faster and its input gradient 16%
slower; with fewer weights, both are faster (AMD EPYC, AVX2, one thread)."""
RATE = 1.5
"""Multiply-adds in the time of one of a direct convolution: the median of 20 products with 256 or
512 channels and 1 or 8 samples, from 0.81 to 3.2 (AMD EPYC, AVX2, one thread)."""
FEWEST_CHANNELS = 32
"""Smallest number of channels and filters."""


class GatheredGeometry(NamedTuple):
    """Sizes of a convolution.

    Attributes:
        height, width: of x.
        h_out, w_out: of y.
        r, s: size of the filters.
        pad_top, pad_left: rows and columns of zeros around x.
        stride_v, stride_h: strides.
        rows: pixels of a block.
        parts: parts of the columns of the result, which are separate items.
        units: see `planning.KernelPlan`.
    """

    height: int
    width: int
    h_out: int
    w_out: int
    r: int
    s: int
    pad_top: int
    pad_left: int
    stride_v: int
    stride_h: int
    rows: int
    parts: int
    units: int


def supports(case: Case) -> bool:
    """Return whether the kernels compute a case, with weights that are worth it."""
    shape = case.shape
    channels, filters = shape.maps[2], shape.out[2]
    many = math.prod(shape.window) * channels * filters >= FEWEST_WEIGHTS
    small = math.prod(shape.out[:2]) <= MOST_PIXELS and min(channels, filters) >= FEWEST_CHANNELS
    return many and small and not shape.pool_height and shape.window != (1, 1)


def estimate(case: Case) -> Sequence[tuple[float, str]]:
    """Return the estimated time in ns."""
    return alone(case.direct_ns / RATE)


def plan(shape: Shape, phase: Phase, work: Work) -> KernelPlan:
    """Return the algorithm of a phase, forward or the input gradient."""
    is_forward = phase is Phase.FORWARD
    summed, columns = shape.maps[2], shape.out[2]
    if not is_forward:
        summed, columns = columns, summed
    rows = max(4 * TILE, min(MOST_ROWS, BLOCK // max(summed, columns) // TILE * TILE))
    pixels = math.prod(shape.out[:2])
    bands = units_per_item(work.batch_size, work.threads, most=max(1, pixels // (4 * TILE)))
    parts = units_per_item(work.batch_size * bands, work.threads, most=-(-columns // PANEL))
    geometry = GatheredGeometry(
        *shape.maps[:2], *shape.out[:2], *shape.window, *shape.pads, *shape.strides, rows, parts,
        bands * parts,
    )  # fmt: skip
    scratch = rows * (summed + LINE) + (0 if is_forward else rows * columns)
    kernels = (conv2d_forward, prepare_forward)
    if not is_forward:
        kernels = (conv2d_backward_input, prepare_backward_input)
    positions = math.prod(shape.window)
    return KernelPlan(
        kernels[0], geometry, scratch, tile_of(rows), kernels[1],
        positions * -(-columns // PANEL), positions * summed * columns,
    )  # fmt: skip


@inlined
def _gather(source, grid, m, rows, target):
    """Copy the pixels of maps under some pixels of a grid, and zeros outside the maps.

    Args:
        source: `Maps`.
        grid: (size, steps, shifts) of a sample's grid. Pixel (i, j) is over pixel (i, j) · steps +
            shifts of the maps.
        m, rows: number of the first pixel, and how many. Those of all samples are numbered.
        target: flat array, and distance of its pixels.
    """
    ((high, wide), steps, shifts), channels, (values, distance) = grid, source.channels, target
    line, j, r = m // wide, m % wide, 0
    while r < rows:
        n, h = line // high, line % high * steps[0] + shifts[0]
        end = min(rows, r + wide - j)
        while r < end:
            v = j * steps[1] + shifts[1]
            if 0 <= h < source.height and 0 <= v < source.width:
                pixel = (n * source.height + h) * source.width + v
                copy(source.values, pixel * channels, values, r * distance, channels)
            else:
                values[r * distance : r * distance + channels] = 0
            j += 1
            r += 1
        line, j = line + 1, 0


@inlined
def _store(source, grid, m, rows, columns, adds, target):
    """Store the pixels of a grid to the pixels of maps under them, or add them if `adds`.

    Args:
        source: flat array of pixels, and its first element.
        columns: (first, stop), the channels to store.
        target: `Maps`. Other arguments are those of `_gather`.
    """
    (pixels, start), ((high, wide), steps, shifts), (q, q_stop) = source, grid, columns
    values, channels, line, j, r = target.values, target.channels, m // wide, m % wide, 0
    while r < rows:
        n, h = line // high, line % high * steps[0] + shifts[0]
        end = min(rows, r + wide - j)
        while r < end:
            at, v = start + r * channels, j * steps[1] + shifts[1]
            pixel = ((n * target.height + h) * target.width + v) * channels
            if adds:
                for i in range(q, q_stop):
                    values[pixel + i] += pixels[at + i]
            else:
                copy(pixels, at + q, values, pixel + q, q_stop - q)
            j += 1
            r += 1
        line, j = line + 1, 0


@kernel
def conv2d_forward(items, x, w, b, y, geo, pool, scratch):
    """Compute `direct_convolution.conv2d_forward`."""
    c, k, mine, pixels = x.shape[3], y.shape[3], scratch[items.thread], geo.h_out * geo.w_out
    x, y_flat, positions = maps_of(x), y.reshape(-1), geo.r * geo.s
    size, steps = (geo.h_out, geo.w_out), (geo.stride_v, geo.stride_h)
    item = items.start
    while item < items.stop:
        count, span, columns = item_range(item, items.stop, x.samples, geo, k)
        first, last = pixel_range(span, pixels)
        block = block_rows(max(1, last - first), geo.rows)
        for m in range(first, last, block):
            rows = min(block, last - m)
            for t in range(positions):
                shifts = t // geo.s - geo.pad_top, t % geo.s - geo.pad_left
                _gather(x, (size, steps, shifts), m, rows, (mine, c + LINE))
                d = (b, 0, 0) if t == 0 else (y_flat, m * k, k)
                multiply_block(
                    (mine, 0, c + LINE), w[t * c * k :], d, (y_flat, m * k, k), (rows, c, *columns),
                    lower_bound(pool) if t == positions - 1 else NO_LOWER_BOUND, (x.values, 0, 0),
                )  # fmt: skip
        item += count


@inlined
def _phase(size, phase, stride, pad):
    """Return the first row (or column) of x in a phase, how many rows the phase has, and the row of
    y that reaches the first one by the first position of the phase; it may be outside of y.
    """
    first = (phase - pad) % stride
    return first, taps(size, first, stride), (first + pad - phase) // stride


@kernel
def conv2d_backward_input(items, dy, w, dx, geo, pool, scratch):
    """Compute `direct_convolution.conv2d_backward_input`."""
    dy, dx, mine, item = maps_of(dy), maps_of(dx), scratch[items.thread], items.start
    while item < items.stop:
        count, span, columns = item_range(item, items.stop, dy.samples, geo, dx.channels)
        for phase in range(geo.stride_v * geo.stride_h):
            _compute_phase(phase, (span, columns), dy, w, dx, pool.adds, geo, mine)
        item += count


@inlined
def _compute_phase(phase, part, dy, w, dx, adds, geo, mine):
    """Compute the pixels of a phase in some bands of samples, and some columns."""
    (f, g), (span, columns) = (phase // geo.stride_h, phase % geo.stride_h), part
    top, high, above = _phase(geo.height, f, geo.stride_v, geo.pad_top)
    left, wide, before = _phase(geo.width, g, geo.stride_h, geo.pad_left)
    down, across = taps(geo.r, f, geo.stride_v), taps(geo.s, g, geo.stride_h)
    c, k, steps = dx.channels, dy.channels, (geo.stride_v, geo.stride_h)
    block = geo.rows * (k + LINE)
    first, last = pixel_range(span, high * wide)
    size = block_rows(max(1, last - first), geo.rows)
    for m in range(first, last, size):
        rows = min(size, last - m)
        if down * across == 0:
            mine[block : block + rows * c] = 0
        for t in range(down * across):
            i, j = t // across, t % across
            grid = (high, wide), (1, 1), (above - i, before - j)
            _gather(dy, grid, m, rows, (mine, k + LINE))
            position = (f + i * geo.stride_v) * geo.s + g + j * geo.stride_h
            multiply_block(
                (mine, 0, k + LINE), w[position * c * k :], (mine, block, c if t > 0 else -1),
                (mine, block, c), (rows, k, *columns), NO_LOWER_BOUND, (dy.values, 0, 0),
            )  # fmt: skip
        grid = (high, wide), steps, (top, left)
        _store((mine, block), grid, m, rows, columns, adds, dx)
