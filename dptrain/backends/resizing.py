"""Bilinear resizing of images, with the same bits on the host and on a GPU."""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

_CHUNK = 1 << 15
"""Pixels that are resized at a time, which the L2 cache holds."""


class Taps(NamedTuple):
    """The pixels of an axis that become a resized pixel, and their weights.

    Attributes:
        first: int32 (target,), the first of consecutive pixels.
        weights: float32 (target, T), of T pixels; each row sums to 1.
    """

    first: NDArray[np.int32]
    weights: NDArray[np.float32]


def bilinear_weights(source: int, target: int) -> NDArray[np.float32]:
    """Return the matrix that resizes an axis of `source` pixels to `target` pixels.

    Pixel centres are at half-integer positions. The weights of neighbours follow a triangle whose
    half width is one source pixel, or one target pixel if that is wider, so that no pixel is
    skipped if an image gets smaller. Weights are normalised at the border.

    Returns:
        float32 (target, source); each row sums to 1.
    """
    scale = source / target
    width = max(scale, 1.0)
    centres = (np.arange(target) + 0.5) * scale
    distance = np.abs(np.arange(source)[None, :] + 0.5 - centres[:, None]) / width
    weights = np.maximum(1.0 - distance, 0.0)
    return np.asarray(weights / weights.sum(axis=1, keepdims=True), dtype=np.float32)


@cache
def bilinear_taps(source: int, target: int) -> Taps:
    """Return the weights of `bilinear_weights` that are not 0, and some that are 0 next to them."""
    weights = bilinear_weights(source, target)
    used = weights > 0.0
    first, last = used.argmax(axis=1), source - 1 - used[:, ::-1].argmax(axis=1)
    count = int((last - first).max()) + 1
    first = np.minimum(first, source - count)
    columns = first[:, None] + np.arange(count)
    return Taps(first.astype(np.int32), np.take_along_axis(weights, columns, axis=1))


def resize(images: NDArray[Any], size: tuple[int, int]) -> NDArray[np.float32]:
    """Return images in another size: first the rows are combined, then the columns.

    Each product and each sum is rounded to float32, in the order of the pixels, so that the bits of
    an image depend neither on the library nor on the other images.

    Args:
        images: (…, H', W'), any real type.
        size: (H, W).

    Returns:
        float32 (…, H, W).
    """
    *leading, height, width = images.shape
    rows, columns = bilinear_taps(height, size[0]), bilinear_taps(width, size[1])
    flat, count = images.reshape(-1, height, width), math.prod(leading)
    resized = np.empty((count, *size), np.float32)
    chunk = max(_CHUNK // (height * width), 1)
    for start in range(0, count, chunk):
        span = slice(start, start + chunk)
        combined = _combine_rows(flat[span].astype(np.float32), rows)
        # Rows of adjacent numbers are combined faster than columns.
        turned = np.ascontiguousarray(combined.swapaxes(1, 2))
        resized[span] = _combine_rows(turned, columns).swapaxes(1, 2)
    return resized.reshape(*leading, *size)


def _combine_rows(images: NDArray[np.float32], taps: Taps) -> NDArray[np.float32]:
    total = np.take(images, taps.first, axis=1)
    total *= taps.weights[:, :1]
    for index in range(1, taps.weights.shape[1]):
        products = np.take(images, taps.first + index, axis=1)
        products *= taps.weights[:, index, None]
        total += products
    return total
