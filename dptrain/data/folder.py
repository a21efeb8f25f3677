"""A directory of pictures, one folder a class, decoded when read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptrain.data.base import Dataset, Samples
from dptrain.data.images import pixels
from dptrain.data.spec import Request
from dptrain.data.stored import split_rows
from dptrain.data.targets import labels_for
from dptrain.errors import UserError
from dptrain.network.layers import Shape

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff", ".webp")


@dataclass(frozen=True)
class FolderSamples(Samples):
    """Picture files, each decoded and resized whenever it is read.

    Attributes:
        paths: one a sample.
        targets: in the type that the loss reads.
        shape: (C, H, W) of the network; one channel reads pictures as grey, others as colour.
    """

    paths: tuple[Path, ...]
    targets: NDArray[Any]
    shape: Shape

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, indices: NDArray[np.int64], x: NDArray[np.float32], y: NDArray[Any]) -> None:
        for row, index in enumerate(indices):
            picture = decode(self.paths[index], grey=self.shape[0] == 1)
            pixels(picture.shape[1:], self.shape, dtype=picture.dtype)(picture, x[row : row + 1])
        y[...] = self.targets[indices]


def decode(path: Path, *, grey: bool) -> NDArray[np.uint8]:
    """Pixels of a picture file, uint8 (1, C, H, W), the right way up."""
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as file:
            if file.mode.startswith(("I", "F")):
                # Pillow would clip their values at 255 without a word.
                raise ValueError(f"more than 8 bits a pixel, mode {file.mode}")
            upright = ImageOps.exif_transpose(file)
            array = np.asarray(upright.convert("L" if grey else "RGB"))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise UserError(
            f"{path} cannot be read as a picture ({error}); replace or remove it"
        ) from None
    return array[None, None] if grey else array.transpose(2, 0, 1)[None]


def is_picture(path: Path) -> bool:
    """Whether a file is a picture by its name; hidden ones, as macOS leaves them, are not."""
    hidden = path.name.startswith(".")
    return path.suffix.lower() in SUFFIXES and not hidden and path.is_file()


def class_folders(folder: Path) -> list[Path]:
    """One a class, in alphabetical order."""
    return sorted(f for f in folder.iterdir() if f.is_dir() and not f.name.startswith("."))


def list_pictures(folder: Path) -> tuple[tuple[str, ...], list[Path], NDArray[np.int64]]:
    """Class names in alphabetical order, picture files, and a label for each."""
    folders = class_folders(folder)
    if not folders:
        raise UserError(f"{folder} has no folders; expected one folder of pictures a class")
    paths: list[Path] = []
    labels: list[int] = []
    for label, inner in enumerate(folders):
        found = sorted(f for f in inner.iterdir() if is_picture(f))
        if not found:
            raise UserError(f"{inner} has no pictures; expected {', '.join(SUFFIXES)}")
        paths += found
        labels += [label] * len(found)
    return tuple(f.name for f in folders), paths, np.array(labels, dtype=np.int64)


def is_split(folder: Path) -> bool:
    """Whether the pictures come split into training and test."""
    return (folder / "train").is_dir() and (folder / "test").is_dir()


def _splits(
    folder: Path,
) -> tuple[tuple[str, ...], list[tuple[list[Path], NDArray[np.int64]]]]:
    """Class names, and the pictures and labels of training and test."""
    if is_split(folder):
        classes, paths, labels = list_pictures(folder / "train")
        others, test_paths, test_labels = list_pictures(folder / "test")
        if others != classes:
            raise UserError(
                f"{folder / 'test'} has classes {', '.join(others)}; expected those of train, "
                f"{', '.join(classes)}"
            )
        return classes, [(paths, labels), (test_paths, test_labels)]
    classes, paths, labels = list_pictures(folder)
    rows = split_rows(len(paths), str(folder), labels)
    return classes, [([paths[row] for row in part], labels[part]) for part in rows]


def open_folder(request: Request) -> Dataset:
    """``DIR/class/…``, or ``DIR/train/class/…`` and ``DIR/test/class/…``."""
    folder = request.existing("directory")
    network = request.network
    shape = network.input_shape
    if len(shape) != 3 or shape[0] not in (1, 3):
        raise UserError(
            f"{folder} has pictures, but network {network.name} takes {shape}; "
            "expected (1, H, W) or (3, H, W)"
        )
    classes, splits = _splits(folder)
    train, test = (
        FolderSamples(tuple(paths), labels_for(labels, network, str(folder)), shape)
        for paths, labels in splits
    )
    colour = "grey" if shape[0] == 1 else "colour"
    return Dataset(
        name=request.name,
        train=train,
        test=test,
        input_shape=shape,
        targets=network.loss.targets,
        classes=classes,
        description=(
            f"pictures of {folder}; {len(train):,} training and {len(test):,} test "
            f"samples; read as {colour}, resized to {shape[1]}×{shape[2]}"
        ),
        num_outputs=network.num_outputs,
    )
