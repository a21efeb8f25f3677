"""A directory of images, one folder for each class, decoded when they are read."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptrain.backends.pixels import PixelFormat
from dptrain.data.adaptation import adapt_request
from dptrain.data.assembly import preprocessing_for, split_rows, targets_of, unseen_notes
from dptrain.data.base import Dataset, Samples, count_text
from dptrain.data.image_files.colour import any_has_colour
from dptrain.data.image_files.decoder import DecodedImage, RuleCounts, decode_file
from dptrain.data.image_files.listing import (
    NO_SPLIT,
    LeftOut,
    count_unused,
    find_images,
    is_image,
    no_images,
    sub_folders,
)
from dptrain.data.image_files.tar_members import ImageFile
from dptrain.data.preprocessing.classes import Names, listed
from dptrain.data.preprocessing.images import Adapter
from dptrain.data.preprocessing.names import printable, same_form
from dptrain.data.preprocessing.preprocessing import Preprocessing
from dptrain.data.spec import Request, escape
from dptrain.errors import UserError
from dptrain.network.layers import Shape

_DIGEST_BYTES = 4096
VALIDATION_NAMES = ("val", "valid", "validation")
"""Names of the folder next to ``train`` that is used for validation; the first that exists."""
TEST_NAMES = ("test", *VALIDATION_NAMES)
"""Names of the folder next to ``train`` that is used for the test; the first that exists."""
TRAINING_NAMES = ("train", "training")
"""Names, in lower case, that a folder of classes has if it is meant as a split."""
SPLIT_NAMES = (*TRAINING_NAMES, *TEST_NAMES, "testing", "dev", "eval")
"""Names, in lower case, of which two folders of classes are meant as splits."""

SPLITS = ("training", "test", "validation")
"""Names of the splits, in the order of `Dataset.splits`."""


@dataclass(frozen=True, repr=False)
class ImageSamples(Samples):
    """Image files, each decoded and resized whenever it is read.

    Attributes:
        paths: one for each sample, in folders or in archives.
        targets: in the type that the loss reads.
        preprocessing: of the model.
        counts: counts the rules by which images are decoded; None if they are not counted.
    """

    paths: tuple[ImageFile, ...]
    targets: NDArray[Any]
    preprocessing: Preprocessing
    counts: RuleCounts | None = None

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def decodes(self) -> bool:
        return True

    def known_targets(self) -> NDArray[Any]:
        return self.targets

    def subset(self, indices: NDArray[np.int64]) -> ImageSamples:
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
        path = self.paths[index]
        self._count(path, read_image(path, self.preprocessing, x))

    def _count(self, path: ImageFile, decoded: DecodedImage) -> None:
        if self.counts is not None:
            self.counts.add(path, decoded.rules)

    def read_pixels(self, index: int, x: NDArray[np.uint8]) -> bool:
        """Decode one image to 8-bit pixels (1, C, H, W); return False if it must be resized."""
        path = self.paths[index]
        decoded = decode_file(path, grey=self.preprocessing.is_grey)
        self._count(path, decoded)
        image = decoded.pixels
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
            name = printable("/".join(Path(str(path)).parts[-2:]))
            try:
                with path.open("rb") as file:
                    start = file.read(_DIGEST_BYTES)
                    size = file.seek(0, os.SEEK_END)
                yield f"{name}\0{size}\0".encode() + start
            except OSError as error:
                raise UserError(f"{path} cannot be read: {error.strerror or error}") from None
        yield self.targets[indices].tobytes()


def read_image(
    path: ImageFile, preprocessing: Preprocessing, x: NDArray[np.float32]
) -> DecodedImage:
    """Decode an image file and convert it to the network's input `x`, (1, C, H, W)."""
    decoded = decode_file(path, grey=preprocessing.is_grey)
    adapter = _adapter(preprocessing, decoded.pixels.shape[1:])
    adapter.check(str(path))
    adapter(decoded.pixels, x)
    return decoded


def _adapter(preprocessing: Preprocessing, shape: Shape) -> Adapter:
    """Return what converts an image of a file, uint8 of `shape`, to the network's input."""
    # 255 is white in a file, even if it was another value in the training data.
    return preprocessing.adapter(shape, np.dtype(np.uint8), white=255)


@dataclass(frozen=True)
class ImageFolder:
    """The images of one split.

    Attributes:
        classes: names in alphabetical order, in the form of `same_form`.
        paths: image files, class by class.
        labels: int64, one for each file.
    """

    classes: tuple[str, ...]
    paths: list[Path]
    labels: NDArray[np.int64]


