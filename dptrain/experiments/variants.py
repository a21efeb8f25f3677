"""Variants of a network: the same layers with other strides, filters, kernels or pooling."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dptrain.errors import UserError, shown
from dptrain.network.layers import AveragePool2d, Conv2d, Layer, MaxPool2d, SumPool2d
from dptrain.network.network import Network

POOLINGS = (MaxPool2d, AveragePool2d, SumPool2d)
UNCHANGED = "unchanged"
"""Name of the original network among the variants."""


@dataclass(frozen=True)
class Variant:
    """One variant.

    Attributes:
        name: changes separated by commas, such as ``stride 2``.
        changes: values by axis, as the user wrote them.
        network: the network; None if it is not possible.
        why: the reason why it is not possible.
    """

    name: str
    changes: Mapping[str, str]
    network: Network | None
    why: str = ""

    @property
    def slug(self) -> str:
        """The name in a form for file names."""
        return re.sub(r"[^a-z0-9.]+", "-", self.name.lower())


def list_variants(
    network: Network, axes: Mapping[str, Sequence[str]], *, cross: bool = False
) -> list[Variant]:
    """Return the original network, then each change alone or all combinations of changes.

    Args:
        network: the original network.
        axes: values by names of `AXES`.
        cross: True to combine the axes.

    Returns:
        The variants, each network once; a value that changes nothing adds none.

    Raises:
        UserError: a value is not valid, or the network has no layer that it changes.
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
    name = ", ".join(f"{axis} {value}" for axis, value in choice.items()) or UNCHANGED
    variant = Variant(name, choice, None)
    title = f"{network.name}-{variant.slug}" if choice else network.name
    try:
        return replace(variant, network=replace(network, layers=layers, name=title))
    except UserError as error:
        return replace(variant, why=str(error))


def _changed(layers: Sequence[Layer], name: str, value: str) -> list[Layer]:
    axis = AXES[name]
    positions = [i for i, layer in enumerate(layers) if isinstance(layer, axis.kinds)]
    positions = positions[: axis.max_layers]
    if not positions:
        raise UserError(f"--{name} {value}: the network has no {axis.what}")
    result = list(layers)
    for i in positions:
        result[i] = axis.change(layers[i], name, value)
    return result


@dataclass(frozen=True)
class Axis:
    """A property of layers that variants change.

    Attributes:
        kinds: classes of the layers that are changed.
        what: name of these layers in messages.
        change: returns the changed layer, from a layer, the name of the axis and a value.
        max_layers: largest number of layers that are changed, from the input on; None for all.
    """

    kinds: tuple[type[Layer], ...]
    what: str
    change: Callable[[Any, str, str], Layer]
    max_layers: int | None = None


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
            f"--{name} has the value '{shown(value)}'; expected whole numbers of at least 1, "
            f"separated by commas{form}"
        )
    return int(value)


AXES: Mapping[str, Axis] = {
    "stride": Axis((Conv2d,), "convolution", _convolution("stride")),
    "filters": Axis((Conv2d,), "convolution", _convolution("filters")),
    "kernel": Axis((Conv2d,), "convolution", _convolution("kernel")),
    "pool": Axis(POOLINGS, "pooling", _pooling),
    "first-pool": Axis(POOLINGS, "pooling", _pooling, max_layers=1),
}
"""Axes by the name of the flag without dashes, in the order in which changes are applied."""
