"""Convolution by F(4×4, 3×3) or F(2×2, 5×5) (`winograd`), forward and backward.

Arguments are those of `convolution` and `pooled_convolution`, with a `walk` instead of the
geometry. Small samples go together, so that the 36 matrix products have enough rows.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dptrain.backends.numba.jit import inlined, kernel
from dptrain.backends.numba.microkernels import multiply
from dptrain.backends.numba.patches import NOTHING, pool_row, unpool
from dptrain.backends.numba.vector import compiled_registers, copy, transpose
from dptrain.backends.numba.winograd import (
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


def suits(window: tuple[int, int], strides: tuple[int, int], c: int, k: int) -> bool:
    """Whether a convolution can be computed so: channels must fill vectors."""
    width = compiled_registers().width
    fits = c % width == 0 and k % width == 0 and min(c, k) >= FEWEST and max(c, k) <= MOST
    return fits and window in ((3, 3), (5, 5)) and strides == (1, 1)


def wins(maps: tuple[int, int], fewest: int, forward: bool) -> bool:
    """Whether stages with filters of 3 by 3 take less time than on the tile unit.

    Measured: forward below 32 channels (16 → 32, 16 × 16 maps: 291 against 384 µs; 32 → 64,
    46 × 46: 2255 against 1843), backward always, if tiles of 4 × 4 cover the outputs without a
    third more (10 × 10: 310 against 222).

    Args:
        maps: height and width of the output, or backward by the input of that.
        fewest: channels of input or output, whichever has fewer.
    """
    covered = [-(-n // SIDE) * SIDE for n in maps]
    close = 3 * covered[0] * covered[1] <= 4 * maps[0] * maps[1]
    return close and (fewest < 32 or not forward)


def walk(
    maps: tuple[int, int, int], out: tuple[int, int, int], pads: tuple[int, int], taps: int = 3
) -> NDArray[np.integer]:
    """How to walk over a convolution from `maps` (H, W, C) to `out` (Ho, Wo, K).

    Backward by the input it goes from dy to dx. Filters have `taps` rows and columns.

    Args:
        pads: rows above and columns before the maps.

    Returns:
        int64: H, W, C, Ho, Wo, K, rows above, columns before; columns of the padded maps; tiles of
        a row and of a sample; samples and tiles that go together; distances of the matrices of
        inputs and outputs; where weights, inputs, outputs, padded maps, a sample's output and
        what is behind it begin in scratch; taps, rows and columns of a tile; how long scratch is.
    """
    (_, _, c), (h_out, w_out, k) = maps, out
    side = SIDES[taps]
    down, across = (-(-n // side) for n in (h_out, w_out))
    # What goes between two transforms stays in L2.
    block = 96 if c + k <= 48 else 48
    samples = max(1, block // (down * across))
    together = min(block, samples * down * across)
    # A line more than they need, or all matrices lie in the same sets of the cache.
    v_matrix, m_matrix = together * c + LINE, together * k + LINE
    v = MATRICES * c * k
    m = v + MATRICES * v_matrix
    padded = m + MATRICES * m_matrix
    columns = across * side + taps - 1
    y = padded + (down * side + taps - 1) * columns * c
    rest = y + h_out * w_out * k
    # The flipped weights, or a sample's dz and sums over it.
    more = -(-max(taps**2 * c * k, maps[0] * maps[1] * c + c, h_out * w_out * k + k) // LINE) * LINE
    return np.array(
        [*maps, *out, *pads, columns, across, down * across, samples, together, v_matrix,
         m_matrix, 0, v, m, padded, y, rest, taps, side, rest + more + LINE],
        INTEGERS[taps],
    )  # fmt: skip


@inlined
def _pad(walk, x, start, scratch):  # type: ignore[no-untyped-def]
    """One sample's maps, in zeros."""
    height, width, c, above, before, columns = (
        walk[0], walk[1], walk[2], walk[6], walk[7], walk[8],
    )  # fmt: skip
    for i in range(height):
        row = walk[18] + ((i + above) * columns + before) * c
        copy(x, start + i * width * c, scratch, row, width * c)


@inlined
def _inputs(walk, scratch, first, few, place):  # type: ignore[no-untyped-def]
    """Transform tiles of the padded sample, as tiles from `place` on."""
    c = walk[2]
    transform_inputs(
        scratch, walk[18], walk[8] * c, c, walk[22], walk[9], first, few,
        scratch, walk[16] + place * c, walk[13],
    )  # fmt: skip


@inlined
def _products(walk, scratch, count):  # type: ignore[no-untyped-def]
    multiply_matrices(
        scratch, walk[16], walk[13], walk[2], scratch, walk[15], walk[5],
        scratch, walk[17], walk[14], count,
    )  # fmt: skip


