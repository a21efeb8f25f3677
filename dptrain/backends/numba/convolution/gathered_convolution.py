"""Convolution as matrix products over the pixels of several samples, forward and input gradient.

`direct_convolution` reads all weights once for every sample. With 512 → 512 channels on 14 × 14
maps and a stride of 2, these are 9 MB for 49 pixels, and reading them takes as long as the
products. Here, a block of pixels of several samples is multiplied with all weights: for each
position of the filters, the pixels of the input under those of the output are copied next to each
other and multiplied with the weights of this position, and the products are added to those of the
positions before. With 1 × 1 filters and a stride of 1, pixels are multiplied where they are.

`prepare` packs the weights in panels of 32 columns, each of which is contiguous: rows of many
filters would map to few sets of the L1 cache.

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
from dptrain.backends.numba.convolution.im2col import maps_of, phase_taps, taps, vector_part
from dptrain.backends.numba.convolution.microkernels import NO_LOWER_BOUND, multiply_streaming
from dptrain.backends.numba.convolution.planning import (
    Case,
    KernelPlan,
    Shape,
    Work,
    counted,
    units_per_item,
)
from dptrain.backends.numba.dense.matmul import RAMP
from dptrain.backends.numba.vector import LINE, copy, prefetch, transpose
from dptrain.native.jit import inlined, kernel
from dptrain.plan.lowering import Phase
from dptrain.plan.selection import alone

PANEL = 32
"""Columns of a panel of the weights."""
STEPS = 256
"""Largest number of steps of a product, so that a panel stays in the L1 cache."""
ALIASED = 64
"""Elements: pixels at a multiple of this distance map to a quarter of the sets of the L1 cache, or
to fewer, most of which the panel occupies; their blocks are copied. Products of 64 to 256 channels
on 56 × 56 maps are 5 to 15% faster with the copy (AMD EPYC, AVX-512, one thread)."""
TILE = 12
"""Rows of a register tile."""
MOST_ROWS, BLOCK = 192, 131072
"""Largest number of pixels of a block, and of its elements, which stay in the L2 cache."""
AHEAD = 24
"""Pixels between those that are copied and those that are prefetched. Copies of short parts of
distant pixels wait for memory otherwise: weight gradients of 1 × 1 filters, on maps that exceed the
L3 cache, take 4 to 12% less time (AMD EPYC, AVX-512, two threads)."""
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
        dilation_v, dilation_h: distances of the pixels under adjacent positions of a filter.
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
    dilation_v: int
    dilation_h: int
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
    is_forward, is_single = phase is Phase.FORWARD, shape.window == (1, 1)
    summed, columns = shape.maps[2], shape.out[2]
    if not is_forward:
        summed, columns = columns, summed
    row = summed if is_single else max(summed, columns)
    rows = max(4 * TILE, min(MOST_ROWS, BLOCK // row // TILE * TILE))
    pixels = math.prod(shape.out[:2])
    # Few pixels are worth the time of reading the weights only once: then columns are divided.
    bands = units_per_item(work.batch_size, work.threads, most=max(1, pixels // (4 * TILE)))
    parts = units_per_item(work.batch_size * bands, work.threads, most=-(-columns // PANEL))
    geometry = geometry_of(shape, rows, parts, bands * parts)
    is_stored = is_forward or (is_single and shape.strides == (1, 1))
    scratch = rows * (summed + LINE) + (0 if is_stored else rows * columns)
    kernels = (conv2d_forward, prepare_forward)
    if not is_forward:
        kernels = (conv2d_backward_input, prepare_backward_input)
    positions = math.prod(shape.window)
    return KernelPlan(
        kernels[0], geometry, scratch, tile_of(rows), kernels[1],
        positions * -(-columns // PANEL), positions * summed * columns,
    )  # fmt: skip


def geometry_of(shape: Shape, rows: int, parts: int, units: int) -> GatheredGeometry:
    """Return the geometry of a convolution."""
    return GatheredGeometry(
        *shape.maps[:2], *shape.out[:2], *shape.window, *shape.pads, *shape.strides,
        *shape.dilations, rows, parts, units,
    )  # fmt: skip


def tile_of(rows: int) -> str:
    """Describe the register tile, and the pixels of a block."""
    return f"{TILE}×{PANEL}, {counted(rows, 'pixel')}"


@kernel
def prepare_forward(items, w, geo, shared):
    """Pack w (R, S, C, K) in panels of filters; items are panels of a position."""
    c, k, flat = w.shape[2], w.shape[3], w.reshape(-1)
    panels = (k + PANEL - 1) // PANEL
    for item in range(items.start, items.stop):
        base, first = item // panels * c * k, item % panels * PANEL
        columns = min(PANEL, k - first)
        for i in range(c):
            copy(flat, base + i * k + first, shared, base + first * c + i * columns, columns)


@kernel
def prepare_backward_input(items, w, geo, shared):
    """Pack the transposes of w (R, S, C, K) in panels of channels; items are panels of a
    position.
    """
    c, k = w.shape[2], w.shape[3]
    panels = (c + PANEL - 1) // PANEL
    for item in range(items.start, items.stop):
        base, first = item // panels * c * k, item % panels * PANEL
        columns = min(PANEL, c - first)
        transpose(
            w.reshape(-1), base + first * k, k, shared, base + first * k, columns, columns, k
        )  # fmt: skip


@inlined
def multiply_block(a, packed, d, c, shape, bound, following):
    """Multiply a block of pixels with some panels.

    Args:
        a: (flat array, first element, distance) of the pixels of the operand.
        packed: panels.
        d: what is added, as in `microkernels`.
        c: (flat array, first element, distance) of the pixels of the result.
        shape: (pixels, summed channels, first column, end of the columns).
        bound: lower bound of the result.
        following: (flat array, first element, distance) of the pixels of the next block, which are
            prefetched. The distance is 0 if they are not known.
    """
    rows, summed, q, q_stop = shape
    (a, a_start, a_row), (c, c_start, c_row), (array, start, row) = a, c, following
    panels = (q_stop - q + PANEL - 1) // PANEL
    share = (TILE + panels - 1) // panels
    for p in range(q, q_stop, PANEL):
        columns, pixel = min(PANEL, q_stop - p), (p - q) // PANEL * share % TILE
        for s in range(0, summed, STEPS):
            steps = min(STEPS, summed - s)
            addend, addend_start, addend_row = d[0], d[1] + p, d[2]
            if s > 0:
                addend, addend_start, addend_row = c, c_start + p, c_row
            multiply_streaming(
                (a, a_start + s),
                (RAMP, 0, a_row),
                (RAMP, 0, 1),
                (packed, p * summed + s * columns, columns),
                (addend, addend_start, addend_row),
                (c, c_start + p),
                (RAMP, 0, c_row),
                (rows, steps, columns),
                bound if s + steps == summed else NO_LOWER_BOUND,
                (array, start + pixel * row + s * share, TILE * row, share),
                TILE,
            )


@inlined
def item_range(item, stop, samples, geo, columns):
    """Return how many items are computed together, their bands, and their columns.

    The bands are (first, end, bands of a sample).
    """
    per_part = geo.units // geo.parts
    index, first = item // (samples * per_part), item % (samples * per_part)
    count = min(samples * per_part - first, stop - item)
    return count, (first, first + count, per_part), vector_part(columns, index, geo.parts, PANEL)


@inlined
def pixel_range(span, pixels):
    """Return the first pixel and the end of some bands; samples have `pixels` each."""
    first, end, per_sample = span
    return pixels * first // per_sample, pixels * end // per_sample


@inlined
def block_rows(rows, most):
    """Return the pixels of blocks of about the same size, a multiple of the height of a tile."""
    blocks = (rows + most - 1) // most
    return ((rows + blocks - 1) // blocks + TILE - 1) // TILE * TILE


@inlined
def prefetch_elements(array, start, count):
    """Prefetch some elements of a flat array."""
    for i in range(start, start + count, LINE):
        prefetch(array, i)


@inlined
def gather(source, grid, m, rows, channels, target):
    """Copy some channels of the pixels of maps under some pixels of a grid, and zeros outside the
    maps.

    Pixels are divided into rows of the grid, because a division takes longer than copying a pixel.

    Args:
        source: `Maps`.
        grid: (size, steps, shifts) of a sample's grid. Pixel (i, j) is over pixel (i, j) · steps +
            shifts of the maps.
        m, rows: number of the first pixel, and how many. Those of all samples are numbered.
        channels: the first, and how many.
        target: (flat array, first element, distance) of the copies.
    """
    ((high, wide), steps, shifts), (q, count), (values, start, distance) = grid, channels, target
    line, j, r = m // wide, m % wide, 0
    while r < rows:
        n, h = line // high, line % high * steps[0] + shifts[0]
        end = min(rows, r + wide - j)
        while r < end:
            v, at = j * steps[1] + shifts[1], start + r * distance
            if 0 <= h < source.height and 0 <= v < source.width:
                pixel = (n * source.height + h) * source.width + v
                first = pixel * source.channels + q
                prefetch_elements(source.values, first + AHEAD * steps[1] * source.channels, count)
                copy(source.values, first, values, at, count)
            else:
                values[at : at + count] = 0
            j += 1
            r += 1
        line, j = line + 1, 0


@inlined
def _store(source, grid, m, rows, columns, adds, target):
    """Store the pixels of a grid to the pixels of maps under them, or add them if `adds`.

    Args:
        source: flat array of pixels, and its first element.
        columns: (first, stop), the channels to store.
        target: `Maps`. Other arguments are those of `gather`.
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


