"""MNIST and its relatives: IDX files, gzipped or not.

An IDX file has the magic number 0x0000 0x08 (bytes) and the number of axes, then the axes' lengths
as big-endian 32-bit integers, then the bytes.

Source: Y. LeCun, C. Cortes, C. Burges, "The MNIST database of handwritten digits".
"""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dptrain.data.base import Dataset
from dptrain.data.images import pixels
from dptrain.data.spec import Request
from dptrain.data.stored import StoredSamples, make_dataset
from dptrain.data.targets import labels_for
from dptrain.errors import UserError

SPLITS = ("train", "t10k")


def find(folder: Path, split: str, what: str, axes: int) -> Path:
    """The file of a split, by its usual names: with a dash or a dot, with ``.gz`` or without."""
    names = [f"{split}-{what}{mark}idx{axes}-ubyte{end}" for mark in "-." for end in ("", ".gz")]
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise UserError(f"{folder / names[0]} does not exist; expected it, or {', '.join(names[1:])}")


def read_idx(path: Path, axes: int) -> NDArray[np.uint8]:
    """Bytes of an IDX file with `axes` axes; `UserError` where it is damaged."""
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path} cannot be unpacked ({error}); fetch it again") from None
    magic = bytes((0, 0, 8, axes))
    header = 4 + 4 * axes
    if content[:4] != magic or len(content) < header:
        raise UserError(
            f"{path} starts with {content[:4].hex()}; expected {magic.hex()}, an IDX file of "
            f"bytes with {axes} axes"
        )
    shape = tuple(int(n) for n in np.frombuffer(content[4:header], dtype=">u4"))
    if len(content) - header != math.prod(shape):
        raise UserError(
            f"{path} has {len(content) - header} bytes after its header; expected "
            f"{math.prod(shape)} for shape {shape}; fetch it again"
        )
    return np.frombuffer(content, dtype=np.uint8, offset=header).reshape(shape)


def open_mnist(request: Request) -> Dataset:
    """Four IDX files of a directory."""
    folder = request.existing("directory")
    crop = request.choice("fit", ("resize", "crop")) == "crop"
    splits, most = [], 0
    for split in SPLITS:
        images_path, labels_path = (
            find(folder, split, "images", 3),
            find(folder, split, "labels", 1),
        )
        images, labels = read_idx(images_path, 3)[:, None], read_idx(labels_path, 1)
        if len(images) != len(labels) or not images.size:
            raise UserError(
                f"{images_path} has {len(images)} pictures and {labels_path.name} "
                f"{len(labels)} labels; expected as many of both, at least one"
            )
        targets = labels_for(labels, request.network, request.path)
        shape = request.network.input_shape
        adapter = pixels(images.shape[1:], shape, dtype=images.dtype, crop=crop)
        splits.append(StoredSamples(images, targets, np.arange(len(images)), adapter))
        most = max(most, int(labels.max()))
    return make_dataset(
        request,
        *splits,
        origin=f"IDX files of {request.path}",
        where=request.path,
        classes=tuple(str(label) for label in range(most + 1)),
    )
