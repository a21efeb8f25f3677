"""DenseNet-121 as torchvision defines it.

Source: Huang et al., "Densely connected convolutional networks", 2017, table 1; section 4.2 has the
recipe.
"""

from __future__ import annotations

from dataclasses import replace

from dptrain.network.activations import ReLU
from dptrain.network.combining import Concatenate
from dptrain.network.functional import Input, Tensor, name_scope
from dptrain.network.initializers import He, Uniform
from dptrain.network.layers import AveragePool2d, Conv2d, MaxPool2d, Shape
from dptrain.network.network import Network
from dptrain.network.normalization import BatchNorm2d
from dptrain.network.zoo.blocks import classify, conv_norm
from dptrain.network.zoo.recipes import IMAGENET, IMAGENET_SIZE, Entry

GROWTH, COUNTS = 32, (6, 12, 24, 16)
"""Filters of each layer, and layers of each block."""


def _convolution(x: Tensor, filters: int, kernel: int, number: str = "") -> Tensor:
    """Return normalisation, ReLU and convolution."""
    y = ReLU()(BatchNorm2d()(x, name=f"norm{number}"), name=f"relu{number}")
    return Conv2d(filters, kernel, padding=kernel // 2, bias=False)(y, name=f"conv{number}")


def _block(x: Tensor, count: int) -> Tensor:
    """Return x and the outputs of layers, each of which reads x and all outputs before it."""
    found = [x]
    for number in range(1, count + 1):
        with name_scope(f"denselayer{number}"):
            y = Concatenate()(found) if number > 1 else x
            y = _convolution(y, 4 * GROWTH, 1, "1")
            found.append(_convolution(y, GROWTH, 3, "2"))
    return Concatenate()(found)


def densenet(input_shape: Shape, outputs: int) -> Network:
    """Return the network for images of at least 29×29 pixels and some number of classes."""
    with name_scope("features"):
        names = ("conv0", "norm0", "relu0")
        y = conv_norm(Input(input_shape), 2 * GROWTH, 7, 2, names=names, init=He())
        y = MaxPool2d(3, 2, padding=1)(y, name="pool0")
        for stage, count in enumerate(COUNTS, 1):
            with name_scope(f"denseblock{stage}"):
                y = _block(y, count)
            if stage < len(COUNTS):
                with name_scope(f"transition{stage}"):
                    y = AveragePool2d(2, 2)(_convolution(y, y.shape[0] // 2, 1), name="pool")
        y = ReLU()(BatchNorm2d()(y, name="norm5"))
    return classify(y, outputs, "densenet121", layer="classifier", init=Uniform())


NETWORKS = {
    "densenet121": Entry(
        "3×224×224, dense blocks",
        densenet,
        *IMAGENET_SIZE,
        replace(IMAGENET, nesterov=True, weight_decay=1e-4),
    ),
}
