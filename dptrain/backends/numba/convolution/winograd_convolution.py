"""Winograd convolution of stride 1 (`winograd_transforms`), forward and backward.

Arguments are those of `direct_convolution`, with a `WinogradGeometry`. `prepare_forward` and
`prepare_backward_input` transform the weights once for all threads.

Bands are ranges of rows of tiles, or of pooled rows. A thread processes its range of bands in
blocks of rows of tiles, which may belong to several samples: loads and transforms their inputs,
multiplies them with the weights as 36 matrices, and transforms and stores their outputs. The `pool`
of functions that load or store is None without pooling; the compiler removes the branch that does
not apply.

Blocks of the weight gradient are ranges of filters. Tiles are always summed in the same blocks,
which begin at the first sample of a row of partial sums.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from dptrain.backends.numba.convolution.fused_pooling import (
    adds,
    lower_bound,
    pool_or_none,
    pool_rows,
    select_by_pool,
    unpool_rows,
)
from dptrain.backends.numba.convolution.im2col import maps_of, vector_part
from dptrain.backends.numba.convolution.microkernels import NO_LOWER_BOUND, multiply
from dptrain.backends.numba.convolution.planning import (
    WIDTH,
    Case,
    KernelPlan,
    Shape,
    Work,
    units_per_item,
)
from dptrain.backends.numba.convolution.winograd_cost import (
    are_near,
    estimated_ns,
    parts_of_filters,
    rows_of_gradient,
)
from dptrain.backends.numba.convolution.winograd_geometry import (
    CHANNELS_PER_ITEM,
    LARGE_BLOCK,
    Tiles,
    WinogradGeometry,
    make_geometry,
)
from dptrain.backends.numba.convolution.winograd_transforms import (
    INTEGERS,
    MATRICES,
    PANEL,
    SIDES,
    add_products,
    multiply_matrices,
    transform_gradients,
    transform_inputs,
    transform_outputs,
    transform_sums,
    transform_weights,
)
from dptrain.backends.numba.prefetching import tile_rows_part
from dptrain.backends.numba.vector import (
    LINE,
    compiled_registers,
    copy,
    transpose,
    vector_width,
)
from dptrain.native.jit import inlined, kernel
from dptrain.plan.lowering import Phase
from dptrain.plan.selection import alone

SUM_BYTES, MAP_BYTES = 16 << 20, 32 << 20
"""Size of all sums of a weight gradient from which an L3 cache does not hold them, and largest size
of the transformed maps of all threads that it holds."""
FEWEST, FEWEST_WITH_MANY, MANY = 12, 8, 32
"""Smallest number of input or output channels, and if the other number is at least `MANY`. Below,
the transforms cost as much as they save."""
SAVED = 8
"""See `planning.KernelPlan`: a quarter as many products, and each thread fetches all transformed
weights. Measured without this limit on 2 cores of an Intel Xeon (AVX-512), 16 → 32 channels,
16 × 16, one sample: 18.6 µs on two threads, 12.4 µs on one."""
WEIGHTS = 1024
"""Pairs of channels whose transform is worth one more thread: 7 µs."""


def supports(taps: int, case: Case) -> bool:
    """Return whether the kernels for filters of `taps` rows compute a case, with enough channels to
    transform them.
    """
    return case.shape.window[0] == taps and not refusal(case)


def refusal(case: Case) -> str:
    """Return why the kernels cannot compute a case with any number of samples; empty if they can.

    Example:
        >>> refusal(Case(Shape((8, 8, 16), (4, 4, 16), (3, 3), (2, 2), (1, 1)), Phase.FORWARD))
        'stride 2×2: no Winograd'
    """
    shape = case.shape
    size, c, k = "×".join(map(str, shape.window)), shape.maps[2], shape.out[2]
    fewest = FEWEST_WITH_MANY if max(c, k) >= MANY else FEWEST
    reasons = {
        "1×1 filters": shape.window == (1, 1) and shape.pads == (0, 0),
        "fp32-direct excludes Winograd": not case.winograd,
        "stride {}×{}: no Winograd".format(*shape.strides): shape.strides != (1, 1),
        "dilation {}×{}: no Winograd".format(*shape.dilations): shape.dilations != (1, 1),
        f"{size}: no Winograd": shape.window not in [(taps, taps) for taps in SIDES],
        "padding exceeds the filters": not shape.is_plain,
        f"{c} channels, {k} filters: no Winograd": min(c, k) < fewest,
    }
    return next((reason for reason, applies in reasons.items() if applies), "")


def estimate(case: Case) -> Sequence[tuple[float, str]]:
    """Return the estimated time in ns."""
    return alone(estimated_ns(case))


def plan(shape: Shape, phase: Phase, work: Work) -> KernelPlan:
    """Return the Winograd algorithm of a phase of a convolution that `supports` accepts."""
    if phase is Phase.BACKWARD_WEIGHT:
        return _plan_backward_weight(shape, work)
    maps, out, pads = shape.maps, shape.out, shape.pads
    if phase is Phase.BACKWARD_INPUT:
        maps, out, pads = shape.out, shape.maps, shape.dy_pads
    geometry = make_geometry(maps, out, pads, shape.window[0], pool_height=shape.pool_height)
    scratch = geometry.scratch_size
    # A thread computes adjacent bands together, so the number of bands costs nothing.
    bands = geometry.tiles_down if work.threads > 1 else 1
    grain = max(1, min(geometry.block_rows, work.batch_size * bands // work.threads))
    items = -(-maps[2] // CHANNELS_PER_ITEM)
    packed = shape.window[0] ** 2 * maps[2] * geometry.k_vectors
    weights = MATRICES * geometry.u_stride + packed
    prepare_grain = -(-WEIGHTS // (CHANNELS_PER_ITEM * geometry.k_vectors))
    parts = 1
    # With fused pooling, each part would compute the gradient before pooling again. Products in
    # place have all filters.
    divides = phase is Phase.FORWARD or not are_near(maps[2], geometry.k_vectors)
    if divides and geometry.m_offset != geometry.v_offset:
        parts = parts_of_filters(
            work.batch_size * bands, geometry.tiles_across, maps[2], geometry.k_vectors,
            work.threads, keeps_weights=work.keeps_weights,
        )  # fmt: skip
    if parts > 1:
        bands, geometry = bands * parts, geometry._replace(parts=INTEGERS[shape.window[0]](parts))
        grain = -(-work.batch_size * bands // work.threads)
    geometry = geometry._replace(units=bands)
    kernel, prepare = conv2d_forward, prepare_forward
    if phase is Phase.BACKWARD_INPUT:
        kernel, prepare = conv2d_backward_input, prepare_backward_input
    return KernelPlan(
        kernel, geometry, scratch, _tile(geometry), prepare, items, weights, grain, prepare_grain,
        saved=SAVED,
    )  # fmt: skip


def _plan_backward_weight(shape: Shape, work: Work) -> KernelPlan:
    k_vectors = -(-shape.out[2] // compiled_registers().width)
    work = replace(work, rows=_rows(shape, work))
    blocks = units_per_item(work.rows, work.threads, k_vectors)
    geometry = make_geometry(
        shape.maps, shape.out, shape.pads, shape.window[0], pool_height=shape.pool_height,
        gradient=True, large_blocks=not work.by_shape and _has_distant_sums(shape, work, blocks),
    )  # fmt: skip
    return KernelPlan(
        conv2d_backward_weight, geometry._replace(units=blocks), geometry.scratch_size,
        _tile(geometry), rows=work.rows, saved=SAVED,
    )  # fmt: skip


def _tile(geometry: WinogradGeometry) -> str:
    return f"{geometry.tile_side}×{geometry.tile_side} outputs"


def _rows(shape: Shape, work: Work) -> int:
    """Return the rows of partial sums of the weight gradient; micro-shards fix their number."""
    if work.by_shape or work.rows == 1:
        return work.rows
    side = SIDES[shape.window[0]]
    tiles = work.batch_size * math.prod(-(-n // side) for n in shape.out[:2])
    k = -(-shape.out[2] // WIDTH) * WIDTH
    return rows_of_gradient(work.rows, tiles, shape.maps[2], k, work.threads)


def _has_distant_sums(shape: Shape, work: Work, blocks: int) -> bool:
    """Return whether a cache holds the transformed maps of a large block, but not the sums."""
    c, k = shape.maps[2], shape.out[2]
    sums, maps = work.rows * c * k, work.threads * LARGE_BLOCK * (c + k // blocks)
    return 4 * MATRICES * sums > SUM_BYTES and 4 * MATRICES * maps <= MAP_BYTES


@inlined
def _prepare(start, stop, w, geo, u, flipped):
    """Transform the weights of groups `start` to `stop` of input channels to u (36, C, K), of which
    each matrix is in panels.

    The weights that are flipped, or that do not fill vectors, are first packed after u.
    """
    c, k, vectors, taps = geo.c, geo.k, geo.k_vectors, geo.taps
    matrix, positions = c * vectors, taps * taps
    first, last = CHANNELS_PER_ITEM * start, min(c, CHANNELS_PER_ITEM * stop)
    begin, count = first * vectors, (last - first) * vectors
    if not flipped and k == vectors:
        _transform_weight_panels(w, 0, geo, first, last, u)
        return
    packed = MATRICES * geo.u_stride
    for tap in range(positions):
        row = packed + tap * matrix + begin
        if k < vectors:
            for p in range(row, row + count):
                u[p] = 0
        if flipped:
            source = (positions - 1 - tap) * c * k + first
            transpose(w, source, c, u, row, vectors, k, last - first)
        else:
            for i in range(last - first):
                copy(w, (tap * c + first + i) * k, u, row + i * vectors, k)
    _transform_weight_panels(u, packed, geo, first, last, u)


@inlined
def _transform_weight_panels(w, start, geo, first, last, u):
    """Transform the weights w (R, S, C, K) of channels `first` to `last`."""
    c, vectors = geo.c, geo.k_vectors
    for i in range(first, last):
        for p in range(0, vectors, PANEL):
            columns = min(PANEL, vectors - p)
            transform_weights(
                w, start + i * vectors + p, geo.taps, c * vectors,
                u, p * c + i * columns, geo.u_stride, columns,
            )  # fmt: skip


@kernel
def prepare_forward(items, w, geo, shared):
    """Transform the weights w (R, S, C, K); items are groups of input channels."""
    _prepare(items.start, items.stop, w.reshape(-1), geo, shared, False)


@kernel
def prepare_backward_input(items, w, geo, shared):
    """Flip and transform the weights w (R, S, C, K); items are groups of channels of dy."""
    _prepare(items.start, items.stop, w.reshape(-1), geo, shared, True)


@inlined
def _fill_scratch(geo, mine):
    """Fill the constant parts of scratch: zeros after the maps, the bias 0, and 0, 1, 2, …."""
    table = mine.view(np.int32)
    # The last vector of channels may cross the end of the padded rows.
    mine[geo.band_offset - geo.c_vectors - LINE : geo.band_offset] = 0
    mine[geo.bias_offset : geo.ramp_offset] = 0
    for i in range(geo.ramp_size):
        table[geo.ramp_offset + i] = i


@inlined
def _load_rows(geo, x, pool, tiles, mine):
    """Load the padded inputs of some rows of tiles."""
    c, width, pitch = geo.c, geo.width, geo.padded_width * geo.c
    top = tiles.row * geo.tile_side - geo.pad_top
    high = tiles.rows * geo.tile_side + geo.taps - 1
    first = max(0, top)
    last = max(first, min(geo.height, top + high))
    start = geo.padded_offset + geo.pad_left * c
    for i in range(high):
        begin = geo.padded_offset + i * pitch
        if top + i < first or top + i >= last:
            mine[begin : begin + pitch] = 0
        else:
            mine[begin : begin + geo.pad_left * c] = 0
            mine[begin + (geo.pad_left + width) * c : begin + pitch] = 0
    target = start + (first - top) * pitch
    if pool is None:
        source = (tiles.n * geo.height + first) * width * c
        for i in range(last - first):
            copy(x.values, source + i * width * c, mine, target + i * pitch, width * c)
    else:
        sums = mine, geo.rest_offset, mine[geo.rest_offset :]
        rows = mine, target, geo.padded_width
        unpool_rows(pool, x, tiles.n, (first, last), rows, (0, c), sums)


@inlined
def _tiles(geo, down, i, stop, panel, at):
    """Return the tiles of a panel from row i on: up to row `stop`, or to the end of the sample.

    Only a block of one row has several panels. Rows of tiles of all samples are numbered
    consecutively, `down` for each.
    """
    rows, first = min(down - i % down, stop - i), geo.tiles_across * panel // geo.panels
    count = rows * (geo.tiles_across * (panel + 1) // geo.panels - first)
    return Tiles(i // down, i % down, rows, first, count, at)


@inlined
def _rows_of(geo, tiles, y, pool, base, mine):
    """Return (flat array, first element) of the rows of y of some tiles.

    With pooling they are in scratch, which begins with row `base` of the sample.
    """
    top, pitch = tiles.row * geo.tile_side, geo.w_out * geo.k
    if pool is None:
        return y.values, (tiles.n * geo.h_out + top) * pitch
    return mine, geo.band_offset + (top - base) * pitch


@inlined
def _pool_rows(geo, mine, n, y, pool, filters, rows, windows):
    """Pool the windows that rows `rows` of the maps complete, of the rows of windows `windows`.

    Returns:
        The first row of the maps that is still in scratch, and the next row of windows.
    """
    (base, ready), (p, stop) = rows, windows
    if pool is None:
        return base, p
    pitch = geo.w_out * geo.k
    while p < stop:
        above = p * pool.stride_v - pool.pad_top
        top, bottom = max(0, above), min(geo.h_out, above + pool.window_v)
        if bottom > ready:
            break
        source = mine, geo.band_offset + (above - base) * pitch, geo.w_out
        pool_rows(pool, source, (top - above, bottom - above), y, n, p, filters)
        p += 1
    kept = min(ready, max(base, p * pool.stride_v - pool.pad_top))
    if p < stop and kept > base:
        for q in range(geo.band_offset, geo.band_offset + (ready - kept) * pitch):
            mine[q] = mine[q + (kept - base) * pitch]
    return kept, p


@inlined
def _tile_rows(geo, y, pool):
    """Return the rows of tiles of a sample that are needed."""
    if pool is None:
        return geo.tiles_down
    bottom = (y.height - 1) * pool.stride_v - pool.pad_top + pool.window_v
    return -(-min(geo.h_out, bottom) // geo.tile_side)


@inlined
def _pooled_row(geo, y, pool, bands, band):
    """Return the first pooled row of a band; bands begin at a row of tiles if windows allow it."""
    if pool is None:
        return 0
    step = max(1, geo.tile_side // pool.stride_v)
    return min(y.height, -(-y.height // step) * band // bands * step)


@inlined
def _first_tile_row(geo, pool, down, bands, band, p):
    """Return the first row of tiles of a band, which begins with pooled row p."""
    if pool is None:
        return down * band // bands
    return max(0, p * pool.stride_v - pool.pad_top) // geo.tile_side


@inlined
def _last_tile_row(geo, pool, down, bands, band, p):
    """Return the row of tiles after those of the bands before `band`, whose first row is p."""
    if pool is None:
        return down * band // bands
    if p == 0:
        return 0
    bottom = (p - 1) * pool.stride_v - pool.pad_top + pool.window_v
    return -(-min(geo.h_out, bottom) // geo.tile_side)


@inlined
def _inputs(geo, x, pool, down, first, stop):
    """Return the part of x that some rows of tiles read; nothing of gradients after pooling."""
    if pool is not None:
        return x.values, 0, 0
    shape, tiles = (geo.height, geo.width * geo.c), (down, geo.tile_side)
    shifts = -geo.pad_top, geo.taps - 1 - geo.pad_top
    return tile_rows_part(x.values, shape, tiles, (first, stop), shifts)


@inlined
def _outputs(geo, y, pool, down, first, stop):
    """Return the part of y in some rows of tiles; nothing with pooling.

    Threads that compute parts of the filters would take the lines from each other.
    """
    if pool is not None or geo.parts > 1:
        return y.values, 0, 0
    shape, tiles = (geo.h_out, geo.w_out * geo.k), (down, geo.tile_side)
    return tile_rows_part(y.values, shape, tiles, (first, stop), (0, 0))


@inlined
def _convolve(start, stop, filters, source, u, target, geo, mine):
    """Compute bands `start` to `stop` of y from x and transformed weights.

    Args:
        filters: (first, stop), the filters to compute; the first is a multiple of the vector width.
        source: x, and its pool: None, or x is a gradient after pooling.
        target: y, and its pool: None, or y is pooled; the lower bound of y; None, or whether the
            result is added to y.
        mine: scratch with the bias.
    """
    (x, x_pool), (y, pool, bound, adds) = source, target
    side, half, bands = geo.tile_side, vector_width() // 2, geo.units // geo.parts
    channels = (geo.c + half - 1) // half * half
    columns = filters[0], geo.k_vectors if filters[1] == geo.k else filters[1]
    down = _tile_rows(geo, y, pool)
    p = _pooled_row(geo, y, pool, bands, start % bands)
    last_p = _pooled_row(geo, y, pool, bands, stop % bands)
    row = _first_tile_row(geo, pool, down, bands, start % bands, p)
    last = _last_tile_row(geo, pool, down, bands, stop % bands, last_p)
    # Rows of tiles of all samples are numbered consecutively.
    g, last_g, base = start // bands * down + row, stop // bands * down + last, row * side
    while g < last_g:
        # All blocks have about as many rows.
        left = last_g - g
        block = -(-left // -(-left // geo.block_rows))
        for panel in range(geo.panels):
            i, count = g, 0
            while i < g + block:
                tiles = _tiles(geo, down, i, g + block, panel, count)
                if panel == 0:
                    _load_rows(geo, x, x_pool, tiles, mine)
                transform_inputs(geo, tiles, channels, mine, None)
                i, count = i + tiles.rows, count + tiles.num
            multiply_matrices(
                geo, mine, u, count, columns,
                _inputs(geo, x, x_pool, down, g + block, min(g + 2 * block, last_g)),
                _outputs(geo, y, pool, down, g, g + block),
            )  # fmt: skip
            i, count = g, 0
            while i < g + block:
                tiles = _tiles(geo, down, i, g + block, panel, count)
                rows = _rows_of(geo, tiles, y, pool, base, mine)
                transform_outputs(geo, tiles, filters, mine, rows, bound, adds)
                if panel == geo.panels - 1:
                    ready = min(geo.h_out, (tiles.row + tiles.rows) * side)
                    end = last_p if tiles.n == stop // bands else y.height
                    base, p = _pool_rows(
                        geo, mine, tiles.n, y, pool, filters, (base, ready), (p, end)
                    )
                    if tiles.row + tiles.rows == down:
                        base, p = 0, 0
                i, count = i + tiles.rows, count + tiles.num
        g += block


@inlined
def _convolve_parts(items, source, u, target, geo, mine):
    """Compute some items: the bands of all samples of the first part of the filters, then of the
    second, ….
    """
    item, whole = items.start, items.stop
    if geo.parts > 1:
        whole = source[0].samples * (geo.units // geo.parts)
    while item < items.stop:
        part, first = item // whole, item % whole
        count = min(whole - first, items.stop - item)
        filters = vector_part(geo.k, part, geo.parts, vector_width())
        _convolve(first, first + count, filters, source, u, target, geo, mine)
        item += count


@kernel
def conv2d_forward(items, x, w, b, y, geo, pool, scratch):
    """Compute `direct_convolution.conv2d_forward`."""
    mine, target = scratch[items.thread], (maps_of(y), pool_or_none(pool), lower_bound(pool), None)
    _fill_scratch(geo, mine)
    copy(b, 0, mine, geo.bias_offset, geo.k)
    _convolve_parts(items, (maps_of(x), None), w, target, geo, mine)


@kernel
def conv2d_backward_input(items, dy, w, dx, geo, pool, scratch):
    """Compute `direct_convolution.conv2d_backward_input`; the geometry maps dy to dx."""
    mine, target = scratch[items.thread], (maps_of(dx), None, NO_LOWER_BOUND, adds(pool))
    _fill_scratch(geo, mine)
    _convolve_parts(items, (maps_of(dy), pool_or_none(pool)), w, target, geo, mine)


@inlined
def sum_bias(geo, dy, start, pixels, channels, mine):
    """Add `channels` channels of some pixels of dy to the gradient of the bias, as a product."""
    one, table = geo.tile_offset, mine.view(np.int32)
    mine[one] = 1
    for p in range(0, pixels, geo.ramp_size):
        multiply(
            (mine, one),
            (table, geo.ramp_offset, 0),
            (table, geo.ramp_offset, 0),
            (dy, start + p * geo.k, geo.k),
            (mine, geo.bias_offset, 0),
            (mine, geo.bias_offset),
            (table, geo.ramp_offset, 0),
            (1, min(geo.ramp_size, pixels - p), channels),
            NO_LOWER_BOUND,
        )


def _unpool_gradients(pool, geo, dy, tiles, first_k, channels, mine):
    top = tiles.row * geo.tile_side
    rows = top, min(geo.h_out, top + tiles.rows * geo.tile_side)
    target, sums = (mine, geo.band_offset, geo.w_out), mine[geo.rest_offset :]
    written = first_k, first_k + channels
    unpool_rows(pool, dy, tiles.n, rows, target, written, (mine, geo.bias_offset, sums))


def _sum_biases(pool, geo, dy, tiles, first_k, channels, mine):
    if pool.bias:
        top, bottom = tiles.row * geo.tile_side, (tiles.row + tiles.rows) * geo.tile_side
        source = (tiles.n * geo.h_out + top) * geo.w_out * geo.k + first_k
        pixels = (min(geo.h_out, bottom) - top) * geo.w_out
        sum_bias(geo, dy.values, source, pixels, channels, mine)


_load_gradients = select_by_pool(_unpool_gradients, _sum_biases)
"""_load_gradients(pool, geo, dy, tiles, first_k, channels, mine): load the gradients of rows of
tiles, unless dy contains them, and add them to the gradient of the bias.
"""


@inlined
def _is_transposed(geo):
    """Return whether the sums of the weight gradient are (36, K, C): C fills vectors better.

    20 filters of 32 channels then need 20 · 32 sums for each matrix instead of 32 · 32.
    """
    return geo.k * geo.c_vectors < geo.c * geo.k_vectors


@inlined
def _finish_transposed_gradient(geo, first_k, channels, mine, sums):
    """Write dw of some filters to `sums`."""
    c, tile = geo.c, geo.tile_offset
    for q in range(channels):
        for p in range(0, geo.c_vectors, PANEL):
            columns = min(PANEL, geo.c_vectors - p)
            source = geo.sums_offset + p * channels + q * columns
            transform_sums(mine, source, geo.u_stride, geo.taps, mine, tile, columns, columns)
            for tap in range(geo.taps * geo.taps):
                for i in range(min(columns, c - p)):
                    target = (tap * c + p + i) * geo.k + first_k + q
                    sums[target] = mine[tile + tap * columns + i]


@inlined
def _finish_gradient(geo, first_k, channels, vectors, pooled, mine, sums):
    """Write dw and db of some filters to `sums`."""
    c, k, taps, tile = geo.c, geo.k, geo.taps, geo.tile_offset
    if _is_transposed(geo):
        _finish_transposed_gradient(geo, first_k, channels, mine, sums)
    for i in range(0 if _is_transposed(geo) else c):
        for p in range(0, vectors, PANEL):
            columns = min(PANEL, vectors - p)
            source, target = geo.sums_offset + p * c + i * columns, i * k + first_k + p
            if p + columns <= channels:
                transform_sums(mine, source, geo.u_stride, taps, sums, target, c * k, columns)
                continue
            transform_sums(mine, source, geo.u_stride, taps, mine, tile, columns, columns)
            for tap in range(taps * taps):
                copy(mine, tile + tap * columns, sums, target + tap * c * k, channels - p)
    bias = geo.bias_offset + (first_k if pooled else 0)
    copy(mine, bias, sums, taps * taps * c * k + first_k, channels)


@inlined
def _sum_row(samples, blocks, x, dy, sums, geo, pool, mine):
    """Write dw and then db of some samples and blocks of filters to `sums`."""
    (begin, end), (first_b, last_b), found = samples, blocks, pool_or_none(pool)
    width, down = vector_width(), geo.tiles_down
    first_k = geo.k_vectors // width * first_b // geo.units * width
    vectors = geo.k_vectors // width * last_b // geo.units * width - first_k
    channels = min(vectors, geo.k - first_k)
    left = geo.v_offset, geo.v_stride, geo.c_vectors, geo.c
    right = geo.m_offset, geo.m_stride, vectors
    if _is_transposed(geo):
        left = geo.m_offset, geo.m_stride, vectors, channels
        right = geo.v_offset, geo.v_stride, geo.c_vectors
    _fill_scratch(geo, mine)
    if begin == end:
        mine[geo.sums_offset : geo.sums_offset + MATRICES * geo.u_stride] = 0
    g, last_g = begin * down, end * down
    while g < last_g:
        block = min(geo.block_rows, last_g - g)
        for panel in range(geo.panels):
            i, count = g, 0
            while i < g + block:
                tiles = _tiles(geo, down, i, g + block, panel, count)
                if panel == 0:
                    _load_rows(geo, x, None, tiles, mine)
                    _load_gradients(pool, geo, dy, tiles, first_k, channels, mine)
                first_ahead = min(i + block, last_g)
                last_ahead = min(i + block + tiles.rows, last_g)
                # A thread that computes some filters reads few lines of dy.
                last_of_all = last_ahead if channels == geo.k else first_ahead
                transform_inputs(
                    geo, tiles, geo.c_vectors, mine,
                    _inputs(geo, x, None, down, first_ahead, last_ahead),
                )  # fmt: skip
                transform_gradients(
                    geo, tiles, (first_k, channels, vectors),
                    _rows_of(geo, tiles, dy, found, tiles.row * geo.tile_side, mine), mine,
                    _outputs(geo, dy, found, down, first_ahead, last_of_all),
                )  # fmt: skip
                i, count = i + tiles.rows, count + tiles.num
            add_products(geo, mine, left, right, count, g == begin * down and panel == 0)
        g += block
    _finish_gradient(geo, first_k, channels, vectors, found is not None, mine, sums)


@kernel
def conv2d_backward_weight(items, x, dy, partial, bounds, geo, pool, scratch):
    """Compute `direct_convolution.conv2d_backward_weight`.

    Adjacent blocks of a row are computed together.
    """
    x, dy, item, mine = maps_of(x), maps_of(dy), items.start, scratch[items.thread]
    while item < items.stop:
        row, first = item // geo.units, item % geo.units
        last = min(geo.units, first + items.stop - item)
        samples = bounds[row], bounds[row + 1]
        _sum_row(samples, (first, last), x, dy, partial[row], geo, pool, mine)
        item += last - first
