"""Arrays in an HDF5 file, ``hdf5:FILE``, of which each rank reads the rows of its samples.

It needs the package h5py, the extra ``hdf5``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptrain.data.base import Dataset
from dptrain.data.preprocessing.layout import channels_first
from dptrain.data.sources.arrays import (
    ENDINGS,
    NAMES,
    Pair,
    dataset_of_pairs,
    error_line,
    expected_shape,
    left_out_arrays,
    names_in,
    pairs_by_ending,
)
from dptrain.data.spec import CLASSES, Request, unescape
from dptrain.errors import UserError
from dptrain.network.layers import Shape


class DatasetRows:
    """Rows of a dataset of inputs; see `dptrain.data.stored.StoredInputs`.

    Every process opens the file when it first reads, so that workers receive no open file.

    Args:
        path: of the file.
        dataset: of the open file.
        expected: (C, H, W) that images probably have.
        where: name of the dataset, for messages.
    """

    def __init__(self, path: Path, dataset: Any, expected: Shape, where: str) -> None:
        self._path, self._name, self._expected, self._where = path, dataset.name, expected, where
        self._opened: Any = None
        self.dtype: np.dtype[Any] = dataset.dtype
        row = np.broadcast_to(np.zeros((), self.dtype), dataset.shape)
        self.shape: Shape = channels_first(row, where, expected).shape
        # Reading a row decompresses its chunk, which worker processes do at the same time.
        self.decodes = bool(dataset.id.get_create_plist().get_nfilters())

    def __getitem__(self, rows: NDArray[np.int64]) -> NDArray[Any]:
        # A single ascending selection reads each chunk once.
        chosen, places = np.unique(rows, return_inverse=True)
        with _readable(self._path):
            if self._opened is None:
                self._opened = _open(self._path)[self._name]
            stored = self._opened[chosen]
        return channels_first(stored[places], self._where, self._expected)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}


def open_hdf5(request: Request) -> Dataset:
    """Open datasets x and y, or x_train, y_train, x_test and y_test, of an HDF5 file.

    Inputs may be named x, images or data, and targets y, labels, targets or target, or as the
    options x and y state. A split is an ending of the name, or a group: ``train/images``. Shapes,
    types and conversion are those of `dptrain.data.sources.arrays.open_npz`. Inputs stay in the
    file: every rank reads the rows of its samples when it needs them.
    """
    path = request.existing("file")
    with _readable(path), _open(path) as file:
        found = _datasets(request, file)
        pairs = _pairs(request, path, found)
        text = {CLASSES: _in_memory(file[CLASSES])} if _is_dataset(file.get(CLASSES)) else {}
        names = names_in(text, str(path))
        used = {pair.name for pair in found.values()} | ({f"/{CLASSES}"} if names else set())
        others = [name for name in _names(file) if f"/{name}" not in used]
    return dataset_of_pairs(
        request, pairs, str(path), names=names, lazy=True, unused=left_out_arrays(others)
    )


def first_pair(request: Request) -> Pair:
    """Return inputs and targets of the training split, or of all samples, as they are stored."""
    path = request.existing("file")
    with _readable(path), _open(path) as file:
        return next(iter(_pairs(request, path, _datasets(request, file)).values()))


def _datasets(request: Request, file: Any) -> dict[str, Any]:
    """Return the datasets by the names that `pairs_by_ending` expects."""
    found: dict[str, Any] = {}
    for kind, usual in NAMES.items():
        names = [unescape(request.options[kind])] if kind in request.options else usual
        for ending in ENDINGS:
            # Without the underscore, an ending is the name of a group.
            places = (p for name in names for p in (f"{name}{ending}", f"{ending[1:]}/{name}"))
            datasets = (file.get(place) for place in places)
            dataset = next(filter(_is_dataset, datasets), None)
            if dataset is not None:
                found[f"{kind}{ending}"] = dataset
    return found


def _pairs(request: Request, path: Path, datasets: Mapping[str, Any]) -> dict[str, Pair]:
    """Return inputs, which stay in the file, and targets, by the endings of their names."""
    found = pairs_by_ending(datasets, str(path))
    if found is None:
        wanted = " and ".join(
            request.options.get(kind, " or ".join(names)) for kind, names in NAMES.items()
        )
        with _open(path) as file:
            names = _names(file)
        some = ", ".join(names[:10]) + (", …" if len(names) > 10 else "")
        raise UserError(
            f"{path} has the datasets {some or '(none)'}; expected {wanted}, in the file or in "
            f"groups train and test, or name them: hdf5:{request.path}?x=NAME&y=NAME"
        )
    expected = expected_shape(request)
    return {
        ending: (DatasetRows(path, x, expected, f"{x.name[1:]} of {path}"), _in_memory(y))
        for ending, (x, y) in found.items()
    }


def _is_dataset(found: Any) -> bool:
    """Return True for an array of an open file, as opposed to a group or an empty dataset."""
    return getattr(found, "shape", None) is not None


def _names(file: Any) -> list[str]:
    """Return the names of all datasets, with those of their groups."""
    names: list[str] = []
    file.visititems(lambda name, found: names.append(name) if _is_dataset(found) else None)
    return names


def _in_memory(dataset: Any) -> NDArray[Any]:
    """Return all numbers or texts of a dataset."""
    is_text = (dataset.dtype.metadata or {}).get("vlen") in (str, bytes)
    return np.array(dataset.asstr()[()], np.str_) if is_text else np.asarray(dataset[()])


def _open(path: Path) -> Any:
    """Return the open file."""
    try:
        import h5py
    except ImportError as error:
        raise UserError(
            f"hdf5:{path} needs the package h5py ({error}); pip install '.[hdf5]', or convert it "
            "to npy files"
        ) from None
    # Some parallel file systems have no locks.
    return h5py.File(path, "r", locking="best-effort")


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Raise `UserError` for a file that is damaged or has a filter that is not installed."""
    try:
        yield
    except UserError:
        raise
    except (OSError, RuntimeError, KeyError, ValueError) as error:
        raise UserError(
            f"{path} cannot be read as HDF5 ({error_line(error)}); replace it"
        ) from None
