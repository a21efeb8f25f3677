"""Samples in arrays: cached in memory, or read from files whenever they are needed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dptrain.backends.pixels import INPUTS, PixelFormat
from dptrain.data.base import Samples
from dptrain.data.preprocessing.images import Adapter, centre
from dptrain.data.preprocessing.preprocessing import Preprocessing
from dptrain.machine import free_memory
from dptrain.network.layers import Shape

HOST_SHARE = 0.25
"""Largest share of the available host memory that the cached data sets of a node may take."""

_CHUNK = 256


class StoredInputs(Protocol):
    """Raw samples by row. NumPy arrays and memory maps implement it."""

    @property
    def shape(self) -> tuple[int, ...]:
        """(number of samples, *shape of one)."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the stored numbers."""

    def __getitem__(self, rows: NDArray[np.int64], /) -> NDArray[Any]:
        """Return samples by row, (n, *shape of one)."""


@dataclass(frozen=True, repr=False)
class StoredSamples(Samples):
    """Rows of stored inputs, preprocessed each time they are read.

    Attributes:
        inputs: raw samples.
        targets: a target for each row of `inputs`, in the type that the loss reads.
        rows: int64 (n,), the rows that belong to this split.
        preprocessing: of the model.
        where: name of the data, for messages.
        white: 8-bit value that becomes 1; None: as in `preprocessing`.
        keeps_size: True if `read_kept` does not resize images, although the network's input has
            another size.
        weights: float64, one for each row of `inputs`; None if the data has none.
    """

    inputs: StoredInputs
    targets: NDArray[Any]
    rows: NDArray[np.int64]
    preprocessing: Preprocessing
    where: str
    white: int | None = None
    keeps_size: bool = False
    weights: NDArray[np.float64] | None = None

    @cached_property
    def adapter(self) -> Adapter:
        """Conversion from raw samples to the network's inputs."""
        shape, dtype = tuple(self.inputs.shape[1:]), self.inputs.dtype
        return self.preprocessing.adapter(shape, dtype, white=self.white)

    @cached_property
    def _always_in_range(self) -> bool:
        white = self.preprocessing.white if self.white is None else self.white
        return self.inputs.dtype == np.uint8 and white == 255

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def _stored_form(self) -> tuple[Shape, PixelFormat]:
        """Shape and form of what `read_kept` fills if it does not resize."""
        found = self.adapter.stored_as(self.inputs.dtype)
        assert found is not None
        return found

    def known_targets(self) -> NDArray[Any]:
        return self.targets[self.rows]

    def known_weights(self) -> NDArray[np.float64] | None:
        return None if self.weights is None else self.weights[self.rows]

    def subset(self, indices: NDArray[np.int64]) -> StoredSamples:
        return replace(self, rows=self.rows[indices])

    def as_stored(self) -> StoredSamples | None:
        if self.adapter.stored_as(self.inputs.dtype) is None:
            return None
        return replace(self, keeps_size=True)

    @property
    def readable_shape(self) -> Shape:
        return self._stored_form[0] if self.keeps_size else self.adapter.readable_shape

    @property
    def decodes(self) -> bool:
        return bool(getattr(self.inputs, "decodes", False))

    @property
    def pixels(self) -> PixelFormat:
        return self._stored_form[1] if self.keeps_size else self.adapter.kept_as(self.inputs.dtype)

    def read(self, indices: NDArray[np.int64], x: NDArray[np.float32], y: NDArray[Any]) -> None:
        rows = self.rows[indices]
        self.adapter(self.inputs[rows], x)
        self._check(x, rows)
        y[...] = self.targets[rows]

    def read_kept(self, indices: NDArray[np.int64], x: NDArray[Any], y: NDArray[Any]) -> None:
        pixels = self.pixels
        if pixels == INPUTS:
            self.read(indices, x, y)
            return
        rows, inputs = self.rows[indices], self.inputs
        if _is_copied_by_rows(inputs, x):
            # Straight into x: two thirds of the time of a copy by index and another one. Any mode
            # but "raise" needs no buffer.
            np.take(inputs, rows, axis=0, out=x, mode="clip")  # type: ignore[call-overload]
        elif self.keeps_size:
            x[...] = inputs[rows]
        else:
            self.adapter.keep(inputs[rows], x)
        if not self._always_in_range:
            converted = np.empty((len(x), *pixels.converted_shape(x.shape[1:])), np.float32)
            pixels.convert(x, converted)
            self._check(converted, rows)
        y[...] = self.targets[rows]

    def cached_on_device(self) -> CachedSamples:
        """Return the samples for loaders if a device caches their images and the host does not."""
        return CachedSamples(StoredImages(self), self.targets[self.rows], pixels=self.pixels)

    def _check(self, x: NDArray[np.float32], rows: NDArray[np.int64]) -> None:
        if not self._always_in_range:
            self.preprocessing.check_values(x, rows, self.where)


def _is_copied_by_rows(inputs: Any, x: NDArray[Any]) -> bool:
    """Return True if the rows of an array can be copied to `x` as they are."""
    # `numpy.take` would copy the whole of an array that is not contiguous.
    return (
        isinstance(inputs, np.ndarray)
        and inputs.flags.c_contiguous
        and inputs.dtype == x.dtype
        and inputs.shape[1:] == x.shape[1:]
    )


