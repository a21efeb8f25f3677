"""The network for a data set: its input, its outputs, and the names of its classes.

Every source of data calls `adapt_request` as soon as it knows the shape of its samples and their
targets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptrain.data.preprocessing.classes import (
    Labels,
    Names,
    are_texts,
    labels_in,
    listed,
    names_for,
)
from dptrain.data.spec import Request
from dptrain.errors import UserError, shown
from dptrain.network.adaptation import adapt, edit_outputs
from dptrain.network.layers import Shape
from dptrain.network.losses import (
    Loss,
    MeanSquaredError,
    SigmoidBinaryCrossEntropy,
    SoftmaxCrossEntropy,
)
from dptrain.network.network import Network

FEW = 100
"""More labels than these, with less than two samples each, are no classes."""
FEW_NUMBERS = 20
"""More whole numbers than these, stored as floating-point numbers, are no classes."""


def adapt_request(
    request: Request,
    sample: Shape,
    targets: Sequence[NDArray[Any]],
    where: str,
    *,
    names: Names | None = None,
    are_labels: bool = False,
) -> Request:
    """Return the request for a network that fits the data, with the names of the labels.

    A network of the zoo gets the channels or columns of the data and its number of classes or
    values; one that begins with the weights of a file keeps its outputs if labels without names
    are their numbers. A network of the user's own must have them. The one of a trained model is
    not changed.

    Args:
        request: from the user, whose names of the labels replace `names`.
        sample: shape of a raw sample.
        targets: of all splits, as stored.
        where: name of the data, for messages.
        names: of the labels; None if they have none.
        are_labels: True if the targets can be nothing else than labels.

    Raises:
        UserError: the network has other outputs than the data has classes or values.
    """
    request = replace(request, names=names if request.names is None else request.names)
    network = request.network
    if request.preprocessing is not None:
        return request
    if network.loss.targets == "values" and (request.names is not None or are_labels):
        raise UserError(
            f"{where} has classes, but {network.label} predicts values; use "
            f"{classifier_for(network)}, or data with values"
        )
    is_binary = network.loss.targets == "binary" and network.num_outputs == 1
    if network.loss.targets != "classes" and not is_binary:
        found = f"{where}: targets have shape {targets[0].shape}"
        return _with_outputs(request, sample, math.prod(targets[0].shape[1:]), found)
    parts = [labels_in(y, where, request.names) for y in targets]
    labels = replace(parts[0], values=np.unique(np.concatenate([part.values for part in parts])))
    count = sum(len(part.values) for part in parts)
    if is_binary:
        _check_two_classes(labels, request, where)
        return request
    keeps_outputs = network.family is None or network.file_kind == "weights"
    if labels.names is not None or not keeps_outputs:
        _check_several_classes(labels, count, where)
    elif _are_outputs(labels, network):
        return request
    request = _with_outputs(request, sample, labels.outputs, _found(labels, where, request))
    if labels.names is None and not _are_outputs(labels, request.network):
        request = replace(request, names={label: str(label) for label in labels.values.tolist()})
    return request


def loss_for(y: NDArray[Any], *, has_names: bool = False) -> Loss:
    """Return the loss that fits targets, for a network that the user did not choose.

    Targets are classes if they are text, one-hot rows, or a few whole numbers, of which each
    occurs twice on average. Other rows of 0 and 1 are several labels. Anything else is values.

    Args:
        y: targets as stored.
        has_names: True if the labels have names.

    Example:
        >>> kinds = [np.array(y) for y in ([0, 1, 2, 1, 2, 0], [0.5, 1.5], [[1, 1], [0, 1]])]
        >>> [loss_for(y).targets for y in kinds]
        ['classes', 'values', 'binary']
    """
    if has_names or are_texts(y):
        return SoftmaxCrossEntropy()
    if math.prod(y.shape[1:]) > 1:
        if not ((y == 0) | (y == 1)).all():
            return MeanSquaredError()
        is_one_hot = y.ndim == 2 and (y.sum(axis=1) == 1).all()
        return SoftmaxCrossEntropy() if is_one_hot else SigmoidBinaryCrossEntropy()
    if not np.isfinite(y).all() or (y != np.floor(y)).any():
        return MeanSquaredError()
    most = max(FEW, len(y) // 2) if y.dtype.kind in "iub" else min(FEW_NUMBERS, len(y) // 2)
    return SoftmaxCrossEntropy() if len(np.unique(y)) <= most else MeanSquaredError()


def classifier_for(network: Network) -> str:
    """Return the network that predicts classes instead of the values of `network`, in words."""
    if network.name.startswith("mlp-") and network.family is not None:
        return network.name.replace("mlp", "classifier", 1)
    return "a network that ends in softmax_cross_entropy"


def class_names(request: Request) -> tuple[str, ...] | None:
    """Return the names of a new model's classes: those of the labels, or numbers; None for values.

    Targets of sigmoid outputs without names have no names of classes.
    """
    network = request.network
    if network.loss.targets == "values":
        return None
    if request.names is not None:
        return tuple(request.names.values())
    is_softmax = network.loss.targets == "classes"
    return tuple(map(str, range(network.num_outputs))) if is_softmax else None


def _with_outputs(request: Request, sample: Shape, outputs: int, found: str) -> Request:
    """Return the request for a network with so many outputs, or raise `UserError`."""
    network = adapt(request.network, sample, outputs)
    if network.num_outputs != outputs:
        raise UserError(
            f"{found}, but {network.label} has {network.num_outputs} outputs; "
            f"{edit_outputs(network, outputs)}"
        )
    return replace(request, network=network)


def _are_outputs(labels: Labels, network: Network) -> bool:
    """Return True if labels without names are numbers of the network's outputs, from 0 on."""
    if labels.count is not None:
        return labels.count == network.num_outputs
    return bool((labels.values >= 0).all() and (labels.values < network.num_outputs).all())


