"""Winograd convolution F(4×4, 3×3) or F(2×2, 5×5) (`winograd_transforms`), forward and backward.

Arguments are those of `direct_convolution` and `direct_convolution_pool`, with a
`WinogradGeometry`. Small samples are processed together, so that the 36 matrix products have enough
rows.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dptrain.backends.numba.im2col import pool_row, unpool
from dptrain.backends.numba.jit import inlined, kernel
from dptrain.backends.numba.microkernels import NO_LOWER_BOUND, multiply
from dptrain.backends.numba.vector import compiled_registers, copy, transpose
from dptrain.backends.numba.winograd_transforms import (
    FEWEST,
    INTEGERS,
    MATRICES,
    MOST,
    SIDE,
    SIDES,
    add_products,
    finish_weight_gradient,
    multiply_matrices,
    transform_gradients,
    transform_inputs,
    transform_outputs,
    transform_weights,
)

LINE = 16
"""Float32 elements of a cache line."""


def supports(window: tuple[int, int], strides: tuple[int, int], c: int, k: int) -> bool:
    """Return whether the kernels support a convolution: channels must fill vectors."""
    width = compiled_registers().width
    fits = c % width == 0 and k % width == 0 and min(c, k) >= FEWEST and max(c, k) <= MOST
    return fits and window in ((3, 3), (5, 5)) and strides == (1, 1)


def is_faster_than_amx(maps: tuple[int, int], fewest: int, forward: bool) -> bool:
    """Return whether stages with 3 × 3 filters are faster than on AMX.

    Measured: forward with fewer than 32 channels (16 → 32, 16 × 16: 291 instead of 384 µs; 32 → 64,
    46 × 46: 2255 instead of 1843 µs), and backward, if 4 × 4 tiles cover at most a third more than
    the outputs (10 × 10: 310 instead of 222 µs).

    Args:
        maps: height and width of the stage's output.
        fewest: the smaller number of input and output channels.
    """
    covered = [-(-n // SIDE) * SIDE for n in maps]
    close = 3 * covered[0] * covered[1] <= 4 * maps[0] * maps[1]
    return close and (fewest < 32 or not forward)


class WinogradGeometry(NamedTuple):
    """Sizes of a Winograd convolution from x (N, H, W, C) to y (N, Ho, Wo, K).

    Attributes:
        height: rows of x.
        width: columns of x.
        c: channels of x.
        h_out: rows of y.
        w_out: columns of y.
        k: channels of y.
        pad_top: rows of zeros above x.
        pad_left: columns of zeros to the left of x.
        padded_width: columns of padded x.
        tiles_across: tiles in a row.
        num_tiles: tiles of a sample.
        block_samples: samples that are transformed together.
        block_tiles: tiles that are transformed together.
        v_stride: distance of the matrices of V.
        m_stride: distance of the matrices of M.
        u_offset: start of U (transformed weights, or sums of their gradient) in scratch.
        v_offset: start of V (transformed inputs) in scratch.
        m_offset: start of M (products) in scratch.
        padded_offset: start of padded x in scratch.
        y_offset: start of one sample's y in scratch.
        work_offset: start of temporary memory in scratch.
        taps: rows and columns of a filter.
        tile_side: rows and columns of an output tile.
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
    padded_width: int
    tiles_across: int
    num_tiles: int
    block_samples: int
    block_tiles: int
    v_stride: int
    m_stride: int
    u_offset: int
    v_offset: int
    m_offset: int
    padded_offset: int
    y_offset: int
    work_offset: int
    taps: int
    tile_side: int
    scratch_size: int