@inlined
def _outputs(walk, scratch, first, few, place, y, start, bias, biased, floor):  # type: ignore[no-untyped-def]
    """Transform tiles from `place` on back, into a sample's output."""
    k = walk[5]
    transform_outputs(
        scratch, walk[17] + place * k, walk[14], k, walk[21], walk[22], walk[9], first, few,
        y, start, walk[3], walk[4], bias, biased, floor,
    )  # fmt: skip


@inlined
def _clear(scratch, start, stop):  # type: ignore[no-untyped-def]
    for i in range(start, stop):
        scratch[i] = 0


@kernel
def conv2d_forward(start, stop, thread, x, w, b, y, walk, relu, scratch):  # type: ignore[no-untyped-def]
    """As `convolution.conv2d_forward`."""
    mine, floor = scratch[thread], np.float32(0) if relu else NOTHING
    x_size, y_size = walk[0] * walk[1] * walk[2], walk[3] * walk[4] * walk[5]
    tiles, samples, together = walk[10], walk[11], walk[12]
    transform_weights(w, 0, walk[21], walk[2], walk[5], mine, 0)
    _clear(mine, walk[18], walk[19])
    for n in range(start, stop, samples):
        count = min(samples, stop - n)
        for first in range(0, tiles, together):
            few = min(together, tiles - first)
            for g in range(count):
                if first == 0:
                    _pad(walk, x, (n + g) * x_size, mine)
                _inputs(walk, mine, first, few, g * few)
            _products(walk, mine, count * few)
            for g in range(count):
                _outputs(walk, mine, first, few, g * few, y, (n + g) * y_size, b, True, floor)


@kernel
def conv2d_relu_pool_forward(start, stop, thread, x, w, b, y, argmax, walk, pool, scratch):  # type: ignore[no-untyped-def]
    """As `pooled_convolution.conv2d_relu_pool_forward`."""
    mine, x_size = scratch[thread], walk[0] * walk[1] * walk[2]
    h_out, w_out, k, band = walk[3], walk[4], walk[5], walk[19]
    tiles, samples, together = walk[10], walk[11], walk[12]
    h_pool, w_pool = y.shape[1], y.shape[2]
    transform_weights(w, 0, walk[21], walk[2], k, mine, 0)
    _clear(mine, walk[18], walk[19])
    for n in range(start, stop, samples):
        count = min(samples, stop - n)
        for first in range(0, tiles, together):
            few = min(together, tiles - first)
            for g in range(count):
                if first == 0:
                    _pad(walk, x, (n + g) * x_size, mine)
                _inputs(walk, mine, first, few, g * few)
            _products(walk, mine, count * few)
            for g in range(count):
                _outputs(walk, mine, first, few, g * few, mine, band, b, True, np.float32(0))
                if first + few < tiles:
                    continue
                for i in range(h_pool):
                    above = i * pool[2] - pool[0]
                    top, bottom = max(0, above), min(h_out, above + pool[4])
                    pool_row(
                        mine, band + above * w_out * k, top - above, bottom - above, w_out, w_out,
                        w_pool, k, pool, y, argmax, ((n + g) * h_pool + i) * w_pool * k,
                    )  # fmt: skip


@inlined
def _flip(walk, w, scratch):  # type: ignore[no-untyped-def]
    """Weights as backward by the input meets them, transformed."""
    k, c, flipped, taps = walk[2], walk[5], walk[20], walk[21] * walk[21]
    for tap in range(taps):
        transpose(w, (taps - 1 - tap) * c * k, k, scratch, flipped + tap * c * k, c, c, k)
    transform_weights(scratch, flipped, walk[21], k, c, scratch, 0)


@kernel
def conv2d_backward_input(start, stop, thread, dy, w, dx, walk, scratch):  # type: ignore[no-untyped-def]
    """As `convolution.conv2d_backward_input`; `walk` goes from dy to dx."""
    mine = scratch[thread]
    dy_size, dx_size = walk[0] * walk[1] * walk[2], walk[3] * walk[4] * walk[5]
    tiles, samples, together = walk[10], walk[11], walk[12]
    _flip(walk, w.reshape(-1), mine)
    _clear(mine, walk[18], walk[19])
    for n in range(start, stop, samples):
        count = min(samples, stop - n)
        for first in range(0, tiles, together):
            few = min(together, tiles - first)
            for g in range(count):
                if first == 0:
                    _pad(walk, dy, (n + g) * dy_size, mine)
                _inputs(walk, mine, first, few, g * few)
            _products(walk, mine, count * few)
            for g in range(count):
                _outputs(
                    walk, mine, first, few, g * few, dx, (n + g) * dx_size, mine, False, NOTHING
                )


