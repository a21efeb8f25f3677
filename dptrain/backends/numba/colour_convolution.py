"""Convolution of colour images by F(4×4, 3×3), fused with ReLU and 2 × 2 max pooling.

Arguments are those of `pooled_convolution`, with a `walk` instead of the geometry. One row of
tiles (`colour_tiles`) is computed at a time, from padded maps to pooled ones or back to the sums
of the weights' gradient, and all of it stays in L1.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dptrain.backends.numba.colour_tiles import (
    CHANNELS,
    HALF,
    LANES,
    add_halves,
    halve_products,
    pool_halves,
    spread_halves,
    transform_colours,
)
from dptrain.backends.numba.jit import inlined, kernel
from dptrain.backends.numba.patches import copy_padded
from dptrain.backends.numba.vector import compiled_registers, vector_width
from dptrain.backends.numba.winograd import (
    MATRICES,
    MOST,
    SIDE,
    finish_weight_gradient,
    transform_weights,
)

WINDOWS = SIDE // 2
"""Windows of a tile, down and across."""


def suits(window: tuple[int, int], strides: tuple[int, int], c: int, k: int) -> bool:
    """Whether it can be computed so, if it is pooled by whole windows of 2 × 2 side by side."""
    return (
        window == (3, 3)
        and strides == (1, 1)
        and c == CHANNELS
        and k % compiled_registers().width == 0
        and k <= MOST
    )


def walk(
    maps: tuple[int, int, int], out: tuple[int, int, int], pads: tuple[int, int]
) -> NDArray[np.int64]:
    """How to walk over a convolution from `maps` (H, W, 3) to `out` (Ho, Wo, K), before pooling.

    Returns:
        int64: H, W, 3, Ho, Wo, K, rows above, columns before; rows and columns of the padded maps;
        rows of tiles, tiles of a row; length of a row that holds all that tiles read; where
        weights or sums, inputs, mixed rows, halves and padded maps begin in scratch; how long
        scratch is.
    """
    (_, _, c), (h_out, w_out, k) = maps, out
    width = compiled_registers().width
    group = width // LANES
    down, across = (-(-(n // 2) // WINDOWS) for n in (h_out, w_out))
    rows, columns = SIDE * down + 2, SIDE * (-(-across // group) * group) + 2
    # The last tile reads one number more than it has; a vector's rest may cross the row's end.
    pitch = -(-(columns * c + 1) // width) * width
    v = MATRICES * c * k
    mixed = v + MATRICES * LANES * (-(-across // group) * group)
    halves = mixed + (SIDE + 2) * pitch
    padded = halves + across * HALF * width
    size = padded + rows * columns * c + pitch
    return np.array(
        [*maps, *out, *pads, rows, columns, down, across, pitch, 0, v, mixed, halves, padded,
         -(-size // 16) * 16],
        np.int64,
    )  # fmt: skip


@inlined
def _inputs(walk, i, scratch):  # type: ignore[no-untyped-def]
    """Transform row i of the padded sample's tiles."""
    row = walk[9] * walk[2]
    transform_colours(
        scratch, walk[17] + i * SIDE * row, row, scratch, walk[15], walk[12],
        scratch, walk[14], walk[11],
    )  # fmt: skip


@kernel
def conv2d_relu_pool_forward(start, stop, thread, x, w, b, y, argmax, walk, pool, scratch):  # type: ignore[no-untyped-def]
    """As `pooled_convolution.conv2d_relu_pool_forward`.

    Which maximum is the first among equals is decided before the bias is added.
    """
    mine, x_flat, size = scratch[thread], x.reshape(-1), walk[0] * walk[1] * walk[2]
    _, h_pool, w_pool, k = y.shape
    y_flat, argmax_flat, maps = y.reshape(-1), argmax.reshape(-1), (walk[0], walk[1], walk[2])
    transform_weights(w.reshape(-1), 0, 3, walk[2], k, mine, walk[13])
    padded = mine[walk[17] :]
    padded[:] = 0
    for n in range(start, stop):
        copy_padded(x_flat, n * size, maps, padded, walk[8], walk[9], walk[6], walk[7])
        for i in range(walk[10]):
            _inputs(walk, i, mine)
            place = (n * h_pool + i * WINDOWS) * w_pool * k
            for q in range(0, k, vector_width()):
                halve_products(mine, walk[13] + q, k, mine, walk[14], mine, walk[16], walk[11])
                pool_halves(
                    mine, walk[16], y_flat, place + q, argmax_flat, place + q, b, q,
                    k, w_pool * k, min(WINDOWS, h_pool - i * WINDOWS), w_pool,
                )  # fmt: skip


@kernel
def conv2d_relu_pool_backward_weight(  # type: ignore[no-untyped-def]
    start, stop, thread, x, dy, argmax, partial, walk, pool, scratch
):
    """As `pooled_convolution.conv2d_relu_pool_backward_weight`."""
    mine, x_flat, size = scratch[thread], x.reshape(-1), walk[0] * walk[1] * walk[2]
    _, h_pool, w_pool, k = dy.shape
    dy_flat, argmax_flat, maps = dy.reshape(-1), argmax.reshape(-1), (walk[0], walk[1], walk[2])
    sums, padded = partial[thread], mine[walk[17] :]
    sums[:] = 0
    mine[: walk[14]] = 0
    padded[:] = 0
    for n in range(start, stop):
        copy_padded(x_flat, n * size, maps, padded, walk[8], walk[9], walk[6], walk[7])
        for i in range(walk[10]):
            _inputs(walk, i, mine)
            place = (n * h_pool + i * WINDOWS) * w_pool * k
            for q in range(0, k, vector_width()):
                spread_halves(
                    mine, walk[16], dy_flat, place + q, argmax_flat, place + q,
                    sums, 9 * walk[2] * k + q,
                    k, w_pool * k, min(WINDOWS, h_pool - i * WINDOWS), w_pool,
                )  # fmt: skip
                add_halves(mine, walk[13] + q, k, mine, walk[14], mine, walk[16], walk[11])
    finish_weight_gradient(mine, walk[13], 3, walk[2], k, sums)