def make_geometry(
    maps: tuple[int, int, int], out: tuple[int, int, int], pads: tuple[int, int], taps: int = 3
) -> WinogradGeometry:
    """Return the geometry of a convolution from `maps` (H, W, C) to `out` (Ho, Wo, K).

    For the input gradient, `maps` are those of dy and `out` those of dx.

    Args:
        pads: rows of zeros above and columns of zeros to the left of the maps.
        taps: rows and columns of the filters.
    """
    (_, _, c), (h_out, w_out, k) = maps, out
    side = SIDES[taps]
    down, across = (-(-n // side) for n in (h_out, w_out))
    # Data between two transforms stays in the L2 cache.
    block = 96 if c + k <= 48 else 48
    samples = max(1, block // (down * across))
    together = min(block, samples * down * across)
    # One additional cache line; otherwise all matrices would map to the same sets of the cache.
    v_matrix, m_matrix = together * c + LINE, together * k + LINE
    v = MATRICES * c * k
    m = v + MATRICES * v_matrix
    padded = m + MATRICES * m_matrix
    columns = across * side + taps - 1
    y = padded + (down * side + taps - 1) * columns * c
    rest = y + h_out * w_out * k
    # Temporary memory: flipped weights, or one sample's dz and its sums.
    more = -(-max(taps**2 * c * k, maps[0] * maps[1] * c + c, h_out * w_out * k + k) // LINE) * LINE
    sizes = (
        *maps,
        *out,
        *pads,
        columns,
        across,
        down * across,
        samples,
        together,
        v_matrix,
        m_matrix,
        0,
        v,
        m,
        padded,
        y,
        rest,
        taps,
        side,
        rest + more + LINE,
    )
    return WinogradGeometry._make(map(INTEGERS[taps], sizes))


@inlined
def _pad(geo, x, start, scratch):  # type: ignore[no-untyped-def]
    """Copy one sample into zero-padded scratch."""
    height, width, c, above, before, columns = (
        geo.height,
        geo.width,
        geo.c,
        geo.pad_top,
        geo.pad_left,
        geo.padded_width,
    )
    for i in range(height):
        row = geo.padded_offset + ((i + above) * columns + before) * c
        copy(x, start + i * width * c, scratch, row, width * c)


@inlined
def _inputs(geo, scratch, first, num_tiles, tile):  # type: ignore[no-untyped-def]
    """Transform input tiles of the padded sample into V, from tile `tile` on."""
    c = geo.c
    transform_inputs(
        scratch,
        geo.padded_offset,
        geo.padded_width * c,
        c,
        geo.tile_side,
        geo.tiles_across,
        first,
        num_tiles,
        scratch,
        geo.v_offset + tile * c,
        geo.v_stride,
    )


@inlined
def _products(geo, scratch, count):  # type: ignore[no-untyped-def]
    multiply_matrices(
        scratch,
        geo.v_offset,
        geo.v_stride,
        geo.c,
        scratch,
        geo.u_offset,
        geo.k,
        scratch,
        geo.m_offset,
        geo.m_stride,
        count,
    )


@inlined
def _outputs(geo, scratch, first, num_tiles, tile, y, start, bias, biased, lower_bound):  # type: ignore[no-untyped-def]
    """Transform products from tile `tile` on into one sample's output."""
    k = geo.k
    transform_outputs(
        scratch,
        geo.m_offset + tile * k,
        geo.m_stride,
        k,
        geo.taps,
        geo.tile_side,
        geo.tiles_across,
        first,
        num_tiles,
        y,
        start,
        geo.h_out,
        geo.w_out,
        bias,
        biased,
        lower_bound,
    )


@inlined
def _clear(scratch, start, stop):  # type: ignore[no-untyped-def]
    for i in range(start, stop):
        scratch[i] = 0


@kernel
def conv2d_forward(start, stop, thread, x, w, b, y, geo, relu, scratch):  # type: ignore[no-untyped-def]
    """Compute `direct_convolution.conv2d_forward`."""
    mine, lower_bound = scratch[thread], np.float32(0) if relu else NO_LOWER_BOUND
    x_size, y_size = geo.height * geo.width * geo.c, geo.h_out * geo.w_out * geo.k
    tiles, samples, together = geo.num_tiles, geo.block_samples, geo.block_tiles
    transform_weights(w, 0, geo.taps, geo.c, geo.k, mine, 0)
    _clear(mine, geo.padded_offset, geo.y_offset)
    for n in range(start, stop, samples):
        count = min(samples, stop - n)
        for first in range(0, tiles, together):
            num_tiles = min(together, tiles - first)
            for g in range(count):
                if first == 0:
                    _pad(geo, x, (n + g) * x_size, mine)
                _inputs(geo, mine, first, num_tiles, g * num_tiles)
            _products(geo, mine, count * num_tiles)
            for g in range(count):
                _outputs(
                    geo,
                    mine,
                    first,
                    num_tiles,
                    g * num_tiles,
                    y,
                    (n + g) * y_size,
                    b,
                    True,
                    lower_bound,
                )


@kernel
def conv2d_relu_pool_forward(start, stop, thread, x, w, b, y, argmax, geo, pool, scratch):  # type: ignore[no-untyped-def]
    """Compute `direct_convolution_pool.conv2d_relu_pool_forward`."""
    mine, x_size = scratch[thread], geo.height * geo.width * geo.c
    h_out, w_out, k, band = geo.h_out, geo.w_out, geo.k, geo.y_offset
    tiles, samples, together = geo.num_tiles, geo.block_samples, geo.block_tiles
    h_pool, w_pool = y.shape[1], y.shape[2]
    transform_weights(w, 0, geo.taps, geo.c, k, mine, 0)
    _clear(mine, geo.padded_offset, geo.y_offset)
    for n in range(start, stop, samples):
        count = min(samples, stop - n)
        for first in range(0, tiles, together):
            num_tiles = min(together, tiles - first)
            for g in range(count):
                if first == 0:
                    _pad(geo, x, (n + g) * x_size, mine)
                _inputs(geo, mine, first, num_tiles, g * num_tiles)
            _products(geo, mine, count * num_tiles)
            for g in range(count):
                _outputs(
                    geo, mine, first, num_tiles, g * num_tiles, mine, band, b, True, np.float32(0)
                )
                if first + num_tiles < tiles:
                    continue
                for i in range(h_pool):
                    above = i * pool.stride_v - pool.pad_top
                    top, bottom = max(0, above), min(h_out, above + pool.window_v)
                    pool_row(
                        mine,
                        band + above * w_out * k,
                        top - above,
                        bottom - above,
                        w_out,
                        w_out,
                        w_pool,
                        k,
                        pool,
                        y,
                        argmax,
                        ((n + g) * h_pool + i) * w_pool * k,
                    )


@inlined
def _flip(geo, w, scratch):  # type: ignore[no-untyped-def]
    """Flip and transform the weights for the input gradient."""
    k, c, flipped, taps = geo.c, geo.k, geo.work_offset, geo.taps * geo.taps
    for tap in range(taps):
        transpose(w, (taps - 1 - tap) * c * k, k, scratch, flipped + tap * c * k, c, c, k)
    transform_weights(scratch, flipped, geo.taps, k, c, scratch, 0)


@kernel
def conv2d_backward_input(start, stop, thread, dy, w, dx, geo, scratch):  # type: ignore[no-untyped-def]
    """Compute `direct_convolution.conv2d_backward_input`; the geometry maps dy to dx."""
    mine = scratch[thread]
    dy_size, dx_size = geo.height * geo.width * geo.c, geo.h_out * geo.w_out * geo.k
    tiles, samples, together = geo.num_tiles, geo.block_samples, geo.block_tiles
    _flip(geo, w.reshape(-1), mine)
    _clear(mine, geo.padded_offset, geo.y_offset)
    for n in range(start, stop, samples):
        count = min(samples, stop - n)
        for first in range(0, tiles, together):
            num_tiles = min(together, tiles - first)
            for g in range(count):
                if first == 0:
                    _pad(geo, dy, (n + g) * dy_size, mine)
                _inputs(geo, mine, first, num_tiles, g * num_tiles)
            _products(geo, mine, count * num_tiles)
            for g in range(count):
                _outputs(
                    geo,
                    mine,
                    first,
                    num_tiles,
                    g * num_tiles,
                    dx,
                    (n + g) * dx_size,
                    mine,
                    False,
                    NO_LOWER_BOUND,
                )


@kernel
def conv2d_relu_pool_backward_input(  # type: ignore[no-untyped-def]
    start, stop, thread, dy, argmax, w, dx, geo, pool, scratch
):
    """Compute `direct_convolution_pool.conv2d_relu_pool_backward_input`."""
    mine, dx_size = scratch[thread], geo.h_out * geo.w_out * geo.k
    tiles, samples, together, k = geo.num_tiles, geo.block_samples, geo.block_tiles, geo.c
    h_pool, w_pool = dy.shape[1], dy.shape[2]
    padded, sums = mine[geo.padded_offset : geo.y_offset], mine[geo.work_offset :]
    _flip(geo, w.reshape(-1), mine)
    _clear(mine, geo.padded_offset, geo.y_offset)
    for n in range(start, stop, samples):
        count = min(samples, stop - n)
        for first in range(0, tiles, together):
            num_tiles = min(together, tiles - first)
            for g in range(count):
                if first == 0:
                    unpool(
                        dy,
                        argmax,
                        (n + g) * h_pool * w_pool * k,
                        h_pool,
                        w_pool,
                        k,
                        pool,
                        padded,
                        geo.padded_width,
                        geo.pad_top,
                        geo.pad_left,
                        sums,
                    )
                _inputs(geo, mine, first, num_tiles, g * num_tiles)
            _products(geo, mine, count * num_tiles)
            for g in range(count):
                _outputs(
                    geo,
                    mine,
                    first,
                    num_tiles,
                    g * num_tiles,
                    dx,
                    (n + g) * dx_size,
                    mine,
                    False,
                    NO_LOWER_BOUND,
                )


@inlined
def _gradients(geo, dz, start, scratch, first, num_tiles, tile):  # type: ignore[no-untyped-def]
    """Transform tiles of one sample's dz, from tile `tile` on."""
    k = geo.k
    transform_gradients(
        dz,
        start,
        geo.h_out,
        geo.w_out,
        k,
        geo.taps,
        geo.tile_side,
        geo.tiles_across,
        first,
        num_tiles,
        scratch,
        geo.m_offset + tile * k,
        geo.m_stride,
    )


@inlined
def _add(geo, scratch, count):  # type: ignore[no-untyped-def]
    """Add products to the sums, which use the memory of the transformed weights."""
    add_products(
        scratch,
        geo.v_offset,
        geo.v_stride,
        geo.c,
        scratch,
        geo.m_offset,
        geo.m_stride,
        geo.k,
        scratch,
        geo.u_offset,
        count,
    )


@kernel
def conv2d_backward_weight(start, stop, thread, x, dy, partial, geo, scratch):  # type: ignore[no-untyped-def]
    """Compute `direct_convolution.conv2d_backward_weight`."""
    c, k, pixels = geo.c, geo.k, geo.h_out * geo.w_out
    mine, sums, one = scratch[thread], partial[thread], len(scratch[thread]) - LINE
    tiles, samples, together = geo.num_tiles, geo.block_samples, geo.block_tiles
    patch = geo.taps * geo.taps * c
    ramp = mine.view(np.int32)
    sums[:] = 0
    _clear(mine, 0, geo.v_offset)
    _clear(mine, geo.padded_offset, geo.y_offset)
    mine[one], mine[one + 1] = 1, 0
    for n in range(start, stop, samples):
        count = min(samples, stop - n)
        for first in range(0, tiles, together):
            num_tiles = min(together, tiles - first)
            for g in range(count):
                if first == 0:
                    _pad(geo, x, (n + g) * geo.height * geo.width * c, mine)
                _inputs(geo, mine, first, num_tiles, g * num_tiles)
                _gradients(geo, dy, (n + g) * pixels * k, mine, first, num_tiles, g * num_tiles)
            _add(geo, mine, count * num_tiles)
        # db is the product of ones with dy.
        multiply(
            (mine, one),
            (ramp, one + 1, 0),
            (ramp, one + 1, 0),
            (dy, n * pixels * k, k),
            (sums, patch * k, 0),
            (sums, patch * k),
            (ramp, one + 1, 0),
            (1, count * pixels, k),
            NO_LOWER_BOUND,
        )
    finish_weight_gradient(mine, 0, geo.taps, c, k, sums)


@kernel
def conv2d_relu_pool_backward_weight(  # type: ignore[no-untyped-def]
    start, stop, thread, x, dy, argmax, partial, geo, pool, scratch
):
    """Compute `direct_convolution_pool.conv2d_relu_pool_backward_weight`."""
    c, k, w_out = geo.c, geo.k, geo.w_out
    mine, sums = scratch[thread], partial[thread]
    tiles, samples, together = geo.num_tiles, geo.block_samples, geo.block_tiles
    h_pool, w_pool = dy.shape[1], dy.shape[2]
    dz, db = mine[geo.work_offset :], sums[geo.taps * geo.taps * c * k :]
    sums[:] = 0
    _clear(mine, 0, geo.v_offset)
    _clear(mine, geo.padded_offset, len(mine))
    for n in range(start, stop, samples):
        count = min(samples, stop - n)
        for first in range(0, tiles, together):
            num_tiles = min(together, tiles - first)
            for g in range(count):
                if first == 0:
                    _pad(geo, x, (n + g) * geo.height * geo.width * c, mine)
                    unpool(
                        dy,
                        argmax,
                        (n + g) * h_pool * w_pool * k,
                        h_pool,
                        w_pool,
                        k,
                        pool,
                        dz,
                        w_out,
                        0,
                        0,
                        db,
                    )
                _inputs(geo, mine, first, num_tiles, g * num_tiles)
                _gradients(geo, dz, 0, mine, first, num_tiles, g * num_tiles)
            _add(geo, mine, count * num_tiles)
    finish_weight_gradient(mine, 0, geo.taps, c, k, sums)
