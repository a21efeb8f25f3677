"""Winograd convolution F(4×4, 3×3) of RGB images, fused with ReLU and 2 × 2 max pooling.

Arguments are those of `direct_convolution` with pooling, with a `WinogradRgbGeometry`. One row of
tiles (`winograd_rgb_transforms`) is processed at a time, from padded maps to pooled ones, or back
to the sums of the weight gradient; all of its data stays in the L1 cache. Bands are ranges of these
rows, blocks of the weight gradient are ranges of filters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from dptrain.backends.numba.convolution.planning import (
    Case,
    KernelPlan,
    Shape,
    Work,
    units_per_item,
)
from dptrain.backends.numba.convolution.winograd_cost import WEIGHTS
from dptrain.backends.numba.convolution.winograd_rgb_transforms import (
    CHANNELS,
    INTERMEDIATES,
    LANES,
    add_weight_gradients,
    transform_product_columns,
    transform_rgb_inputs,
    transform_rows_and_pool,
    unpool_and_transform_rows,
)
from dptrain.backends.numba.convolution.winograd_transforms import (
    MATRICES,
    SIDE,
    transform_sums,
    transform_weights,
)
from dptrain.backends.numba.vector import compiled_registers, copy, vector_width
from dptrain.native.jit import inlined, kernel
from dptrain.plan.lowering import Phase
from dptrain.plan.selection import alone

TAPS = 9
"""Weights of a filter for each channel."""
TILE = f"{SIDE}×{SIDE} outputs"
"""Description of a tile."""
WINDOWS = SIDE // 2
"""Pooling windows of a tile in each dimension."""


MIN_FILTERS = 12
"""Smallest number of filters. With 8 filters it would save a third of the time (Intel Xeon,
AVX-512), but rounding makes outputs that are exactly 0 positive, so that ReLU passes their
gradients (docs/explanation/numerics.md)."""
SAVED = 4
"""See `planning.KernelPlan`."""


def supports(case: Case) -> bool:
    """Return whether this module supports a case, pooled by adjacent 2 × 2 windows."""
    shape = case.shape
    kind = shape.window, shape.strides, shape.dilations, shape.maps[2]
    fits = kind == ((3, 3), (1, 1), (1, 1), CHANNELS) and shape.halved
    return case.winograd and fits and shape.out[2] >= MIN_FILTERS


def estimate(case: Case) -> Sequence[tuple[float, str]]:
    """Return the estimated time in ns: two thirds of that of a direct convolution if all outputs of
    the tiles are needed, and the transform of the weights.

    Measured with 16 filters, 32 × 32 maps, batch 32: forward 157 instead of 276 µs, weight gradient
    180 instead of 306 µs (Intel Xeon, AVX-512).
    """
    needed, computed = 1, 1
    for n in case.shape.out[:2]:
        needed, computed = needed * (n - n % 2), computed * -(-(n - n % 2) // SIDE) * SIDE
    if not needed:
        return alone(math.inf)
    transform = 0.0 if case.work.by_shape else WEIGHTS * CHANNELS * case.shape.out[2]
    return alone(case.direct_ns * (2 * computed) / (3 * needed) + transform)


class WinogradRgbGeometry(NamedTuple):
    """Sizes of a Winograd convolution from x (N, H, W, 3) to y (N, Ho, Wo, K), before pooling.

    Attributes:
        height: rows of x.
        width: columns of x.
        c: channels of x.
        h_out: rows of y.
        w_out: columns of y.
        k: channels of y.
        k_vectors: k, rounded up to whole vectors.
        pad_top: rows of zeros above x.
        pad_left: columns of zeros to the left of x.
        padded_height: rows of padded x.
        padded_width: columns of padded x.
        tiles_down: rows of tiles.
        tiles_across: tiles in a row.
        pitch: row stride of Bᵀ x.
        u_offset: start of the sums of the transformed weight gradient in scratch.
        v_offset: start of V (transformed inputs) in scratch.
        mixed_offset: start of Bᵀ x in scratch.
        intermediate_offset: start of the intermediates in scratch.
        padded_offset: start of padded x in scratch.
        tile_offset: start of the weight gradient of whole vectors in scratch.
        scratch_size: float32 elements of scratch that a thread needs.
        units: see `planning.KernelPlan`.
    """

    height: int
    width: int
    c: int
    h_out: int
    w_out: int
    k: int
    k_vectors: int
    pad_top: int
    pad_left: int
    padded_height: int
    padded_width: int
    tiles_down: int
    tiles_across: int
    pitch: int
    u_offset: int
    v_offset: int
    mixed_offset: int
    intermediate_offset: int
    padded_offset: int
    tile_offset: int
    scratch_size: int
    units: int = 1


def make_geometry(
    maps: tuple[int, int, int], out: tuple[int, int, int], pads: tuple[int, int]
) -> WinogradRgbGeometry:
    """Return the geometry from `maps` (H, W, 3) to `out` (Ho, Wo, K), before pooling."""
    (_, _, c), (h_out, w_out, k) = maps, out
    width = compiled_registers().width
    group = width // LANES
    down, across = (-(-(n // 2) // WINDOWS) for n in (h_out, w_out))
    rows, columns = SIDE * down + 2, SIDE * (-(-across // group) * group) + 2
    # The last tile reads one element beyond its end, and the last vector may cross the row's end.
    pitch = -(-(columns * c + 1) // width) * width
    k_vectors = -(-k // width) * width
    v = MATRICES * c * k_vectors
    mixed = v + MATRICES * LANES * (-(-across // group) * group)
    intermediates = mixed + (SIDE + 2) * pitch
    padded = intermediates + across * INTERMEDIATES * width
    tile = padded + rows * columns * c + pitch
    size = tile + TAPS * c * k_vectors
    return WinogradRgbGeometry(
        *maps,
        *out,
        k_vectors,
        *pads,
        rows,
        columns,
        down,
        across,
        pitch,
        0,
        v,
        mixed,
        intermediates,
        padded,
        tile,
        -(-size // 16) * 16,
    )


def plan(shape: Shape, phase: Phase, work: Work) -> KernelPlan:
    """Return the algorithm of the forward pass or of the weight gradient."""
    geometry = make_geometry(shape.maps, shape.out, shape.pads)
    scratch = geometry.scratch_size
    if phase is Phase.BACKWARD_WEIGHT:
        vectors = geometry.k_vectors // compiled_registers().width
        blocks = units_per_item(work.rows, work.threads, vectors)
        geometry = geometry._replace(units=blocks)
        return KernelPlan(conv2d_backward_weight, geometry, scratch, TILE, saved=SAVED)
    bands = geometry.tiles_down if work.threads > 1 else 1
    grain = max(1, min(bands, work.batch_size * bands // work.threads))
    shared = geometry.v_offset + TAPS * geometry.c * geometry.k_vectors
    return KernelPlan(
        conv2d_forward, geometry._replace(units=bands), scratch, TILE, prepare_forward, 1, shared,
        grain, saved=SAVED,
    )  # fmt: skip


@kernel
def prepare_forward(items, w, geo, shared):
    """Transform the weights w (3, 3, 3, K), in one item."""
    if items.start < items.stop:
        weights, packed = geo.c * geo.k_vectors, MATRICES * geo.c * geo.k_vectors
        w_flat = w.reshape(-1)
        for i in range(TAPS * geo.c):
            row = packed + i * geo.k_vectors
            shared[row : row + geo.k_vectors] = 0
            copy(w_flat, i * geo.k, shared, row, geo.k)
        transform_weights(shared, packed, 3, weights, shared, 0, weights, weights)


@inlined
def _clear(geo, first, last, mine):
    """Clear the padded maps for rows of tiles `first` to `last`, numbered over all samples."""
    down, row = geo.tiles_down, geo.padded_width * geo.c
    low, high = 0, down
    if first // down == (last - 1) // down:
        low, high = first % down, (last - 1) % down + 1
    start, stop = low * SIDE * row, (high * SIDE + 2) * row + geo.pitch
    mine[geo.padded_offset + start : geo.padded_offset + stop] = 0


@inlined
def _load_rows(geo, x, n, first, last, mine):
    """Copy what rows of tiles `first` to `last` of a sample need into the cleared padded maps."""
    c, x_flat = geo.c, x.reshape(-1)
    count = min(geo.width, geo.padded_width - geo.pad_left) * c
    stop = min(geo.height, last * SIDE + 2 - geo.pad_top)
    for h in range(max(0, first * SIDE - geo.pad_top), stop):
        target = ((h + geo.pad_top) * geo.padded_width + geo.pad_left) * c
        source = (n * geo.height + h) * geo.width * c
        copy(x_flat, source, mine, geo.padded_offset + target, count)


@inlined
def _inputs(geo, i, scratch):
    """Transform row i of the padded sample's tiles."""
    row = geo.padded_width * geo.c
    transform_rgb_inputs(
        scratch,
        geo.padded_offset + i * SIDE * row,
        row,
        scratch,
        geo.mixed_offset,
        geo.pitch,
        scratch,
        geo.v_offset,
        geo.tiles_across,
    )


