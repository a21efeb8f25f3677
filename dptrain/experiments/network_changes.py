"""Changes of a network: the same layers with other strides, widths, kernels or pooling."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from dptrain.bounds import MAX_WHOLE, Limits, parse_number, wrong_number
from dptrain.errors import UserError, shown
from dptrain.network.layers import AveragePool2d, Conv2d, Dense, Layer, MaxPool2d, SumPool2d
from dptrain.network.network import Network

T = TypeVar("T")
POOLINGS = (MaxPool2d, AveragePool2d, SumPool2d)


class ImpossibleNetworkError(UserError):
    """A network cannot have a value that is valid for others."""


def change_layers(network: Network, changes: Mapping[str, str]) -> Network:
    """Return the network with some changes.

    Args:
        network: the original network.
        changes: a value for each of some names of `AXES`.

    Raises:
        ImpossibleNetworkError: the changed network is not possible.
        UserError: a value is not valid for any network, or there is no layer that it changes.

    Example:
        >>> from dptrain.network import Flatten
        >>> network = Network((1, 8, 8), [Conv2d(4, padding=1), Flatten(), Dense(3)])
        >>> change_layers(network, {"filters": "6"}).layers[0].filters
        6
    """
    layers = list(network.layers)
    # In this order a change of the first pooling follows that of all poolings.
    for name in sorted(changes, key=list(AXES).index):
        layers = _changed(layers, name, changes[name])
    return _possible(lambda: replace(network, layers=layers))


def _changed(layers: Sequence[Layer], name: str, value: str) -> list[Layer]:
    axis = AXES[name]
    positions = [i for i, layer in enumerate(layers) if isinstance(layer, axis.kinds)]
    positions = positions[: axis.max_layers]
    if axis.spares_output:
        positions = [i for i in positions if i != _output_layer(layers)]
    if not positions:
        raise UserError(f"{name} {value}: the network has no {axis.what}")
    result = list(layers)
    for i in positions:
        result[i] = axis.change(layers[i], name, value)
    return result


@dataclass(frozen=True)
class Axis:
    """A property of layers that is changed.

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
    return _possible(lambda: replace(layer, **fields))  # type: ignore[type-var]


def _possible(make: Callable[[], T]) -> T:
    """Return what `make` returns.

    Raises:
        ImpossibleNetworkError: it refuses the values.
    """
    try:
        return make()
    except UserError as error:
        raise ImpossibleNetworkError(str(error)) from None


def _pooling(layer: Any, name: str, value: str) -> Layer:
    window, slash, stride = value.partition("/")
    size = _number(name, window)
    return _replaced(layer, window=size, stride=_number(name, stride) if slash else layer.stride)


def _widened(layer: Any, name: str, value: str) -> Layer:
    """Return a layer with a multiple of its filters or units."""
    limits = Limits(above=0, at_most=MAX_WHOLE)
    factor = parse_number(value, float, limits)
    if factor is None:
        raise UserError(wrong_number(name, value, float, limits))
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
            f"{name} has the value '{shown(value)}'; expected whole numbers from 1 to "
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
"""Axes by name, in the order in which changes are applied."""
