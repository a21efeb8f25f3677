"""Affine maps from the pixels of an input to positions in an image, and random boxes.

A map is a matrix, float64 (n, 3, 3), in homogeneous coordinates (row, column, 1). The matrices that
change an input act on positions relative to its centre. Kernels receive `fixed_point` numbers, so
that all of them sample the same positions.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

TRIES = 10
"""Random boxes of which the first that fits is taken, as in torchvision."""

UNIT = 1 << 16
"""A pixel in the positions that kernels compute."""

MAX_SIZE = 1 << 13
"""Largest height and width of images. Positions up to four times as far fit 32 bits."""

Floats = NDArray[np.float64]


def identities(count: int) -> Floats:
    """Return `count` maps that change nothing."""
    return np.tile(np.eye(3), (count, 1, 1))


def scales(rows: Floats, columns: Floats) -> Floats:
    """Return maps that multiply rows and columns by factors (n,)."""
    maps = identities(len(rows))
    maps[:, 0, 0], maps[:, 1, 1] = rows, columns
    return maps


def rotations(degrees: Floats) -> Floats:
    """Return maps that turn the input counter-clockwise by angles (n,)."""
    angles = np.deg2rad(degrees)
    maps = scales(np.cos(angles), np.cos(angles))
    maps[:, 0, 1], maps[:, 1, 0] = np.sin(angles), -np.sin(angles)
    return maps


def fixed_point(maps: Floats, factors: Floats, size: tuple[int, ...]) -> NDArray[np.int64]:
    """Return maps of the centres of pixels (0, 0), (0, 1), … in units of 1/65,536 pixel.

    Args:
        maps: (n, 3, 3), from positions relative to the centre of an input to positions in an image.
        factors: (n, 2), pixels of the image, vertical and horizontal, for one of the input.
        size: height and width of the input.

    Returns:
        int64 (n, 8): for the row of the position in the image, what is multiplied by the row and by
        the column of the pixel, and what is added; the same for its column; and the half widths of
        the triangles that weight rows and columns: a pixel of the image, or of the input if that is
        larger.
    """
    corner = np.array([0.5 - size[0] / 2, 0.5 - size[1] / 2, 1.0])
    numbers = np.empty((len(maps), 8))
    numbers[:, :6] = maps[:, :2].reshape(-1, 6)
    numbers[:, [2, 5]] = maps[:, :2] @ corner
    numbers[:, 6:] = np.maximum(factors, 1.0)
    return np.rint(numbers * UNIT).astype(np.int64)


def random_boxes(
    uniform: Floats, areas: tuple[float, float], aspects: tuple[float, float], size: tuple[int, ...]
) -> Floats:
    """Return heights and widths of random boxes in an image.

    The share of the area is uniform, and the ratio of width to height is uniform in its logarithm.

    Args:
        uniform: (2 · TRIES, n), random numbers in [0, 1).
        areas: least and largest share of the area of the image.
        aspects: least and largest ratio of width to height.
        size: height and width of the image.

    Returns:
        (n, 2); zeros if no box fits.
    """
    area = (areas[0] + (areas[1] - areas[0]) * uniform[:TRIES]) * (size[0] * size[1])
    low, high = np.log(aspects)
    root = np.exp((low + (high - low) * uniform[TRIES:]) / 2)
    sides = np.sqrt(area)
    boxes = np.stack([sides / root, sides * root], axis=-1)
    fits = np.all(boxes <= np.array(size), axis=-1)
    chosen = boxes[fits.argmax(axis=0), np.arange(fits.shape[1])]
    return np.where(fits.any(axis=0)[:, None], chosen, 0.0)


def resized_crops(
    uniform: Floats, place: Floats, least_area: float, size: tuple[int, ...]
) -> tuple[Floats, Floats]:
    """Return the boxes of random resized crops, with aspect ratios from 3/4 to 4/3.

    If no box fits, which is rare, it is the largest one with such a ratio, in the centre.

    Args:
        uniform: (2 · TRIES, n), as for `random_boxes`.
        place: (2, n), random numbers in [0, 1): the row and the column among those that fit.
        least_area: least share of the area of the image.
        size: height and width of the image.

    Returns:
        Heights and widths, and centres (row, column), each (n, 2).
    """
    height, width = size
    boxes = random_boxes(uniform, (least_area, 1.0), (3 / 4, 4 / 3), size)
    largest = min(height, width * 4 / 3), min(width, height * 4 / 3)
    fits = boxes[:, :1] > 0.0
    boxes = np.where(fits, boxes, largest)
    free = np.array(size) - boxes
    return boxes, np.where(fits, place.T, 0.5) * free + boxes / 2


def squares_around(
    uniform: Floats, side: int, size: tuple[int, ...]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return squares around random pixels, without the parts outside of the image.

    Args:
        uniform: (2, n), random numbers in [0, 1).
        side: of a square in pixels.
        size: height and width of the image.

    Returns:
        First row and column, and the row and the column after the last ones, each int64 (n, 2).
    """
    lengths = np.array(size)
    first = (uniform.T * lengths).astype(np.int64) - side // 2
    return np.maximum(first, 0), np.minimum(first + side, lengths)
