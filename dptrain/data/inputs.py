"""New samples for a trained network: files without targets, brought to it as its data was.

What the run was trained on decides: its pictures' white and colours, resize or crop, the mean and
deviation of its columns. Where that data can be looked at, inputs that disagree with it are
refused, for a network answers anything.
"""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptrain.data import SOURCES
from dptrain.data import irradiance as field
from dptrain.data.arrays import DAMAGE, channels_first, map_npy, opened_npz
from dptrain.data.base import Samples
from dptrain.data.cifar10 import CLASSES
from dptrain.data.digits import WHITE
from dptrain.data.folder import SUFFIXES, class_folders, decode, is_picture, is_split
from dptrain.data.images import Adapter, pixels
from dptrain.data.spec import Request, parse
from dptrain.data.table import Columns, read_training
from dptrain.errors import UserError
from dptrain.network.layers import Shape
from dptrain.network.network import Network

EXPECTED = "expected a .npy, .npz or .csv file, a picture, or a folder of pictures"
ARRAY_NAMES = ("x", "x_test")
_ROUNDING = 1e-4


@dataclass(frozen=True)
class Inputs:
    """Samples without targets.

    Attributes:
        samples: their `read` fills x and leaves y alone.
        names: what identifies each: a file relative to its folder, or the number of its row,
            from 0.
        classes: names of the network's outputs, in the words of the data it was trained on; None
            where that has no names but numbers, or has gone.
    """

    samples: Samples
    names: Sequence[str]
    classes: tuple[str, ...] | None


@dataclass(frozen=True)
class _Rule:
    """How the data of a run was brought to its network.

    Attributes:
        request: what the run was trained on.
        shape: of a stored sample, (C, H, W) or (F,); None where it is not known.
        byte: whether its numbers were 8-bit pixels; None where it is not known.
        white: the 8-bit value that becomes 1.
        columns: what standardises tables; None for other data.
    """

    request: Request
    shape: Shape | None = None
    byte: bool | None = None
    white: int = 255
    columns: Columns | None = None

    @property
    def data(self) -> str:
        """What the run was trained on, for messages."""
        request = self.request
        return f"{request.name}:{request.path}" if request.path else request.name

    @property
    def grey(self) -> bool:
        """Whether picture files are read as grey: as the data was, else as the network is."""
        return (self.shape or self.request.network.input_shape)[0] == 1

    def adapter(self, source: Shape, dtype: np.dtype[Any], *, white: int) -> Adapter:
        """What brings samples of this shape and type to the network."""
        target = self.request.network.input_shape
        if self.request.name == "irradiance":
            return field.standardise(source, target)
        crop = self.request.options.get("fit") == "crop"
        return pixels(source, target, dtype=dtype, crop=crop, white=white)

    def check(self, shape: Shape, dtype: np.dtype[Any], where: str) -> None:
        """`UserError` where inputs are of another kind than the data was."""
        grey = self.shape is not None and len(self.shape) == 3 and self.grey
        if grey and len(shape) == 3 and shape[0] == 3:
            raise UserError(
                f"{where} has colours, but the network was trained on the grey pictures of "
                f"{self.data}; make them grey"
            )
        if self.byte is False and dtype == np.uint8:
            raise UserError(
                f"{where} has 8-bit pixels, but the network was trained on the numbers of "
                f"{self.data}, which are not; convert them as those were"
            )

    def check_values(self, x: NDArray[np.float32], names: Sequence[str], where: str) -> None:
        """`UserError` where the network would see what it cannot have been trained on."""
        most = np.abs(x).max(axis=tuple(range(1, x.ndim)))
        if not np.isfinite(most).all():
            name = names[int(np.argmin(np.isfinite(most)))]
            raise UserError(f"{where}: sample {name} has values that are not finite")
        if self.byte and most.max(initial=0.0) > 1.0 + _ROUNDING:
            name = names[int(most.argmax())]
            raise UserError(
                f"{where}: sample {name} is too bright or too dark; the network was trained on "
                f"pixels 0 to {self.white}, expected uint8 like them, or floats from -1 to 1"
            )


