"""From the raw arrays of a source to a data set: split, preprocessing, targets, cache."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptrain.data.base import Dataset, count_text
from dptrain.data.classes import Labels, Names, labels_in, listed
from dptrain.data.preprocessing import Preprocessing
from dptrain.data.sharding import epoch_order
from dptrain.data.spec import Request
from dptrain.data.stored import StoredInputs, StoredSamples, cache_limit_bytes, cache_samples
from dptrain.data.targets import targets_for
from dptrain.errors import UserError, shown
from dptrain.network.adaptation import adapt, edit_input, edit_outputs
from dptrain.network.layers import Shape
from dptrain.network.network import Network

_SPLIT_SEED = 5
FEW = 100
MOST_UNUSED = 10
"""More than `FEW` labels, less than one in `MOST_UNUSED` of which occurs, number no classes."""


@dataclass(frozen=True)
class RawSplit:
    """One split of a source before preprocessing.

    Attributes:
        inputs: raw samples.
        targets: a target for each row of `inputs`, as stored.
        rows: int64 (n,), the rows that belong to this split.
    """

    inputs: StoredInputs
    targets: NDArray[Any]
    rows: NDArray[np.int64]


def fixed_split(
    count: int, where: str, labels: NDArray[Any] | None = None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return rows for training (four fifths) and for the test (one fifth), each ascending.

    The split is random but always the same. If it followed the seed of the run, a run with another
    seed would train on samples on which an earlier one was tested. With `labels` it is stratified.
    """
    if count < 2:
        raise UserError(f"{where} has {count} samples; expected at least 2")
    order = epoch_order(count, _SPLIT_SEED, 0)
    if labels is not None:
        order = order[np.argsort(labels[order], kind="stable")]
    test = np.zeros(count, dtype=np.bool_)
    test[order[::5]] = True
    return np.flatnonzero(~test), np.flatnonzero(test)


