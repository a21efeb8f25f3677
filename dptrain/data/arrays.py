"""The user's own arrays: ``npz:FILE`` in memory, ``npy:X,Y`` mapped from files of any size."""

from __future__ import annotations

import tokenize
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.npyio import NpzFile
from numpy.typing import NDArray

from dptrain.data.base import Dataset
from dptrain.data.images import pixels
from dptrain.data.spec import Request, existing
from dptrain.data.stored import StoredSamples, make_dataset, split_rows
from dptrain.data.targets import targets_for
from dptrain.errors import UserError

SPLIT_NAMES = ("x_train", "y_train", "x_test", "y_test")
WHOLE_NAMES = ("x", "y")
DAMAGE = (
    ValueError, OSError, EOFError, TypeError, KeyError, RuntimeError, SyntaxError, MemoryError,
    OverflowError, zipfile.BadZipFile, zlib.error, tokenize.TokenError,
)  # fmt: skip
"""What NumPy and zipfile raise on files that are damaged, or do not fit in memory."""


def open_npz(request: Request) -> Dataset:
    """Arrays ``x_train``, ``y_train``, ``x_test``, ``y_test``, or ``x`` and ``y``."""
    path = request.existing("file")
    arrays = _read_npz(path)
    if "x" in arrays:
        train = test = _check(arrays["x"], arrays["y"], f"x and y of {path}")
        rows = _split(request, train[1], str(path))
    else:
        train, test = (
            _check(arrays[f"x_{split}"], arrays[f"y_{split}"], f"x_{split} and y_{split} of {path}")
            for split in ("train", "test")
        )
        rows = np.arange(len(train[0])), np.arange(len(test[0]))
        if train[0].shape[1:] != test[0].shape[1:]:
            raise UserError(
                f"{path}: x_train has samples of shape {train[0].shape[1:]} and x_test of "
                f"{test[0].shape[1:]}; expected the same"
            )
    return _dataset(request, train, test, rows, str(path))


def open_npy(request: Request) -> Dataset:
    """Two ``.npy`` files, inputs and targets; the inputs are mapped and never read as a whole."""
    names = request.path.split(",")
    if len(names) != 2:
        raise UserError(f"npy:{request.path} names {len(names)} files; expected npy:X.npy,Y.npy")
    x, y = (map_npy(existing(Path(name), "file")) for name in names)
    both = _check(x, np.asarray(y), " and ".join(names))
    return _dataset(request, both, both, _split(request, both[1], names[0]), names[0], lazy=True)


def _dataset(
    request: Request,
    train: tuple[NDArray[Any], NDArray[Any]],
    test: tuple[NDArray[Any], NDArray[Any]],
    rows: tuple[NDArray[np.int64], NDArray[np.int64]],
    where: str,
    *,
    lazy: bool = False,
) -> Dataset:
    network = request.network
    crop = request.choice("fit", ("resize", "crop")) == "crop"
    splits = []
    for (x, y), chosen in zip((train, test), rows, strict=True):
        adapter = pixels(x.shape[1:], network.input_shape, dtype=x.dtype, crop=crop)
        splits.append(StoredSamples(x, targets_for(y, network, where), chosen, adapter))
    classes = None
    if network.loss.targets == "classes":
        most = max(int(samples.targets.max()) for samples in splits)
        classes = tuple(str(label) for label in range(most + 1))
    return make_dataset(
        request, *splits, origin=f"arrays of {where}", where=where, classes=classes, lazy=lazy
    )


def _split(
    request: Request, y: NDArray[Any], where: str
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    labels = y if y.ndim == 1 and request.network.loss.targets == "classes" else None
    return split_rows(len(y), where, labels)


def _check(x: NDArray[Any], y: NDArray[Any], where: str) -> tuple[NDArray[Any], NDArray[Any]]:
    """Inputs as (n, C, H, W) or (n, F), targets with as many rows."""
    if y.ndim < 1 or x.ndim < 1 or len(x) != len(y):
        raise UserError(
            f"{where} have shapes {x.shape} and {y.shape}; expected as many targets as inputs"
        )
    return channels_first(x, where), y


def channels_first(x: NDArray[Any], where: str) -> NDArray[Any]:
    """Inputs as (n, C, H, W) or (n, F), whichever way they are stored."""
    if x.dtype.kind not in "biuf":
        raise UserError(f"{where}: inputs are of type {x.dtype}; expected numbers")
    if x.ndim not in (2, 3, 4) or not x.size:
        raise UserError(
            f"{where}: inputs have shape {x.shape}; expected (n, C, H, W), (n, H, W, C), "
            "(n, H, W) or (n, F), and at least one"
        )
    if x.ndim == 3:
        x = x[:, None]
    elif x.ndim == 4 and x.shape[3] in (1, 3) and x.shape[1] not in (1, 3):
        x = x.transpose(0, 3, 1, 2)
    return x


def _read_npz(path: Path) -> dict[str, NDArray[Any]]:
    expected = f"expected {', '.join(SPLIT_NAMES)}, or {' and '.join(WHOLE_NAMES)}"
    with opened_npz(path, expected) as file:
        for names in (SPLIT_NAMES, WHOLE_NAMES):
            if all(name in file for name in names):
                return {name: np.asarray(file[name]) for name in names}
        found = ", ".join(file) or "nothing"
    raise UserError(f"{path} has {found}; {expected}")


@contextmanager
def opened_npz(path: Path, expected: str) -> Iterator[NpzFile]:
    """Arrays of a file; `UserError` where it, or one that is read in the block, is damaged."""
    try:
        with path.open("rb") as opened:
            file = np.load(opened, allow_pickle=False)
            if not isinstance(file, NpzFile):
                raise TypeError("it holds a single array")
            with file:
                yield file
    except UserError:
        raise
    except DAMAGE as error:
        raise UserError(f"{path} cannot be read as npz ({_line(error)}); {expected}") from None


def map_npy(path: Path) -> NDArray[Any]:
    """The array of a file, mapped; `UserError` where it is damaged."""
    try:
        # np.load would leave a damaged zip file open.
        if not zipfile.is_zipfile(path):
            return np.lib.format.open_memmap(path, mode="r")
    except DAMAGE as error:
        raise UserError(
            f"{path} cannot be read as npy ({_line(error)}); expected an array of numbers"
        ) from None
    raise UserError(f"{path} holds several arrays; call it .npz, and name it npz:{path}")


def _line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
