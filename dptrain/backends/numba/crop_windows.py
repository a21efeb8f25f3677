"""Minibatches from images in memory: random crops, flips and changes of colours in one kernel."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptrain.backends.numba.jit import inlined, kernel
from dptrain.backends.numba.vector import copy, interleave, transpose

Array = NDArray[Any]

SUMS = 8
"""Partial sums of a mean, which are the elements of a vector."""


@inlined
def _mean(plane):  # type: ignore[no-untyped-def]
    """Return the mean of a channel, summed in double precision."""
    a = b = c = d = e = f = g = h = 0.0
    whole = plane.size // SUMS * SUMS
    for i in range(0, whole, SUMS):
        a += np.float64(plane[i])
        b += np.float64(plane[i + 1])
        c += np.float64(plane[i + 2])
        d += np.float64(plane[i + 3])
        e += np.float64(plane[i + 4])
        f += np.float64(plane[i + 5])
        g += np.float64(plane[i + 6])
        h += np.float64(plane[i + 7])
    for i in range(whole, plane.size):
        a += np.float64(plane[i])
    total = ((a + b) + (c + d)) + ((e + f) + (g + h))
    return np.float32(total / plane.size)


@inlined
def _recolour(plane, mean, factor, added):  # type: ignore[no-untyped-def]
    """Change the colours of a channel: (x − mean) · factor + added, rounded as in NumPy.

    One loop would be compiled to fused multiply-adds, which do not round products.
    """
    count = np.uintp(plane.size)
    for i in range(count):
        plane[i] = (plane[i] - mean) * factor
    for i in range(count):
        plane[i] += added


@inlined
def _fill(line, start, stop):  # type: ignore[no-untyped-def]
    """Write zeros."""
    for x in range(np.uintp(start), np.uintp(stop)):
        line[x] = np.float32(0.0)


@inlined
def _move(plane, images, image, channel, top, left):  # type: ignore[no-untyped-def]
    """Copy a channel of a window that is as wide as the image to plane (H·W,).

    Consecutive rows are copied at once, although they belong to one row after the move, and then
    the columns outside the image are set to zero.
    """
    rows, width = images.shape[2], images.shape[3]
    height = plane.size // width
    first, last = min(max(-top, 0), height), max(min(rows - top, height), 0)
    _fill(plane, 0, first * width)
    if last > first:
        row = (image * images.shape[1] + channel) * rows + top + first
        right = max(-left, 0)
        count = (last - first) * width - abs(left)
        copy(images, row * width + left + right, plane, first * width + right, count)
        border = 0 if left < 0 else width - left
        for y in range(first, last):
            _fill(plane, y * width + border, y * width + border + abs(left))
    _fill(plane, max(first, last) * width, plane.size)


@inlined
def _cut(plane, images, image, channel, top, left, width, mirrored):  # type: ignore[no-untyped-def]
    """Copy a channel of a window to plane (H·W,); zeros are outside the image."""
    rows, columns = images.shape[2], images.shape[3]
    first = min(max(-left, 0), width)
    count = max(min(columns - left, width) - first, 0)
    base = (image * images.shape[1] + channel) * rows
    for y in range(plane.size // width):
        at, row = y * width, top + y
        if row < 0 or row >= rows or count == 0:
            _fill(plane, at, at + width)
        elif mirrored == 0:
            _fill(plane, at, at + first)
            copy(images, (base + row) * columns + left + first, plane, at + first, count)
            _fill(plane, at + first + count, at + width)
        else:
            line, end = images[image, channel, row, left + first :], at + width - first
            _fill(plane, at, end - count)
            last = np.uintp(end - 1)
            for x in range(np.uintp(count)):
                plane[last - x] = line[x]
            _fill(plane, end, at + width)


@inlined
def _place(source, start, pitch, target, at, channels, pixels):  # type: ignore[no-untyped-def]
    """Write channels with a distance of `pitch` as pixels."""
    if channels == 1 or pixels == 1:
        copy(source, start, target, at, channels * pixels)
    elif channels == 3:
        interleave(source, start, pitch, target, at, pixels)
    else:
        transpose(
            source.reshape(-1), start, pitch, target.reshape(-1), at, channels, channels, pixels
        )


@kernel
def load_crop_windows(  # type: ignore[no-untyped-def]
    start, stop, thread, target, planes, images, windows, recolourings, recolours
):
    """Copy windows of images to target; items are windows.

    Args:
        target: (N, H, W, C).
        planes: (threads, C, H·W), scratch memory.
        images: (M, C, H', W').
        windows: int64 (N, 4), image, first row and first column, which may be outside the image,
            and whether the window is mirrored.
        recolourings: (N, 2), factor of the distances from the mean of each channel, and the number
            that is added; used if `recolours` is not 0.
        recolours: whether the colours change.
    """
    channels, rows, columns = images.shape[1], images.shape[2], images.shape[3]
    height, width = target.shape[1], target.shape[2]
    scratch = planes[thread]
    for n in range(start, stop):
        image, top, left, mirrored = windows[n, 0], windows[n, 1], windows[n, 2], windows[n, 3]
        at = n * height * width * channels
        whole_rows = left == 0 and width == columns and 0 <= top <= rows - height
        if recolours == 0 and mirrored == 0 and whole_rows:
            first = (image * channels * rows + top) * columns
            _place(images, first, rows * columns, target, at, channels, height * width)
            continue
        for c in range(channels):
            plane = scratch[c]
            if mirrored == 0 and width == columns and abs(left) < width:
                _move(plane, images, image, c, top, left)
            else:
                _cut(plane, images, image, c, top, left, width, mirrored)
            if recolours != 0:
                mean = _mean(plane)
                _recolour(plane, mean, recolourings[n, 0], mean + recolourings[n, 1])
        _place(scratch, 0, height * width, target, at, channels, height * width)