@inlined
def _is_pointwise(geo):
    """Return whether filters have one position, so that each pixel belongs to one of x."""
    return geo.r * geo.s == 1


@kernel
def conv2d_forward(items, x, w, b, y, geo, pool, scratch):
    """Compute `direct_convolution.conv2d_forward`."""
    c, k, mine, pixels = x.shape[3], y.shape[3], scratch[items.thread], geo.h_out * geo.w_out
    x, y_flat, positions = maps_of(x), y.reshape(-1), geo.r * geo.s
    size, steps = (geo.h_out, geo.w_out), (geo.stride_v, geo.stride_h)
    is_adjacent = _is_pointwise(geo) and geo.h_out == geo.height and geo.w_out == geo.width
    item = items.start
    while item < items.stop:
        count, span, columns = item_range(item, items.stop, x.samples, geo, k)
        first, last = pixel_range(span, pixels)
        block = block_rows(max(1, last - first), geo.rows)
        for m in range(first, last, block):
            rows, result = min(block, last - m), (y_flat, m * k, k)
            following = x.values, (m + block) * c, c if is_adjacent else 0
            for t in range(positions):
                top, left = t // geo.s * geo.dilation_v, t % geo.s * geo.dilation_h
                shifts, a = (top - geo.pad_top, left - geo.pad_left), (x.values, m * c, c)
                if not is_adjacent or c % ALIASED == 0:
                    a = mine, 0, c + LINE
                    gather(x, (size, steps, shifts), m, rows, (0, c), a)
                d = (b, 0, 0) if t == 0 else result
                bound = lower_bound(pool) if t == positions - 1 else NO_LOWER_BOUND
                multiply_block(a, w[t * c * k :], d, result, (rows, c, *columns), bound, following)
        item += count


