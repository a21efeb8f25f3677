"""Blocks that several networks of ImageNet share, with the names of torchvision's parameters."""

from __future__ import annotations

import math
from collections.abc import Callable

from dptrain.network.activations import ReLU, Sigmoid
from dptrain.network.combining import GlobalAveragePool2d
from dptrain.network.functional import Tensor
from dptrain.network.initializers import Initializer, Normal
from dptrain.network.layers import Conv2d, Dense, Dropout, Flatten, Layer, PaddingName
from dptrain.network.network import Network
from dptrain.network.normalization import BatchNorm2d

Make = Callable[[], Layer]
"""A class of layers, or a function that returns one: calls do not share parameters."""


def fan_out(filters: int, kernel: int = 1) -> Normal:
    """Return the initial values that keep the variance of gradients, as torchvision has them.

    The fan-out of a convolution counts all of its filters, also with groups. Source: He et al.,
    "Delving deep into rectifiers", 2015, equation 14.
    """
    return Normal(math.sqrt(2.0 / (filters * kernel * kernel)))


def in_sequence(scope: str) -> tuple[str, str, str]:
    """Return the names of three layers of a PyTorch `Sequential`."""
    return f"{scope}.0", f"{scope}.1", f"{scope}.2"


def conv_norm(
    x: Tensor,
    filters: int,
    kernel: int | tuple[int, int],
    stride: int = 1,
    *,
    names: tuple[str, ...],
    activation: Make | None = ReLU,
    norm: Make = BatchNorm2d,
    groups: int = 1,
    padding: int | PaddingName | None = None,
    init: Initializer | None = None,
) -> Tensor:
    """Return a convolution without bias, a normalisation and a function of single elements.

    Args:
        x: the input.
        filters, kernel, stride, groups: of the convolution.
        names: of the layers.
        activation: None for none.
        norm: the normalisation.
        padding: of the convolution; None for half of its kernel.
        init: initial weights; None for `fan_out`.
    """
    if padding is None or init is None:
        assert isinstance(kernel, int), "only square kernels have defaults"
        padding = kernel // 2 if padding is None else padding
        init = init or fan_out(filters, kernel)
    convolution = Conv2d(
        filters, kernel, stride, padding, groups=groups, bias=False, rounding="floor",
        weight_init=init,
    )  # fmt: skip
    y = norm()(convolution(x, name=names[0]), name=names[1])
    return y if activation is None else activation()(y, name=names[2])


def squeeze_excitation(
    x: Tensor, squeezed: int, activation: Make = ReLU, gate: Make = Sigmoid
) -> Tensor:
    """Return maps that are multiplied by a gate per channel, a function of the means of all.

    Source: Hu, Shen and Sun, "Squeeze-and-excitation networks", 2018.
    """
    y, channels = GlobalAveragePool2d()(x), x.shape[0]
    y = activation()(Conv2d(squeezed, 1, weight_init=fan_out(squeezed))(y, name="fc1"))
    return x * gate()(Conv2d(channels, 1, weight_init=fan_out(channels))(y, name="fc2"))


def classify(
    x: Tensor,
    outputs: int,
    name: str,
    *,
    layer: str = "fc",
    dropout: float = 0.0,
    init: Initializer | None = None,
) -> Network:
    """Return the network that classifies maps by the means of their channels.

    Args:
        x: the maps.
        outputs: number of classes.
        name: of the network.
        layer: name of the dense layer.
        dropout: rate before the dense layer.
        init: initial weights of the dense layer; None for a standard deviation of 0.01.
    """
    y = Flatten()(GlobalAveragePool2d()(x))
    if dropout:
        y = Dropout(dropout)(y)
    return Network.from_output(
        Dense(outputs, weight_init=init or Normal(0.01))(y, name=layer), name=name
    )
