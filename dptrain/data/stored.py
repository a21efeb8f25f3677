"""Samples in arrays: cached in memory after preprocessing, or preprocessed when they are read."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dptrain.data.base import Samples
from dptrain.data.images import Adapter, centre
from dptrain.data.preprocessing import Preprocessing
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
    """

    inputs: StoredInputs
    targets: NDArray[Any]
    rows: NDArray[np.int64]
    preprocessing: Preprocessing
    where: str
    white: int | None = None

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

    @property
    def readable_shape(self) -> Shape:
        return self.adapter.readable_shape

    def read(self, indices: NDArray[np.int64], x: NDArray[np.float32], y: NDArray[Any]) -> None:
        rows = self.rows[indices]
        self.adapter(self.inputs[rows], x)
        if not self._always_in_range:
            self.preprocessing.check_values(x, rows, self.where)
        y[...] = self.targets[rows]


@dataclass(frozen=True, repr=False)
class CachedSamples(Samples):
    """Preprocessed samples in memory; sample i is row i mod m.

    Attributes:
        x: float32 (m, C, H, W) or (m, F), contiguous.
        y: their targets.
        count: number of samples; None: one for each row.
    """

    x: NDArray[np.float32]
    y: NDArray[Any]
    count: int | None = None

    def __len__(self) -> int:
        return len(self.x) if self.count is None else self.count

    @property
    def readable_shape(self) -> Shape:
        return self.x.shape[1:]

    def rows(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the rows of samples."""
        return indices if self.count is None else indices % len(self.x)

    def read(self, indices: NDArray[np.int64], x: NDArray[np.float32], y: NDArray[Any]) -> None:
        rows = self.rows(indices)
        if x.shape[1:] == self.readable_shape:
            # Any mode but "raise" writes straight into x.
            np.take(self.x, rows, axis=0, out=x, mode="clip")
        else:
            x[...] = self.x[rows][centre(self.readable_shape, x.shape)]
        self.read_targets(rows, y)

    def read_targets(self, rows: NDArray[np.int64], y: NDArray[Any]) -> None:
        """Fill `y` with the targets of rows."""
        np.take(self.y, rows, axis=0, out=y, mode="clip")


def cache_samples(samples: StoredSamples) -> CachedSamples:
    """Preprocess all samples once; raise `UserError` if a value is out of range."""
    count = len(samples)
    x = np.empty((count, *samples.readable_shape), dtype=np.float32)
    y = np.empty((count, *samples.targets.shape[1:]), dtype=samples.targets.dtype)
    for start in range(0, count, _CHUNK):
        span = slice(start, min(start + _CHUNK, count))
        samples.read(np.arange(span.start, span.stop, dtype=np.int64), x[span], y[span])
    return CachedSamples(x, y)


def cache_limit_bytes(ranks_per_node: int) -> int:
    """Return the size in bytes up to which a rank caches a data set in host memory.

    Every rank of a node holds its own copy, so the node's share is divided by the ranks.
    """
    return int(HOST_SHARE * free_memory()) // ranks_per_node
