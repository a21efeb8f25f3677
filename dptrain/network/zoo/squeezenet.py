"""SqueezeNet 1.1 as torchvision defines it.

Source: Iandola et al., "SqueezeNet: AlexNet-level accuracy with 50x fewer parameters and <0.5MB
model size", 2016; version 1.1 and its recipe are those of https://github.com/forresti/SqueezeNet.
"""

from __future__ import annotations

import math
from dataclasses import replace

from dptrain.network.activations import ReLU
from dptrain.network.combining import Concatenate, GlobalAveragePool2d
from dptrain.network.functional import Input, Tensor, name_scope
from dptrain.network.initializers import Normal, Uniform
from dptrain.network.layers import Conv2d, Dropout, Flatten, MaxPool2d, Shape
from dptrain.network.network import Network
from dptrain.network.zoo.recipes import IMAGENET, IMAGENET_SIZE, Entry

_SQUEEZED = {3: 16, 4: 16, 6: 32, 7: 32, 9: 48, 10: 48, 11: 64, 12: 64}
"""Filters of the first convolution of each fire module by its number among all layers. The two
others have four times as many; a pooling comes before modules 3, 6 and 9."""


def _convolution(x: Tensor, filters: int, kernel: int, name: str, stride: int = 1) -> Tensor:
    layer = Conv2d(filters, kernel, stride, "valid" if stride > 1 else kernel // 2,
                   rounding="floor", weight_init=Uniform(math.sqrt(6.0)))  # fmt: skip
    return ReLU()(layer(x, name=name))


def squeezenet(input_shape: Shape, outputs: int) -> Network:
    """Return the network for images of at least 17×17 pixels and some number of classes."""
    y = _convolution(Input(input_shape), 64, 3, "features.0", stride=2)
    for number, squeezed in _SQUEEZED.items():
        if number - 1 not in _SQUEEZED:
            y = MaxPool2d(3, 2, rounding="ceil")(y)
        with name_scope(f"features.{number}"):
            y = _convolution(y, squeezed, 1, "squeeze")
            expanded = (_convolution(y, 4 * squeezed, k, f"expand{k}x{k}") for k in (1, 3))
            y = Concatenate()(*expanded)
    last = Conv2d(outputs, 1, weight_init=Normal(0.01))
    y = ReLU()(last(Dropout(0.5)(y), name="classifier.1"))
    return Network.from_output(Flatten()(GlobalAveragePool2d()(y)), name="squeezenet1-1")


NETWORKS = {
    # Published for minibatches of 512 with the rate 0.04: 170,000 steps are 68 epochs.
    "squeezenet1-1": Entry(
        "3×224×224, fire modules",
        squeezenet,
        *IMAGENET_SIZE,
        replace(
            IMAGENET,
            learning_rate=0.02,
            epochs=68,
            schedule="polynomial",
            step_at=None,
            weight_decay=2e-4,
        ),
    ),
}
