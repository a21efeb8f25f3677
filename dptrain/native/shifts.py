"""Random crops, horizontal flips and cutouts of images."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptrain.native.jit import Items, kernel

Array = NDArray[Any]


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
