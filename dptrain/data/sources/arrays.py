"""Arrays of users: ``npz:FILE`` in memory, ``npy:X,Y`` memory-mapped from files of any size."""

from __future__ import annotations

import tokenize
import warnings
import zipfile
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.format import MAGIC_PREFIX
from numpy.lib.npyio import NpzFile
from numpy.typing import NDArray

from dptrain.data.adaptation import adapt_request
from dptrain.data.assembly import (
    RawSplit,
    make_dataset,
    preprocessing_for,
    split_rows,
    with_target_unit,
)
from dptrain.data.base import Dataset
from dptrain.data.preprocessing.classes import (
    Names,
    coded_labels,
    labels_in,
    names_from,
    read_names,
)
from dptrain.data.preprocessing.layout import channels_first
from dptrain.data.preprocessing.names import find_path
from dptrain.data.preprocessing.scale import check_against_training, common_scale, moments
from dptrain.data.spec import CLASSES, Request, existing, unescape
from dptrain.data.stored import StoredInputs
from dptrain.data.weights import checked_weights
from dptrain.errors import UserError, shown
from dptrain.network.layers import Shape
from dptrain.network.network import Network

SPLIT_NAMES = ("x_train", "y_train", "x_test", "y_test")
WHOLE_NAMES = ("x", "y")
WEIGHTS = "sample_weight"
"""Name of an array with the weights of x, or with ``_train``, of x_train."""
CLASSES_FILE = "classes.txt"
"""File with the names of the classes, one on each line, in a folder of arrays."""
VALIDATION = "_validation"
"""Ending of the names of the validation split in mappings of pairs."""
VALIDATION_ENDINGS = (VALIDATION, "_valid", "_val")
"""Endings of the names of arrays that are the validation split."""
ENDINGS = ("", "_train", "_test", *VALIDATION_ENDINGS)
"""Endings of the names of the arrays of all splits."""
NAMES = {"x": ("x", "images", "data"), "y": ("y", "labels", "targets", "target")}
"""Names of inputs and of targets in files; the first that exists."""
Pair = tuple[StoredInputs, NDArray[Any]]
"""Inputs and targets."""
DAMAGE = (
    ValueError, OSError, EOFError, TypeError, KeyError, RuntimeError, SyntaxError, MemoryError,
    OverflowError, zipfile.BadZipFile, zlib.error, tokenize.TokenError,
)  # fmt: skip
"""Errors that NumPy and zipfile raise for files that are damaged or do not fit in memory."""


def open_npz(request: Request) -> Dataset:
    """Open a NumPy archive with the arrays x_train, y_train, x_test, y_test, or x and y.

    Inputs may be named x, images or data, and targets y, labels, targets or target.
    x: images (n, C, H, W), (n, H, W, C) or (n, H, W), or vectors (n, F). uint8 is taken as pixels
    0 to 255 and converted to -1 to 1, and images of other types are if they look so; other numbers
    are taken as they are, see `dptrain.data.preprocessing.scale`. y: integer labels (n,) or
    one-hot rows (n, classes); for networks that predict values, numbers (n,) or (n, F). With x and
    y only, dptrain chooses a fifth of the samples for the test, always the same. x_val and y_val
    (or _valid, _validation) next to the four arrays are the validation split. sample_weight,
    numbers (n,), are the weights of x in the loss, and sample_weight_train those of x_train.
    """
    path = request.existing("file")
    pairs, names, weights, unused = _read_npz(path)
    return dataset_of_pairs(request, pairs, str(path), names=names, weights=weights, unused=unused)


def open_npy(request: Request) -> Dataset:
    """Open ``.npy`` files with the arrays of `open_npz`: x and y, or a folder of all four.

    The inputs are memory-mapped and never read as a whole, so they may be larger than the memory.
    A folder may also have a file with the names of the classes.
    """
    folder, names = find_path(Path(unescape(request.path))), request.paths
    if folder.is_dir():
        return _open_folder(request, folder)
    if len(names) != 2:
        raise UserError(
            f"{request.text} names {len(names)} files; expected npy:X.npy,Y.npy or npy:DIR; write "
            "a comma in a path as %2C"
        )
    x, y = (map_npy(existing(Path(name), "file")) for name in names)
    pairs = {"": (x, np.asarray(y))}
    return dataset_of_pairs(request, pairs, names[0], both=" and ".join(names), lazy=True)


def training_pair(request: Request) -> Pair:
    """Return inputs and targets of the training split, or of all samples, as they are stored."""
    if request.name == "npz":
        path = request.existing("file")
        return next(iter(_read_npz(path)[0].values()))
    folder, names = find_path(Path(unescape(request.path))), request.paths
    if folder.is_dir():
        names = [str(folder / f"{name}.npy") for name in SPLIT_NAMES[:2]]
    x, y = (map_npy(existing(Path(name), "file")) for name in (names * 2)[:2])
    return x, np.asarray(y)


