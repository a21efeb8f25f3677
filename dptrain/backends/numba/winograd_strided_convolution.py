"""Winograd convolution F(4×4, 2×2) for 4 × 4 filters with stride 2, forward and backward.

Rows and columns of the padded maps have a *phase*: their number modulo 2. A filter of 4 × 4 with
stride 2 is the sum of four filters of 2 × 2 with stride 1, each of which reads one phase. So

- the forward pass and the weight gradient are those of a 2 × 2 filter over maps of half the height
  and width with 4 C channels, of which the channels (phase, c) of a pixel are adjacent;
- the input gradient is four convolutions of dy with 2 × 2 filters, one for each phase of dx.

Both take 25 instead of 64 multiplications. Arguments are those of `direct_convolution`, with a
`StridedGeometry`. Items of the forward pass and of the input gradient are rows of tiles; a thread
transforms and multiplies blocks of such rows, also of several samples. Items of the weight gradient
are ranges of filters.
"""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import numpy as np

from dptrain.backends.numba.fused_pooling import lower_bound
from dptrain.backends.numba.jit import inlined, kernel
from dptrain.backends.numba.microkernels import NO_LOWER_BOUND
from dptrain.backends.numba.planning import Algorithm, Shape, Work, units_per_item
from dptrain.backends.numba.vector import (
    LINE,
    compiled_registers,
    copy,
    transpose,
    vector_width,
)
from dptrain.backends.numba.winograd_convolution import sum_bias
from dptrain.backends.numba.winograd_geometry import CHANNELS_PER_ITEM, block_rows
from dptrain.backends.numba.winograd_strided_transforms import (
    MATRICES,
    SIDE,
    SIZE,
    TAPS,
    transform_gradients,
    transform_inputs,
    transform_outputs,
    transform_sums,
    transform_weights,
)
from dptrain.backends.numba.winograd_transforms import PANEL, add_products, multiply_matrices
from dptrain.plan.lowering import Phase

PHASES = 4
"""Phases of a pixel: two of its row times two of its column."""
FEWEST = 32
"""Smallest number of input or output channels for which the transforms pay."""
TILES = 24
"""About how many tiles a block has. V of 64 channels and four phases then takes 0.6 MB."""


class StridedGeometry(NamedTuple):
    """Sizes of a convolution from x (N, H, W, C) to y (N, Ho, Wo, K) with 4 × 4 filters.

    Attributes:
        height: rows of x.
        width: columns of x.
        c: channels of x.
        h_out: rows of y.
        w_out: columns of y.
        k: channels of y.
        pad_top: rows of zeros above x.
        pad_left: columns of zeros to the left of x.
        tiles_down: rows of tiles of a sample: of y or, for the input gradient, of a phase of dx.
        tiles_across: tiles in a row.
        block_rows: rows of tiles of a block.
        padded_width: pixels of a padded row in scratch.
        v_stride: distance of the matrices of V.
        m_stride: distance of the matrices of M.
        u_stride: distance of the matrices of U, and of those of the sums of the weight gradient.
        ramp_size: number of integers 0, 1, 2, … in scratch.
        v_offset: start of V (transformed inputs) in scratch.
        m_offset: start of M (products, or transformed gradients) in scratch.
        padded_offset: start of padded rows in scratch.
        sums_offset: start of the sums of the transformed weight gradient in scratch.
        tile_offset: start of one element 1 in scratch.
        bias_offset: start of the bias, or of its gradient, in scratch.
        ramp_offset: start of 0, 1, 2, … in scratch.
        scratch_size: float32 elements of scratch that a thread needs.
    """

    height: int
    width: int
    c: int
    h_out: int
    w_out: int
    k: int
    pad_top: int
    pad_left: int
    tiles_down: int
    tiles_across: int
    block_rows: int
    padded_width: int
    v_stride: int
    m_stride: int
    u_stride: int
    ramp_size: int
    v_offset: int
    m_offset: int
    padded_offset: int
    sums_offset: int
    tile_offset: int
    bias_offset: int
    ramp_offset: int
    scratch_size: int


