"""CIFAR-10 in its binary version: records of 1 label byte and 3,072 pixel bytes (R, G, B planes).

Source: A. Krizhevsky, "Learning multiple layers of features from tiny images", 2009;
https://www.cs.toronto.edu/~kriz/cifar.html
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dptrain.data.adaptation import adapt_request
from dptrain.data.assembly import RawSplit, make_dataset, preprocessing_for
from dptrain.data.base import Dataset
from dptrain.data.spec import Request
from dptrain.errors import UserError

SHAPE = (3, 32, 32)
RECORD_BYTES = 3073
CLASSES = (
    "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
)  # fmt: skip
TRAIN_FILES = tuple(f"data_batch_{i}.bin" for i in range(1, 6))
TEST_FILES = ("test_batch.bin",)


class Records:
    """Images in some binary files, memory-mapped; see `StoredInputs`."""

    def __init__(self, paths: list[Path]) -> None:
        self.maps = [_map(path) for path in paths]
        self._starts = np.cumsum([0, *(len(records) for records in self.maps)])
        self.shape = (int(self._starts[-1]), *SHAPE)
        self.dtype = np.dtype(np.uint8)

    def labels(self) -> NDArray[np.uint8]:
        """Return the label byte of every record."""
        return np.concatenate([records[:, 0] for records in self.maps])

    def __getitem__(self, rows: NDArray[np.int64]) -> NDArray[np.uint8]:
        out = np.empty((len(rows), RECORD_BYTES - 1), dtype=np.uint8)
        owners = np.searchsorted(self._starts, rows, side="right") - 1
        for i, records in enumerate(self.maps):
            mine = owners == i
            out[mine] = records[rows[mine] - self._starts[i], 1:]
        return out.reshape(-1, *SHAPE)


def _map(path: Path) -> NDArray[np.uint8]:
    if not path.is_file():
        raise UserError(
            f"{path} does not exist; expected the binary version of CIFAR-10: "
            f"{TRAIN_FILES[0]} … {TRAIN_FILES[-1]} and {TEST_FILES[0]}"
        )
    size = path.stat().st_size
    if size == 0 or size % RECORD_BYTES:
        raise UserError(
            f"{path} has {size} bytes; expected a multiple of {RECORD_BYTES}, "
            "1 label and 3,072 pixels for each image; download it again"
        )
    records = np.memmap(path, dtype=np.uint8, mode="r", shape=(size // RECORD_BYTES, RECORD_BYTES))
    if (most := records[:, 0].max()) >= len(CLASSES):
        raise UserError(f"{path} has label {most}; expected 0 to 9, is it the binary version?")
    return records


def open_cifar10(request: Request) -> Dataset:
    """Open CIFAR-10 from a directory, or from ``cifar-10-batches-bin`` in it.

    Files: ``data_batch_1.bin`` to ``data_batch_5.bin`` and ``test_batch.bin``.
    """
    folder = request.existing("directory")
    inner = folder / "cifar-10-batches-bin"
    folder = inner if inner.is_dir() else folder
    splits = []
    for names in (TRAIN_FILES, TEST_FILES):
        records = Records([folder / name for name in names])
        labels = records.labels()
        splits.append(RawSplit(records, labels, np.arange(len(labels))))
    label_names, targets = dict(enumerate(CLASSES)), [split.targets for split in splits]
    request = adapt_request(
        request, SHAPE, targets, request.path, names=label_names, are_labels=True
    )
    return make_dataset(
        request,
        *splits,
        preprocessing=preprocessing_for(request, SHAPE, np.dtype(np.uint8)),
        origin="CIFAR-10",
        where=request.path,
        has_split=True,
        white=255,
    )