@inlined
def _phase(size, phase, stride, pad, offset):
    """Return the first row (or column) of x in a phase, how many rows the phase has, and the row of
    y that reaches the first one by the first position of the phase; it may be outside of y.

    Args:
        size: rows of x.
        phase, stride, pad: of the phase.
        offset: rows from the first position of a filter to that of the phase.
    """
    first = (phase - pad) % stride
    return first, taps(size, first, stride), (first + pad - offset) // stride


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
    first_v, step_v, down, below = phase_taps(geo.r, f, geo.stride_v, geo.dilation_v)
    first_h, step_h, across, beyond = phase_taps(geo.s, g, geo.stride_h, geo.dilation_h)
    offset_v, offset_h = first_v * geo.dilation_v, first_h * geo.dilation_h
    top, high, above = _phase(geo.height, f, geo.stride_v, geo.pad_top, offset_v)
    left, wide, before = _phase(geo.width, g, geo.stride_h, geo.pad_left, offset_h)
    if adds and down * across == 0:
        return
    c, k, steps = dx.channels, dy.channels, (geo.stride_v, geo.stride_h)
    stored = geo.rows * (k + LINE)
    is_adjacent = _is_pointwise(geo) and high == geo.h_out and wide == geo.w_out
    in_place = _is_pointwise(geo) and geo.stride_v * geo.stride_h == 1
    first, last = pixel_range(span, high * wide)
    size = block_rows(max(1, last - first), geo.rows)
    for m in range(first, last, size):
        rows, result = min(size, last - m), (dx.values, m * c, c)
        if not in_place:
            result = mine, stored, c
        if down * across == 0:
            mine[stored : stored + rows * c] = 0
        following = dy.values, (m + size) * k, k if is_adjacent else 0
        for t in range(down * across):
            i, j, a = t // across, t % across, (dy.values, m * k, k)
            if not is_adjacent or k % ALIASED == 0:
                a = mine, 0, k + LINE
                shifts = above - i * below, before - j * beyond
                gather(dy, ((high, wide), (1, 1), shifts), m, rows, (0, k), a)
            position = (first_v + i * step_v) * geo.s + first_h + j * step_h
            is_added = t > 0 or (in_place and adds)
            multiply_block(
                a, w[position * c * k :], (result[0], result[1], c if is_added else -1), result,
                (rows, k, *columns), NO_LOWER_BOUND, following,
            )  # fmt: skip
        if not in_place:
            grid = (high, wide), steps, (top, left)
            _store((mine, stored), grid, m, rows, columns, adds, dx)
