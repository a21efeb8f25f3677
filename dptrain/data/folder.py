"""A directory of images, one folder for each class, decoded when they are read."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptrain.backends.pixels import PixelFormat
from dptrain.data.adaptation import adapt_request
from dptrain.data.assembly import preprocessing_for, split_rows, targets_of
from dptrain.data.base import Dataset, Samples, count_text
from dptrain.data.colour import has_colour
from dptrain.data.images import Adapter
from dptrain.data.preprocessing import Preprocessing
from dptrain.data.spec import Request
from dptrain.errors import UserError
from dptrain.network.layers import Shape

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff", ".webp")
MAX_PIXELS = 64_000_000
"""Larger images are refused: decoded, this many pixels take 0.2 GB, and float32 copies more."""
_DIGEST_BYTES = 4096
VALIDATION_NAMES = ("val", "valid", "validation")
"""Names of the folder next to ``train`` that is used for validation; the first that exists."""
TEST_NAMES = ("test", *VALIDATION_NAMES)
"""Names of the folder next to ``train`` that is used for the test; the first that exists."""


@dataclass(frozen=True, repr=False)
class FolderSamples(Samples):
    """Image files, each decoded and resized whenever it is read.

    Attributes:
        paths: one for each sample.
        targets: in the type that the loss reads.
        preprocessing: of the model.
    """

    paths: tuple[Path, ...]
    targets: NDArray[Any]
    preprocessing: Preprocessing

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def decodes(self) -> bool:
        return True

    def known_targets(self) -> NDArray[Any]:
        return self.targets

    def subset(self, indices: NDArray[np.int64]) -> FolderSamples:
        paths = tuple(self.paths[index] for index in indices)
        return replace(self, paths=paths, targets=self.targets[indices])

    def read(self, indices: NDArray[np.int64], x: NDArray[np.float32], y: NDArray[Any]) -> None:
        for row, index in enumerate(indices):
            self.read_input(index, x[row : row + 1])
        y[...] = self.targets[indices]

    @property
    def kept_pixels(self) -> PixelFormat:
        """Conversion of what `read_pixels` returns to inputs."""
        adapter = _adapter(self.preprocessing, self.preprocessing.input_shape)
        return adapter.kept_as(np.dtype(np.uint8))

    def read_input(self, index: int, x: NDArray[np.float32]) -> None:
        """Decode one image and convert it to the network's input, (1, C, H, W)."""
        read_image(self.paths[index], self.preprocessing, x)

    def read_pixels(self, index: int, x: NDArray[np.uint8]) -> bool:
        """Decode one image to 8-bit pixels (1, C, H, W); return False if it must be resized."""
        path = self.paths[index]
        image = decode(path, grey=self.preprocessing.is_grey)
        adapter = _adapter(self.preprocessing, image.shape[1:])
        adapter.check(str(path))
        if adapter.kept_as(image.dtype) != self.kept_pixels:
            return False
        adapter.keep(image, x)
        return True

    def content(
        self, indices: NDArray[np.int64], input_shape: Shape, target_shape: Shape
    ) -> Iterator[bytes]:
        # Decoding is slow; a file is represented by its name, size and first bytes.
        for index in indices:
            path = self.paths[index]
            name = printable(f"{path.parent.name}/{path.name}")
            try:
                with path.open("rb") as file:
                    start = file.read(_DIGEST_BYTES)
                yield f"{name}\0{path.stat().st_size}\0".encode() + start
            except OSError as error:
                raise UserError(f"{path} cannot be read: {error.strerror or error}") from None
        yield self.targets[indices].tobytes()


def read_image(path: Path, preprocessing: Preprocessing, x: NDArray[np.float32]) -> None:
    """Decode an image file and convert it to the network's input, (1, C, H, W)."""
    image = decode(path, grey=preprocessing.is_grey)
    adapter = _adapter(preprocessing, image.shape[1:])
    adapter.check(str(path))
    adapter(image, x)


def _adapter(preprocessing: Preprocessing, shape: Shape) -> Adapter:
    """Return what converts an image of a file, uint8 of `shape`, to the network's input."""
    # 255 is white in a file, even if it was another value in the training data.
    return preprocessing.adapter(shape, np.dtype(np.uint8), white=255)


def decode(path: Path, *, grey: bool) -> NDArray[np.uint8]:
    """Return the pixels of an image file, uint8 (1, C, H, W), turned upright."""
    from PIL import Image, ImageOps

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            opened = Image.open(path)
        with opened as file:
            if file.width * file.height > MAX_PIXELS:
                raise ValueError(
                    f"{file.width}×{file.height} pixels, more than {MAX_PIXELS // 10**6} million"
                )
            if file.mode.startswith(("I", "F")):
                # Pillow clips their values at 255 without an error.
                raise ValueError(f"more than 8 bits a pixel, mode {file.mode}")
            upright = ImageOps.exif_transpose(file)
            array = np.asarray(upright.convert("L" if grey else "RGB"))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise UserError(
            f"{path} cannot be read as an image ({error}); replace or remove it"
        ) from None
    return array[None, None] if grey else array.transpose(2, 0, 1)[None]


def is_image(path: Path) -> bool:
    """Return True if the file's name is that of an image and does not start with a dot."""
    hidden = path.name.startswith(".")
    return path.suffix.lower() in SUFFIXES and not hidden and path.is_file()


def class_folders(folder: Path) -> list[Path]:
    """Return the folders of the classes in alphabetical order."""
    return sorted(f for f in folder.iterdir() if f.is_dir() and not f.name.startswith("."))


