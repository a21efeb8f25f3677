"""MNIST and data sets in its format: IDX files, gzipped or not.

An IDX file has the magic number 0x0000 0x08 (bytes) and the number of axes, then the axes' lengths
as big-endian 32-bit integers, then the bytes.

Source: Y. LeCun, C. Cortes, C. Burges, "The MNIST database of handwritten digits".
"""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from dptrain.data.adaptation import adapt_request
from dptrain.data.assembly import RawSplit, make_dataset, preprocessing_for
from dptrain.data.base import Dataset
from dptrain.data.spec import Request
from dptrain.errors import UserError

SPLITS = ("train", "t10k")
_CHUNK_BYTES = 1 << 22


def find_file(folder: Path, split: str, what: str, axes: int) -> Path:
    """Return the file of a split by its usual names: with - or ., with or without ``.gz``."""
    names = [f"{split}-{what}{mark}idx{axes}-ubyte{end}" for mark in "-." for end in ("", ".gz")]
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise UserError(f"{folder / names[0]} does not exist; expected it, or {', '.join(names[1:])}")


def read_idx(path: Path, axes: int) -> NDArray[np.uint8]:
    """Return the bytes of an IDX file with `axes` axes; raise `UserError` if it is damaged."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            return _read_idx(file, path, axes)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{path} cannot be unpacked ({error}); download it again") from None


def _read_idx(file: BinaryIO | gzip.GzipFile, path: Path, axes: int) -> NDArray[np.uint8]:
    magic = bytes((0, 0, 8, axes))
    header = _read_bytes(file, 4 + 4 * axes)
    if header[:4] != magic or len(header) < 4 + 4 * axes:
        raise UserError(
            f"{path} starts with {header[:4].hex()}; expected {magic.hex()}, an IDX file of "
            f"bytes with {axes} axes"
        )
    shape = tuple(int(n) for n in np.frombuffer(header[4:], dtype=">u4"))
    size = math.prod(shape)
    # A compressed file of a few megabytes can hold gigabytes: no more is read than the header
    # states, and one byte that shows whether there is more.
    content = _read_bytes(file, size + 1)
    if len(content) != size:
        found = f"{len(content)}" if len(content) < size else f"more than {size}"
        raise UserError(
            f"{path} has {found} bytes after its header; expected {size} for shape {shape}; "
            "download it again"
        )
    return np.frombuffer(content, dtype=np.uint8).reshape(shape)


def _read_bytes(file: BinaryIO | gzip.GzipFile, size: int) -> bytes:
    """Return at most `size` bytes; no memory is reserved for bytes that the file does not have."""
    content = bytearray()
    while len(content) < size:
        chunk = file.read(min(_CHUNK_BYTES, size - len(content)))
        if not chunk:
            break
        content += chunk
    return bytes(content)


def open_mnist(request: Request) -> Dataset:
    """Open four IDX files of a directory.

    Files: ``train-images-idx3-ubyte``, ``train-labels-idx1-ubyte``, ``t10k-images-idx3-ubyte``,
    ``t10k-labels-idx1-ubyte``; with ``.`` in place of the second ``-``, and with ``.gz``, too.
    """
    folder = request.existing("directory")
    splits, shapes = [], []
    for split in SPLITS:
        images_path = find_file(folder, split, "images", 3)
        labels_path = find_file(folder, split, "labels", 1)
        images, labels = read_idx(images_path, 3)[:, None], read_idx(labels_path, 1)
        if len(images) != len(labels) or not images.size:
            raise UserError(
                f"{images_path} has {len(images)} images and {labels_path.name} "
                f"{len(labels)} labels; expected equal numbers, at least one"
            )
        splits.append(RawSplit(images, labels, np.arange(len(images))))
        shapes.append(images.shape[1:])
    if shapes[0] != shapes[1]:
        raise UserError(
            f"{folder} has training images of shape {shapes[0]} and test images of {shapes[1]}; "
            "expected the same"
        )
    targets = [split.targets for split in splits]
    request = adapt_request(request, shapes[0], targets, request.path, are_labels=True)
    return make_dataset(
        request,
        *splits,
        preprocessing=preprocessing_for(request, shapes[0], np.dtype(np.uint8)),
        origin=f"IDX files of {request.path}",
        where=request.path,
        has_split=True,
        white=255,
    )
