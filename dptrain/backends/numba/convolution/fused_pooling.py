"""The parts of convolution kernels that depend on whether ReLU and max pooling are fused.

Every kernel has an argument `pool`. Its type selects these parts at compile time:

- `NoPool`: forward stores rows of the output, with or without ReLU, and the gradient dz of the
  output is dy.
- `PoolGeometry`: forward stores the positive maxima of windows and their positions, and dz is
  computed from dy and these positions ("unpooling"), a few rows at a time.

`select_by_pool` makes one function of two such parts. All functions use flat arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numba.extending import overload

from dptrain.backends.numba.convolution.microkernels import NO_LOWER_BOUND
from dptrain.backends.numba.pooling.pooling_windows import maximum_of_windows, scatter_to_windows
from dptrain.native.jit import inlined


class PoolGeometry(NamedTuple):
    """Padding, strides and window size of pooling, and the size (H, W) of its input."""

    pad_top: int
    pad_left: int
    stride_v: int
    stride_h: int
    window_v: int
    window_h: int
    height: int
    width: int


class NoPool(NamedTuple):
    """A convolution's output that is not pooled.

    Attributes:
        height, width: its size.
        relu: 1 if ReLU follows.
        adds: 1 if the input gradient is added to what is in memory.
        bias: 0 if the gradient of the bias is not needed, which then remains undefined.
    """

    height: int
    width: int
    relu: int
    adds: int = 0
    bias: int = 1


def pool_geometry(
    pads: tuple[int, int],
    strides: tuple[int, int],
    window: tuple[int, int],
    maps: tuple[int, int],
) -> PoolGeometry:
    """Return the geometry of pooling; every pair is (vertical, horizontal)."""
    return PoolGeometry(*pads, *strides, *window, *maps)


def select_by_pool(pooled: Callable[..., Any], plain: Callable[..., Any]) -> Any:
    """Return a function for kernels that is `pooled` or `plain`, by the type of its argument.

    Args:
        pooled: Python function whose first argument is a `PoolGeometry`.
        plain: Python function of the same arguments, the first of which is a `NoPool`.
    """

    def selected(pool, *args):
        raise NotImplementedError("kernels call this function; Python cannot")

    options = {"error_model": "numpy", "fastmath": {"contract"}}

    @overload(selected, strict=False, jit_options=options)
    def _select(pool, *args):
        return pooled if pool.instance_class is PoolGeometry else plain

    return selected


def _is_pooled(pool):
    return True


def _is_not_pooled(pool):
    return False


is_pooled = select_by_pool(_is_pooled, _is_not_pooled)
"""is_pooled(pool): a constant of the compiled code."""


def _zero(pool):
    return np.float32(0)


def _bound(pool):
    return np.float32(0) if pool.relu else NO_LOWER_BOUND


lower_bound = select_by_pool(_zero, _bound)
"""lower_bound(pool): the lower bound of the convolution's outputs, 0 with ReLU."""


def _never(pool):
    return None


def _adds(pool):
    return pool.adds != 0


adds = select_by_pool(_never, _adds)
"""adds(pool): None with pooling, otherwise whether the input gradient is added to dx."""


def _with_bias(pool):
    return True


def _has_bias(pool):
    return pool.bias != 0


has_bias = select_by_pool(_with_bias, _has_bias)
"""has_bias(pool): whether the gradient of the bias is needed."""


def _tiles_are_exact(pool, h_pool, w_pool):
    same = pool.stride_v == pool.window_v and pool.stride_h == pool.window_h
    inside = pool.pad_top == 0 and pool.pad_left == 0
    return same and inside and h_pool * pool.window_v == pool.height and (
        w_pool * pool.window_h == pool.width
    )  # fmt: skip


windows_cover_map = inlined(_tiles_are_exact)
"""windows_cover_map(pool, h_pool, w_pool): True if each pixel is in exactly one window."""


