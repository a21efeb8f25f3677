"""Random crops, horizontal flips, affine maps, mixed channels and cutouts of images."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptrain.native.jit import Items, inlined, kernel

Array = NDArray[Any]

MAP = 8
"""First of the numbers of a window that are a map, see `dptrain.data.loading.geometry`."""

_BITS, UNIT, _HALF, _FRACTION = 16, 1 << 16, 1 << 15, (1 << 16) - 1
"""Bits of a position after the point, a pixel, half a pixel, and the bits after the point."""


@inlined
def _first(position, width):
    """Return the first pixel of an axis that a triangle of a half width weights."""
    return max(((position - width - _HALF) >> _BITS) + 1, 0)


@inlined
def _last(position, width, length):
    """Return the last pixel of an axis that a triangle of a half width weights."""
    return min((position + width - _HALF - 1) >> _BITS, length - 1)


@inlined
def _weight(pixel, position, width):
    """Return the weight of a pixel, an integer."""
    return width - abs((pixel << _BITS) + _HALF - position)


@inlined
def _interpolate(image, row, column, target, y, x):
    """Write the bilinear interpolation at a position to pixel (y, x) of target (C, H, W).

    This is what `_average` computes for half widths of one pixel, up to rounding, in less time.
    """
    rows, columns = image.shape[1], image.shape[2]
    above, before = row - _HALF, column - _HALF
    down, right = np.float32(above & _FRACTION), np.float32(before & _FRACTION)
    down, right = down * np.float32(1.0 / UNIT), right * np.float32(1.0 / UNIT)
    i, j = above >> _BITS, before >> _BITS
    top, bottom = np.uintp(max(i, 0)), np.uintp(min(i + 1, rows - 1))
    left, last = np.uintp(max(j, 0)), np.uintp(min(j + 1, columns - 1))
    for c in range(np.uintp(image.shape[0])):
        upper, lower = np.float32(image[c, top, left]), np.float32(image[c, bottom, left])
        upper += right * (np.float32(image[c, top, last]) - upper)
        lower += right * (np.float32(image[c, bottom, last]) - lower)
        target[c, y, x] = upper + down * (lower - upper)


@inlined
def _average(image, row, column, high, wide, target, y, x):
    """Write the weighted mean around a position to pixel (y, x) of target (C, H, W)."""
    top, bottom = _first(row, high), _last(row, high, image.shape[1])
    left, right = _first(column, wide), _last(column, wide, image.shape[2])
    across = 0
    for j in range(left, right + 1):
        across += _weight(j, column, wide)
    for c in range(np.uintp(image.shape[0])):
        total, down = np.float32(0.0), 0
        for i in range(top, bottom + 1):
            line, weight = np.float32(0.0), _weight(i, row, high)
            for j in range(left, right + 1):
                pixel = np.float32(image[c, np.uintp(i), np.uintp(j)])
                line += np.float32(_weight(j, column, wide)) * pixel
            total += np.float32(weight) * line
            down += weight
        target[c, y, x] = total / (np.float32(down) * np.float32(across))


@inlined
def sample(image, windows, n, target, scale, offset):
    """Fill target (C, H, W) with the positions of an image (C, H', W') that map n describes.

    A value v of the image becomes v · scale + offset, and positions outside of it become 0. A value
    is the mean of the pixels around a position, weighted by the product of two triangles: bilinear
    interpolation, or the mean over the area of an output pixel if the image gets smaller. Positions
    and weights are integers, so that every backend computes the same ones.
    """
    channels, rows, columns = image.shape
    down, right = windows[n, MAP], windows[n, MAP + 1]
    down_columns, right_columns = windows[n, MAP + 3], windows[n, MAP + 4]
    high, wide = windows[n, MAP + 6], windows[n, MAP + 7]
    for y in range(np.uintp(target.shape[1])):
        row, column = windows[n, MAP + 2] + down * np.intp(y), windows[n, MAP + 5]
        column += down_columns * np.intp(y)
        for x in range(np.uintp(target.shape[2])):
            if not (0 <= row < rows << _BITS and 0 <= column < columns << _BITS):
                for c in range(np.uintp(channels)):
                    target[c, y, x] = 0
            else:
                if high == UNIT and wide == UNIT:
                    _interpolate(image, row, column, target, y, x)
                else:
                    _average(image, row, column, high, wide, target, y, x)
                for c in range(np.uintp(channels)):
                    target[c, y, x] = target[c, y, x] * scale + offset
            row += right
            column += right_columns


@inlined
def mix_channels(target, recolourings, n):
    """Multiply the three channels of target (3, …) by matrix n, the numbers after the first two."""
    m = recolourings[n, 2:]
    red, green, blue = target[0].reshape(-1), target[1].reshape(-1), target[2].reshape(-1)
    for i in range(np.uintp(red.size)):
        r, g, b = red[i], green[i], blue[i]
        red[i] = m[0] * r + m[1] * g + m[2] * b
        green[i] = m[3] * r + m[4] * g + m[5] * b
        blue[i] = m[6] * r + m[7] * g + m[8] * b


@kernel
def shift(items: Items, source: Array, moves: Array, target: Array) -> None:
    """Crop target n, (C, H, W), from an image of source, (M, C, H', W'), with zeros outside the
    image.

    Items are targets. Row n of `moves`, int64 (N, 4), contains the image's number, the first row
    and column of the crop, which may be outside the image, and whether it is flipped.
    """
    _, channels, rows, columns = source.shape
    height, width = target.shape[2], target.shape[3]
    zero, one = np.float32(0.0), np.uintp(1)
    for n in range(items.start, items.stop):
        image, top, left, mirrored = moves[n, 0], moves[n, 1], moves[n, 2], moves[n, 3]
        first = min(max(-left, 0), width)
        count = np.uintp(max(min(columns - left, width) - first, 0))
        for c in range(channels):
            for y in range(height):
                line = target[n, c, y]
                inside = 0 <= top + y < rows
                if not inside or count < width:
                    for x in range(np.uintp(width)):
                        line[x] = zero
                if not inside or count == 0:
                    continue
                row = source[image, c, top + y, left + first :]
                if mirrored != 0:
                    end = np.uintp(width - first) - one
                    for x in range(count):
                        line[end - x] = row[x]
                else:
                    part = line[first:]
                    for x in range(count):
                        part[x] = row[x]


@kernel
def warp(items: Items, source: Array, windows: Array, target: Array) -> None:
    """Sample target n, (C, H, W), from an image of source, (M, C, H', W').

    Items are targets. Row n of `windows`, int64 (N, 16), contains the image's number and the map.
    """
    for n in range(items.start, items.stop):
        sample(source[windows[n, 0]], windows, n, target[n], np.float32(1.0), np.float32(0.0))


@kernel
def blend(items: Items, recolourings: Array, target: Array) -> None:
    """Multiply the channels of target n, (3, H, W), by the matrix in row n of `recolourings`."""
    for n in range(items.start, items.stop):
        mix_channels(target[n], recolourings, n)


@kernel
def erase(items: Items, cutouts: Array, target: Array) -> None:
    """Set a part of target n, (C, H, W), to zero.

    Items are targets. Row n of `cutouts`, int64 (N, 4), contains the first row and column of the
    part, and the row and column after its last ones.
    """
    zero = np.float32(0.0)
    for n in range(items.start, items.stop):
        top, left, bottom, right = cutouts[n, 0], cutouts[n, 1], cutouts[n, 2], cutouts[n, 3]
        for c in range(target.shape[1]):
            for y in range(top, bottom):
                line = target[n, c, y]
                for x in range(np.uintp(left), np.uintp(right)):
                    line[x] = zero