@dataclass(frozen=True)
class ArrayInputs(Samples):
    """Rows of an array, in memory or mapped."""

    inputs: NDArray[Any]
    adapter: Adapter
    rule: _Rule
    where: str

    def __len__(self) -> int:
        return len(self.inputs)

    def read(self, indices: NDArray[np.int64], x: NDArray[np.float32], y: NDArray[Any]) -> None:
        self.adapter(self.inputs[indices], x)
        self.rule.check_values(x, [str(index) for index in indices], self.where)


@dataclass(frozen=True)
class PictureInputs(Samples):
    """Picture files, decoded when read; white is 255 in them, whatever it was in the data."""

    paths: tuple[Path, ...]
    rule: _Rule

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, indices: NDArray[np.int64], x: NDArray[np.float32], y: NDArray[Any]) -> None:
        for row, index in enumerate(indices):
            path = self.paths[index]
            picture = decode(path, grey=self.rule.grey)
            adapter = self.rule.adapter(picture.shape[1:], picture.dtype, white=255)
            adapter.check(str(path))
            adapter(picture, x[row : row + 1])


def open_inputs(source: Path, network: Network, trained_on: str, *, seed: int) -> Inputs:
    """Open samples to predict from.

    Args:
        source: ``.npy`` or ``.npz`` (array x, x_test, or the only one) of pictures (n, H, W),
            (n, H, W, C), (n, C, H, W) or of tables (n, F); a ``.csv`` with the columns that the
            run was trained on; a picture; a folder of pictures, nested or not.
        network: trained.
        trained_on: data spec of the run; its files need not be there still, but for csv.
        seed: of the run.

    Raises:
        UserError: whatever a user can get wrong, in one line.
    """
    request = parse(trained_on, SOURCES, network, seed)
    try:
        if not source.exists():
            raise UserError(f"{source} does not exist; {EXPECTED}")
        rule, classes = _rule(request), _classes(request)
        if source.is_dir() or is_picture(source):
            return _open_pictures(source, rule, classes)
        return _open_array(source, rule, classes)
    except OSError as error:
        raise UserError(
            f"{error.filename or source} cannot be read: {error.strerror or error}"
        ) from None


def _open_array(source: Path, rule: _Rule, classes: tuple[str, ...] | None) -> Inputs:
    suffix, where = source.suffix.lower(), str(source)
    if suffix == ".csv":
        array: NDArray[Any] = _read_csv(source, rule)
    elif suffix == ".npy":
        array = channels_first(map_npy(source), where)
    elif suffix == ".npz":
        array = channels_first(_read_npz(source), where)
    else:
        raise UserError(f"{source} is of no kind that can be read; {EXPECTED}")
    if rule.columns is not None:
        array = _standardised(array, rule.columns, where)
    rule.check(array.shape[1:], array.dtype, where)
    adapter = rule.adapter(array.shape[1:], array.dtype, white=rule.white)
    adapter.check(where)
    names = tuple(str(row) for row in range(len(array)))
    return Inputs(ArrayInputs(array, adapter, rule, where), names, classes)


def _open_pictures(source: Path, rule: _Rule, classes: tuple[str, ...] | None) -> Inputs:
    if rule.columns is not None or rule.byte is False:
        raise UserError(
            f"{source} is a picture or a folder of them, but the network was trained on the "
            f"numbers of {rule.data}; expected numbers like them"
        )
    shape = rule.shape or rule.request.network.input_shape
    if len(shape) != 3 or shape[0] not in (1, 3):
        raise UserError(
            f"{source} has pictures, but the network was trained on samples of shape {shape}; "
            "expected a .npy or .npz file"
        )
    if source.is_file():
        return Inputs(PictureInputs((source,), rule), (_printable(source.name),), classes)
    paths = tuple(sorted(path for path in source.rglob("*") if _is_among(path, source)))
    if not paths:
        raise UserError(f"{source} has no pictures; expected {', '.join(SUFFIXES)}")
    names = tuple(_printable(path.relative_to(source).as_posix()) for path in paths)
    return Inputs(PictureInputs(paths, rule), names, classes)