@inlined
def zero_pixels(target, start, rows, columns, row, pitch, channels):
    """Set `channels` elements of each pixel of a rectangle to 0.

    Args:
        target, start: flat array and first element.
        rows, columns: size of the rectangle.
        row, pitch: distances of rows and of pixels.
        channels: elements of a pixel.
    """
    for i in range(rows):
        first = start + i * row
        if channels == pitch:
            target[first : first + columns * pitch] = 0
        else:
            for j in range(columns):
                target[first + j * pitch : first + j * pitch + channels] = 0


@inlined
def unpool_rows(
    pool, dy, argmax, n, pooled_maps, rows, target, start, columns, channels, sums, sums_start,
    uncounted,
):  # fmt: skip
    """Write dz of the rows from `rows[0]` to `rows[1]` of a sample's convolution output.

    Every row is written, including pixels outside all windows, so that rows can be computed in any
    division into ranges.

    Args:
        pool: geometry.
        dy, argmax: flat, of all samples.
        n: the sample.
        pooled_maps: (Hp, Wp, K).
        rows: (first, stop), rows that exist.
        target, start: flat array, and the element for pixel (first, 0) and channel 0.
        columns: pixels of a row of `target`, each of K elements.
        channels: (first, stop), the channels to write.
        sums, sums_start: flat array and first element: dy is added to K elements for each window
            that begins in these rows and has a positive element.
        uncounted: K elements that receive the sums of the other windows.
    """
    h_pool, w_pool, k = pooled_maps
    (first, stop), (q, q_stop) = rows, channels
    high, wide, w_out = pool.window_v, pool.window_h, pool.width
    start += q
    if not windows_cover_map(pool, h_pool, w_pool):
        zero_pixels(target, start, stop - first, w_out, columns * k, k, q_stop - q)
    overlap = pool.stride_v < high or pool.stride_h < wide
    begin_window = max(0, (first + pool.pad_top - high) // pool.stride_v + 1)
    stop_window = min(h_pool, (stop + pool.pad_top - 1) // pool.stride_v + 1)
    for i in range(begin_window, stop_window):
        row = i * pool.stride_v - pool.pad_top
        added, added_start = sums, sums_start
        if max(0, row) < first:
            added, added_start = uncounted, 0
        j = 0
        while j < w_pool:
            column = j * pool.stride_h - pool.pad_left
            begin, end, count = max(0, -column), min(wide, w_out - column), 1
            if begin == 0 and end == wide:
                # Process all windows up to the last complete one together.
                count = max(1, min(w_pool, (w_out - wide + pool.pad_left) // pool.stride_h + 1) - j)
            window = ((n * h_pool + i) * w_pool + j) * k + q
            scatter_to_windows(
                *(target, start + ((row - first) * columns + column) * k),
                *(dy, window, argmax, window, added, added_start + q, overlap),
                *(max(0, first - row), min(high, stop - row), begin, end, wide),
                *(columns * k, pool.stride_h, q_stop - q, count, k),
            )
            j += count


@inlined
def pool_rows(pool, band, start, rows, columns, y, argmax, y_start, w_pool, k, channels):
    """Compute the maxima of one row of windows.

    Args:
        pool: geometry.
        band, start: flat array, and the element for the window's first row, even if that row is
            above the map.
        rows: (first, stop), rows of the window that exist.
        columns: pixels of a row of `band`, each of K elements.
        y, argmax, y_start: flat arrays, and the element of the row's first window.
        w_pool: number of windows.
        k: number of channels.
        channels: (first, stop), the channels to compute.
    """
    wide, w_out, (q, q_stop) = pool.window_h, pool.width, channels
    j = 0
    while j < w_pool:
        column = j * pool.stride_h - pool.pad_left
        begin, end, count = max(0, -column), min(wide, w_out - column), 1
        if begin == 0 and end == wide:
            # Process all windows up to the last complete one together.
            count = max(1, min(w_pool, (w_out - wide + pool.pad_left) // pool.stride_h + 1) - j)
        window = y_start + j * k + q
        maximum_of_windows(
            *(band, start + column * k + q, y, window, argmax, window),
            *(rows[0], rows[1], begin, end, wide, columns * k, pool.stride_h),
            *(q_stop - q, count, k),
        )
        j += count
