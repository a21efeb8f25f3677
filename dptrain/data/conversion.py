"""Converting a data set to memory-mapped arrays, the folder that ``npy:DIR`` reads."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptrain.data.base import Dataset, Samples
from dptrain.data.preprocessing.preprocessing import Preprocessing
from dptrain.data.sources.arrays import CLASSES_FILE
from dptrain.errors import UserError
from dptrain.files import write_whole, writing

BATCH = 256
"""Samples that are read at once."""


def convert_data(
    dataset: Dataset, folder: Path, progress: Callable[[int], None] = lambda count: None
) -> list[Path]:
    """Write the splits of a data set as ``.npy`` files, and the names of its classes.

    8-bit images keep their size and their pixels. Images of different sizes are written as the
    network's inputs, in float32. Training on the result has the same bits.

    Args:
        dataset: the data set.
        folder: a folder that does not exist or is empty.
        progress: called with the number of samples that were written.

    Returns:
        The files.

    Raises:
        UserError: the data is a table, the folder is not empty, or a file
            cannot be read or written.
    """
    preprocessing = dataset.preprocessing
    if preprocessing.kind == "table":
        raise UserError(
            f"{dataset.name} has columns, which arrays cannot describe; train on it without "
            "converting it"
        )
    with writing(folder, "--output"):
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise UserError(f"{folder} is not empty; choose another --output")
    partial: dict[Path, Path] = {}
    try:
        for name, samples in zip(("train", "test", "validation"), dataset.splits, strict=False):
            paths = folder / f"x_{name}.npy", folder / f"y_{name}.npy"
            partial.update((path, path.with_name(f".{path.name}.partial")) for path in paths)
            _write_split(dataset, samples, folder, [partial[path] for path in paths], progress)
        with writing(folder, "--output"):
            for path, file in partial.items():
                file.replace(path)
    except BaseException:
        for file in partial.values():  # Their samples are zero until they are written.
            with suppress(OSError):
                file.unlink()
        raise
    written = list(partial)
    if dataset.classes is not None:
        text = "".join(f"{name}\n" for name in dataset.classes)
        write_whole(folder / CLASSES_FILE, text, "--output")
        written.append(folder / CLASSES_FILE)
    return written


def _write_split(
    dataset: Dataset,
    samples: Samples,
    folder: Path,
    paths: Sequence[Path],
    progress: Callable[[int], None],
) -> None:
    stored = _as_pixels(dataset, samples)
    source = samples if stored is None else stored
    dtype = np.dtype(np.float32 if stored is None else np.uint8)
    shape = (
        dataset.input_shape if stored is None else (stored.readable_shape or dataset.input_shape)
    )
    kind = np.dtype(np.int32 if dataset.targets == "classes" else np.float32)
    with writing(folder, "--output"):
        x = np.lib.format.open_memmap(paths[0], "w+", dtype, (len(samples), *shape))
        y = np.lib.format.open_memmap(paths[1], "w+", kind, (len(samples), *dataset.target_shape))
        for path in paths:
            _reserve(path)
    for first in range(0, len(samples), BATCH):
        indices = np.arange(first, min(first + BATCH, len(samples)), dtype=np.int64)
        read: Any = source.read if stored is None else source.read_kept
        part: NDArray[Any] = np.empty((len(indices), *shape), dtype)
        targets: NDArray[Any] = np.empty((len(indices), *dataset.target_shape), kind)
        read(indices, part, targets)
        with writing(folder, "--output"):
            x[indices] = _as_given(part, dataset.preprocessing)
            y[indices] = dataset.preprocessing.to_values(targets)
        progress(len(indices))
    with writing(folder, "--output"):
        x.flush()
        y.flush()


def _as_given(x: NDArray[Any], preprocessing: Preprocessing) -> NDArray[Any]:
    """Return inputs as they are written: vectors that were standardised have their own unit."""
    if not preprocessing.mean:
        return x
    given: NDArray[Any] = x * np.array(preprocessing.deviation) + np.array(preprocessing.mean)
    return given


def _reserve(path: Path) -> None:
    """Reserve the disk space of a file: without it, a write to the mapped memory is a SIGBUS."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        os.posix_fallocate(descriptor, 0, os.fstat(descriptor).st_size)
    finally:
        os.close(descriptor)


def _as_pixels(dataset: Dataset, samples: Samples) -> Samples | None:
    """Return samples whose images are read as they are stored; None if they must be converted."""
    stored = samples.as_stored() or samples
    is_8bit = stored.pixels.dtype == "uint8" and dataset.preprocessing.white == 255
    return stored if is_8bit else None
