"""The parts of convolution kernels that depend on whether ReLU and max pooling are fused.

Every kernel has an argument `pool`. Its type selects these parts at compile time:

- `NoPool`: forward stores rows of the output, with or without ReLU, and the gradient dz of the
  output is dy.
- `Pool`: forward stores the positive maxima of windows and their positions, and dz is
  computed from dy and these positions ("unpooling"), a few rows at a time.

`select_by_pool` makes one function of two such parts. All functions use flat arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numba.extending import overload
from numpy.typing import NDArray

from dptrain.backends.numba.convolution.microkernels import NO_LOWER_BOUND
from dptrain.backends.numba.pooling.pooling_windows import maximum_of_windows, scatter_to_windows
from dptrain.native.jit import inlined


class Pool(NamedTuple):
    """Padding, strides and window size of pooling, and the size (H, W) of its input.

    Attributes:
        argmax: like the output, the position of each maximum in its window, counted row by row.
            Fused pooling stores the first among equals as uint8, and `NO_GRADIENT` if it is not
            positive.
    """

    pad_top: int
    pad_left: int
    stride_v: int
    stride_h: int
    window_v: int
    window_h: int
    height: int
    width: int
    argmax: NDArray[Any] = np.zeros((1, 1, 1, 1), np.uint8)


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


def select_by_pool(pooled: Callable[..., Any], plain: Callable[..., Any]) -> Any:
    """Return a function for kernels that is `pooled` or `plain`, by the type of its argument.

    Args:
        pooled: Python function whose first argument is a `Pool`.
        plain: Python function of the same arguments, the first of which is a `NoPool`.
    """

    def selected(pool, *args):
        raise NotImplementedError("kernels call this function; Python cannot")

    options = {"error_model": "numpy", "fastmath": {"contract"}}

    @overload(selected, strict=False, jit_options=options)
    def _select(pool, *args):
        return pooled if pool.instance_class is Pool else plain

    return selected


def _itself(pool):
    return pool


def _nothing(pool):
    return None


pool_or_none = select_by_pool(_itself, _nothing)
"""pool_or_none(pool): `pool`, or None without pooling."""


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
def unpool_rows(pool, dy, n, rows, target, channels, sums):
    """Write dz of the rows from `rows[0]` to `rows[1]` of a sample's convolution output.

    Every row is written, including pixels outside all windows, so that rows can be computed in any
    division into ranges.

    Args:
        pool: geometry, and positions of the maxima.
        dy: `Maps`.
        n: the sample.
        rows: (first, stop), rows that exist.
        target: (flat array, element for pixel (first, 0) and channel 0, pixels of a row), with K
            elements for each pixel.
        channels: (first, stop), the channels to write.
        sums: (flat array, first element, uncounted): dy is added to K elements for each window that
            begins in these rows and has a positive element, and to `uncounted` for other windows.
    """
    k, (first, stop), (q, q_stop) = dy.channels, rows, channels
    (values, start, columns), (sums_values, sums_start, uncounted) = target, sums
    high, wide, w_out = pool.window_v, pool.window_h, pool.width
    start += q
    if not windows_cover_map(pool, dy.height, dy.width):
        zero_pixels(values, start, stop - first, w_out, columns * k, k, q_stop - q)
    overlap = pool.stride_v < high or pool.stride_h < wide
    begin_window = max(0, (first + pool.pad_top - high) // pool.stride_v + 1)
    stop_window = min(dy.height, (stop + pool.pad_top - 1) // pool.stride_v + 1)
    for i in range(begin_window, stop_window):
        row = i * pool.stride_v - pool.pad_top
        added, added_start = sums_values, sums_start
        if max(0, row) < first:
            added, added_start = uncounted, 0
        j = 0
        while j < dy.width:
            column = j * pool.stride_h - pool.pad_left
            begin, end, count = max(0, -column), min(wide, w_out - column), 1
            if begin == 0 and end == wide:
                # Process all windows up to the last complete one together.
                complete = (w_out - wide + pool.pad_left) // pool.stride_h + 1
                count = max(1, min(dy.width, complete) - j)
            window = ((n * dy.height + i) * dy.width + j) * k + q
            scatter_to_windows(
                *(values, start + ((row - first) * columns + column) * k),
                *(dy.values, window, pool.argmax, window, added, added_start + q, overlap),
                *(max(0, first - row), min(high, stop - row), begin, end, wide),
                *(columns * k, pool.stride_h, q_stop - q, count, k),
            )
            j += count


@inlined
def pool_rows(pool, source, rows, y, n, p, channels):
    """Compute the maxima of row p of the windows of sample n.

    Args:
        pool: geometry; receives the positions.
        source: (flat array, element for the window's first row, even if that row is above the map,
            pixels of a row), with K elements for each pixel.
        rows: (first, stop), rows of the window that exist.
        y: `Maps`.
        channels: (first, stop), the channels to compute.
    """
    (band, start, columns), k = source, y.channels
    wide, w_out, (q, q_stop) = pool.window_h, pool.width, channels
    j = 0
    while j < y.width:
        column = j * pool.stride_h - pool.pad_left
        begin, end, count = max(0, -column), min(wide, w_out - column), 1
        if begin == 0 and end == wide:
            # Process all windows up to the last complete one together.
            complete = (w_out - wide + pool.pad_left) // pool.stride_h + 1
            count = max(1, min(y.width, complete) - j)
        window = ((n * y.height + p) * y.width + j) * k + q
        maximum_of_windows(
            *(band, start + column * k + q, y.values, window, pool.argmax, window),
            *(rows[0], rows[1], begin, end, wide, columns * k, pool.stride_h),
            *(q_stop - q, count, k),
        )
        j += count