@dataclass(frozen=True, repr=False)
class CachedSamples(Samples):
    """Samples in memory; sample i is row i mod m.

    Attributes:
        x: (m, C, H, W) or (m, F), contiguous, of the type of `pixels`; `StoredImages` if only a
            device has them in memory.
        y: their targets.
        count: number of samples; None: one for each row.
        pixels: conversion of `x` to inputs.
        stored: the samples before they were resized to `x`; None if they were not.
        weights: float64 (m,); None if the data has none.
    """

    x: Any
    y: NDArray[Any]
    count: int | None = None
    pixels: PixelFormat = INPUTS
    stored: StoredSamples | None = None
    weights: NDArray[np.float64] | None = None

    def __len__(self) -> int:
        return len(self.x) if self.count is None else self.count

    def known_targets(self) -> NDArray[Any]:
        return self.y[self.rows(np.arange(len(self), dtype=np.int64))]

    def known_weights(self) -> NDArray[np.float64] | None:
        return self.weights

    def subset(self, indices: NDArray[np.int64]) -> CachedSamples:
        if self.count is not None:  # The rows repeat; a copy of each sample would be large.
            return replace(self, count=len(indices))
        stored = None if self.stored is None else self.stored.subset(indices)
        weights = None if self.weights is None else self.weights[indices]
        return replace(self, x=self.x[indices], y=self.y[indices], stored=stored, weights=weights)

    def as_stored(self) -> StoredSamples | None:
        return self.stored

    @property
    def readable_shape(self) -> Shape:
        return tuple(self.x.shape[1:])

    def rows(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the rows of samples."""
        return indices if self.count is None else indices % len(self.x)

    def read(self, indices: NDArray[np.int64], x: NDArray[np.float32], y: NDArray[Any]) -> None:
        rows = self.rows(indices)
        if x.shape[1:] != self.readable_shape:
            self.pixels.convert(self.x[rows][centre(self.readable_shape, x.shape)], x)
        elif self.pixels == INPUTS:
            # Any mode but "raise" writes straight into x.
            np.take(self.x, rows, axis=0, out=x, mode="clip")
        else:
            self.pixels.convert(self.x[rows], x)
        self.read_targets(rows, y)

    def read_targets(self, rows: NDArray[np.int64], y: NDArray[Any]) -> None:
        """Fill `y` with the targets of rows."""
        np.take(self.y, rows, axis=0, out=y, mode="clip")

    def read_kept(self, indices: NDArray[np.int64], x: NDArray[Any], y: NDArray[Any]) -> None:
        rows = self.rows(indices)
        np.take(self.x, rows, axis=0, out=x, mode="clip")
        self.read_targets(rows, y)


class StoredImages:
    """The images of stored samples as an array without memory: parts of it are read as needed.

    Attributes:
        shape, dtype, ndim, nbytes: as of an array with the images of all samples.
    """

    def __init__(self, samples: StoredSamples) -> None:
        self._samples = samples
        self.shape = (len(samples), *samples.readable_shape)
        self.dtype, self.ndim = np.dtype(samples.pixels.dtype), len(self.shape)
        self.nbytes = math.prod(self.shape) * self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, span: slice) -> NDArray[Any]:
        """Read consecutive images; raise `UserError` if a value is out of range."""
        indices = np.arange(len(self), dtype=np.int64)[span]
        images = np.empty((len(indices), *self.shape[1:]), self.dtype)
        targets = self._samples.targets
        y = np.empty((len(indices), *targets.shape[1:]), targets.dtype)
        self._samples.read_kept(indices, images, y)
        return images


class JoinedImages:
    """The images of several arrays, one after the other, as an array that is read in parts.

    Args:
        arrays: (M, …) each, of the same type; arrays, or `StoredImages`.

    Attributes:
        shape, dtype, ndim, nbytes: as of an array with all of the images.
    """

    def __init__(self, arrays: Sequence[Any]) -> None:
        self._arrays = arrays
        self.shape: Shape = (sum(len(each) for each in arrays), *arrays[0].shape[1:])
        self.dtype, self.ndim = arrays[0].dtype, len(self.shape)
        self.nbytes = math.prod(self.shape) * self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, span: slice) -> NDArray[Any]:
        """Read consecutive images; raise `UserError` if a value is out of range."""
        start, stop, _ = span.indices(len(self))
        parts = []
        for each in self._arrays:
            parts.append(each[min(start, len(each)) : min(max(stop, 0), len(each))])
            start, stop = max(start - len(each), 0), stop - len(each)
        return np.concatenate(parts)


def cache_samples(samples: StoredSamples) -> CachedSamples:
    """Read all samples once; raise `UserError` if a value is out of range."""
    count = len(samples)
    x = np.empty((count, *samples.readable_shape), samples.pixels.dtype)
    y = np.empty((count, *samples.targets.shape[1:]), dtype=samples.targets.dtype)
    for start in range(0, count, _CHUNK):
        span = slice(start, min(start + _CHUNK, count))
        samples.read_kept(np.arange(span.start, span.stop, dtype=np.int64), x[span], y[span])
    return CachedSamples(
        x, y, pixels=samples.pixels, stored=samples.as_stored(), weights=samples.known_weights()
    )


def cache_limit_bytes(ranks_per_node: int) -> int:
    """Return the size in bytes up to which a rank caches a data set in host memory.

    Every rank of a node holds its own copy, so the node's share is divided by the ranks.
    """
    return int(HOST_SHARE * free_memory()) // ranks_per_node