@kernel
def conv2d_forward(items, x, w, b, y, geo, pool, scratch):
    """Compute `direct_convolution.conv2d_forward` with pooling.

    The first of equal maxima is determined before the bias is added.
    """
    mine, down, bands = scratch[items.thread], geo.tiles_down, geo.units
    (_, h_pool, w_pool, k), y_flat = y.shape, y.reshape(-1)
    first, last = items.start * down // bands, items.stop * down // bands
    _clear(geo, first, last, mine)
    loaded = -1
    for row in range(first, last):
        n, i = row // down, row % down
        if n != loaded:
            _load_rows(geo, x, n, i, min(down, last - n * down), mine)
            loaded = n
        _inputs(geo, i, mine)
        row_start = (n * h_pool + i * WINDOWS) * w_pool * k
        for q in range(0, k, vector_width()):
            transform_product_columns(
                w, q, geo.k_vectors, mine, geo.v_offset, mine, geo.intermediate_offset,
                geo.tiles_across, k - q,
            )  # fmt: skip
            transform_rows_and_pool(
                mine, geo.intermediate_offset, y_flat, row_start + q, pool.argmax, row_start + q,
                b, q, k, w_pool * k, min(WINDOWS, h_pool - i * WINDOWS), w_pool, k - q,
            )  # fmt: skip