@kernel
def conv2d_relu_pool_backward_input(  # type: ignore[no-untyped-def]
    start, stop, thread, dy, argmax, w, dx, walk, pool, scratch
):
    """As `pooled_convolution.conv2d_relu_pool_backward_input`."""
    mine, dx_size = scratch[thread], walk[3] * walk[4] * walk[5]
    tiles, samples, together, k = walk[10], walk[11], walk[12], walk[2]
    h_pool, w_pool = dy.shape[1], dy.shape[2]
    padded, sums = mine[walk[18] : walk[19]], mine[walk[20] :]
    _flip(walk, w.reshape(-1), mine)
    _clear(mine, walk[18], walk[19])
    for n in range(start, stop, samples):
        count = min(samples, stop - n)
        for first in range(0, tiles, together):
            few = min(together, tiles - first)
            for g in range(count):
                if first == 0:
                    unpool(
                        dy, argmax, (n + g) * h_pool * w_pool * k, h_pool, w_pool, k, pool,
                        padded, walk[8], walk[6], walk[7], sums,
                    )  # fmt: skip
                _inputs(walk, mine, first, few, g * few)
            _products(walk, mine, count * few)
            for g in range(count):
                _outputs(
                    walk, mine, first, few, g * few, dx, (n + g) * dx_size, mine, False, NOTHING
                )


@inlined
def _gradients(walk, dz, start, scratch, first, few, place):  # type: ignore[no-untyped-def]
    """Transform tiles of a sample's dz, as tiles from `place` on."""
    k = walk[5]
    transform_gradients(
        dz, start, walk[3], walk[4], k, walk[21], walk[22], walk[9], first, few,
        scratch, walk[17] + place * k, walk[14],
    )  # fmt: skip


@inlined
def _add(walk, scratch, count):  # type: ignore[no-untyped-def]
    """Add products to the sums, which lie where weights lie forward."""
    add_products(
        scratch, walk[16], walk[13], walk[2], scratch, walk[17], walk[14], walk[5],
        scratch, walk[15], count,
    )  # fmt: skip


@kernel
def conv2d_backward_weight(start, stop, thread, x, dy, partial, walk, scratch):  # type: ignore[no-untyped-def]
    """As `convolution.conv2d_backward_weight`."""
    c, k, pixels = walk[2], walk[5], walk[3] * walk[4]
    mine, sums, one = scratch[thread], partial[thread], len(scratch[thread]) - LINE
    tiles, samples, together = walk[10], walk[11], walk[12]
    patch = walk[21] * walk[21] * c
    ramp = mine.view(np.int32)
    sums[:] = 0
    _clear(mine, 0, walk[16])
    _clear(mine, walk[18], walk[19])
    mine[one], mine[one + 1] = 1, 0
    for n in range(start, stop, samples):
        count = min(samples, stop - n)
        for first in range(0, tiles, together):
            few = min(together, tiles - first)
            for g in range(count):
                if first == 0:
                    _pad(walk, x, (n + g) * walk[0] * walk[1] * c, mine)
                _inputs(walk, mine, first, few, g * few)
                _gradients(walk, dy, (n + g) * pixels * k, mine, first, few, g * few)
            _add(walk, mine, count * few)
        # db is the product of dy with ones.
        multiply(
            (mine, one), (ramp, one + 1, 0), (ramp, one + 1, 0), (dy, n * pixels * k, k),
            (sums, patch * k, 0), (sums, patch * k), (ramp, one + 1, 0), (1, count * pixels, k),
            NOTHING,
        )  # fmt: skip
    finish_weight_gradient(mine, 0, walk[21], c, k, sums)


@kernel
def conv2d_relu_pool_backward_weight(  # type: ignore[no-untyped-def]
    start, stop, thread, x, dy, argmax, partial, walk, pool, scratch
):
    """As `pooled_convolution.conv2d_relu_pool_backward_weight`."""
    c, k, w_out = walk[2], walk[5], walk[4]
    mine, sums = scratch[thread], partial[thread]
    tiles, samples, together = walk[10], walk[11], walk[12]
    h_pool, w_pool = dy.shape[1], dy.shape[2]
    dz, db = mine[walk[20] :], sums[walk[21] * walk[21] * c * k :]
    sums[:] = 0
    _clear(mine, 0, walk[16])
    _clear(mine, walk[18], len(mine))
    for n in range(start, stop, samples):
        count = min(samples, stop - n)
        for first in range(0, tiles, together):
            few = min(together, tiles - first)
            for g in range(count):
                if first == 0:
                    _pad(walk, x, (n + g) * walk[0] * walk[1] * c, mine)
                    unpool(
                        dy, argmax, (n + g) * h_pool * w_pool * k, h_pool, w_pool, k, pool,
                        dz, w_out, 0, 0, db,
                    )  # fmt: skip
                _inputs(walk, mine, first, few, g * few)
                _gradients(walk, dz, 0, mine, first, few, g * few)
            _add(walk, mine, count * few)
    finish_weight_gradient(mine, 0, walk[21], c, k, sums)