def class_folders(folder: Path) -> dict[str, list[Path]]:
    """Return the folders of each class by its name, in alphabetical order.

    Two folders whose names differ in the form of their characters alone are one class.
    """
    found: dict[str, list[Path]] = {}
    for inner in sorted(sub_folders(folder), key=lambda inner: same_form(inner.name)):
        found.setdefault(printable(same_form(inner.name)), []).append(inner)
    for name, folders in found.items():
        if len({same_form(inner.name) for inner in folders}) > 1:
            raise UserError(
                f"{folder} has folders whose names differ only in bytes that are not UTF-8, "
                f"'{name}'; rename one"
            )
    return found


def list_images(folder: Path, left_out: LeftOut) -> ImageFolder:
    """Return the images in the folder of each class and in its sub-folders.

    Args:
        folder: has a folder for each class.
        left_out: counts the files that are not used.
    """
    folders = class_folders(folder)
    if not folders:
        raise UserError(f"{folder} has no folders; expected one folder of images for each class")
    _refuse_one_outer_folder(folder, folders)
    for path in sorted(folder.iterdir()):
        if not path.is_dir() or path.name.startswith("."):
            count_unused(path, left_out)
    paths: list[Path] = []
    labels: list[int] = []
    for label, inners in enumerate(folders.values()):
        here = LeftOut(inners[0])
        found = [path for inner in inners for path in find_images(inner, left_out, folder)]
        if not found:
            find_images(inners[0], here, folder)
            raise no_images(inners[0], here)
        paths += found
        labels += [label] * len(found)
    return ImageFolder(tuple(folders), paths, np.array(labels, dtype=np.int64))


def _refuse_one_outer_folder(folder: Path, folders: Mapping[str, list[Path]]) -> None:
    """Raise `UserError` if the folders of classes are one level deeper."""
    (inner, *others), *_ = folders.values()
    if len(folders) > 1 or others or len(sub_folders(inner)) < 2 or _has_images(inner):
        return
    raise UserError(
        f"{folder} has one folder, {inner.name}, which contains {len(sub_folders(inner))} folders; "
        f"if they are the classes, use folder:{escape(str(inner), commas=False)}"
    )


def split_folders(folder: Path) -> list[Path]:
    """Return the folders for training, for the test and, if there is a third, for validation.

    Returns:
        An empty list if the images are not split.

    Raises:
        UserError: a folder looks like that of a split, but its name or its neighbours do not.
    """
    train = folder / "train"
    if train.is_dir() and sub_folders(train):
        test = next((folder / name for name in TEST_NAMES if (folder / name).is_dir()), None)
        if test is not None:
            others = (folder / name for name in VALIDATION_NAMES if test.name == "test")
            return [train, test, *[other for other in others if other.is_dir()][:1]]
    outer = [inner for inner in sub_folders(folder) if sub_folders(inner)]
    named = [inner for inner in outer if inner.name.lower() in SPLIT_NAMES]
    found = ""
    if len(named) > 1:
        found = f"{named[0]} and {named[1].name} have folders in them"
    for inner in named:
        if inner.name.lower() in TRAINING_NAMES and not _has_images(inner):
            found = f"{inner} has no images but folders"
    if found:
        raise UserError(
            f"{found}; for images that are split, expected {train} and one of "
            f"{', '.join(TEST_NAMES)} next to it; if it is the folder of a class, rename it"
        )
    return []


def _has_images(folder: Path) -> bool:
    """Return True if a folder itself has an image."""
    return any(path.is_file() and is_image(path) for path in folder.iterdir())


def _splits(
    request: Request, folder: Path, left_out: LeftOut
) -> tuple[tuple[str, ...], list[tuple[list[Path], NDArray[np.int64]]], bool]:
    """Return class names, images and labels of each split, and whether they were split."""
    parts = split_folders(folder)
    if not parts:
        found = list_images(folder, left_out)
        rows = split_rows(request, len(found.paths), str(folder), found.labels)
        paths, labels = found.paths, found.labels
        return found.classes, [([paths[row] for row in part], labels[part]) for part in rows], False
    for path in sorted(folder.iterdir()):
        if path not in parts:
            count_unused(path, left_out, NO_SPLIT)
    splits = [list_images(part, left_out) for part in parts]
    classes = splits[0].classes
    for part, split in zip(parts[1:], splits[1:], strict=True):
        if split.classes != classes:
            missing = [name for name in classes if name not in split.classes]
            unknown = [name for name in split.classes if name not in classes]
            raise UserError(
                f"{part} has classes {listed(split.classes)}; expected those of "
                f"{parts[0].name}, {listed(classes)}"
                + (f"; missing: {listed(missing)}" if missing else "")
                + (f"; unknown: {listed(unknown)}" if unknown else "")
            )
    return classes, [(split.paths, split.labels) for split in splits], True


