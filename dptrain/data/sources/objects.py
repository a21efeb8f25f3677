"""Data sets from Python objects: arrays, or samples by index.

Anything of the following can be trained on:

- a data spec, as for `dptrain.data.open_data`;
- a tuple ``(x, y)``, ``(x_train, y_train, x_test, y_test)`` or ``(x_train, y_train, x_val, y_val,
  x_test, y_test)`` of arrays, or a tuple of pairs ``((x_train, y_train), (x_test, y_test))``;
- a mapping with the keys x and y, or x_train, y_train, x_test and y_test, and perhaps x_val and
  y_val (or with their other names in `arrays.NAMES`), classes, the names of the labels 0, 1, …, and
  sample_weight or sample_weight_train, the weights of x or x_train in the loss, such as an open npz
  file;
- an object with ``len(data)`` and ``data[i] -> (x, y)``: a list of pairs, or a PyTorch ``Dataset``.
  x is an image (an array or a PIL image) or a vector, always of the same shape; y is a label or
  numbers. ``data[i]`` must return the same sample each time: samples are read once if they fit in
  memory. The attribute ``targets``, if it exists, contains all y, so that they need not be read;
- an object with the attributes ``train`` and ``test``, and perhaps ``validation``, each one of the
  above;
- a `Dataset`.

Arrays have the shapes and types that ``npz`` files have: see `arrays.open_npz`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptrain.data import open_data
from dptrain.data.base import Dataset
from dptrain.data.preprocessing.classes import are_texts, listed, names_from
from dptrain.data.preprocessing.layout import as_numbers, channels_first, refuse_masked
from dptrain.data.preprocessing.preprocessing import Preprocessing
from dptrain.data.sources.arrays import (
    VALIDATION,
    Pair,
    UsualNames,
    dataset_of_pairs,
    expected_shape,
    names_in,
    pairs_by_ending,
    unused_note,
    weights_name,
)
from dptrain.data.spec import CLASSES, Request
from dptrain.data.stored import cache_limit_bytes
from dptrain.errors import UserError
from dptrain.network.adaptation import resize
from dptrain.network.layers import Shape
from dptrain.network.network import Network
from dptrain.notes import show_notes

_EXPECTED = (
    "expected a data spec, (x, y), (x_train, y_train, x_test, y_test), a mapping with these keys "
    "(or images or data for x, and labels, targets or target for y), or an object with len(data) "
    "and data[i] -> (x, y)"
)


class ObjectInputs:
    """Raw inputs of an object that returns samples by index; see `StoredInputs`.

    Args:
        samples: has ``samples[i] -> (x, y)``.
        count: number of samples.
        first: input of the first sample.
        expected: (C, H, W) that images probably have.
        where: name of the data, for messages.
    """

    decodes = True

    def __init__(
        self, samples: Any, count: int, first: NDArray[Any], expected: Shape, where: str
    ) -> None:
        self._samples, self._expected, self._where = samples, expected, where
        self._stored_shape = first.shape
        self.dtype = first.dtype
        self.shape = (count, *channels_first(first[None], where, expected).shape[1:])

    def __getitem__(self, rows: NDArray[np.int64]) -> NDArray[Any]:
        stored = np.empty((len(rows), *self._stored_shape), self.dtype)
        for index, row in enumerate(rows):
            stored[index] = self.read(int(row))[0]
        return channels_first(stored, self._where, self._expected)

    def read(self, row: int) -> tuple[NDArray[Any], Any]:
        """Return input and target of a sample."""
        where = f"sample {row} of {self._where}"
        x, y = _pair_of(self._samples[row], where)
        x = as_numbers(x, f"the input of {where}")
        if x.shape != self._stored_shape or x.dtype != self.dtype:
            raise UserError(
                f"{where} has shape {x.shape} and type {x.dtype}; expected {self._stored_shape} "
                f"and {self.dtype}, as sample 0 has"
            )
        return x, y


def dataset_from(
    data: Any,
    network: Network,
    *,
    seed: int = 0,
    ranks_per_node: int = 1,
    preprocessing: Preprocessing | None = None,
    split: bool = True,
    classes: Any = None,
    weights: Any = None,
) -> Dataset:
    """Return a data set for a network from a spec, arrays or another object.

    Args:
        data: one of the objects that this module describes.
        network, seed, ranks_per_node, preprocessing, split: as for `open_data`.
        classes: names of the labels of Python objects: a list in the order of the labels 0, 1, …,
            or a mapping from label to name; None if they have none, or if a mapping of arrays names
            them.
        weights: numbers (n,), the weights of the training samples of Python objects, or of all
            samples without a split; None if there are none, or if a mapping has them.

    Raises:
        UserError: the object is of none of these kinds, or does not match the network or the
            preprocessing.

    Example:
        >>> import numpy as np
        >>> from dptrain.network import Dense, Flatten, Network
        >>> network = Network((1, 8, 8), [Flatten(), Dense(10)])
        >>> x, y = np.zeros((50, 8, 8), np.uint8), np.arange(50) % 10
        >>> dataset_from((x, y), network)
        <Dataset arrays: 40 training and 10 test samples of 1×8×8>
    """
    if classes is not None and isinstance(data, str | Dataset):
        raise UserError(
            "classes names the labels of arrays and other Python objects; name those of a file in "
            "its specification, such as npz:f.npz?classes=cat,dog"
        )
    if weights is not None and isinstance(data, str | Dataset):
        raise UserError(
            "sample_weight has the weights of arrays and other Python objects; a table has them in "
            "a column: csv:FILE?target=COLUMN&weight=COLUMN"
        )
    if isinstance(data, str):
        return open_data(
            data,
            network,
            seed=seed,
            ranks_per_node=ranks_per_node,
            preprocessing=preprocessing,
            split=split,
        )
    if isinstance(data, Dataset):
        show_notes(data.notes)
        return _checked_dataset(data, network, preprocessing)
    if isinstance(data, Mapping):
        data = UsualNames(data)
    name = "samples" if array_pairs(data) is None else "arrays"
    own = names_in(data, "the data") if classes is None and isinstance(data, Mapping) else None
    names = own if classes is None else names_from(classes, CLASSES)
    request = Request(name, "", {}, network, seed, ranks_per_node, preprocessing, split, names)
    pairs = _pairs(request, data)
    is_used = names is not None
    others = [k for k in data if k != CLASSES or not is_used] if isinstance(data, Mapping) else []
    if isinstance(data, Mapping) and weights is None:
        weights = data.get(weights_name(pairs))
    dataset = dataset_of_pairs(
        request, pairs, "the data", weights=weights, unused=unused_note(others, pairs)
    )
    show_notes(dataset.notes)
    return dataset


def _checked_dataset(
    data: Dataset, network: Network, preprocessing: Preprocessing | None
) -> Dataset:
    """Return the data set, which was preprocessed when it was opened, if it fits the network."""
    network = resize(network, data.input_shape, data.num_outputs)
    found = (data.input_shape, data.targets, data.num_outputs)
    expected = (network.input_shape, network.loss.targets, network.num_outputs)
    if found != expected:
        raise UserError(
            f"the data set {data.name} was opened for a network with input, targets and outputs "
            f"{found}; {network.label} has {expected}; open it for this network"
        )
    if preprocessing is None:
        return data
    own, classes = data.class_list, preprocessing.class_list(network)
    if own != classes and own is not None and classes is not None:
        raise UserError(
            f"the data set {data.name} was opened with the classes {listed(own.names)}; those of "
            f"the network are {listed(classes.names)}; pass the specification of the data instead"
        )
    if preprocessing.kind == "table" and preprocessing.digest() != data.preprocessing.digest():
        raise UserError(
            f"the data set {data.name} was opened with other columns, means or deviations than "
            "those of the network; pass the specification of the data instead"
        )
    return data


def _pairs(request: Request, data: Any) -> dict[str, Pair]:
    """Return inputs and targets by the endings of their names, as for `dataset_of_pairs`."""
    arrays = array_pairs(data)
    if arrays is not None:
        return {
            tail: (as_numbers(x, f"x{tail}"), as_targets(y, f"y{tail}"))
            for tail, (x, y) in arrays.items()
        }
    train, test = getattr(data, "train", None), getattr(data, "test", None)
    if _has_samples(train):
        parts = {"_train": train, "_test": test} if _has_samples(test) else {"": train}
        validation = getattr(data, "validation", None)
        if _has_samples(test) and _has_samples(validation):
            parts[VALIDATION] = validation
    elif _has_samples(data):
        parts = {"": data}
    else:
        if hasattr(data, "dataset") and hasattr(data, "batch_size"):
            raise UserError(
                f"the data is a {type(data).__name__}; pass its data set, loader.dataset: "
                "minibatches and their order follow from the settings batch_size and seed"
            )
        if isinstance(data, os.PathLike):
            raise UserError(f"the data is the path {data}; pass a text such as 'folder:{data}'")
        raise UserError(f"the data is of type {type(data).__name__}; {_EXPECTED}")
    pairs: dict[str, Pair] = {}
    for tail, part in parts.items():
        inner = array_pairs(part)
        if inner is not None:
            (x, y), *others = inner.values()
            if others:
                raise UserError(f"data.{tail[1:]} has several splits; expected (x, y)")
            pairs[tail] = as_numbers(x, f"x{tail}"), as_targets(y, f"y{tail}")
        else:
            name = f"data.{tail[1:]}" if tail else "the data"
            pairs[tail] = _read_samples(request, part, name, len(parts))
    return pairs


def array_pairs(data: Any) -> dict[str, tuple[Any, Any]] | None:
    """Return the arrays of a tuple or a mapping by the endings of their names; None for others."""
    if isinstance(data, Mapping):
        found = pairs_by_ending(UsualNames(data), "the data")
        if found is not None:
            return found
        raise UserError(f"the data has the keys {', '.join(map(str, data))}; {_EXPECTED}")
    if not isinstance(data, tuple):
        return None
    if len(data) in (2, 3) and all(isinstance(part, tuple) and len(part) == 2 for part in data):
        data = tuple(chain(*data))
    endings = {2: ("",), 4: ("_train", "_test"), 6: ("_train", VALIDATION, "_test")}
    if len(data) in endings:
        pairs = zip(data[::2], data[1::2], strict=True)
        return dict(zip(endings[len(data)], pairs, strict=True))
    raise UserError(f"the data is a tuple of {len(data)} objects; {_EXPECTED}")


def _has_samples(data: Any) -> bool:
    return hasattr(data, "__len__") and hasattr(data, "__getitem__") and not hasattr(data, "dtype")


def _read_samples(request: Request, samples: Any, where: str, splits: int) -> Pair:
    """Return inputs and targets of an object with samples; inputs stay in it if they are large."""
    count = len(samples)
    if not count:
        raise UserError(f"{where} has no samples; expected at least 1")
    x, y = _pair_of(samples[0], f"sample 0 of {where}")
    first = as_numbers(x, f"the input of sample 0 of {where}")
    inputs = ObjectInputs(samples, count, first, expected_shape(request), where)
    # Raw and preprocessed samples exist at the same time.
    size = splits * count * (first.nbytes + 4 * math.prod(request.network.input_shape))
    fits = size <= cache_limit_bytes(request.ranks_per_node)
    known = getattr(samples, "targets", None)
    if known is not None and hasattr(known, "__len__") and len(known) == count and not fits:
        return inputs, as_targets(known, f"the targets of {where}")
    stored = np.empty((count, *first.shape), first.dtype) if fits else None
    targets = []
    for row in range(count):
        x, y = inputs.read(row)
        if stored is not None:
            stored[row] = x
        targets.append(np.asarray(y))
    if len({target.shape for target in targets}) > 1:
        raise UserError(f"{where} has targets of different shapes; expected equal ones")
    y = as_targets(np.stack(targets), f"the targets of {where}")
    return (inputs if stored is None else stored), y


def as_targets(y: Any, where: str) -> NDArray[Any]:
    """Return an array of numbers, or of text, from an object that NumPy understands."""
    refuse_masked(y, where)
    try:
        array: NDArray[Any] = np.asarray(y)
    except (TypeError, ValueError, RuntimeError):
        return as_numbers(y, where)
    return array if are_texts(array) else as_numbers(array, where)


def _pair_of(sample: Any, where: str) -> tuple[Any, Any]:
    if isinstance(sample, tuple | list) and len(sample) == 2:
        return sample[0], sample[1]
    raise UserError(f"{where} is {type(sample).__name__}; expected a pair (x, y)")
