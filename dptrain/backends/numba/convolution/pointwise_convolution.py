"""Convolution with 1 × 1 filters: one matrix product over the pixels of all samples.

Arguments are those of `direct_convolution`, with a `PointwiseGeometry`. The forward pass multiplies
x (pixels, C) with w (C, K), the input gradient dy (pixels, K) with the transpose of w, and the
weight gradient the transpose of x with dy. `prepare`
packs the weights in panels of 32 columns, each of which is contiguous: rows of many filters would
map to few sets of the L1 cache. A thread multiplies blocks of pixels, also of several samples, so
that all panels are read once for each block.

ResNet-50 with 8 samples, 512 → 2048 channels on 7 × 7 maps: 70 instead of 33 multiply-adds per ns
of the direct convolution, which multiplies the pixels of one sample (Intel Xeon, AVX-512, one
thread).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from dptrain.backends.numba.convolution.fused_pooling import lower_bound
from dptrain.backends.numba.convolution.im2col import vector_part
from dptrain.backends.numba.convolution.microkernels import (
    NO_LOWER_BOUND,
    multiply_spaced,
    multiply_streaming,
)
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
GRADIENT_STEPS, GRADIENT_COLUMNS, GRADIENT_ROWS = 256, 512, 144
"""Pixels, filters and channels that the weight gradient packs at a time, in at most 0.7 MB."""
AHEAD = 24
"""Pixels between those that are copied and those that are prefetched. Copies of short parts of
distant pixels wait for memory otherwise: weight gradients of maps that exceed the L3 cache take 4
to 12% less time (AMD EPYC, AVX-512, two threads)."""
RATE = 1.1
"""Multiply-adds in the time of one of a direct convolution: the median of 27 products of 1 × 1
convolutions with 64 to 2048 channels and 8 samples, from 0.84 to 1.6 (AMD EPYC, AVX2, one
thread)."""
FEWEST = 16
"""Smallest number of channels and filters."""
FEWEST_OF_GRADIENT = 128
"""Smallest number of channels for which packing pays in the weight gradient."""


class PointwiseGeometry(NamedTuple):
    """Sizes of a convolution with 1 × 1 filters.

    Attributes:
        height, width: of x.
        h_out, w_out: of y.
        stride_v, stride_h: strides.
        rows: pixels of a block.
        parts: parts of the columns of the result, which are separate items.
        units: see `planning.KernelPlan`.
    """

    height: int
    width: int
    h_out: int
    w_out: int
    stride_v: int
    stride_h: int
    rows: int
    parts: int
    units: int


def supports(case: Case) -> bool:
    """Return whether the kernels compute a case, with enough channels to pack the weights."""
    shape, phase = case.shape, case.phase
    plain = shape.window == (1, 1) and shape.pads == (0, 0) and not shape.pool_height
    inside = all(
        (o - 1) * s < i for o, s, i in zip(shape.out, shape.strides, shape.maps, strict=False)
    )
    channels, filters = shape.maps[2], shape.out[2]
    if phase is Phase.BACKWARD_WEIGHT and channels < FEWEST_OF_GRADIENT:
        return False
    return plain and inside and min(channels, filters) >= FEWEST


def estimate(case: Case) -> Sequence[tuple[float, str]]:
    """Return the estimated time in ns."""
    return alone(case.direct_ns / RATE)


def plan(shape: Shape, phase: Phase, work: Work) -> KernelPlan:
    """Return the algorithm of a phase."""
    if phase is Phase.BACKWARD_WEIGHT:
        return _plan_backward_weight(shape, work)
    is_forward = phase is Phase.FORWARD
    summed, columns = shape.maps[2], shape.out[2]
    if not is_forward:
        summed, columns = columns, summed
    rows = max(4 * TILE, min(MOST_ROWS, BLOCK // summed // TILE * TILE))
    pixels = math.prod(shape.out[:2])
    # Few pixels are worth the time of reading the weights only once: then columns are divided.
    bands = units_per_item(work.batch_size, work.threads, most=max(1, pixels // (4 * TILE)))
    parts = units_per_item(work.batch_size * bands, work.threads, most=-(-columns // PANEL))
    sizes = *shape.maps[:2], *shape.out[:2], *shape.strides
    geometry = PointwiseGeometry(*sizes, rows, parts, bands * parts)
    scratch = rows * (summed + LINE) + (
        0 if is_forward or shape.strides == (1, 1) else rows * columns
    )
    kernels = (conv2d_forward, prepare_forward)
    if not is_forward:
        kernels = (conv2d_backward_input, prepare_backward_input)
    return KernelPlan(
        kernels[0], geometry, scratch, tile_of(rows), kernels[1], -(-columns // PANEL),
        summed * columns,
    )  # fmt: skip


def tile_of(rows: int) -> str:
    """Describe the register tile, and the pixels of a block."""
    return f"{TILE}×{PANEL}, {counted(rows, 'pixel')}"


def _plan_backward_weight(shape: Shape, work: Work) -> KernelPlan:
    blocks = units_per_item(work.rows, work.threads, most=-(-shape.out[2] // PANEL))
    geometry = PointwiseGeometry(*shape.maps[:2], *shape.out[:2], *shape.strides, 0, 1, blocks)
    scratch = GRADIENT_STEPS * (GRADIENT_COLUMNS + GRADIENT_ROWS)
    return KernelPlan(conv2d_backward_weight, geometry, scratch, tile_of(0))


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
def _row_of_x(geo, line):
    """Return the first pixel of the row of x under a row of y, both counted over all samples."""
    n, i = line // geo.h_out, line % geo.h_out
    return (n * geo.height + i * geo.stride_v) * geo.width


@inlined
def _prefetch_elements(array, start, count):
    for i in range(start, start + count, LINE):
        prefetch(array, i)


@inlined
def _gather(geo, x, c, m, rows, channels, target):
    """Copy some channels of the pixels of x under the pixels m to m + rows of y.

    Pixels are divided into rows of y, because a division takes longer than copying a pixel.

    Args:
        channels: the first, and how many.
        target: (flat array, first element, distance) of the copies.
    """
    (first, count), (mine, start, distance) = channels, target
    line, j, r = m // geo.w_out, m % geo.w_out, 0
    while r < rows:
        pixel = _row_of_x(geo, line) + j * geo.stride_h
        end = min(rows, r + geo.w_out - j)
        while r < end:
            source = pixel * c + first
            _prefetch_elements(x, source + AHEAD * geo.stride_h * c, count)
            copy(x, source, mine, start + r * distance, count)
            pixel += geo.stride_h
            r += 1
        line, j = line + 1, 0


@kernel
def conv2d_forward(items, x, w, b, y, geo, pool, scratch):
    """Compute `direct_convolution.conv2d_forward`."""
    c, k, mine = x.shape[3], y.shape[3], scratch[items.thread]
    x_flat, y_flat = x.reshape(-1), y.reshape(-1)
    is_strided = geo.stride_v * geo.stride_h > 1
    is_copied = is_strided or c % ALIASED == 0
    item = items.start
    while item < items.stop:
        count, span, columns = item_range(item, items.stop, x.shape[0], geo, k)
        first, last = pixel_range(span, geo.h_out * geo.w_out)
        size = block_rows(max(1, last - first), geo.rows)
        for m in range(first, last, size):
            rows = min(size, last - m)
            a = x_flat, m * c, c
            if is_copied:
                a = mine, 0, c + LINE
                _gather(geo, x_flat, c, m, rows, (0, c), a)
            following = x_flat, (m + size) * c, 0 if is_strided else c
            result, shape = (y_flat, m * k, k), (rows, c, *columns)
            multiply_block(a, w, (b, 0, 0), result, shape, lower_bound(pool), following)
        item += count


@kernel
def conv2d_backward_input(items, dy, w, dx, geo, pool, scratch):
    """Compute `direct_convolution.conv2d_backward_input`."""
    c, k, mine = dx.shape[3], dy.shape[3], scratch[items.thread]
    dy_flat, dx_flat = dy.reshape(-1), dx.reshape(-1)
    is_strided, is_copied = geo.stride_v * geo.stride_h > 1, k % ALIASED == 0
    block = geo.rows * (k + LINE)
    item = items.start
    while item < items.stop:
        count, span, columns = item_range(item, items.stop, dy.shape[0], geo, c)
        first, last = pixel_range(span, geo.h_out * geo.w_out)
        size = block_rows(max(1, last - first), geo.rows)
        for m in range(first, last, size):
            rows = min(size, last - m)
            a = dy_flat, m * k, k
            if is_copied:
                a = mine, 0, k + LINE
                for r in range(rows):
                    copy(dy_flat, (m + r) * k, mine, r * (k + LINE), k)
            shape, following = (rows, k, *columns), (dy_flat, (m + size) * k, k)
            if is_strided:
                d, result = (mine, 0, -1), (mine, block, c)
                multiply_block(a, w, d, result, shape, NO_LOWER_BOUND, following)
                _scatter(geo, (mine, block), m, rows, dx_flat, c, columns, pool.adds)
            else:
                d, result = (dx_flat, m * c, c if pool.adds else -1), (dx_flat, m * c, c)
                multiply_block(a, w, d, result, shape, NO_LOWER_BOUND, following)
        item += count


@inlined
def _scatter(geo, source, m, rows, dx, c, columns, adds):
    """Add the gradients of the pixels of x under the pixels m to m + rows of y to dx; or store
    them, and zeros up to the next ones.

    Args:
        source: gradients (rows, C) and their first element.
        columns: range of the channels.
    """
    (gradients, start), (q, q_stop) = source, columns
    line, j, r = m // geo.w_out, m % geo.w_out, 0
    while r < rows:
        pixel = _row_of_x(geo, line) + j * geo.stride_h
        end = min(rows, r + geo.w_out - j)
        if not adds:
            _clear(geo, line, j, end - r, dx, c, q, q_stop)
        while r < end:
            at, target = start + r * c, pixel * c
            if adds:
                for i in range(q, q_stop):
                    dx[target + i] += gradients[at + i]
            else:
                copy(gradients, at + q, dx, target + q, q_stop - q)
            pixel += geo.stride_h
            r += 1
        line, j = line + 1, 0


@inlined
def _clear(geo, line, j, count, dx, c, q, q_stop):
    """Store zeros from the pixels of x under pixels of one row of y up to the next ones."""
    is_last = line % geo.h_out + 1 == geo.h_out
    down = geo.height - (geo.h_out - 1) * geo.stride_v if is_last else geo.stride_v
    start = j * geo.stride_h
    stop = geo.width if j + count == geo.w_out else (j + count) * geo.stride_h
    for row in range(down):
        first = _row_of_x(geo, line) + row * geo.width
        if q_stop - q == c:
            dx[(first + start) * c : (first + stop) * c] = 0
        else:
            for pixel in range(first + start, first + stop):
                dx[pixel * c + q : pixel * c + q_stop] = 0


@kernel
def conv2d_backward_weight(items, x, dy, partial, bounds, geo, pool, scratch):
    """Compute `direct_convolution.conv2d_backward_weight`; blocks are ranges of filters.

    Pixels are summed in parts of `GRADIENT_STEPS`, which begin at the first sample of a row of
    partial sums.
    """
    c, k, blocks = x.shape[3], dy.shape[3], geo.units
    pixels, mine = geo.h_out * geo.w_out, scratch[items.thread]
    for item in range(items.start, items.stop):
        index, block = item // blocks, item % blocks
        first, last = bounds[index] * pixels, bounds[index + 1] * pixels
        q, q_stop = vector_part(k, block, blocks, PANEL)
        sums = partial[index]
        if first == last:
            for i in range(c):
                sums[i * k + q : i * k + q_stop] = 0
        for p in range(q, q_stop, GRADIENT_COLUMNS):
            columns = p, min(q_stop, p + GRADIENT_COLUMNS)
            _sum_columns(geo, x, dy, (first, last), columns, sums, mine)
        if pool.bias:
            total, dy_flat = sums[c * k :], dy.reshape(-1)
            total[q:q_stop] = 0
            for m in range(first, last):
                for i in range(q, q_stop):
                    total[i] += dy_flat[m * k + i]


@inlined
def _sum_columns(geo, x, dy, pixels, columns, sums, mine):
    """Write some columns of the weight gradient of some pixels to sums."""
    (first, last), (q, q_stop) = pixels, columns
    c, k, width = x.shape[3], dy.shape[3], q_stop - q
    x_flat, dy_flat, block = x.reshape(-1), dy.reshape(-1), GRADIENT_STEPS * GRADIENT_COLUMNS
    for m in range(first, last, GRADIENT_STEPS):
        steps = min(GRADIENT_STEPS, last - m)
        for p in range(0, width, PANEL):
            wide = min(PANEL, width - p)
            for r in range(steps):
                source = (m + r) * k + q + p
                _prefetch_elements(dy_flat, source + AHEAD * k, wide)
                copy(dy_flat, source, mine, p * steps + r * wide, wide)
        for i in range(0, c, GRADIENT_ROWS):
            rows = min(GRADIENT_ROWS, c - i)
            _gather(geo, x_flat, c, m, steps, (i, rows), (mine, block, rows))
            for p in range(0, width, PANEL):
                wide, target = min(PANEL, width - p), i * k + q + p
                multiply_spaced(
                    (mine, block),
                    (RAMP, 0, 1),
                    (RAMP, 0, rows),
                    (mine, p * steps, wide),
                    (sums, target, -1 if m == first else k),
                    (sums, target),
                    (RAMP, 0, k),
                    (rows, steps, wide),
                    NO_LOWER_BOUND,
                    TILE,
                )
