"""Samples kept in arrays: in memory, or mapped from files and adapted when read."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dptrain.data.base import Dataset, Samples
from dptrain.data.images import Adapter, centre
from dptrain.data.sharding import epoch_order
from dptrain.data.spec import Request
from dptrain.errors import UserError
from dptrain.machine import free_memory
from dptrain.network.layers import Shape

HOST_SHARE = 0.25
"""Largest share of the available host memory that the cached data sets of a node may take."""

_SPLIT_SEED = 5
_CHUNK = 256


class Inputs(Protocol):
    """Stored samples; NumPy arrays and memory maps are."""

    @property
    def shape(self) -> tuple[int, ...]:
        """(number of samples, shape of one)."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the stored numbers."""

    def __getitem__(self, rows: NDArray[np.int64], /) -> NDArray[Any]:
        """Samples by row, (n, shape of one)."""


@dataclass(frozen=True)
class StoredSamples(Samples):
    """Rows of stored inputs, adapted each time they are read.

    Attributes:
        inputs: stored samples.
        targets: a target for every row of `inputs`, in the type that the loss reads.
        rows: int64 (n,), which of them belong to this split.
        adapter: brings inputs to the network.
    """

    inputs: Inputs
    targets: NDArray[Any]
    rows: NDArray[np.int64]
    adapter: Adapter

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def canvas(self) -> Shape:
        return self.adapter.canvas

    def read(self, indices: NDArray[np.int64], x: NDArray[np.float32], y: NDArray[Any]) -> None:
        rows = self.rows[indices]
        self.adapter(self.inputs[rows], x)
        y[...] = self.targets[rows]


@dataclass(frozen=True)
class MemorySamples(Samples):
    """Adapted samples in memory; sample i is row i mod m.

    Attributes:
        x: float32 (m, C, H, W) or (m, F), contiguous.
        y: their targets.
        count: number of samples; that of the rows where left out.
    """

    x: NDArray[np.float32]
    y: NDArray[Any]
    count: int | None = None

    def __len__(self) -> int:
        return len(self.x) if self.count is None else self.count

    @property
    def canvas(self) -> Shape:
        return self.x.shape[1:]

    def rows(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Rows of samples."""
        return indices if self.count is None else indices % len(self.x)

    def read(self, indices: NDArray[np.int64], x: NDArray[np.float32], y: NDArray[Any]) -> None:
        rows = self.rows(indices)
        if x.shape[1:] == self.canvas:
            # Any mode but "raise" writes straight into x.
            np.take(self.x, rows, axis=0, out=x, mode="clip")
        else:
            x[...] = self.x[rows][centre(self.canvas, x.shape)]
        self.read_targets(rows, y)

    def read_targets(self, rows: NDArray[np.int64], y: NDArray[Any]) -> None:
        """Fill `y` with the targets of rows."""
        np.take(self.y, rows, axis=0, out=y, mode="clip")


def keep_in_memory(samples: StoredSamples, where: str) -> MemorySamples:
    """Adapt everything once; `UserError` where a value is not finite."""
    count = len(samples)
    x = np.empty((count, *samples.canvas), dtype=np.float32)
    y = np.empty((count, *samples.targets.shape[1:]), dtype=samples.targets.dtype)
    for start in range(0, count, _CHUNK):
        span = slice(start, min(start + _CHUNK, count))
        indices = np.arange(span.start, span.stop, dtype=np.int64)
        samples.read(indices, x[span], y[span])
        finite = np.isfinite(x[span]).reshape(len(indices), -1).all(axis=1)
        if not finite.all():
            row = samples.rows[start + int(np.argmin(finite))]
            raise UserError(f"{where}: sample {row} has values that are not finite")
    return MemorySamples(x, y)


def cache_limit_bytes(ranks_per_node: int) -> int:
    """Return the size in bytes up to which a rank caches a data set in host memory.

    Every rank of a node holds its own copy, so the node's share is divided by the ranks.
    """
    return int(HOST_SHARE * free_memory()) // ranks_per_node


def split_rows(
    count: int, where: str, labels: NDArray[Any] | None = None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Four fifths for training, one fifth for the test, for data that comes without a split.

    The split is random but always the same: if it followed the seed of the run, a run with another
    seed would train on what an earlier one was tested on. With `labels` it is stratified.

    Returns:
        Rows for training and for the test, each ascending.
    """
    if count < 2:
        raise UserError(f"{where} has {count} samples; expected at least 2")
    order = epoch_order(count, _SPLIT_SEED, 0)
    if labels is not None:
        order = order[np.argsort(labels[order], kind="stable")]
    test = np.zeros(count, dtype=np.bool_)
    test[order[::5]] = True
    return np.flatnonzero(~test), np.flatnonzero(test)


def make_dataset(
    request: Request,
    train: StoredSamples,
    test: StoredSamples,
    *,
    origin: str,
    where: str,
    classes: tuple[str, ...] | None = None,
    lazy: bool = False,
) -> Dataset:
    """Check, adapt and describe two stored splits.

    Args:
        request: what the user asked for.
        train, test: the splits.
        origin: first part of the description.
        where: what the user named, for messages.
        classes: names of the classes.
        lazy: never adapt in advance, however small the data is.
    """
    for split, samples in (("training", train), ("test", test)):
        if not len(samples):
            raise UserError(f"{where} has no {split} samples")
        samples.adapter.check(where)
    network = request.network
    adapted = (len(train) + len(test)) * math.prod(train.canvas) * 4
    small = not lazy and adapted <= cache_limit_bytes(request.ranks_per_node)
    counts = f"{len(train):,} training and {len(test):,} test samples"
    notes = [part for part in (origin, counts, train.adapter.note) if part]
    return Dataset(
        name=request.name,
        train=keep_in_memory(train, where) if small else train,
        test=keep_in_memory(test, where) if small else test,
        input_shape=network.input_shape,
        targets=network.loss.targets,
        classes=classes if network.loss.targets != "values" else None,
        description="; ".join(notes),
        num_outputs=network.num_outputs,
    )