def supports(shape: Shape) -> bool:
    """Return whether the kernels support a convolution and it has enough channels to be faster."""
    c, k = shape.maps[2], shape.out[2]
    vector = compiled_registers().width
    whole = c % vector == 0 and k % vector == 0 and min(c, k) >= FEWEST
    return (
        shape.window == (4, 4) and shape.strides == (2, 2) and not shape.pool_height
        and whole
    )  # fmt: skip


def make_geometry(shape: Shape, phase: Phase) -> StridedGeometry:
    """Return the geometry of a stage. No result depends on the sizes that are chosen here, except
    for the order of the sums of the weight gradient.
    """
    (h, w, c), (h_out, w_out, k) = shape.maps, shape.out
    high, wide, v_channels, m_channels, margin = h_out, w_out, PHASES * c, k, SIZE - SIDE
    if phase is Phase.BACKWARD_INPUT:
        # The phases of dx begin at two adjacent rows of dy.
        high, wide, v_channels, m_channels, margin = -(-h // 2), -(-w // 2), k, c, SIZE - SIDE + 1
    down, across = -(-high // SIDE), -(-wide // SIDE)
    rows = block_rows(across, TILES)
    tiles, padded_width = rows * across, across * SIDE + margin
    v_stride, m_stride = tiles * v_channels + LINE, tiles * m_channels + LINE
    u_stride, ramp_size = v_channels * m_channels + LINE, max(v_channels, tiles, 256)
    regions = (
        MATRICES * v_stride,
        MATRICES * m_stride,
        (min(rows, down) * SIDE + margin) * padded_width * v_channels,
        MATRICES * u_stride if phase is Phase.BACKWARD_WEIGHT else 0,
        LINE,
        max(c, k),
        ramp_size,
    )
    offsets = accumulate((-(-size // LINE) * LINE for size in regions), initial=0)
    return StridedGeometry(
        *shape.maps, *shape.out, *shape.pads, down, across, rows, padded_width,
        v_stride, m_stride, u_stride, ramp_size, *offsets,
    )  # fmt: skip


def plan(shape: Shape, phase: Phase, work: Work) -> Algorithm:
    """Return the algorithm of a phase of a convolution that `supports` accepts."""
    geometry = make_geometry(shape, phase)
    scratch, c, k = geometry.scratch_size, geometry.c, geometry.k
    if phase is Phase.BACKWARD_WEIGHT:
        blocks = units_per_item(work.rows, work.threads, k // compiled_registers().width)
        return Algorithm(conv2d_backward_weight, geometry, scratch, blocks)
    rows = geometry.tiles_down
    grain = max(1, min(geometry.block_rows, work.batch_size * rows // work.threads))
    if phase is Phase.FORWARD:
        items, shared = PHASES * -(-c // CHANNELS_PER_ITEM), MATRICES * geometry.u_stride
        return Algorithm(
            conv2d_forward, geometry, scratch, rows, prepare_forward, items, shared, grain=grain
        )
    items = PHASES * -(-k // CHANNELS_PER_ITEM)
    shared = PHASES * (MATRICES * geometry.u_stride + TAPS**2 * c * k)
    return Algorithm(
        conv2d_backward_input, geometry, scratch, rows, prepare_backward_input, items, shared,
        grain=grain,
    )  # fmt: skip


@kernel
def prepare_forward(start, stop, thread, w, geo, shared):  # type: ignore[no-untyped-def]
    """Transform the weights w (4, 4, C, K); items are phases and groups of input channels."""
    c, k, groups = geo.c, geo.k, -(-geo.c // CHANNELS_PER_ITEM)
    size = c * k
    for item in range(start, stop):
        phase, first = item // groups, item % groups * CHANNELS_PER_ITEM
        last = min(c, first + CHANNELS_PER_ITEM)
        for i in range(first, last):
            for p in range(0, k, PANEL):
                wide = min(PANEL, k - p)
                transform_weights(
                    w.reshape(-1), (phase // 2 * 4 + phase % 2) * size + i * k + p, 8 * size,
                    2 * size, shared, p * PHASES * c + (phase * c + i) * wide, geo.u_stride, wide,
                )  # fmt: skip


@kernel
def prepare_backward_input(start, stop, thread, w, geo, shared):  # type: ignore[no-untyped-def]
    """Flip, transpose and transform the weights w (4, 4, C, K); items are phases and groups of K.

    The transposed weights are stored after U.
    """
    c, k, groups = geo.c, geo.k, -(-geo.k // CHANNELS_PER_ITEM)
    size = c * k
    for item in range(start, stop):
        phase, first = item // groups, item % groups * CHANNELS_PER_ITEM
        last = min(k, first + CHANNELS_PER_ITEM)
        packed = PHASES * MATRICES * geo.u_stride + phase * TAPS**2 * size
        for tap in range(TAPS**2):
            row, column = 2 * (1 - tap // 2) + phase // 2, 2 * (1 - tap % 2) + phase % 2
            transpose(
                w.reshape(-1), (row * 4 + column) * size + first, k,
                shared, packed + tap * size + first * c, c, c, last - first,
            )  # fmt: skip
        for i in range(first, last):
            for p in range(0, c, PANEL):
                wide = min(PANEL, c - p)
                transform_weights(
                    shared, packed + i * c + p, 2 * size, size,
                    shared, phase * MATRICES * geo.u_stride + p * k + i * wide, geo.u_stride, wide,
                )  # fmt: skip


@inlined
def _fill_ramp(geo, mine):  # type: ignore[no-untyped-def]
    table = mine.view(np.int32)
    for i in range(geo.ramp_size):
        table[geo.ramp_offset + i] = i


@inlined
def _load_phases(geo, x, n, row, rows, mine):  # type: ignore[no-untyped-def]
    """Load the inputs of `rows` rows of tiles from row `row` on of sample n, zero-padded, as pixels
    of 4 C channels.
    """
    c, width, columns = geo.c, geo.width, geo.padded_width
    for i in range(rows * SIDE + SIZE - SIDE):
        for f in range(2):
            h = 2 * (row * SIDE + i) + f - geo.pad_top
            inside = 0 <= h < geo.height
            for j in range(columns):
                target = geo.padded_offset + ((i * columns + j) * PHASES + 2 * f) * c
                v = 2 * j - geo.pad_left
                source = ((n * geo.height + h) * width + v) * c
                first, last = max(0, -v), max(0, min(2, width - v))
                if inside and first == 0 and last == 2:
                    copy(x, source, mine, target, 2 * c)
                    continue
                mine[target : target + 2 * c] = 0
                if inside and first < last:
                    copy(x, source + first * c, mine, target + first * c, (last - first) * c)


@inlined
def _load_gradients(geo, dy, n, row, rows, mine):  # type: ignore[no-untyped-def]
    """Load the rows of dy that `rows` rows of tiles of dx need, zero-padded."""
    k, width = geo.k, geo.w_out
    top, left = row * SIDE + geo.pad_top // 2 - 1, geo.pad_left // 2 - 1
    first, pitch = max(0, left), geo.padded_width * k
    last = max(first, min(width, left + geo.padded_width))
    for i in range(rows * SIDE + SIZE - SIDE + 1):
        target = geo.padded_offset + i * pitch
        if not 0 <= top + i < geo.h_out:
            mine[target : target + pitch] = 0
            continue
        before, after = (first - left) * k, (last - left) * k
        source = ((n * geo.h_out + top + i) * width + first) * k
        mine[target : target + before] = 0
        copy(dy, source, mine, target + before, after - before)
        mine[target + after : target + pitch] = 0


@kernel
def conv2d_forward(  # type: ignore[no-untyped-def]
    start, stop, thread, x, w, b, y, argmax, geo, bands, pool, shared, scratch
):
    """Compute `direct_convolution.conv2d_forward`; items are rows of tiles."""
    mine, x_flat, y_flat = scratch[thread], x.reshape(-1), y.reshape(-1)
    channels, k, down, across = PHASES * geo.c, geo.k, geo.tiles_down, geo.tiles_across
    _fill_ramp(geo, mine)
    copy(b, 0, mine, geo.bias_offset, k)
    g = start
    while g < stop:
        block = min(geo.block_rows, stop - g)
        i, tile = g, 0
        while i < g + block:
            n, row = i // down, i % down
            rows = min(down - row, g + block - i)
            _load_phases(geo, x_flat, n, row, rows, mine)
            transform_inputs(
                mine, geo.padded_offset, geo.padded_width * channels, channels, across,
                rows * across, mine, geo.v_offset + tile * channels, geo.v_stride,
            )  # fmt: skip
            i, tile = i + rows, tile + rows * across
        multiply_matrices(
            MATRICES, mine, geo.v_offset, geo.v_stride, channels, channels, shared, 0, geo.u_stride,
            k, k, geo.m_offset, geo.m_stride, geo.ramp_offset, tile, 0, k, None, None,
        )  # fmt: skip
        i, tile = g, 0
        while i < g + block:
            n, row = i // down, i % down
            rows, top = min(down - row, g + block - i), row * SIDE
            transform_outputs(
                mine, geo.m_offset + tile * k, geo.m_stride, k, across, rows * across,
                y_flat, (n * geo.h_out + top) * geo.w_out * k, geo.w_out * k, k,
                geo.h_out - top, geo.w_out, geo.bias_offset, lower_bound(pool),
            )  # fmt: skip
            i, tile = i + rows, tile + rows * across
        g += block


@kernel
def conv2d_backward_input(  # type: ignore[no-untyped-def]
    start, stop, thread, dy, argmax, w, dx, geo, bands, pool, shared, scratch
):
    """Compute `direct_convolution.conv2d_backward_input`; items are rows of tiles."""
    mine, dy_flat, dx_flat = scratch[thread], dy.reshape(-1), dx.reshape(-1)
    down = geo.tiles_down
    _fill_ramp(geo, mine)
    mine[geo.bias_offset : geo.bias_offset + geo.c] = 0
    g = start
    while g < stop:
        # The padded rows of a block are those of one sample.
        n, row = g // down, g % down
        rows = min(geo.block_rows, stop - g, down - row)
        _load_gradients(geo, dy_flat, n, row, rows, mine)
        for phase in range(PHASES):
            _store_phase(geo, n, row, rows, phase // 2, phase % 2, shared, dx_flat, mine)
        g += rows


@inlined
def _store_phase(geo, n, row, rows, f, g, u, dx, mine):  # type: ignore[no-untyped-def]
    """Compute one phase of `rows` rows of tiles of dx from the loaded gradients."""
    c, k, across, pitch = geo.c, geo.k, geo.tiles_across, geo.padded_width * geo.k
    count, top, left = rows * across, geo.pad_top, geo.pad_left
    # Number of rows of dy between the first rows of the phases, and the first row of dx.
    down, right = (top + 1 - f) // 2 - top // 2, (left + 1 - g) // 2 - left // 2
    h, v = (f + top) % 2, (g + left) % 2
    transform_inputs(
        mine, geo.padded_offset + down * pitch + right * k, pitch, k, across,
        count, mine, geo.v_offset, geo.v_stride,
    )  # fmt: skip
    multiply_matrices(
        MATRICES, mine, geo.v_offset, geo.v_stride, k, k, u,
        (2 * f + g) * MATRICES * geo.u_stride, geo.u_stride, c, c,
        geo.m_offset, geo.m_stride, geo.ramp_offset, count, 0, c, None, None,
    )  # fmt: skip
    first = 2 * row * SIDE + h
    transform_outputs(
        mine, geo.m_offset, geo.m_stride, c, across, count,
        dx, ((n * geo.height + first) * geo.width + v) * c, 2 * geo.width * c, 2 * c,
        (geo.height - first + 1) // 2, (geo.width - v + 1) // 2, geo.bias_offset, NO_LOWER_BOUND,
    )  # fmt: skip


@inlined
def _sum_row(begin, end, first_k, filters, x, dy, sums, geo, mine):  # type: ignore[no-untyped-def]
    """Write dw and then db of samples `begin` to `end` and some filters to `sums`."""
    channels, k, down, across = PHASES * geo.c, geo.k, geo.tiles_down, geo.tiles_across
    if begin == end:
        mine[geo.sums_offset : geo.sums_offset + MATRICES * geo.u_stride] = 0
    mine[geo.bias_offset : geo.bias_offset + filters] = 0
    g, last = begin * down, end * down
    while g < last:
        block = min(geo.block_rows, last - g)
        i, tile = g, 0
        while i < g + block:
            n, row = i // down, i % down
            rows, top = min(down - row, g + block - i), row * SIDE
            high = min(geo.h_out - top, rows * SIDE)
            source = (n * geo.h_out + top) * geo.w_out * k + first_k
            _load_phases(geo, x, n, row, rows, mine)
            sum_bias(geo, dy, source, high * geo.w_out, filters, mine)
            transform_inputs(
                mine, geo.padded_offset, geo.padded_width * channels, channels, across,
                rows * across, mine, geo.v_offset + tile * channels, geo.v_stride,
            )  # fmt: skip
            transform_gradients(
                dy, source, high, geo.w_out, k, filters, across, rows * across,
                mine, geo.m_offset + tile * filters, geo.m_stride,
            )  # fmt: skip
            i, tile = i + rows, tile + rows * across
        add_products(
            MATRICES, mine, geo.v_offset, geo.v_stride, channels, channels, geo.m_offset,
            geo.m_stride, filters, geo.sums_offset, geo.u_stride, geo.ramp_offset, tile,
            g == begin * down,
        )  # fmt: skip
        g += block
    _finish_gradient(geo, first_k, filters, mine, sums)


@inlined
def _finish_gradient(geo, first_k, filters, mine, sums):  # type: ignore[no-untyped-def]
    """Write dw and db of some filters to `sums`."""
    c, k = geo.c, geo.k
    for i in range(PHASES * c):
        phase, channel = i // c, i % c
        target = ((phase // 2 * 4 + phase % 2) * c + channel) * k + first_k
        for p in range(0, filters, PANEL):
            wide = min(PANEL, filters - p)
            source = geo.sums_offset + p * PHASES * c + i * wide
            transform_sums(
                mine, source, geo.u_stride, sums, target + p, 8 * c * k, 2 * c * k, wide
            )  # fmt: skip
    copy(mine, geo.bias_offset, sums, 16 * c * k + first_k, filters)


@kernel
def conv2d_backward_weight(  # type: ignore[no-untyped-def]
    start, stop, thread, x, dy, argmax, partial, bounds, geo, blocks, pool, shared, scratch
):
    """Compute `direct_convolution.conv2d_backward_weight`.

    Adjacent blocks of a row are computed together.
    """
    item, mine, width = start, scratch[thread], vector_width()
    x_flat, dy_flat, vectors = x.reshape(-1), dy.reshape(-1), geo.k // vector_width()
    _fill_ramp(geo, mine)
    while item < stop:
        row, first = item // blocks, item % blocks
        last = min(blocks, first + stop - item)
        first_k, last_k = vectors * first // blocks * width, vectors * last // blocks * width
        _sum_row(
            bounds[row], bounds[row + 1], first_k, last_k - first_k, x_flat, dy_flat,
            partial[row], geo, mine,
        )  # fmt: skip
        item += last - first