def open_folder(request: Request) -> Dataset:
    """Open image files: ``DIR/class/…``, or ``DIR/train/class/…`` and ``DIR/test/class/…``.

    The names of the folders are the names of the classes; images in their sub-folders belong to
    them. Files that are left out are counted in the notes of the data set. A folder ``val``,
    ``valid`` or ``validation`` next to ``train`` and ``test`` is the validation split; without
    ``test`` it is the test split. Without a split dptrain chooses a fifth of the images for the
    test, always the same. A network of the zoo gets an output for each class, and three input
    channels if one of the images has colours, else one. A network of the user's own with one input
    channel reads images as grey, one with three as colour. Images are resized to the network's
    height and width.
    """
    folder = request.existing("directory")
    check_network(request, str(folder))
    left_out = LeftOut(folder)
    classes, splits, has_split = _splits(request, folder, left_out)
    return dataset_of_images(
        request,
        splits,
        str(folder),
        has_split=has_split,
        names=dict(enumerate(classes)),
        notes=tuple(filter(None, [str(left_out)])),
    )


def check_network(request: Request, where: str) -> None:
    """Raise `UserError` if a network cannot read image files."""
    shape = request.network.input_shape
    if request.preprocessing is not None:
        check_takes_images(request.preprocessing, where)
    if len(shape) != 3 or shape[0] not in (1, 3):
        raise UserError(
            f"{where} has images, but {request.network.label} takes {shape}; "
            "expected (1, H, W) or (3, H, W)"
        )


def dataset_of_images(
    request: Request,
    splits: Sequence[tuple[Sequence[ImageFile], NDArray[Any]]],
    where: str,
    *,
    has_split: bool,
    names: Names | None = None,
    notes: tuple[str, ...] = (),
) -> Dataset:
    """Make a data set of image files.

    Args:
        request: for which network, and how; `check_network` has accepted it.
        splits: image files and int64 labels for training, test and perhaps validation.
        where: name of the data, for messages.
        has_split: True if the data set defines its test split.
        names: of the labels, if the data has them.
        notes: as of `Dataset`.
    """
    channels, *size = request.network.input_shape
    if request.network.family is not None and request.preprocessing is None:
        channels = 3 if any_has_colour([path for paths, _ in splits for path in paths]) else 1
    all_labels = [labels for _, labels in splits]
    request = adapt_request(
        request, (channels, *size), all_labels, where, names=names, are_labels=True
    )
    network, shape = request.network, request.network.input_shape
    preprocessing = preprocessing_for(request, None, np.dtype(np.uint8))
    parts = [
        ImageSamples(
            tuple(paths),
            targets_of(request, preprocessing, labels, where),
            preprocessing,
        )
        for paths, labels in splits
    ]
    train, test, *validation = parts
    colour = "grey" if preprocessing.is_grey else "colour"
    counts = f"{count_text(len(train), len(test), *map(len, validation))} samples"
    if not (has_split or request.split):
        counts = f"{len(test):,} samples"
    found = {name: np.unique(part.targets) for name, part in zip(SPLITS, parts, strict=False)}
    return Dataset(
        name=request.name,
        train=train,
        test=test,
        input_shape=shape,
        targets=network.loss.targets,
        classes=preprocessing.classes,
        description=(
            f"images of {where}, {len(np.unique(np.concatenate(all_labels)))} classes; {counts}; "
            f"read as {colour}, "
            f"{'cropped' if preprocessing.fit == 'crop' else 'resized'} to {shape[1]}×{shape[2]}"
        ),
        num_outputs=network.num_outputs,
        preprocessing=preprocessing,
        has_split=has_split,
        validation=validation[0] if validation else None,
        notes=(*notes, *unseen_notes(found, preprocessing, network)),
    )


def check_takes_images(preprocessing: Preprocessing, where: str) -> None:
    """Raise `UserError` if a network that was trained on other data cannot read image files."""
    if not preprocessing.has_pixels:
        raise UserError(
            f"{where} contains images, but the network was trained on the "
            f"{preprocessing.stored_dtype} numbers of {preprocessing.trained_on}; expected "
            f"{preprocessing.expected}"
        )
    shape = preprocessing.stored_shape or preprocessing.input_shape
    if len(shape) != 3 or shape[0] not in (1, 3):
        raise UserError(
            f"{where} contains images, but the network was trained on samples of shape {shape}; "
            f"expected {preprocessing.expected}"
        )