@inlined
def _sum_row(samples, filters, x, dy, sums, geo, pool, mine):
    """Write dw and then db of some samples and filters to `sums`."""
    (begin, end), (first_k, last_k), (_, h_pool, w_pool, k) = samples, filters, dy.shape
    dy_flat, weights = dy.reshape(-1), geo.c * k
    sums[9 * weights + first_k : 9 * weights + last_k] = 0
    mine[: geo.v_offset] = 0
    mine[geo.padded_offset :] = 0
    for n in range(begin, end):
        _load_rows(geo, x, n, 0, geo.tiles_down, mine)
        for i in range(geo.tiles_down):
            _inputs(geo, i, mine)
            row_start = (n * h_pool + i * WINDOWS) * w_pool * k
            for q in range(first_k, last_k, vector_width()):
                unpool_and_transform_rows(
                    mine, geo.intermediate_offset, dy_flat, row_start + q, pool.argmax,
                    row_start + q, sums, 9 * weights + q, k, w_pool * k,
                    min(WINDOWS, h_pool - i * WINDOWS), w_pool, k - q,
                )  # fmt: skip
                add_weight_gradients(
                    mine, geo.u_offset + q, geo.k_vectors, mine, geo.v_offset, mine,
                    geo.intermediate_offset, geo.tiles_across, k - q,
                )  # fmt: skip
    rows, width = geo.c * geo.k_vectors, vector_width()
    count = (last_k - first_k + width - 1) // width * width
    for c in range(geo.c):
        first = c * geo.k_vectors + first_k
        target = geo.tile_offset + first
        transform_sums(mine, geo.u_offset + first, rows, 3, mine, target, rows, count)
    for i in range(TAPS * geo.c):
        source = geo.tile_offset + i * geo.k_vectors + first_k
        copy(mine, source, sums, i * k + first_k, last_k - first_k)


@kernel
def conv2d_backward_weight(items, x, dy, partial, bounds, geo, pool, scratch):
    """Compute `direct_convolution.conv2d_backward_weight` with pooling."""
    item, width, blocks = items.start, vector_width(), geo.units
    while item < items.stop:
        row, first = item // blocks, item % blocks
        last = min(blocks, first + items.stop - item)
        vectors = geo.k_vectors // width
        first_k = vectors * first // blocks * width
        last_k = min(geo.k, vectors * last // blocks * width)
        _sum_row(
            (bounds[row], bounds[row + 1]), (first_k, last_k), x, dy, partial[row], geo, pool,
            scratch[items.thread],
        )  # fmt: skip
        item += last - first