def _is_among(path: Path, folder: Path) -> bool:
    hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
    return not hidden and is_picture(path)


def _printable(name: str) -> str:
    """A file name may hold bytes that are no UTF-8, and no text file could take them."""
    return name.encode("utf-8", "replace").decode("utf-8")


def _read_csv(source: Path, rule: _Rule) -> NDArray[np.float64]:
    if rule.columns is None:
        raise UserError(
            f"{source} has named columns, but the network was trained on {rule.request.name}, "
            "which has none; save the numbers as .npy"
        )
    return rule.columns.read(source)


def _read_npz(source: Path) -> NDArray[Any]:
    expected = f"expected an array {' or '.join(ARRAY_NAMES)}, or a single one"
    with opened_npz(source, expected) as file:
        found = [name for name in ARRAY_NAMES if name in file] or file.files
        if len(found) == 1 or found[:1] == ["x"]:
            return np.asarray(file[found[0]])
    raise UserError(f"{source} has {', '.join(found) or 'nothing'}; {expected}")


def _standardised(array: NDArray[Any], columns: Columns, where: str) -> NDArray[np.float32]:
    if array.shape[1:] != (len(columns.names),):
        raise UserError(
            f"{where} has samples of shape {array.shape[1:]}, but the network was trained on "
            f"{len(columns.names)} columns: {', '.join(columns.names)}"
        )
    return columns.standardise(array)


def _rule(request: Request) -> _Rule:
    """How training brought data to the network, from as little of that data as it takes."""
    name, path = request.name, Path(request.path)
    if name == "digits":
        return _Rule(request, (1, 8, 8), True, white=WHITE)
    if name == "cifar10":
        return _Rule(request, (3, 32, 32), True)
    if name == "mnist":
        return _Rule(request, (1, 28, 28), True)
    if name == "folder":
        return _Rule(request, None, True)
    if name in ("npy", "npz"):
        stored = _stored(request)
        return _Rule(request) if stored is None else _Rule(request, *stored)
    if name == "csv":
        if not path.exists():
            raise UserError(
                f"{path} has gone, and without the data that the network was trained on new "
                "inputs cannot be standardised; put it back, or go to where it lies"
            )
        return _Rule(request, columns=read_training(request)[1])
    if name == "irradiance":
        return _Rule(request, None, False)
    return _Rule(request)


def _stored(request: Request) -> tuple[Shape, bool] | None:
    """Shape of a sample in the user's own arrays, and whether it is 8-bit; None if not there."""
    try:
        if request.name == "npy":
            array = map_npy(Path(request.path.split(",")[0]))
        else:
            array = _header(Path(request.path))
        array = channels_first(array, request.path)
    except DAMAGE:
        return None
    return array.shape[1:], array.dtype == np.uint8


def _header(path: Path) -> NDArray[Any]:
    """An array with the shape and the type of the inputs in an npz file, and no memory."""
    with zipfile.ZipFile(path) as archive:
        name = "x_train.npy" if "x_train.npy" in archive.namelist() else "x.npy"
        with archive.open(name) as file:
            formats = np.lib.format
            first = formats.read_magic(file) == (1, 0)
            read = formats.read_array_header_1_0 if first else formats.read_array_header_2_0
            shape, _, dtype = read(file)
    return np.broadcast_to(np.zeros((), dtype), shape)


def _classes(request: Request) -> tuple[str, ...] | None:
    """A name for every output; outputs that the data has no class for keep their number."""
    width = request.network.num_outputs
    if request.network.loss.targets != "classes":
        return None
    known: Sequence[str] = ()
    if request.name == "cifar10":
        known = CLASSES
    elif request.name == "folder":
        folder = Path(request.path)
        folder = folder / "train" if is_split(folder) else folder
        known = [inner.name for inner in class_folders(folder)] if folder.is_dir() else ()
    names = [_printable(name) for name in known[:width]]
    return tuple(names + [str(i) for i in range(len(names), width)]) if names else None