def _open_folder(request: Request, folder: Path) -> Dataset:
    """Open a folder with files of the arrays, as `dptrain data convert` writes it."""
    more = (f"{kind}{ending}" for ending in VALIDATION_ENDINGS for kind in "xy")
    found = [name for name in more if (folder / f"{name}.npy").exists()]
    arrays = {
        name: map_npy(existing(folder / f"{name}.npy", "file")) for name in (*SPLIT_NAMES, *found)
    }
    arrays.update({k: np.asarray(array) for k, array in arrays.items() if k.startswith("y")})
    pairs = pairs_by_ending(arrays, str(folder))
    assert pairs is not None
    file = folder / CLASSES_FILE
    names = names_from(read_names(file), str(file)) if file.exists() else None
    unused = unused_note(sorted(path.stem for path in folder.glob("*.npy")), pairs)
    weights = folder / f"{weights_name(pairs)}.npy"
    return dataset_of_pairs(
        request,
        pairs,
        str(folder),
        names=names,
        lazy=True,
        weights=map_npy(weights) if weights.exists() else None,
        unused=unused,
    )


def pairs_by_ending(arrays: Mapping[str, Any], where: str) -> dict[str, tuple[Any, Any]] | None:
    """Return inputs and targets as for `dataset_of_pairs`; None if the names are others.

    Raises:
        UserError: of a validation split, there are only inputs or only targets.
    """

    def has(ending: str) -> bool:
        return f"x{ending}" in arrays and f"y{ending}" in arrays

    def pair(ending: str) -> tuple[Any, Any]:
        return arrays[f"x{ending}"], arrays[f"y{ending}"]

    if not (has("_train") and has("_test")):
        return {"": pair("")} if has("") else None
    found = {ending: pair(ending) for ending in ("_train", "_test")}
    more = [ending for ending in VALIDATION_ENDINGS if has(ending)]
    for ending in VALIDATION_ENDINGS:
        for one, other in ((f"x{ending}", f"y{ending}"), (f"y{ending}", f"x{ending}")):
            if one in arrays and other not in arrays:
                raise UserError(f"{where} has {one} but not {other}; add it, or remove {one}")
    return {**found, VALIDATION: pair(more[0])} if more else found


def unused_note(names: Collection[Any], pairs: Collection[str]) -> str:
    """Return a line about the arrays that are in none of the pairs; "" if there are none.

    Args:
        names: of all arrays.
        pairs: endings, from `pairs_by_ending`.
    """
    complete = (e for e in VALIDATION_ENDINGS if f"x{e}" in names and f"y{e}" in names)
    endings = [next(complete, e) if e == VALIDATION else e for e in pairs]
    used = {f"{kind}{ending}" for ending in endings for kind in "xy"} | {weights_name(pairs)}
    return left_out_arrays(name for name in names if name not in used)


def weights_name(pairs: Collection[str]) -> str:
    """Return the name of the array with the weights of the first of the pairs.

    Args:
        pairs: endings, from `pairs_by_ending`.
    """
    return f"{WEIGHTS}{next(iter(pairs))}"


def left_out_arrays(names: Iterable[Any]) -> str:
    """Return a line about arrays that are not used; "" if there are none.

    Raises:
        UserError: one has the name of weights, which the user expects to count.
    """
    left = sorted(map(str, names))
    for name in left:
        if name.replace("weights", "weight") in (WEIGHTS, f"{WEIGHTS}_train"):
            raise UserError(
                f"{name} would not be used: {WEIGHTS} belongs to x and y, and {WEIGHTS}_train to "
                "x_train and y_train, in npz files, npy folders and mappings; rename or remove it"
            )
    some = ", ".join(shown(name, 40) for name in left[:10]) + (", …" if len(left) > 10 else "")
    return f"arrays are left out: {some}" if left else ""


