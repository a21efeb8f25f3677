"""What the convolution kernels share: geometry, scratch, tables of offsets, padded copies.

A *pixel table* says where the pixel's patch starts in a map, a *filter table* where element
(r, s, c) lies in a patch. Distances are in elements.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dptrain.backends.numba.jit import expanded, inlined
from dptrain.backends.numba.vector import copy
from dptrain.backends.numba.windows import scatter_to_windows


def conv_geometry(
    pads: tuple[int, int], strides: tuple[int, int], window: tuple[int, int]
) -> NDArray[np.int64]:
    """What kernels ask of a convolution: (top, left, vertical, horizontal, R, S)."""
    return np.array([*pads, *strides, *window], np.int64)


def pool_geometry(
    pads: tuple[int, int],
    strides: tuple[int, int],
    window: tuple[int, int],
    maps: tuple[int, int],
) -> NDArray[np.int64]:
    """What they ask of pooling: (top, left, vertical, horizontal, R, S, height, width pooled)."""
    return np.array([*pads, *strides, *window, *maps], np.int64)


def conv_scratch(
    pads: tuple[int, int],
    strides: tuple[int, int],
    window: tuple[int, int],
    x_maps: tuple[int, int, int],
    y_maps: tuple[int, int, int],
    pool_height: int = 0,
) -> tuple[int, int, int]:
    """Elements of scratch for each thread: forward, backward by weights, backward by input.

    Args:
        pads: top and left.
        strides: vertical and horizontal.
        window: (R, S).
        x_maps: (H, W, C).
        y_maps: (Ho, Wo, K) of the convolution, before pooling.
        pool_height: height of the window of fused pooling; 0 where there is none.
    """
    (h_in, w_in, c), (h_out, w_out, k) = x_maps, y_maps
    pixels, patch = h_out * w_out, window[0] * window[1] * c
    padded = ((h_out - 1) * strides[0] + window[0]) * ((w_out - 1) * strides[1] + window[1]) * c
    rows = max((h_in - 1 + pads[0]) // strides[0] + 1, h_out) + (window[0] - 1) // strides[0]
    columns = max((w_in - 1 + pads[1]) // strides[1] + 1, w_out) + (window[1] - 1) // strides[1]
    return (
        padded + 2 * pixels + patch + pool_height * w_out * k,
        padded + 2 * patch + pixels + (pixels * k if pool_height else 1),
        rows * columns * k + patch * k + 2 * h_in * w_in + window[0] * window[1] * k + k,
    )


@expanded
def copy_padded(source, start, maps, target, rows, columns, top, left):  # type: ignore[no-untyped-def]
    """Copy maps (height, width, channels) into zeroed maps (rows, columns, channels)."""
    height, width, channels = maps
    first, last = max(0, -left), min(width, columns - left)
    for i in range(max(0, -top), min(height, rows - top)):
        s = start + (i * width + first) * channels
        t = ((i + top) * columns + first + left) * channels
        copy(source, s, target, t, max(0, last - first) * channels)


@expanded
def fill_pixels(height, width, down, across, table):  # type: ignore[no-untyped-def]
    """Pixel table of a map whose patches are `down` and `across` from each other."""
    for i in range(height):
        for j in range(width):
            table[i * width + j] = i * down + j * across


@expanded
def fill_filter(r, s, down, table):  # type: ignore[no-untyped-def]
    """Filter table: r rows `down` from each other, of s elements side by side."""
    for i in range(r):
        for j in range(s):
            table[i * s + j] = i * down + j


@expanded
def fill_ramp(scale, table):  # type: ignore[no-untyped-def]
    """Table of equal distances."""
    for i in range(len(table)):
        table[i] = i * scale


@expanded
def is_inside(geometry, h_in, w_in, rows, columns):  # type: ignore[no-untyped-def]
    """Whether all (rows, columns) that the patches cover lie in the maps, so need no copy."""
    return geometry[0] == 0 and geometry[1] == 0 and rows <= h_in and columns <= w_in


@inlined
def taps(size, phase, stride):  # type: ignore[no-untyped-def]
    """How many of range(size) leave remainder `phase`."""
    return (size - phase + stride - 1) // stride if phase < size else 0


@expanded
def unpool(dy, argmax, start, h_pool, w_pool, k, pool, target, columns, top, left, sums):  # type: ignore[no-untyped-def]
    """Give dy of one sample to the maxima, in `target` (…, columns, K) shifted by (top, left).

    Elements that no window holds are left as they are, and sums (K,) grows by what was given.
    """
    high, wide, h_out, w_out = pool[4], pool[5], pool[6], pool[7]
    overlap = pool[2] < high or pool[3] < wide
    if overlap:
        for i in range(h_out):
            row = ((i + top) * columns + left) * k
            target[row : row + w_out * k] = 0
    for i in range(h_pool):
        row = i * pool[2] - pool[0]
        j = 0
        while j < w_pool:
            column = j * pool[3] - pool[1]
            begin, end, count = max(0, -column), min(wide, w_out - column), 1
            if begin == 0 and end == wide:
                # All windows up to the last whole one.
                count = max(1, min(w_pool, (w_out - wide + pool[1]) // pool[3] + 1) - j)
            place = start + (i * w_pool + j) * k
            scatter_to_windows(
                *(target, ((row + top) * columns + column + left) * k, dy, place, argmax, place),
                *(sums, 0, overlap, max(0, -row), min(high, h_out - row), begin, end),
                *(wide, columns * k, pool[3], k, count),
            )
            j += count