def split_rows(
    request: Request, count: int, where: str, labels: NDArray[Any] | None = None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return rows for training and for the test of a data set that has no split of its own.

    If the request is for all samples (`Request.split` is False), both contain all rows.
    """
    if request.split:
        return fixed_split(count, where, labels)
    rows = np.arange(count, dtype=np.int64)
    return rows, rows


def preprocessing_for(
    request: Request,
    shape: Shape | None,
    dtype: np.dtype[Any],
    *,
    white: int = 255,
    names: Names | None = None,
) -> Preprocessing:
    """Return the saved preprocessing of the request, or determine that of a new model.

    Args:
        request: from the user.
        shape: of a raw sample; None if samples have different sizes.
        dtype: of the raw numbers. 8-bit pixels 0 to `white` become -1 to 1; numbers of any other
            type are taken as they are.
        white: 8-bit value that becomes 1.
        names: of the labels; None if they have none.
    """
    fit = request.fit
    if request.preprocessing is not None:
        return request.preprocessing
    network = request.network
    is_8bit = dtype == np.uint8
    return Preprocessing(
        kind="image" if shape is None or len(shape) == 3 else "vector",
        input_shape=network.input_shape,
        stored_shape=shape,
        stored_dtype=str(dtype),
        scale=2.0 / white if is_8bit else 1.0,
        offset=-1.0 if is_8bit else 0.0,
        white=white,
        fit="crop" if fit == "crop" else "resize",
        classes=class_names(network, names),
        source=request.text,
    )


def class_names(network: Network, names: Names | None) -> tuple[str, ...] | None:
    """Return the names of a new model's classes: those of the labels, or numbers; None for values.

    Targets of sigmoid outputs without names have no names of classes.
    """
    targets = network.loss.targets
    if targets == "values":
        return None
    if names is not None:
        return tuple(names.values())
    return tuple(map(str, range(network.num_outputs))) if targets == "classes" else None


def adapt_request(
    request: Request,
    sample: Shape,
    targets: Sequence[NDArray[Any]],
    where: str,
    *,
    names: Names | None = None,
    are_labels: bool = False,
) -> Request:
    """Return the request for a network that fits the data; every source of data calls this first.

    A network of the zoo gets the channels or columns of the data and its number of classes or
    values. A network of the user's own must have them, and so must the one of a trained model.

    Args:
        request: from the user.
        sample: shape of a raw sample.
        targets: of all splits, as stored.
        where: name of the data, for messages.
        names: of the labels; None if they have none.
        are_labels: True if the targets can be nothing else than labels.

    Raises:
        UserError: the network has other outputs than the data has classes or values.
    """
    network, labels = request.network, list[Labels]()
    if request.preprocessing is not None:
        return request
    if network.loss.targets == "values":
        if names is not None or are_labels:
            raise UserError(
                f"{where} has classes, but network {network.name} predicts values; use a network "
                "that ends in softmax_cross_entropy, or data with values"
            )
        outputs = _num_values(targets)
    elif network.loss.targets == "binary" and network.num_outputs > 1:
        outputs = _num_values(targets)
    else:
        labels = [labels_in(y, where, names) for y in targets]
        outputs = max(part.outputs for part in labels)
        if names is not None or network.family is not None:
            _check_several_classes(labels, outputs, where)
        if network.loss.targets == "binary":
            _check_two_classes(labels, network, where)
            return request
        is_enough = names is None and labels[0].count is None and outputs <= network.num_outputs
        if network.family is None and is_enough:
            return request
    adapted = adapt(network, sample, outputs)
    if adapted.num_outputs != outputs:
        raise UserError(
            f"{_found(targets, labels, where)}, but network {network.name} has "
            f"{network.num_outputs} outputs; {edit_outputs(network, outputs)}"
        )
    return replace(request, network=adapted)


def _num_values(targets: Sequence[NDArray[Any]]) -> int:
    return math.prod(targets[0].shape[1:])


def _found(targets: Sequence[NDArray[Any]], labels: Sequence[Labels], where: str) -> str:
    """Return what the data has, for a message."""
    if not labels:
        return f"{where}: targets have shape {targets[0].shape}"
    names, values = labels[0].names, np.concatenate([part.values for part in labels])
    if names is None:
        return f"{where}: labels from {values.min()} to {values.max()}"
    return f"{where} has {len(names)} classes ({listed(tuple(names.values()))})"


def _check_several_classes(labels: Sequence[Labels], outputs: int, where: str) -> None:
    """Refuse data of one class, and labels that are no numbers of classes."""
    names = labels[0].names
    different = np.unique(np.concatenate([part.values for part in labels]))
    if names is not None and len(names) == 1:
        only = next(iter(names.values()))
        inner = Path(where) / only
        has_folders = inner.is_dir() and any(path.is_dir() for path in inner.iterdir())
        raise UserError(
            f"{where} has only the class {shown(only)}; a network distinguishes at least two, so "
            + (f"use folder:{inner} if its folders are the classes" if has_folders else
               "add samples of another class")
        )  # fmt: skip
    if len(different) == 1 and names is None and labels[0].count is None:
        raise UserError(
            f"{where}: all labels are {different[0]}; a network distinguishes at least two "
            "classes, so add samples of another class"
        )
    if names is None and outputs > max(FEW, MOST_UNUSED * len(different)):
        raise UserError(
            f"{where}: {len(different)} different labels, the largest {different[-1]}; expected "
            "numbers of classes from 0 on, for example numpy.unique(y, return_inverse=True)[1]"
        )


def _check_two_classes(labels: Sequence[Labels], network: Network, where: str) -> None:
    """Raise `UserError` unless one sigmoid output can distinguish the labels."""
    names, values = labels[0].names, np.concatenate([part.values for part in labels])
    if names is None and not ((values == 0) | (values == 1)).all():
        raise UserError(
            f"{where}: targets range from {values.min()} to {values.max()}, but network "
            f"{network.name} ends in {network.loss.kind}, which expects 0 and 1; use data with two "
            "classes, or another network"
        )
    if names is not None and len(names) != 2:
        raise UserError(
            f"{where} has {len(names)} classes ({listed(tuple(names.values()))}), but network "
            f"{network.name} ends in one output and {network.loss.kind}, which distinguishes two; "
            f"use loss softmax_cross_entropy and {edit_outputs(network, len(names))}"
        )


def targets_of(
    request: Request,
    preprocessing: Preprocessing,
    y: NDArray[Any],
    names: Names | None,
    where: str,
) -> NDArray[Any]:
    """Return targets as the loss reads them; labels are matched with the classes of the model.

    Args:
        request: from the user.
        preprocessing: of the model.
        y: targets as stored.
        names: of the labels; None if they have none.
        where: name of the data, for messages.
    """
    network = request.network
    classes = preprocessing.class_list(network)
    if classes is not None:
        example = request.example_of_names(classes.names)
        y = classes.indices(labels_in(y, where, names), where, example)
    elif names is not None:
        raise UserError(
            f"{where} has classes, but network {network.name} predicts values; expected data with "
            "values"
        )
    return targets_for(y, network, where)


def make_dataset(
    request: Request,
    train: RawSplit,
    test: RawSplit,
    *,
    preprocessing: Preprocessing,
    origin: str,
    where: str,
    has_split: bool,
    names: Names | None = None,
    white: int | None = None,
    lazy: bool = False,
    validation: RawSplit | None = None,
    gap: int | None = None,
) -> Dataset:
    """Check, preprocess and describe stored splits.

    Args:
        request: from the user.
        train, test: the splits.
        preprocessing: of the model.
        origin: first part of the description.
        where: name of the data, for messages.
        has_split: True if the data set defines its test split.
        names: of the labels; None if they have none.
        white: 8-bit value that becomes 1, if the data defines it.
        lazy: never cache the samples.
        validation: the split for evaluations during training, if the data set defines one.
        gap: see `Dataset`.
    """
    network, splits = request.network, []
    for name, raw in (("training", train), ("test", test), ("validation", validation)):
        if raw is None:
            continue
        if not len(raw.rows):
            raise UserError(f"{where} has no {name} samples")
        shape = tuple(raw.inputs.shape[1:])
        advice = edit_input(network, shape) if request.preprocessing is None else ""
        preprocessing.check(shape, raw.inputs.dtype, where, advice)
        y = targets_of(request, preprocessing, raw.targets, names, where)
        splits.append(StoredSamples(raw.inputs, y, raw.rows, preprocessing, where, white))
    size = sum(
        len(split) * math.prod(split.readable_shape) * split.pixels.itemsize for split in splits
    )
    cached = not lazy and size <= cache_limit_bytes(request.ranks_per_node)
    counts = f"{count_text(*map(len, splits))} samples"
    if not (has_split or request.split):
        counts = f"{len(test.rows):,} samples"
    notes = [part for part in (origin, counts, splits[0].adapter.note) if part]
    ready = [cache_samples(split) if cached else split for split in splits]
    return Dataset(
        name=request.name,
        train=ready[0],
        test=ready[1],
        input_shape=network.input_shape,
        targets=network.loss.targets,
        classes=preprocessing.classes,
        description="; ".join(notes),
        num_outputs=network.num_outputs,
        preprocessing=preprocessing,
        has_split=has_split,
        validation=ready[2] if validation is not None else None,
        gap=gap,
    )
