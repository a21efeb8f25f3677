"""Winograd convolution F(4×4, 3×3) of RGB images, fused with ReLU and 2 × 2 max pooling.

Arguments are those of `direct_convolution_pool`, with a `WinogradRgbGeometry`. One row of tiles
(`winograd_rgb_transforms`) is processed at a time, from padded maps to pooled ones, or back to the
sums of the weight gradient; all of its data stays in the L1 cache.
"""

from __future__ import annotations

from typing import NamedTuple

from dptrain.backends.numba.im2col import copy_padded
from dptrain.backends.numba.jit import inlined, kernel
from dptrain.backends.numba.vector import compiled_registers, vector_width
from dptrain.backends.numba.winograd_rgb_transforms import (
    CHANNELS,
    INTERMEDIATES,
    LANES,
    add_weight_gradients,
    transform_product_columns,
    transform_rgb_inputs,
    transform_rows_and_pool,
    unpool_and_transform_rows,
)
from dptrain.backends.numba.winograd_transforms import (
    MATRICES,
    MOST,
    SIDE,
    finish_weight_gradient,
    transform_weights,
)

WINDOWS = SIDE // 2
"""Pooling windows of a tile in each dimension."""


def supports(window: tuple[int, int], strides: tuple[int, int], c: int, k: int) -> bool:
    """Return whether this module supports the convolution, pooled by adjacent 2 × 2 windows."""
    return (
        window == (3, 3)
        and strides == (1, 1)
        and c == CHANNELS
        and k % compiled_registers().width == 0
        and k <= MOST
    )


class WinogradRgbGeometry(NamedTuple):
    """Sizes of a Winograd convolution from x (N, H, W, 3) to y (N, Ho, Wo, K), before pooling.

    Attributes:
        height: rows of x.
        width: columns of x.
        c: channels of x.
        h_out: rows of y.
        w_out: columns of y.
        k: channels of y.
        pad_top: rows of zeros above x.
        pad_left: columns of zeros to the left of x.
        padded_height: rows of padded x.
        padded_width: columns of padded x.
        tiles_down: rows of tiles.
        tiles_across: tiles in a row.
        pitch: row stride of Bᵀ x.
        u_offset: start of U (transformed weights, or sums of their gradient) in scratch.
        v_offset: start of V (transformed inputs) in scratch.
        mixed_offset: start of Bᵀ x in scratch.
        intermediate_offset: start of the intermediates in scratch.
        padded_offset: start of padded x in scratch.
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
    scratch_size: int


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
    v = MATRICES * c * k
    mixed = v + MATRICES * LANES * (-(-across // group) * group)
    intermediates = mixed + (SIDE + 2) * pitch
    padded = intermediates + across * INTERMEDIATES * width
    size = padded + rows * columns * c + pitch
    return WinogradRgbGeometry(
        *maps,
        *out,
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
        -(-size // 16) * 16,
    )


@inlined
def _inputs(geo, i, scratch):  # type: ignore[no-untyped-def]
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
def conv2d_relu_pool_forward(start, stop, thread, x, w, b, y, argmax, geo, pool, scratch):  # type: ignore[no-untyped-def]
    """Compute `direct_convolution_pool.conv2d_relu_pool_forward`.

    The first of equal maxima is determined before the bias is added.
    """
    mine, x_flat, size = scratch[thread], x.reshape(-1), geo.height * geo.width * geo.c
    _, h_pool, w_pool, k = y.shape
    y_flat, argmax_flat, maps = y.reshape(-1), argmax.reshape(-1), (geo.height, geo.width, geo.c)
    transform_weights(w.reshape(-1), 0, 3, geo.c, k, mine, geo.u_offset)
    padded = mine[geo.padded_offset :]
    padded[:] = 0
    for n in range(start, stop):
        copy_padded(
            x_flat,
            n * size,
            maps,
            padded,
            geo.padded_height,
            geo.padded_width,
            geo.pad_top,
            geo.pad_left,
        )
        for i in range(geo.tiles_down):
            _inputs(geo, i, mine)
            row_start = (n * h_pool + i * WINDOWS) * w_pool * k
            for q in range(0, k, vector_width()):
                transform_product_columns(
                    mine,
                    geo.u_offset + q,
                    k,
                    mine,
                    geo.v_offset,
                    mine,
                    geo.intermediate_offset,
                    geo.tiles_across,
                )
                transform_rows_and_pool(
                    mine,
                    geo.intermediate_offset,
                    y_flat,
                    row_start + q,
                    argmax_flat,
                    row_start + q,
                    b,
                    q,
                    k,
                    w_pool * k,
                    min(WINDOWS, h_pool - i * WINDOWS),
                    w_pool,
                )


@kernel
def conv2d_relu_pool_backward_weight(  # type: ignore[no-untyped-def]
    start, stop, thread, x, dy, argmax, partial, geo, pool, scratch
):
    """Compute `direct_convolution_pool.conv2d_relu_pool_backward_weight`."""
    mine, x_flat, size = scratch[thread], x.reshape(-1), geo.height * geo.width * geo.c
    _, h_pool, w_pool, k = dy.shape
    dy_flat, argmax_flat, maps = dy.reshape(-1), argmax.reshape(-1), (geo.height, geo.width, geo.c)
    sums, padded = partial[thread], mine[geo.padded_offset :]
    sums[:] = 0
    mine[: geo.v_offset] = 0
    padded[:] = 0
    for n in range(start, stop):
        copy_padded(
            x_flat,
            n * size,
            maps,
            padded,
            geo.padded_height,
            geo.padded_width,
            geo.pad_top,
            geo.pad_left,
        )
        for i in range(geo.tiles_down):
            _inputs(geo, i, mine)
            row_start = (n * h_pool + i * WINDOWS) * w_pool * k
            for q in range(0, k, vector_width()):
                unpool_and_transform_rows(
                    mine,
                    geo.intermediate_offset,
                    dy_flat,
                    row_start + q,
                    argmax_flat,
                    row_start + q,
                    sums,
                    9 * geo.c * k + q,
                    k,
                    w_pool * k,
                    min(WINDOWS, h_pool - i * WINDOWS),
                    w_pool,
                )
                add_weight_gradients(
                    mine,
                    geo.u_offset + q,
                    k,
                    mine,
                    geo.v_offset,
                    mine,
                    geo.intermediate_offset,
                    geo.tiles_across,
                )
    finish_weight_gradient(mine, geo.u_offset, 3, geo.c, k, sums)