def dataset_of_pairs(
    request: Request,
    pairs: Mapping[str, Pair],
    where: str,
    *,
    both: str = "",
    names: Names | None = None,
    lazy: bool = False,
    weights: Any = None,
    unused: str = "",
) -> Dataset:
    """Make a data set of inputs and targets.

    Args:
        request: for which network, and how.
        pairs: inputs and targets of "_train", "_test" and perhaps "_validation", or of "" for data
            without a split.
        where: name of the arrays' source, for messages.
        both: name of the pair x and y, for messages.
        names: of the labels, if the data has them; names that the user states replace them.
        lazy: never cache the samples.
        weights: numbers (n,), the weights of the training samples, or of all without a split; None
            if there are none.
        unused: from `unused_note`.
    """
    saved, expected = request.preprocessing, expected_shape(request)
    checked = {
        tail: _check(x, y, both or f"x{tail} and y{tail} of {where}", expected)
        for tail, (x, y) in pairs.items()
    }
    x, y = next(iter(checked.values()))
    sample = tuple(x.shape[1:])
    if saved is not None and saved.kind == "table":
        checked = {tail: (saved.prepared_rows(x, where), y) for tail, (x, y) in checked.items()}
        x, _ = next(iter(checked.values()))
    known = all_names(request, names)
    targets, texts = coded_labels([y for _, y in checked.values()], known, where)
    checked = {tail: (inputs, targets[i]) for i, (tail, (inputs, _)) in enumerate(checked.items())}
    y = targets[0]
    if texts is not None:
        request = replace(request, names=texts)
    request = adapt_request(request, sample, targets, where, names=names)
    scale, notes = None, tuple[str, ...]()
    if saved is None:
        scale, notes = common_scale(
            {f"x{tail}": x for tail, (x, _) in checked.items()}, where, request.network
        )
    else:
        found = [check_against_training(inputs, saved, where) for inputs, _ in checked.values()]
        notes = tuple(dict.fromkeys(chain.from_iterable(found)))
    own = None if weights is None else checked_weights(weights, len(y), weights_name(pairs))
    if "" in checked:
        rows = split_rows(request, len(y), where, _labels(y, request.network, where))
        splits = [RawSplit(x, y, chosen, own) for chosen in rows]
    else:
        splits = [
            RawSplit(
                *checked[tail],
                np.arange(len(checked[tail][1])),
                own if tail == "_train" else None,
            )
            for tail in ("_train", "_test", VALIDATION)
            if tail in checked
        ]
        for split, name in zip(splits[1:], ("test", "validation"), strict=False):
            _check_alike(splits[0].inputs, split.inputs, where, name)
    preprocessing = preprocessing_for(request, sample, x.dtype, scale=scale)
    if scale is not None and scale.standardises(request.network):
        mean, deviation = moments(splits[0].inputs, splits[0].rows)
        preprocessing = replace(preprocessing, mean=mean, deviation=deviation)
    return make_dataset(
        request,
        splits[0],
        splits[1],
        validation=splits[2] if len(splits) == 3 else None,
        preprocessing=with_target_unit(
            request,
            preprocessing,
            splits[0].targets[splits[0].rows],
            where,
        ),
        origin=where if where.startswith("the ") else f"arrays of {where}",
        where=where,
        has_split="" not in checked,
        lazy=lazy,
        notes=(unused, *notes) if unused else notes,
    )


def expected_shape(request: Request) -> Shape:
    """Return the shape that raw samples probably have."""
    saved = request.preprocessing
    return (saved.stored_shape if saved is not None else None) or request.network.input_shape


def all_names(request: Request, names: Names | None) -> Sequence[str] | None:
    """Return the names of all classes, if the model, the user or the data states them."""
    saved = request.preprocessing
    if saved is not None:
        return saved.classes
    names = names if request.names is None else request.names
    return None if names is None else list(names.values())


def _labels(y: NDArray[Any], network: Network, where: str) -> NDArray[Any] | None:
    """Return the labels by which a split is stratified; None for values."""
    return labels_in(y, where).values if network.loss.targets == "classes" else None


def _check_alike(train: StoredInputs, test: StoredInputs, where: str, name: str) -> None:
    if train.shape[1:] != test.shape[1:]:
        raise UserError(
            f"{where}: x_train has samples of shape {train.shape[1:]} and x_{name} of "
            f"{test.shape[1:]}; expected the same"
        )
    if (train.dtype == np.uint8) != (test.dtype == np.uint8):
        raise UserError(
            f"{where}: x_train is of type {train.dtype} and x_{name} of {test.dtype}; expected "
            "8-bit pixels in both, or in neither"
        )


def _check(x: StoredInputs, y: NDArray[Any], where: str, expected: Shape) -> Pair:
    """Return inputs as (n, C, H, W) or (n, F), and targets with as many rows."""
    if not (y.shape and x.shape) or x.shape[0] != y.shape[0]:
        raise UserError(
            f"{where} have shapes {x.shape} and {y.shape}; expected as many targets as inputs"
        )
    return (channels_first(x, where, expected) if isinstance(x, np.ndarray) else x), y


