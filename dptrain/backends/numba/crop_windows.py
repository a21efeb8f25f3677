"""Minibatches from images in memory: random crops, flips, affine maps, conversion of 8-bit pixels,
changes of colours and cutouts in one kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types
from numba.extending import overload
from numpy.typing import NDArray

from dptrain.backends.numba.vector import copy, interleave, transpose
from dptrain.native.jit import inlined, kernel
from dptrain.native.shifts import MAP, mix_channels, sample

Array = NDArray[Any]

WINDOW, RECOLOURING = 4, 2
"""Numbers that describe a window without a cutout, and a recolouring without a matrix."""

SUMS = 8
"""Partial sums of a mean, which are the elements of a vector."""


def _select_by_type(of_bytes: Callable[..., Any], of_floats: Callable[..., Any]) -> Any:
    """Return a function for kernels that is one of two, by the type of its first argument.

    Args:
        of_bytes: Python function whose first argument is an array of uint8.
        of_floats: Python function of the same arguments, the first of which is of float32.
    """

    def selected(images, *args):
        raise NotImplementedError("kernels call this function; Python cannot")

    options = {"error_model": "numpy", "fastmath": {"contract"}}

    @overload(selected, strict=False, jit_options=options)
    def _select(images, *args):
        return of_bytes if images.dtype == types.uint8 else of_floats

    return selected


@inlined
def _mean(plane):
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
def _recolour(plane, mean, factor, added):
    """Change the colours of a channel: (x − mean) · factor + added, rounded as in NumPy.

    One loop would be compiled to fused multiply-adds, which do not round products.
    """
    count = np.uintp(plane.size)
    for i in range(count):
        plane[i] = (plane[i] - mean) * factor
    for i in range(count):
        plane[i] += added


@inlined
def _fill(line, start, stop):
    """Write zeros."""
    for x in range(np.uintp(start), np.uintp(stop)):
        line[x] = 0


@inlined
def _move(plane, images, image, channel, top, left):
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
def _cut(plane, images, image, channel, top, left, width, mirrored):
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
def _place(source, start, pitch, target, at, channels, pixels):
    """Write channels with a distance of `pitch` as pixels."""
    if channels == 1 or pixels == 1:
        copy(source, start, target, at, channels * pixels)
    elif channels == 3:
        interleave(source, start, pitch, target, at, pixels)
    else:
        transpose(
            source.reshape(-1), start, pitch, target.reshape(-1), at, channels, channels, pixels
        )


def _convert_bytes(cut, plane, conversion):
    scale, offset, count = conversion[0], conversion[1], np.uintp(plane.size)
    for i in range(count):
        plane[i] = np.float32(cut[i]) * scale
    # A loop of its own, so that the product is rounded, as in NumPy.
    for i in range(count):
        plane[i] += offset


def _keep_floats(cut, plane, conversion):
    pass


_convert = _select_by_type(_convert_bytes, _keep_floats)
"""_convert(cut, plane, conversion): write pixels as inputs to plane; inputs are there already."""


def _clear_border_of_bytes(images, plane, top, left, width, mirrored):
    rows, columns, height = images.shape[2], images.shape[3], plane.size // width
    first, last = min(max(-top, 0), height), max(min(rows - top, height), 0)
    _fill(plane, 0, first * width)
    _fill(plane, max(first, last) * width, plane.size)
    begin, end = min(max(-left, 0), width), min(max(columns - left, 0), width)
    if mirrored:
        begin, end = width - end, width - begin
    if begin > 0 or end < width:
        for y in range(first, last):
            _fill(plane, y * width, y * width + begin)
            _fill(plane, y * width + max(begin, end), (y + 1) * width)


def _has_no_border(images, plane, top, left, width, mirrored):
    pass


_clear_border = _select_by_type(_clear_border_of_bytes, _has_no_border)
"""_clear_border(images, plane, top, left, width, mirrored): set inputs outside the image to zero.
8-bit pixels cannot represent it."""


def _cannot_place(images, start, pitch, target, at, channels, pixels):
    return False


def _place_floats(images, start, pitch, target, at, channels, pixels):
    _place(images, start, pitch, target, at, channels, pixels)
    return True


_place_image = _select_by_type(_cannot_place, _place_floats)
"""_place_image(images, …): `_place` inputs; False for pixels, which need conversion."""


@inlined
def _erase(target, windows, n):
    """Set the part of input n to zero that the last four numbers of its window describe."""
    for y in range(windows[n, 4], windows[n, 6]):
        for x in range(windows[n, 5], windows[n, 7]):
            for c in range(target.shape[3]):
                target[n, y, x, c] = 0


@inlined
def _crop(images, windows, n, width, conversion, cuts, planes):
    """Write the inputs of window n to planes (C, H·W)."""
    image, top, left, mirrored = windows[n, 0], windows[n, 1], windows[n, 2], windows[n, 3]
    for c in range(images.shape[1]):
        cut, plane = cuts[c], planes[c]
        if mirrored == 0 and width == images.shape[3] and abs(left) < width:
            _move(cut, images, image, c, top, left)
        else:
            _cut(cut, images, image, c, top, left, width, mirrored)
        _convert(cut, plane, conversion)
        _clear_border(images, plane, top, left, width, mirrored)


@inlined
def _change_colours(planes, recolourings, n):
    """Change the colours of planes (C, H·W)."""
    for c in range(planes.shape[0]):
        plane = planes[c]
        mean = _mean(plane)
        _recolour(plane, mean, recolourings[n, 0], mean + recolourings[n, 1])
    if recolourings.shape[1] > RECOLOURING:
        mix_channels(planes, recolourings, n)


@kernel
def load_crop_windows(items, target, planes, cuts, images, conversion, windows, recolourings):
    """Copy windows of images to target; items are windows.

    Args:
        target: (N, H, W, C).
        planes: (threads, C, H·W), scratch memory.
        cuts: scratch memory of the same shape and the type of `images`; `planes` for inputs.
        images: (M, C, H', W'), inputs (float32) or 8-bit pixels (uint8).
        conversion: float32 (2,), scale and offset of 8-bit pixels.
        windows: int64 (N, 4), (N, 8) or (N, 16), see `CropWindowReplica`.
        recolourings: (N, 2) or (N, 11), see `CropWindowReplica`; (0, 2) if colours do not change.
    """
    channels, rows, columns = images.shape[1], images.shape[2], images.shape[3]
    height, width = target.shape[1], target.shape[2]
    scratch, recolours = planes[items.thread], len(recolourings) > 0
    for n in range(items.start, items.stop):
        image, top, left, mirrored = windows[n, 0], windows[n, 1], windows[n, 2], windows[n, 3]
        at, warps = n * height * width * channels, windows.shape[1] > MAP
        whole_rows = left == 0 and width == columns and 0 <= top <= rows - height
        if not (recolours or warps) and mirrored == 0 and whole_rows:
            first = (image * channels * rows + top) * columns
            pixels = height * width
            if _place_image(images, first, rows * columns, target, at, channels, pixels):
                if windows.shape[1] > WINDOW:
                    _erase(target, windows, n)
                continue
        if warps:
            shaped = scratch.reshape(channels, height, width)
            sample(images[image], windows, n, shaped, conversion[0], conversion[1])
        else:
            _crop(images, windows, n, width, conversion, cuts[items.thread], scratch)
        if recolours:
            _change_colours(scratch, recolourings, n)
        _place(scratch, 0, height * width, target, at, channels, height * width)
        if windows.shape[1] > WINDOW:
            _erase(target, windows, n)
