"""Image files that are decoded once and kept in memory."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptrain.backends.pixels import INPUTS, PixelFormat
from dptrain.data.base import Dataset
from dptrain.data.sources.folder import ImageSamples
from dptrain.data.stored import CachedSamples, cache_limit_bytes
from dptrain.machine import available_cores

_CHUNK = 64
"""Images that a thread decodes at a time."""


def keep_decoded(dataset: Dataset, ranks_per_node: int) -> Dataset:
    """Return the data set with its image files decoded, if they fit in memory.

    Threads decode them, which the library does without the interpreter's lock. Pixels stay uint8 if
    no image is resized; otherwise the inputs are kept as float32. Their values are those of
    `ImageSamples.read`.

    Args:
        dataset: any data set; only one of image files changes.
        ranks_per_node: ranks on this node, each of which keeps its own copy.

    Raises:
        UserError: a file cannot be decoded.
    """
    splits = dataset.splits
    files = [split for split in splits if isinstance(split, ImageSamples)]
    if len(files) < len(splits):
        return dataset
    limit = cache_limit_bytes(ranks_per_node)
    threads = max(available_cores() // ranks_per_node, 1)
    numbers = sum(len(split) for split in files) * math.prod(dataset.input_shape)
    for pixels in (files[0].kept_pixels, INPUTS):
        if numbers * pixels.itemsize > limit:
            break
        found = [_decode(split, pixels, threads) for split in files]
        decoded = [split for split in found if split is not None]
        if len(decoded) == len(splits):
            return dataset.with_splits(decoded)
    return dataset


def _decode(samples: ImageSamples, pixels: PixelFormat, threads: int) -> CachedSamples | None:
    """Decode all images; return None if they cannot be kept as `pixels`."""
    count = len(samples)
    x = np.empty((count, *samples.preprocessing.input_shape), pixels.dtype)
    has_failed = threading.Event()

    def decode(start: int) -> bool:
        """Decode some images; return False if one of all images cannot be kept."""
        for index in range(start, min(start + _CHUNK, count)):
            if has_failed.is_set():
                return False
            if not _decode_one(samples, index, x[index : index + 1]):
                has_failed.set()
        return not has_failed.is_set()

    if not _in_order(decode, range(0, count, _CHUNK), threads):
        return None
    return CachedSamples(x, samples.targets, pixels=pixels)


def _decode_one(samples: ImageSamples, index: int, x: NDArray[Any]) -> bool:
    if x.dtype == np.uint8:
        return samples.read_pixels(index, x)
    samples.read_input(index, x)
    return True


def _in_order(decode: Callable[[int], bool], starts: range, threads: int) -> bool:
    """Return True if `decode` does for all arguments; raise the first error by argument."""
    with ThreadPoolExecutor(threads, "dptrain-decode") as executor:
        try:
            return all(executor.map(decode, starts))
        finally:
            executor.shutdown(wait=False, cancel_futures=True)
