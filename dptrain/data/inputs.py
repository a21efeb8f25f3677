"""Raw samples for a trained network: files, preprocessed as the model requires.

Targets are not needed. If a file contains them, they are read as text.

The model's saved preprocessing decides about everything. Inputs that disagree with it are refused,
because a network computes a prediction for any numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptrain.data.base import Samples
from dptrain.data.image_files.listing import LeftOut, find_images, is_image, no_images
from dptrain.data.preprocessing.classes import Classes, Names, are_texts, labels_in
from dptrain.data.preprocessing.images import Adapter
from dptrain.data.preprocessing.layout import channels_first
from dptrain.data.preprocessing.names import find_path, printable, same_form
from dptrain.data.preprocessing.preprocessing import Preprocessing
from dptrain.data.preprocessing.rows import RowSamples
from dptrain.data.preprocessing.scale import check_against_training
from dptrain.data.sources.arrays import left_out_arrays, map_npy, names_in, opened_npz
from dptrain.data.sources.csv_file import read_columns
from dptrain.data.sources.folder import check_takes_images, read_image
from dptrain.data.sources.table import check_takes_tables, read_targets
from dptrain.data.spec import CLASSES, example_of_option
from dptrain.data.stored import StoredInputs
from dptrain.errors import UserError
from dptrain.files import require_regular
from dptrain.notes import show_notes

EXPECTED = "expected a .npy, .npz or .csv file, an image, or a folder of images"
ARRAY_NAMES = ("x", "x_test")
ARRAY_SUFFIXES = (".npy", ".npz", ".csv")


@dataclass(frozen=True)
class RawInputs:
    """Samples whose targets are not needed.

    Attributes:
        samples: their `read` fills x and leaves y unchanged.
        names: identifies each sample: a file relative to its folder, or the number of its row,
            from 0.
        targets: texts for each sample, empty if they are not known: one, or one for each value that
            is predicted; None if no target is known.
        notes: as of `Dataset`.
    """

    samples: Samples
    names: Sequence[str]
    targets: Sequence[Sequence[str]] | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, repr=False)
class ArrayInputs(Samples):
    """Rows of an array, in memory or memory-mapped, from row `first` on."""

    inputs: StoredInputs
    adapter: Adapter
    preprocessing: Preprocessing
    where: str
    first: int = 0

    def __len__(self) -> int:
        return self.inputs.shape[0] - self.first

    def read(self, indices: NDArray[np.int64], x: NDArray[np.float32], y: NDArray[Any]) -> None:
        rows = indices + self.first
        self.adapter(self.inputs[rows], x)
        self.preprocessing.check_values(x, rows, self.where)


@dataclass(frozen=True, repr=False)
class ImageInputs(Samples):
    """Image files, decoded when they are read."""

    paths: tuple[Path, ...]
    preprocessing: Preprocessing

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def decodes(self) -> bool:
        return True

    def read(self, indices: NDArray[np.int64], x: NDArray[np.float32], y: NDArray[Any]) -> None:
        for row, index in enumerate(indices):
            read_image(self.paths[index], self.preprocessing, x[row : row + 1])


def open_inputs(
    source: Path,
    preprocessing: Preprocessing,
    names: Names | None = None,
    *,
    outputs: int | None = None,
) -> RawInputs:
    """Open samples to predict from.

    Args:
        source: ``.npy`` or ``.npz`` (array x, x_test, or the only one) of images (n, H, W),
            (n, H, W, C), (n, C, H, W) or of vectors (n, F); a ``.csv`` file with the columns that
            the model was trained on; an image; a folder of images, nested or not. Targets are the
            array y or y_test of a .npz file, the target column of a .csv file, or the outermost
            folder of an image whose name is a class of the model.
        preprocessing: of the model.
        names: of the labels in the source; None if it has names for them, or integers.
        outputs: number of values that the network predicts; None if it is not known. An array y
            with another number of columns has no targets.

    Raises:
        UserError: the source does not exist, is damaged, or does not match the model, or its labels
            do not match the model's classes.
    """
    try:
        source = find_path(source)
        if not source.exists():
            raise UserError(f"{source} does not exist; {EXPECTED}")
        found = _open(source, preprocessing, names, outputs)
    except OSError as error:
        raise UserError(
            f"{error.filename or source} cannot be read: {error.strerror or error}"
        ) from None
    show_notes(found.notes)
    return found


def _open(
    source: Path, preprocessing: Preprocessing, names: Names | None, outputs: int | None
) -> RawInputs:
    if source.is_dir():
        return _open_images(source, preprocessing)
    require_regular(source)
    suffix, where = source.suffix.lower(), str(source)
    if suffix not in ARRAY_SUFFIXES and is_image(source):
        check_takes_images(preprocessing, where)
        return RawInputs(ImageInputs((source,), preprocessing), (printable(source.name),))
    if suffix == ".csv":
        return _open_table(source, preprocessing, names)
    if suffix == ".npy":
        return _open_array(map_npy(source), preprocessing, where)
    if suffix != ".npz":
        raise UserError(
            f"{source} has the type '{suffix or 'none'}', which dptrain cannot read; {EXPECTED}"
        )
    stored, y, own, unused = _read_npz(source)
    found, targets, problem = _open_array(stored, preprocessing, where), None, ""
    if y is not None:
        problem = _problem_of_targets(y, len(stored), preprocessing, outputs)
        if not problem:
            targets = _target_texts(y, preprocessing, names or own, where)
    return replace(found, targets=targets, notes=(*filter(None, [unused, problem]), *found.notes))


def _open_array(stored: NDArray[Any], preprocessing: Preprocessing, where: str) -> RawInputs:
    expected = preprocessing.stored_shape or preprocessing.input_shape
    array: NDArray[Any] = channels_first(stored, where, expected)
    preprocessing.check(array.shape[1:], array.dtype, where)
    notes = check_against_training(array, preprocessing, where)
    if preprocessing.kind == "table":
        array = preprocessing.rows.arrange(preprocessing.standardise(array))
    adapter = preprocessing.adapter(array.shape[1:], array.dtype)
    rows = tuple(str(row) for row in range(len(array)))
    return RawInputs(ArrayInputs(array, adapter, preprocessing, where), rows, notes=notes)


def _open_table(source: Path, preprocessing: Preprocessing, names: Names | None) -> RawInputs:
    """Open the rows of a table that have a complete sample."""
    where, layout = str(source), preprocessing.rows
    check_takes_tables(preprocessing, where)
    table = preprocessing.standardise(read_columns(source, preprocessing.columns))
    columns = [
        read_targets(source, name, preprocessing.horizon) for name in preprocessing.target_names
    ]
    known = [column for column in columns if column is not None]
    targets = list(zip(*known, strict=True)) if len(known) == len(columns) else None
    if targets is not None and preprocessing.classes is not None:
        classes = Classes(preprocessing.classes)
        targets = [(name,) for name in _names_of_texts(known[0], classes, names, where)]
    if len(table) <= layout.depth:
        raise UserError(
            f"{where} has {len(table)} rows; expected at least {layout.depth + 1}, because a "
            f"sample is {layout}"
        )
    inputs = table if layout.is_plain else RowSamples(table, layout)
    rows = np.arange(layout.depth, len(table), dtype=np.int64)
    adapter = preprocessing.adapter(tuple(inputs.shape[1:]), inputs.dtype)
    return RawInputs(
        ArrayInputs(inputs, adapter, preprocessing, where, layout.depth),
        tuple(map(str, rows)),
        None if targets is None else targets[layout.depth :],
    )


def _open_images(source: Path, preprocessing: Preprocessing) -> RawInputs:
    check_takes_images(preprocessing, str(source))
    left_out = LeftOut(source)
    paths = tuple(find_images(source, left_out))
    if not paths:
        raise no_images(source, left_out)
    names = tuple(printable(path.relative_to(source).as_posix()) for path in paths)
    classes = Classes(preprocessing.classes or ())
    targets = [_class_of(path, source, classes) for path in paths]
    return RawInputs(
        ImageInputs(paths, preprocessing),
        names,
        [(name,) for name in targets] if any(targets) else None,
        tuple(filter(None, [str(left_out)])),
    )


def _class_of(path: Path, source: Path, classes: Classes) -> str:
    """Return the class of an image: the outermost folder with the name of one, or "".

    The name itself precedes another form of the same integer: 2024/03/7/a.png has class 7.
    """
    folders = (*path.relative_to(source).parts[:-1], source.absolute().name)
    names = [printable(same_form(name)) for name in folders]
    indices = [(name, classes.find(name)) for name in names]
    found = [(name, classes.name(index)) for name, index in indices if index is not None]
    exact = [own for name, own in found if own == name]
    return (exact or [own for _, own in found] or [""])[0]


def _problem_of_targets(
    y: NDArray[Any], count: int, preprocessing: Preprocessing, outputs: int | None
) -> str:
    """Return why an array y has no targets of the samples; "" if it has."""
    left_out = f"targets are left out, because y has shape {y.shape}"
    has_names = preprocessing.classes is not None and are_texts(y)
    if y.dtype.kind not in "iufb" and not has_names:
        return f"targets are left out, because y is of type {y.dtype}, not numbers"
    if not y.shape or len(y) != count:
        return f"{left_out} for {count:,} samples"
    width = math.prod(y.shape[1:])
    if preprocessing.classes is None and (not width or outputs not in (None, width)):
        some = "1 value" if outputs == 1 else f"{outputs or 1} values"
        return f"{left_out}, but the network predicts {some} for each sample"
    return ""


def _target_texts(
    y: NDArray[Any], preprocessing: Preprocessing, names: Names | None, where: str
) -> list[tuple[str, ...]]:
    """Return targets as text: the name of a class, or numbers, for each sample."""
    if preprocessing.classes is None:
        return [tuple(f"{value:.6g}" for value in row) for row in y.reshape(len(y), -1)]
    classes = Classes(preprocessing.classes)
    if are_texts(y):
        return [(name,) for name in _names_of_texts(list(map(str, y.flat)), classes, names, where)]
    labels = labels_in(y, where, names)
    return [(name,) for name in classes.names_of(labels, where, _example)]


def _names_of_texts(
    texts: Sequence[str], classes: Classes, names: Names | None, where: str
) -> list[str]:
    """Return the names of the classes of labels in a table; "" for text that is no label."""
    if not any(map(_is_whole, texts)):
        indices = [classes.find(text) for text in texts]
        return ["" if index is None else classes.name(index) for index in indices]
    numbers = [float(text) if _is_whole(text) else None for text in texts]
    known = np.array([number for number in numbers if number is not None], np.float64)
    found = iter(classes.names_of(labels_in(known, where, names), where, _example))
    return ["" if number is None else next(found) for number in numbers]


def _is_whole(text: str) -> bool:
    try:
        return float(text).is_integer()
    except (ValueError, OverflowError):
        return False


def _example(names: Names) -> str:
    """Return how a user of ``dptrain predict`` states the names of labels."""
    return f"--classes {example_of_option(names)}"


def _read_npz(source: Path) -> tuple[NDArray[Any], NDArray[Any] | None, Names | None, str]:
    """Return inputs, targets and the names of labels if the file has them, and a line about other
    arrays.
    """
    expected = f"expected an array {' or '.join(ARRAY_NAMES)}, or a single one"
    with opened_npz(source, expected) as file:
        names = names_in(file, str(source))
        others = [name for name in file.files if name != CLASSES]
        found = [name for name in ARRAY_NAMES if name in file] or others
        if len(found) == 1 or found[:1] == ["x"]:
            name = f"y{found[0].removeprefix('x')}"
            has_targets = found[0] in ARRAY_NAMES and name in file
            y = np.asarray(file[name]) if has_targets else None
            used = {found[0], *([name] if has_targets else []), *([CLASSES] if names else [])}
            unused = left_out_arrays(set(file.files) - used)
            return np.asarray(file[found[0]]), y, names, unused
    raise UserError(f"{source} has {', '.join(found) or 'nothing'}; {expected}")