def _read_npz(path: Path) -> tuple[dict[str, Pair], Names | None, Any, str]:
    """Return the pairs of a file, the names of its labels, the weights of its samples, and a line
    about its other arrays.
    """
    expected = (
        f"expected {', '.join(SPLIT_NAMES)}, or {' and '.join(WHOLE_NAMES)}; x may be called "
        f"{' or '.join(NAMES['x'][1:])}, and y {' or '.join(NAMES['y'][1:])}"
    )
    with opened_npz(path, expected) as file:
        arrays = UsualNames(file)
        pairs = pairs_by_ending(arrays, str(path))
        if pairs is not None:
            found: dict[str, Pair] = {
                end: (np.asarray(x), np.asarray(y)) for end, (x, y) in pairs.items()
            }
            names = names_in(arrays, str(path))
            others = [name for name in arrays if names is None or name != CLASSES]
            weights = arrays.get(weights_name(found))
            return found, names, weights, unused_note(others, found)
        listed = ", ".join(file) or "nothing"
    raise UserError(f"{path} has {listed}; {expected}")


class UsualNames(Mapping[Any, Any]):
    """Arrays of a file or a mapping, in which inputs are called x, and targets y.

    Args:
        arrays: with the names of `NAMES`, or others, which are kept.
    """

    def __init__(self, arrays: Mapping[Any, Any]) -> None:
        self._arrays = arrays
        named = {
            f"{kind}{ending}": [f"{name}{ending}" for name in names if f"{name}{ending}" in arrays]
            for kind, names in NAMES.items()
            for ending in ENDINGS
        }
        self._own = {usual: names[0] for usual, names in named.items() if names}

    def __getitem__(self, name: Any) -> Any:
        return self._arrays[self._own.get(name, name)]

    def __contains__(self, name: object) -> bool:  # That of `Mapping` reads the array.
        return self._own.get(str(name), name) in self._arrays

    def __iter__(self) -> Iterator[Any]:
        usual = {own: name for name, own in self._own.items()}
        return (usual.get(name, name) for name in self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)


def names_in(arrays: Mapping[str, Any], where: str) -> Names | None:
    """Return the names of the labels in ``classes``; None if there is none, or no text.

    Text is an array of strings, or of bytes in UTF-8, as files of HDF5 have it.
    """
    if CLASSES not in arrays:
        return None
    try:
        given = arrays[CLASSES]
    except ValueError:  # An array of Python objects, which may be anything.
        return None
    if not isinstance(given, Mapping):
        names = np.asarray(given)
        if names.ndim != 1 or names.dtype.kind not in "US":
            return None
        try:
            given = np.char.decode(names, "utf-8") if names.dtype.kind == "S" else names
        except UnicodeDecodeError as error:
            raise UserError(
                f"{CLASSES} of {where} cannot be read ({error}); expected names in UTF-8"
            ) from None
        given = given.tolist()
    return names_from(given, f"{CLASSES} of {where}")


@contextmanager
def opened_npz(path: Path, expected: str) -> Iterator[NpzFile]:
    """Open the arrays of a file; damage in the file or in an array raises `UserError`."""
    try:
        with path.open("rb") as opened:
            start = opened.read(len(MAGIC_PREFIX))
            if not start.startswith((b"PK", MAGIC_PREFIX)):
                raise TypeError("it is not a zip file")  # NumPy would advise to use pickle.
            opened.seek(0)
            file = np.load(opened, allow_pickle=False)
            if not isinstance(file, NpzFile):
                raise TypeError("it holds a single array")
            with file, _without_warnings():
                yield file
    except UserError:
        raise
    except DAMAGE as error:
        if "Object arrays" in str(error):
            raise UserError(
                f"{path} has an array of Python objects, which would need pickle; save text as "
                "y.astype(str), and rows of numbers with equal lengths as one array"
            ) from None
        raise UserError(f"{path} cannot be read as npz ({error_line(error)}); {expected}") from None


def map_npy(path: Path) -> NDArray[Any]:
    """Return the array of a file, memory-mapped; raise `UserError` if it is damaged."""
    try:
        # np.load would leave a damaged zip file open.
        if not zipfile.is_zipfile(path):
            with _without_warnings():
                array = np.lib.format.open_memmap(path, mode="r")
            size, expected = path.stat().st_size, array.offset + array.nbytes
            if size != expected:
                raise ValueError(f"the file has {size} bytes, its header states {expected}")
            return array
    except DAMAGE as error:
        raise UserError(
            f"{path} cannot be read as npy ({error_line(error)}); expected an array of numbers"
        ) from None
    raise UserError(f"{path} holds several arrays; rename it to .npz and use npz:{path}")


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Hide what Python's parser says about a damaged header; the error that follows says it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        yield


def error_line(error: Exception) -> str:
    """Return the first line of the message of an error."""
    return shown(str(error).partition("\n")[0], 200) or type(error).__name__
