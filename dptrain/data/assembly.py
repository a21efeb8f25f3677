"""From the raw arrays of a source to a data set: split, preprocessing, targets, cache."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptrain.data.adaptation import class_names
from dptrain.data.base import Dataset, count_text
from dptrain.data.loading.sharding import epoch_order
from dptrain.data.preprocessing.classes import check_numbers, labels_in, listed
from dptrain.data.preprocessing.preprocessing import Preprocessing
from dptrain.data.preprocessing.scale import Scale
from dptrain.data.preprocessing.targets import targets_for
from dptrain.data.spec import Request
from dptrain.data.stored import StoredInputs, StoredSamples, cache_limit_bytes, cache_samples
from dptrain.errors import UserError
from dptrain.network.adaptation import edit_input
from dptrain.network.layers import Shape
from dptrain.network.network import Network

_SPLIT_SEED = 5


@dataclass(frozen=True)
class RawSplit:
    """One split of a source before preprocessing.

    Attributes:
        inputs: raw samples.
        targets: a target for each row of `inputs`, as stored.
        rows: int64 (n,), the rows that belong to this split.
        weights: float64, one for each row of `inputs`; None if the data has none.
    """

    inputs: StoredInputs
    targets: NDArray[Any]
    rows: NDArray[np.int64]
    weights: NDArray[np.float64] | None = None


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
    scale: Scale | None = None,
) -> Preprocessing:
    """Return the saved preprocessing of the request, or determine that of a new model.

    Args:
        request: from the user.
        shape: of a raw sample; None if samples have different sizes.
        dtype: of the raw numbers. 8-bit pixels 0 to `white` become -1 to 1; numbers of any other
            type are taken as they are.
        white: 8-bit value that becomes 1.
        scale: of the raw numbers; None if they are pixels of 8 bits and nothing else.
    """
    fit = request.fit
    if request.preprocessing is not None:
        return request.preprocessing
    network = request.network
    are_pixels = dtype == np.uint8 if scale is None else scale.are_pixels
    return Preprocessing(
        kind="image" if shape is None or len(shape) == 3 else "vector",
        input_shape=network.input_shape,
        stored_shape=shape,
        stored_dtype=str(dtype),
        scale=2.0 / white if are_pixels else 1.0,
        offset=-1.0 if are_pixels else 0.0,
        white=white,
        magnitude=0.0 if scale is None else scale.magnitude,
        fit="crop" if fit == "crop" else "resize",
        classes=class_names(request),
        source=request.text,
    )


def with_target_unit(
    request: Request, preprocessing: Preprocessing, y: NDArray[Any], where: str
) -> Preprocessing:
    """Return preprocessing that standardises the targets of a new model that predicts values.

    Args:
        request: from the user.
        preprocessing: of the model.
        y: (n,) or (n, F), targets of the training split.
        where: name of the data, for messages.
    """
    if request.preprocessing is not None or request.network.loss.targets != "values":
        return preprocessing
    check_numbers(y, where)
    values = np.asarray(y, np.float64).reshape(len(y), -1)
    with np.errstate(over="ignore", invalid="ignore"):
        mean, deviation = values.mean(axis=0), values.std(axis=0)
    if not np.isfinite(deviation).all():  # Too large for float32, too.
        return preprocessing
    # By rounding, the deviation of equal targets is tiny but not zero.
    varies = (values.min(axis=0) < values.max(axis=0)) & (deviation > 0.0)
    scale = tuple(np.where(varies, deviation, 1.0).tolist())
    offset = tuple(mean.tolist())
    if len(scale) == 1:
        return replace(preprocessing, target_scale=scale[0], target_offset=offset[0])
    return replace(preprocessing, target_scale=scale, target_offset=offset)


def targets_of(
    request: Request,
    preprocessing: Preprocessing,
    y: NDArray[Any],
    where: str,
) -> NDArray[Any]:
    """Return targets as the loss reads them; labels are matched with the classes of the model.

    Args:
        request: from `adapt_request`.
        preprocessing: of the model.
        y: targets as stored.
        where: name of the data, for messages.
    """
    network, names = request.network, request.names
    classes = preprocessing.class_list(network)
    if classes is not None:
        y = classes.indices(labels_in(y, where, names), where, request.example_of_names)
    elif names is not None:
        raise UserError(
            f"{where} has classes, but {network.label} predicts values; expected data with values"
        )
    if network.loss.targets == "values":
        check_numbers(y, where)
        y = preprocessing.to_targets(y)
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
    white: int | None = None,
    lazy: bool = False,
    validation: RawSplit | None = None,
    gap: int | None = None,
    notes: tuple[str, ...] = (),
) -> Dataset:
    """Check, preprocess and describe stored splits.

    Args:
        request: from the user.
        train, test: the splits.
        preprocessing: of the model.
        origin: first part of the description.
        where: name of the data, for messages.
        has_split: True if the data set defines its test split.
        white: 8-bit value that becomes 1, if the data defines it.
        lazy: never cache the samples.
        validation: the split for evaluations during training, if the data set defines one.
        gap, notes: see `Dataset`.
    """
    network, splits, known = request.network, [], dict[str, NDArray[Any]]()
    for name, raw in (("training", train), ("test", test), ("validation", validation)):
        if raw is None:
            continue
        if not len(raw.rows):
            raise UserError(f"{where} has no {name} samples")
        shape, dtype = tuple(raw.inputs.shape[1:]), raw.inputs.dtype
        advice = edit_input(network, shape) if request.preprocessing is None else ""
        preprocessing.check(shape, dtype, where, advice)
        if not request.is_named:
            preprocessing.check_size(shape, dtype, where)
        y = targets_of(request, preprocessing, raw.targets, where)
        known[name] = np.unique(y[raw.rows])
        splits.append(
            StoredSamples(raw.inputs, y, raw.rows, preprocessing, where, white, weights=raw.weights)
        )
    size = sum(
        len(split) * math.prod(split.readable_shape) * split.pixels.itemsize for split in splits
    )
    cached = not lazy and size <= cache_limit_bytes(request.ranks_per_node)
    counts = f"{count_text(*map(len, splits))} samples"
    if not (has_split or request.split):
        counts = f"{len(test.rows):,} samples"
    parts = [part for part in (origin, counts, splits[0].adapter.note) if part]
    ready = [cache_samples(split) if cached else split for split in splits]
    return Dataset(
        name=request.name,
        train=ready[0],
        test=ready[1],
        input_shape=network.input_shape,
        targets=network.loss.targets,
        classes=preprocessing.classes,
        description="; ".join(parts),
        num_outputs=network.num_outputs,
        preprocessing=preprocessing,
        has_split=has_split,
        validation=ready[2] if validation is not None else None,
        gap=gap,
        notes=(*notes, *unseen_notes(known, preprocessing, network)),
    )


def unseen_notes(
    known: Mapping[str, NDArray[Any]], preprocessing: Preprocessing, network: Network
) -> list[str]:
    """Return a note for each split with classes that no training sample has, and for a test split
    without samples of some classes.

    Args:
        known: targets of each split, as the loss reads them, each once.
        preprocessing: of the model.
        network: of the model.
    """
    classes, notes = preprocessing.class_list(network), []
    hint = "; shuffle the rows of a sorted table" if preprocessing.kind == "table" else ""
    for name, targets in known.items() if classes is not None else ():
        unseen = np.setdiff1d(targets, known["training"]).astype(np.int64).tolist()
        if classes is not None and unseen:
            names = listed([classes.name(index) for index in unseen])
            notes.append(f"the {name} split has classes that no training sample has: {names}{hint}")
        absent = np.setdiff1d(known["training"], targets).astype(np.int64).tolist()
        if classes is not None and absent and name == "test" and len(targets):
            names = listed([classes.name(index) for index in absent])
            notes.append(f"the test split has no samples of these classes: {names}")
    return notes
