"""Variants of a network: the same layers with other strides, widths, kernels or pooling."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dptrain.bounds import MAX_WHOLE, Limits, parse_number, wrong_number
from dptrain.errors import UserError, shown
from dptrain.network.layers import AveragePool2d, Conv2d, Dense, Layer, MaxPool2d, SumPool2d
from dptrain.network.network import Network

POOLINGS = (MaxPool2d, AveragePool2d, SumPool2d)
UNCHANGED = "unchanged"
"""Name of the original network among the variants."""


class ImpossibleLayerError(UserError):
    """A layer cannot have a value that is valid for others."""


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
        choices += [
            dict(zip(names, values, strict=True))
            for values in itertools.product(*(axes[name] for name in names))
        ]
    else:
        choices += [{name: value} for name in AXES for value in axes.get(name, ())]
    variants: list[Variant] = []
    for choice in choices:
        layers = list(network.layers)
        try:
            for name, value in choice.items():
                layers = _changed(layers, name, value)
        except ImpossibleLayerError as error:
            variants.append(Variant(_name(choice), choice, None, str(error)))
            continue
        if choice and layers == list(network.layers):
            continue
        if not any(v.network is not None and list(v.network.layers) == layers for v in variants):
            variants.append(_variant(network, choice, layers))
    return variants


def change_layers(network: Network, changes: Mapping[str, str]) -> Network:
    """Return the network with some changes.

    Args:
        network: the original network.
        changes: a value for each of some names of `AXES`.

    Raises:
        UserError: a value is not valid, or the changed network is not possible.
    """
    layers = list(network.layers)
    for name, value in changes.items():
        layers = _changed(layers, name, value)
    return replace(network, layers=layers)


def _variant(network: Network, choice: Mapping[str, str], layers: Sequence[Layer]) -> Variant:
    variant = Variant(_name(choice), choice, None)
    title = f"{network.name}-{variant.slug}" if choice else network.name
    try:
        return replace(variant, network=replace(network, layers=layers, name=title))
    except UserError as error:
        return replace(variant, why=str(error))


def _name(choice: Mapping[str, str]) -> str:
    return ", ".join(f"{axis} {value}" for axis, value in choice.items()) or UNCHANGED


def _changed(layers: Sequence[Layer], name: str, value: str) -> list[Layer]:
    axis = AXES[name]
    positions = [i for i, layer in enumerate(layers) if isinstance(layer, axis.kinds)]
    positions = positions[: axis.max_layers]
    if axis.spares_output:
        positions = [i for i in positions if i != _output_layer(layers)]
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
        spares_output: True if the last layer with parameters, which the targets determine, stays.
    """

    kinds: tuple[type[Layer], ...]
    what: str
    change: Callable[[Any, str, str], Layer]
    max_layers: int | None = None
    spares_output: bool = False


def _output_layer(layers: Sequence[Layer]) -> int:
    """Return the position of the last convolution or dense layer."""
    return max(i for i, layer in enumerate(layers) if isinstance(layer, Conv2d | Dense))


def _convolution(field: str) -> Callable[[Any, str, str], Layer]:
    def change(layer: Conv2d, name: str, value: str) -> Layer:
        return _replaced(layer, **{field: _number(name, value)})

    return change


def _replaced(layer: Layer, **fields: Any) -> Layer:
    """Return a layer with other fields.

    Raises:
        ImpossibleLayerError: the layer cannot have them.
    """
    try:
        return replace(layer, **fields)  # type: ignore[type-var]
    except UserError as error:
        raise ImpossibleLayerError(str(error)) from None


def _pooling(layer: Any, name: str, value: str) -> Layer:
    window, slash, stride = value.partition("/")
    size = _number(name, window)
    return _replaced(layer, window=size, stride=_number(name, stride) if slash else layer.stride)


def _widened(layer: Any, name: str, value: str) -> Layer:
    """Return a layer with a multiple of its filters or units."""
    limits = Limits(above=0, at_most=MAX_WHOLE)
    factor = parse_number(value, float, limits)
    if factor is None:
        raise UserError(wrong_number(f"--{name}", value, float, limits))
    if isinstance(layer, Dense):
        return replace(layer, units=max(1, round(layer.units * factor)))
    return _with_filters(layer, max(1, round(layer.filters * factor)))


def _with_filters(layer: Conv2d, filters: int) -> Layer:
    """Return a convolution with another number of filters; depthwise ones stay depthwise."""
    is_depthwise = layer.groups > 1 and layer.groups == layer.filters
    return _replaced(layer, filters=filters, groups=filters if is_depthwise else layer.groups)


def _with_number_of_filters(layer: Conv2d, name: str, value: str) -> Layer:
    return _with_filters(layer, _number(name, value))


def _number(name: str, value: str) -> int:
    number = parse_number(value, int, Limits(at_least=1)) if value.isdecimal() else None
    if number is None:
        form = ", or window/stride such as 3/2" if name.endswith("pool") else ""
        raise UserError(
            f"--{name} has the value '{shown(value)}'; expected whole numbers from 1 to "
            f"{MAX_WHOLE:,}, separated by commas{form}"
        )
    return int(number)


AXES: Mapping[str, Axis] = {
    "stride": Axis((Conv2d,), "convolution", _convolution("stride")),
    "filters": Axis((Conv2d,), "convolution", _with_number_of_filters),
    "width": Axis((Conv2d, Dense), "convolution or dense layer", _widened, spares_output=True),
    "kernel": Axis((Conv2d,), "convolution", _convolution("kernel")),
    "pool": Axis(POOLINGS, "pooling", _pooling),
    "first-pool": Axis(POOLINGS, "pooling", _pooling, max_layers=1),
}
"""Axes by the name of the flag without dashes, in the order in which changes are applied."""