def _found(labels: Labels, where: str, request: Request) -> str:
    """Return what the data has, for a message."""
    if labels.names is not None:
        names = tuple(labels.names.values())
        return f"{where} has {len(names)} classes ({listed(names)})"
    low, high = labels.values.min(), labels.values.max()
    if low < 0:
        raise UserError(
            f"{where}: labels from {low} to {high}; expected whole numbers from 0 on, or names of "
            f"the labels, such as {_example(labels, request)}"
        )
    some = "" if high - low + 1 == len(labels.values) else f" ({len(labels.values)} different)"
    return f"{where}: labels from {low} to {high}{some}"


def _check_several_classes(labels: Labels, count: int, where: str) -> None:
    """Refuse data of one class, and numbers that are no classes.

    Args:
        labels: the different ones.
        count: number of samples.
        where: name of the data, for messages.
    """
    names = labels.names
    if names is not None and len(names) == 1:
        only = next(iter(names.values()))
        inner = Path(where) / only
        has_folders = inner.is_dir() and any(path.is_dir() for path in inner.iterdir())
        raise UserError(
            f"{where} has only the class {shown(only)}; a network distinguishes at least two, so "
            + (
                f"use folder:{inner} if its folders are the classes"
                if has_folders
                else "add samples of another class"
            )
        )
    if names is None and labels.count is None and len(labels.values) == 1:
        raise UserError(
            f"{where}: all labels are {labels.values[0]}; a network distinguishes at least two "
            "classes, so add samples of another class"
        )
    if names is None and len(labels.values) > max(FEW, count // 2):
        raise UserError(
            f"{where}: {len(labels.values):,} different labels for {count:,} samples; expected "
            "classes with several samples each; to predict values, use a network that ends in "
            "mean_squared_error"
        )


def _example(labels: Labels, request: Request) -> str:
    """Return how a user may name labels that have no names."""
    count = len(np.unique(labels.values))
    names = ("no", "yes") if count == 2 else [f"class{number}" for number in range(count)]
    return request.example_of_names(names_for(labels, names))


def _check_two_classes(labels: Labels, request: Request, where: str) -> None:
    """Raise `UserError` unless one sigmoid output can distinguish the labels."""
    names, values, network = labels.names, labels.values, request.network
    if names is None and not ((values == 0) | (values == 1)).all():
        are_two = len(values) == 2
        raise UserError(
            f"{where}: targets range from {values.min()} to {values.max()}, but network "
            f"{network.name} ends in {network.loss.kind}, which expects 0 and 1; "
            + (
                f"name the labels, such as {_example(labels, request)}"
                if are_two
                else "use data with two classes, or another network"
            )
        )
    if names is not None and len(names) != 2:
        raise UserError(
            f"{where} has {len(names)} classes ({listed(tuple(names.values()))}), but network "
            f"{network.name} ends in one output and {network.loss.kind}, which distinguishes two; "
            f"use loss softmax_cross_entropy and {edit_outputs(network, len(names))}"
        )