def list_images(folder: Path) -> tuple[tuple[str, ...], list[Path], NDArray[np.int64]]:
    """Return class names in alphabetical order, image files, and a label for each file."""
    folders = class_folders(folder)
    if not folders:
        raise UserError(f"{folder} has no folders; expected one folder of images for each class")
    paths: list[Path] = []
    labels: list[int] = []
    for label, inner in enumerate(folders):
        found = sorted(f for f in inner.iterdir() if is_image(f))
        if not found:
            raise UserError(_no_images(folder, inner))
        paths += found
        labels += [label] * len(found)
    return tuple(f.name for f in folders), paths, np.array(labels, dtype=np.int64)


def _no_images(folder: Path, inner: Path) -> str:
    hint = ""
    if class_folders(inner):
        hint = (
            f"; for images that are split, expected {folder / 'train'} and one of "
            f"{', '.join(TEST_NAMES)} next to it"
        )
    return f"{inner} has no images; expected {', '.join(SUFFIXES)}{hint}"


def split_folders(folder: Path) -> list[Path]:
    """Return the folders for training, for the test and, if there is a third, for validation.

    Returns:
        An empty list if the images are not split.
    """
    train = folder / "train"
    if not (train.is_dir() and class_folders(train)):
        return []
    test = next((folder / name for name in TEST_NAMES if (folder / name).is_dir()), None)
    if test is None:
        return []
    others = (folder / name for name in VALIDATION_NAMES if test.name == "test")
    return [train, test, *[other for other in others if other.is_dir()][:1]]


def _splits(
    request: Request, folder: Path
) -> tuple[tuple[str, ...], list[tuple[list[Path], NDArray[np.int64]]], bool]:
    """Return class names, images and labels of each split, and whether they were split."""
    found = split_folders(folder)
    if found:
        classes, paths, labels = list_images(found[0])
        splits = [(paths, labels)]
        for other in found[1:]:
            others, paths, labels = list_images(other)
            if others != classes:
                raise UserError(
                    f"{other} has classes {', '.join(others)}; expected those of "
                    f"{found[0].name}, {', '.join(classes)}"
                )
            splits.append((paths, labels))
        return classes, splits, True
    classes, paths, labels = list_images(folder)
    rows = split_rows(request, len(paths), str(folder), labels)
    return classes, [([paths[row] for row in part], labels[part]) for part in rows], False


def open_folder(request: Request) -> Dataset:
    """Open image files: ``DIR/class/…``, or ``DIR/train/class/…`` and ``DIR/test/class/…``.

    The names of the folders are the names of the classes. A folder ``val``, ``valid`` or
    ``validation`` next to ``train`` and ``test`` is the validation split; without ``test`` it is
    the test split. Without a split dptrain chooses a fifth of the images for the test, always the
    same. A network of the zoo gets an output for each class, and three input channels if one of the
    images has colours, else one. A network of the user's own with one input channel reads images as
    grey, one with three as colour. Images are resized to the network's height and width.
    """
    folder = request.existing("directory")
    shape = request.network.input_shape
    if len(shape) != 3 or shape[0] not in (1, 3):
        raise UserError(
            f"{folder} has images, but network {request.network.name} takes {shape}; "
            "expected (1, H, W) or (3, H, W)"
        )
    where = str(folder)
    classes, splits, has_split = _splits(request, folder)
    names = dict(enumerate(map(printable, classes)))
    channels = shape[0]
    if request.network.family is not None and request.preprocessing is None:
        channels = 3 if any(has_colour(paths) for paths, _ in splits) else 1
    labels_of_splits = [labels for _, labels in splits]
    request = adapt_request(
        request, (channels, *shape[1:]), labels_of_splits, where, names=names, are_labels=True
    )
    network, shape = request.network, request.network.input_shape
    preprocessing = preprocessing_for(request, None, np.dtype(np.uint8))
    check_takes_images(preprocessing, where)
    train, test, *validation = (
        FolderSamples(
            tuple(paths),
            targets_of(request, preprocessing, labels, where),
            preprocessing,
        )
        for paths, labels in splits
    )
    colour = "grey" if preprocessing.is_grey else "colour"
    counts = f"{count_text(len(train), len(test), *map(len, validation))} samples"
    if not (has_split or request.split):
        counts = f"{len(test):,} samples"
    return Dataset(
        name=request.name,
        train=train,
        test=test,
        input_shape=shape,
        targets=network.loss.targets,
        classes=preprocessing.classes,
        description=(
            f"images of {folder}, {len(classes)} classes; {counts}; read as {colour}, "
            f"{'cropped' if preprocessing.fit == 'crop' else 'resized'} to {shape[1]}×{shape[2]}"
        ),
        num_outputs=network.num_outputs,
        preprocessing=preprocessing,
        has_split=has_split,
        validation=validation[0] if validation else None,
    )


def check_takes_images(preprocessing: Preprocessing, where: str) -> None:
    """Raise `UserError` if a network that was trained on other data cannot read image files."""
    if not preprocessing.is_8bit:
        raise UserError(
            f"{where} contains images, but the network was trained on the "
            f"{preprocessing.stored_dtype} numbers of {preprocessing.trained_on}; expected numbers "
            "like them"
        )
    shape = preprocessing.stored_shape or preprocessing.input_shape
    if len(shape) != 3 or shape[0] not in (1, 3):
        raise UserError(
            f"{where} contains images, but the network was trained on samples of shape {shape}; "
            "expected a .npy or .npz file"
        )


def printable(name: str) -> str:
    """Return a file name as valid UTF-8: other bytes are replaced by a question mark."""
    return name.encode("utf-8", "replace").decode("utf-8")
