"""Direct convolution: implicit GEMM with register tiles, forward and backward, for every shape.

Activations are (N, H, W, C), weights (R, S, C, K), all float32 and contiguous. Tables of offsets
(`im2col`) locate the operands of the products of `microkernels` in the maps. `fused_pooling`
contains the parts that depend on whether ReLU and max pooling are fused.

- Forward and input gradient: each sample has `geometry.units` items (bands). An item is a range of
  rows and a range of channels (`ConvGeometry.column_blocks`) of the result.
- Weight gradient: each row of `partial` has `geometry.units` items (blocks). An item is a range of
  the filters' rows and a range of filters.

Bands and blocks only divide outputs among threads; no result depends on them. The order of a sum
follows from the shape of the layer: filter rows, columns and channels in the forward pass and the
input gradient, samples and blocks of `gradient_rows` rows in the weight gradient. `scratch` has one
row of float32 for each thread.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from dptrain.backends.numba.convolution.fused_pooling import (
    lower_bound,
    pool_rows,
    select_by_pool,
    unpool_rows,
)
from dptrain.backends.numba.convolution.im2col import (
    GROUP,
    ConvGeometry,
    fill_filter,
    fill_groups,
    fill_phases,
    fill_pixels,
    fill_ramp,
    filter_runs,
    gradient_rows,
    gradient_rows_above,
    is_inside,
    load_padded_gradient,
    load_patches,
    maps_of,
    pack_flipped,
    padded_columns,
    padded_gradient,
    padded_rows,
    part,
    phase_entries,
    phase_taps,
    row_entries,
    rows_alike,
    taps,
    vector_part,
)
from dptrain.backends.numba.convolution.microkernels import (
    NO_LOWER_BOUND,
    multiply,
    multiply_adjacent,
    multiply_spaced,
)
from dptrain.backends.numba.convolution.planning import (
    Case,
    KernelPlan,
    Shape,
    Work,
    counted,
    units_per_item,
)
from dptrain.backends.numba.vector import compiled_registers, vector_width
from dptrain.native.caches import cache_bytes
from dptrain.native.jit import inlined, kernel
from dptrain.plan.lowering import Phase
from dptrain.plan.selection import alone

MOST_STEPS = 1024
"""Largest number of weights of a filter that a product sums, if they are not in one filter row."""
STORED = 16384
"""Largest number of outputs that are stored before they are pooled, in rows of windows."""


@inlined
def _filter_rows(geometry, steps):
    """Return how many filter rows of `steps` steps each a product sums; about the same in all.

    A panel of the weights, which all register tiles of a product read, must stay in the L2 cache.
    Its rows can be a multiple of 1 KB apart and then map to few sets of the cache.
    """
    blocks = (geometry.r * steps + MOST_STEPS - 1) // MOST_STEPS
    return (geometry.r + blocks - 1) // blocks


@inlined
def _multiply_pixels(patches, tables, filters, y, rows, geometry, filter_rows, bound):
    """Compute convolution outputs of some rows of pixels from their patches.

    Args:
        patches: (flat array, first element of the first patch).
        tables: pixel table of the patches, pixel table of y, and filter table of the patches;
            entries of a row.
        filters: flat weights of K filters, and biases; first filter to compute, and the end.
        y: (flat array, element for the first pixel and channel 0).
        rows: number of rows of pixels.
        filter_rows: (first, stop), the rows of the filters that are not in the padding.
        bound: lower bound of the outputs.
    """
    (a_rows, c_rows, a_steps, entries), (w, b, q, q_stop), (i, stop) = tables, filters, filter_rows
    (a, a_start), (c, c_start), k = patches, y, len(b)
    steps = len(w) // (geometry.r * k)
    size = _filter_rows(geometry, steps)
    d, d_start, d_row = b, q, 0
    while True:
        end = min(stop, (i // size + 1) * size)
        multiply_spaced(
            (a, a_start),
            (a_rows, 0, 1),
            (a_steps, i * steps, 1),
            (w, i * steps * k + q, k),
            (d, d_start, d_row),
            (c, c_start + q),
            (c_rows, 0, 1),
            (rows * entries, (end - i) * steps, q_stop - q),
            bound if end >= stop else NO_LOWER_BOUND,
            entries,
        )
        if end >= stop:
            break
        d, d_start, d_row, i = c, c_start + q, 1, end


def _forward_plain(pool, x, y, filters, n, rows, geometry, memory):
    padded, tables, _ = memory
    _, columns, inside = padded
    filter_rows, down = (geometry.r, geometry.dilation_v), geometry.stride_v
    row = down * (x.width if inside else columns) * x.channels
    for i_chunk in range(rows[0], rows[1], geometry.rows):
        stop = min(rows[1], i_chunk + geometry.rows)
        a, a_start = load_patches(x, n, i_chunk, stop - i_chunk, geometry, padded)
        i = i_chunk
        while i < stop:
            above = i * down - geometry.pad_top
            first, last, stop_row = rows_alike(i, stop, down, above, filter_rows, x.height)
            target = y.values, (n * y.height + i) * y.width * y.channels
            _multiply_pixels(
                (a, a_start + (i - i_chunk) * row), tables, filters, target, stop_row - i,
                geometry, (first, last), lower_bound(pool),
            )  # fmt: skip
            i = stop_row


def _forward_pooled(pool, x, y, filters, n, rows, geometry, memory):
    padded, tables, band = memory
    (_, columns, inside), (_, _, q, q_stop) = padded, filters
    high, h_out, pitch = pool.window_v, pool.height, pool.width * y.channels
    row = geometry.stride_v * (x.width if inside else columns) * x.channels
    group = geometry.windows
    chunk = (geometry.rows - high) // pool.stride_v + 1
    for p_chunk in range(rows[0], rows[1], chunk):
        stop = min(rows[1], p_chunk + chunk)
        ready = max(0, p_chunk * pool.stride_v - pool.pad_top)
        loaded, last = ready, min(h_out, (stop - 1) * pool.stride_v - pool.pad_top + high)
        a, a_start = load_patches(x, n, loaded, last - loaded, geometry, padded)
        for p in range(p_chunk, stop, group):
            # `band` contains the rows of a group of rows of windows, from row `above` on.
            end, above = min(stop, p + group), p * pool.stride_v - pool.pad_top
            first, last = max(0, above), min(h_out, (end - 1) * pool.stride_v - pool.pad_top + high)
            if first < ready:
                shift = group * pool.stride_v * pitch
                for e in range((first - above) * pitch, (ready - above) * pitch):
                    band[e] = band[e + shift]
            ready = max(ready, first)
            _multiply_pixels(
                (a, a_start + (ready - loaded) * row), tables, filters,
                (band, (ready - above) * pitch), max(0, last - ready), geometry, (0, geometry.r),
                lower_bound(pool),
            )  # fmt: skip
            ready = max(ready, last)
            for i in range(p, end):
                top = i * pool.stride_v - pool.pad_top
                exist = max(0, top) - top, min(h_out, top + high) - top
                source = band, (top - above) * pitch, pool.width
                pool_rows(pool, source, exist, y, n, i, (q, q_stop))


_forward_rows = select_by_pool(_forward_pooled, _forward_plain)


@kernel
def conv2d_forward(items, x, w, b, y, geometry, pool, scratch):
    """z[n, i, j, k] = b[k] + Σ x[n, i·stride + r·dilation − top, …, c] · w[r, s, c, k].

    With `NoPool`, y is z or max(z, 0). With `Pool`, y is the maximum of max(z, 0) in each window,
    `pool.argmax` receives its position, and z is not stored.

    Args:
        x: (N, H, W, C).
        w: flat weights (R, S, C, K), or what `prepare` made of them.
        b: (K,).
        y: (N, Ho, Wo, K) or (N, Hp, Wp, K), written.
    """
    x, y = maps_of(x), maps_of(y)
    c, k, h_out, w_out, bands = x.channels, y.channels, pool.height, pool.width, geometry.units
    patch, columns = geometry.r * geometry.s * c, padded_columns(w_out, geometry)
    inside, entries = is_inside(geometry, x.height, x.width, h_out, w_out), row_entries(w_out, k)
    if _filter_rows(geometry, geometry.s * c) < geometry.r:
        entries = w_out  # A pixel in two groups would receive all products but the first twice.
    mine, pixels = scratch[items.thread], geometry.rows * entries
    size = padded_rows(geometry.rows, geometry) * columns * c
    tables = mine[size : size + 2 * pixels + patch].view(np.int32)
    a_rows, c_rows, a_steps = tables[:pixels], tables[pixels : 2 * pixels], tables[2 * pixels :]
    width = x.width if inside else columns
    row = geometry.stride_v * width * c
    fill_groups(geometry.rows, w_out, entries, row, geometry.stride_h * c, a_rows)
    fill_groups(geometry.rows, w_out, entries, w_out * k, k, c_rows)
    runs = filter_runs(geometry.s, c, geometry.dilation_h)
    down, across = geometry.dilation_v * width * c, geometry.dilation_h * c
    fill_filter(geometry.r, runs, down, across, a_steps)
    if not inside:
        mine[:size] = 0
    padded, band = (mine[:size], columns, inside), mine[size + 2 * pixels + patch :]
    memory = padded, (a_rows, c_rows, a_steps, entries), band
    row_parts, column_blocks = bands // geometry.column_blocks, geometry.column_blocks
    for item in range(items.start, items.stop):
        n, band_index = item // bands, item % bands
        rows = part(y.height, band_index % row_parts, row_parts)
        q, q_stop = vector_part(k, band_index // row_parts, column_blocks, vector_width())
        _forward_rows(pool, x, y, (w, b, q, q_stop), n, rows, geometry, memory)


def _unpooled_operand(pool, dy, n, rows, dz, channels, sums, constants):
    (values, db), (spare, _, _) = sums, constants
    target = dz, 0, pool.width
    if db < 0:
        unpool_rows(pool, dy, n, rows, target, channels, (spare, 0, spare))
    else:
        unpool_rows(pool, dy, n, rows, target, channels, (values, db, spare))
    return dz, 0


def _plain_operand(pool, dy, n, rows, dz, channels, sums, constants):
    (q, q_stop), (values, db), (_, one, table), k = channels, sums, constants, dy.channels
    start = (n * dy.height + rows[0]) * dy.width * k
    if db >= 0 and pool.bias:
        # db is the product of ones with dy.
        multiply(
            (one, 0),
            (table, 0, 0),
            (table, 0, 0),
            (dy.values, start + q, k),
            (values, db + q, 0),
            (values, db + q),
            (table, 0, 0),
            (1, (rows[1] - rows[0]) * dy.width, q_stop - q),
            NO_LOWER_BOUND,
        )
    return dy.values, start


_gradient_operand = select_by_pool(_unpooled_operand, _plain_operand)
"""Return (flat array, element) of rows of dz, and add them to db = sums[db :] unless db is −1."""


@kernel
def conv2d_backward_weight(items, x, dy, partial, bounds, geometry, pool, scratch):
    """dw[r, s, c, k] = Σ x[n, i·stride + r·dilation − top, …, c] · dz[n, i, j, k]; db[k] = Σ dz.

    Args:
        x: (N, H, W, C).
        dy: (N, Ho, Wo, K) or, with pooling, (N, Hp, Wp, K).
        partial: (rows, R·S·C·K + K); row i becomes dw and then db of samples bounds[i] to
            bounds[i + 1].
        bounds: int64 (rows + 1,).
    """
    x, dy = maps_of(x), maps_of(dy)
    c, k, h_out, w_out, blocks = x.channels, dy.channels, pool.height, pool.width, geometry.units
    patch, columns = geometry.r * geometry.s * c, padded_columns(w_out, geometry)
    inside = is_inside(geometry, x.height, x.width, h_out, w_out)
    step = gradient_rows(w_out, c, k, _row_multiple(pool))
    mine, pixels = scratch[items.thread], step * w_out
    size = padded_rows(geometry.rows, geometry) * columns * c
    tables = mine[size : size + 2 * patch + pixels].view(np.int32)
    rest = mine[size + 2 * patch + pixels :]
    spare, one, dz = rest[:k], rest[k : k + 1], rest[k + 1 :]
    a_rows, c_rows, a_steps = tables[:patch], tables[patch : 2 * patch], tables[2 * patch :]
    padded, constants = (mine[:size], columns, inside), (spare, one, c_rows)
    width = x.width if inside else columns
    row = geometry.stride_v * width * c
    runs = filter_runs(geometry.s, c, geometry.dilation_h)
    down, across = geometry.dilation_v * width * c, geometry.dilation_h * c
    fill_filter(geometry.r, runs, down, across, a_rows)
    fill_ramp(k, c_rows)
    fill_pixels(step, w_out, row, geometry.stride_h * c, a_steps)
    one[0] = 1
    spare[:] = 0
    if not inside:
        mine[:size] = 0
    row_parts, filter_row = blocks // geometry.column_blocks, geometry.s * c
    for item in range(items.start, items.stop):
        index, block = item // blocks, item % blocks
        q, q_stop = vector_part(k, block // row_parts, geometry.column_blocks, vector_width())
        first, last = part(geometry.r, block % row_parts, row_parts)
        first, last = first * filter_row, last * filter_row
        sums, db = partial[index], patch * k if first == 0 else -1
        for e in range(first, last):
            sums[e * k + q : e * k + q_stop] = 0
        if db >= 0:
            sums[db + q : db + q_stop] = 0
        for n in range(bounds[index], bounds[index + 1]):
            for i_chunk in range(0, h_out, geometry.rows):
                stop_row = min(h_out, i_chunk + geometry.rows)
                a, a_start = load_patches(x, n, i_chunk, stop_row - i_chunk, geometry, padded)
                for i in range(i_chunk, stop_row, step):
                    end = min(stop_row, i + step)
                    b, b_start = _gradient_operand(
                        pool, dy, n, (i, end), dz, (q, q_stop), (sums, db), constants
                    )
                    multiply_adjacent(
                        (a, a_start + (i - i_chunk) * row),
                        (a_rows, first, 1),
                        (a_steps, 0, 1),
                        (b, b_start + q, k),
                        (sums, q, 1),
                        (sums, q),
                        (c_rows, first, 1),
                        (last - first, (end - i) * w_out, q_stop - q),
                        NO_LOWER_BOUND,
                        runs[1],
                    )


def _stride_of_windows(pool):
    return pool.stride_v


def _one(pool):
    return 1


_row_multiple = select_by_pool(_stride_of_windows, _one)


@kernel
def prepare_backward_input(items, w, geometry, shared):
    """Write the taps from start to stop of w (R, S, C, K), flipped and transposed, to `shared`."""
    pack_flipped(items.start, items.stop, w.reshape(-1), w.shape, geometry, shared)


@inlined
def _correlate_phases(pool, patches, k, w, dx, part, geometry, tables):
    """Compute rows of dx of a sample from padded dz (K channels); the first is a multiple of the
    stride.

    Args:
        patches: (flat array, first element) of dz.
        part: sample, rows and channels.
    """
    (dz, dz_start), (a_rows, c_rows, a_steps) = patches, tables
    (n, (first_row, stop_row), (q, q_stop)), adds = part, is_added(pool)
    c, dx_start = dx.channels, (n * dx.height + first_row) * dx.width * dx.channels
    top, left, r, s = geometry.pad_top, geometry.pad_left, geometry.r, geometry.s
    down, across, dilation_v = geometry.stride_v, geometry.stride_h, geometry.dilation_v
    d, d_start, d_row = (dx.values, dx_start, 1) if adds else (w, -q, -1)
    pixel, step = 0, 0
    for f in range(down):
        _, _, row_taps, _ = phase_taps(r, f, down, dilation_v)
        for g in range(across):
            _, _, column_taps, _ = phase_taps(s, g, across, geometry.dilation_h)
            width = phase_entries(taps(dx.width, (g - left) % across, across), c, adds)
            size = row_taps * column_taps * k
            height = taps(stop_row - first_row, (f - top) % down, down)
            i = 0
            while i < height:
                first, last, stop = 0, row_taps, height
                if down == 1:
                    h = first_row + i
                    above = h + top - (r - 1) * dilation_v
                    filter_rows = r, dilation_v
                    first, last, stop = rows_alike(h, stop_row, 1, above, filter_rows, pool.height)
                    stop -= first_row
                skipped = first * column_taps * k
                multiply_spaced(
                    (dz, dz_start),
                    (a_rows, pixel + i * width, 1),
                    (a_steps, step + skipped, 1),
                    (w, (step + skipped) * c + q, c),
                    (d, d_start + q, d_row),
                    (dx.values, dx_start + q),
                    (c_rows, pixel + i * width, 1),
                    ((stop - i) * width, (last - first) * column_taps * k, q_stop - q),
                    NO_LOWER_BOUND,
                    width,
                )
                i = stop
            pixel += taps(geometry.rows, (f - top) % down, down) * width
            step += size


def _not_added(pool):
    return False


def _is_added(pool):
    return pool.adds != 0


is_added = select_by_pool(_not_added, _is_added)
"""is_added(pool): whether the input gradient is added to dx; never with fused pooling."""


@kernel
def conv2d_backward_input(items, dy, w, dx, geometry, pool, scratch):
    """dx[n, h, v, c] = Σ dz[n, i, j, k] · w[r, s, c, k] over i·stride + r·dilation − top = h, ….

    Args:
        dy: (N, Ho, Wo, K) or, with pooling, (N, Hp, Wp, K).
        w: flat, from `prepare_backward_input`.
        dx: (N, H, W, C), written.
    """
    dy, dx = maps_of(dy), maps_of(dx)
    c, k, w_in, w_out, bands = dx.channels, dy.channels, dx.width, pool.width, geometry.units
    r, s, down, across = geometry.r, geometry.s, geometry.stride_v, geometry.stride_h
    above, before = gradient_rows_above(geometry)
    dz_rows, columns = padded_gradient(geometry.rows, w_in, w_out, geometry)
    size, pixels = dz_rows * columns * k, geometry.rows * (w_in + GROUP * across)
    mine = scratch[items.thread]
    dz, spare = mine[:size], mine[size : size + k]
    tables = mine[size + k : size + k + 2 * pixels + r * s * k].view(np.int32)
    tables = tables[:pixels], tables[pixels : 2 * pixels], tables[2 * pixels :]
    fill_phases(dx, k, columns, geometry, is_added(pool), tables)
    mine[: size + k] = 0
    row_parts, strips = bands // geometry.column_blocks, (dx.height + down - 1) // down
    for item in range(items.start, items.stop):
        n, band = item // bands, item % bands
        channels = vector_part(c, band // row_parts, geometry.column_blocks, vector_width())
        first, last = part(strips, band % row_parts, row_parts)
        last = min(dx.height, last * down)
        for h in range(first * down, last, geometry.rows):
            rows = h, min(last, h + geometry.rows)
            needed = h // down - above
            height, _ = padded_gradient(rows[1] - h, w_in, w_out, geometry)
            patches = load_padded_gradient(
                pool, dy, n, (needed, needed + height), dz, columns, before, spare
            )
            _correlate_phases(pool, patches, k, w, dx, (n, rows, channels), geometry, tables)


def supports(case: Case) -> bool:
    """Return whether the kernels compute a case: every one."""
    return True


def plan(shape: Shape, phase: Phase, work: Work) -> KernelPlan:
    """Return the algorithm of a phase, which exists for every shape."""
    return _PLANS[phase](shape, work)


def estimate(case: Case) -> Sequence[tuple[float, str]]:
    """Return the estimated time in ns."""
    return alone(case.direct_ns)


def _rows_in_cache(row: int, most: int) -> int:
    """Return how many rows of `row` elements fit half of the L2 cache, from 1 to `most`."""
    return max(1, min(most, cache_bytes(2) // 2 // (4 * row)))


def _parts_of_rows(rows: int, width: int) -> int:
    """Return the largest useful number of parts of rows: 8 pixels fill a register tile."""
    return max(1, min(rows, rows * width // 8))


def _divide(
    items: int, threads: int, rows: int, channels: int, rows_first: bool
) -> tuple[int, int]:
    """Return the number of parts of the rows, and of the channels, of each item.

    Args:
        items: samples, or rows of partial sums.
        threads: number of threads.
        rows: largest number of parts of the rows.
        channels: channels of the result, of which each part has whole vectors.
        rows_first: True divides channels only if rows are not enough,
            False divides rows only if channels are not enough.
    """
    most = [rows, -(-channels // compiled_registers().width)]
    first, second = most if rows_first else reversed(most)
    parts = units_per_item(items, threads, most=first)
    others = units_per_item(items * parts, threads, most=second) if parts == first else 1
    return (parts, others) if rows_first else (others, parts)


def _geometry(
    shape: Shape, rows: int, parts: int = 1, column_blocks: int = 1, windows: int = 0
) -> ConvGeometry:
    return ConvGeometry(
        *shape.pads, *shape.strides, *shape.window, *shape.dilations, rows, column_blocks,
        windows, parts * column_blocks,
    )  # fmt: skip


def _windows(shape: Shape, rows: int) -> int:
    """Return the rows of pooling windows of which outputs are stored together, of at most `rows`;
    0 without pooling.
    """
    if not shape.pool_height:
        return 0
    stride = shape.pool_stride or shape.pool_height
    most = (rows - shape.pool_height) // stride + 1
    return max(1, min(most, STORED // (stride * math.prod(shape.out[1:]))))


def _padded(shape: Shape, geometry: ConvGeometry) -> int:
    """Return the elements of the padded rows of x."""
    rows, columns = (
        padded_rows.py_func(geometry.rows, geometry),
        padded_columns.py_func(shape.out[1], geometry),
    )
    return int(rows * columns * shape.maps[2])


def _plan_forward(shape: Shape, work: Work) -> KernelPlan:
    (h_in, w_in, c), (h_out, w_out, k), (r, s) = shape.maps, shape.out, shape.window
    high = max(1, shape.pool_height)
    stride = shape.pool_stride or high
    # Each thread reads a part of the larger operand and all of the smaller one.
    rows_first = r * s * k <= h_in * w_in
    most = _parts_of_rows(-(-h_out // stride), w_out * stride)
    parts, blocks = _divide(work.batch_size, work.threads, most, k, rows_first)
    row = padded_columns.py_func(w_out, _geometry(shape, 1)) * c * shape.strides[0]
    rows = _rows_in_cache(row, -(-h_out // parts) + high)
    windows = _windows(shape, max(rows, high))
    geometry = _geometry(shape, max(rows, high), parts, blocks, windows)
    tables = 2 * geometry.rows * (w_out + GROUP) + r * s * c
    band = ((windows - 1) * stride + high) * w_out * k if windows else 0
    scratch = _padded(shape, geometry) + tables + band
    tile = _tile(rows=geometry.rows, columns=k)
    return KernelPlan(conv2d_forward, geometry, scratch, tile)


def _plan_backward_weight(shape: Shape, work: Work) -> KernelPlan:
    (_, _, c), (h_out, w_out, k), (r, s) = shape.maps, shape.out, shape.window
    stride = shape.pool_stride or max(1, shape.pool_height)
    step = int(gradient_rows.py_func(w_out, c, k, stride))
    parts, blocks = _divide(work.rows, work.threads, r, k, rows_first=False)
    row = padded_columns.py_func(w_out, _geometry(shape, 1)) * c * shape.strides[0]
    # Rows are computed in steps whose size the order of summation depends on.
    rows = max(1, _rows_in_cache(row, h_out) // step) * step
    geometry = _geometry(shape, rows, parts, blocks)
    tables = 2 * r * s * c + step * w_out
    dz = step * w_out * k if shape.pool_height else 0
    scratch = _padded(shape, geometry) + tables + k + 1 + dz
    _, run = filter_runs.py_func(s, c, shape.dilations[1])
    tile = _tile(rows=rows, columns=k, adjacent=run % GROUP > 0)
    return KernelPlan(conv2d_backward_weight, geometry, scratch, tile)


def _plan_backward_input(shape: Shape, work: Work) -> KernelPlan:
    (h_in, w_in, c), (_, w_out, k), (r, s) = shape.maps, shape.out, shape.window
    down = shape.strides[0]
    strips = -(-h_in // down)
    rows_first = r * s * c <= shape.out[0] * shape.out[1]
    most = _parts_of_rows(strips, w_in * down)
    parts, blocks = _divide(work.batch_size, work.threads, most, c, rows_first)
    _, columns = padded_gradient.py_func(1, w_in, w_out, _geometry(shape, 1))
    rows = _rows_in_cache(columns * k, -(-strips // parts)) * down
    geometry = _geometry(shape, rows, parts, blocks)
    height, _ = padded_gradient.py_func(rows, w_in, w_out, geometry)
    pixels = rows * (w_in + GROUP * shape.strides[1])
    scratch = height * columns * k + k + 2 * pixels + r * s * k
    tile = _tile(rows=rows, columns=c)
    return KernelPlan(
        conv2d_backward_input, geometry, scratch, tile, prepare_backward_input, r * s, r * s * c * k
    )  # fmt: skip


def _tile(*, rows: int, columns: int, adjacent: bool = False) -> str:
    """Describe the register tile of a product, and the rows in scratch.

    Args:
        rows: rows in scratch.
        columns: of the product.
        adjacent: whether the rows of the tile are adjacent in memory.
    """
    registers = compiled_registers()
    tiles = registers.adjacent if adjacent else registers.spaced
    vectors = 2 if columns >= 2 * registers.width else 1
    # Fewer columns than half a vector are computed in vectors of half the width.
    width = registers.width // (2 if 2 * columns <= registers.width else 1)
    return f"{tiles[vectors - 1][0]}×{vectors * width}, {counted(rows, 'row')}"


_PLANS = {
    Phase.FORWARD: _plan_forward,
    Phase.BACKWARD_WEIGHT: _plan_backward_weight,
    Phase.BACKWARD_INPUT: _plan_backward_input,
}
