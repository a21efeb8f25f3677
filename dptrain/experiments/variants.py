"""Variants of a network: the same layers with other strides, filters, kernels or poolings."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dptrain.errors import UserError
from dptrain.network.layers import AveragePool2d, Conv2d, Layer, MaxPool2d, SumPool2d
from dptrain.network.network import Network

POOLINGS = (MaxPool2d, AveragePool2d, SumPool2d)
AS_IT_IS = "as it is"
"""The network that the others are variants of."""


@dataclass(frozen=True)
class Variant:
    """One variant.

    Attributes:
        name: ``stride 2``; several changes with commas between them.
        changes: by axis, as the user wrote them.
        network: None where no such network is possible.
        why: it is not.
    """

    name: str
    changes: Mapping[str, str]
    network: Network | None
    why: str = ""

    @property
    def slug(self) -> str:
        """The name as a part of file names."""
        return re.sub(r"[^a-z0-9.]+", "-", self.name.lower())


def list_variants(
    network: Network, axes: Mapping[str, Sequence[str]], *, cross: bool = False
) -> list[Variant]:
    """The network as it is, then each change alone, or all combinations.

    Args:
        network: what is changed.
        axes: values by names of `AXES`.
        cross: combine the axes.

    Returns:
        Variants, each network once; a value that changes nothing makes none.

    Raises:
        UserError: a value that no layer could have, or nothing that it could change.
    """
    choices: list[dict[str, str]] = [{}]
    if cross:
        names = [name for name in AXES if axes.get(name)]
        choices += [dict(zip(names, values, strict=True))
                    for values in itertools.product(*(axes[name] for name in names))]  # fmt: skip
    else:
        choices += [{name: value} for name in AXES for value in axes.get(name, ())]
    variants: list[Variant] = []
    for choice in choices:
        layers = list(network.layers)
        for name, value in choice.items():
            layers = _changed(layers, name, value)
        if choice and layers == list(network.layers):
            continue
        if not any(v.network is not None and list(v.network.layers) == layers for v in variants):
            variants.append(_variant(network, choice, layers))
    return variants


def _variant(network: Network, choice: Mapping[str, str], layers: Sequence[Layer]) -> Variant:
    name = ", ".join(f"{axis} {value}" for axis, value in choice.items()) or AS_IT_IS
    variant = Variant(name, choice, None)
    title = f"{network.name}-{variant.slug}" if choice else network.name
    try:
        return replace(variant, network=replace(network, layers=layers, name=title))
    except UserError as error:
        return replace(variant, why=str(error))


def _changed(layers: Sequence[Layer], name: str, value: str) -> list[Layer]:
    axis = AXES[name]
    places = [i for i, layer in enumerate(layers) if isinstance(layer, axis.kinds)][: axis.most]
    if not places:
        raise UserError(f"--{name} {value}: the network has no {axis.what}")
    result = list(layers)
    for place in places:
        result[place] = axis.change(layers[place], name, value)
    return result


@dataclass(frozen=True)
class Axis:
    """A way of changing layers.

    Attributes:
        kinds: classes of the layers that it changes.
        what: those, in words.
        change: makes the changed layer of one, the axis's name and a value.
        most: how many it changes at most, from the input on; None for all.
    """

    kinds: tuple[type[Layer], ...]
    what: str
    change: Callable[[Any, str, str], Layer]
    most: int | None = None


def _convolution(field: str) -> Callable[[Any, str, str], Layer]:
    def change(layer: Conv2d, name: str, value: str) -> Layer:
        fields: dict[str, Any] = {field: _number(name, value)}
        return replace(layer, **fields)

    return change


def _pooling(layer: Any, name: str, value: str) -> Layer:
    window, slash, stride = value.partition("/")
    size = _number(name, window)
    changed: Layer = replace(layer, window=size, stride=_number(name, stride) if slash
                             else layer.stride)  # fmt: skip
    return changed


def _number(name: str, value: str) -> int:
    if not (value.isdecimal() and int(value) > 0):
        form = ", or window/stride such as 3/2" if name.endswith("pool") else ""
        raise UserError(
            f"--{name} has '{value}'; expected whole numbers of at least 1 with commas between "
            f"them{form}"
        )
    return int(value)


AXES: Mapping[str, Axis] = {
    "stride": Axis((Conv2d,), "convolution", _convolution("stride")),
    "filters": Axis((Conv2d,), "convolution", _convolution("filters")),
    "kernel": Axis((Conv2d,), "convolution", _convolution("kernel")),
    "pool": Axis(POOLINGS, "pooling", _pooling),
    "first-pool": Axis(POOLINGS, "pooling", _pooling, most=1),
}
"""By the flag's name without its dashes, in the order in which changes are made."""
