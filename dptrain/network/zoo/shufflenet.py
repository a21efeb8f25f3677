"""ShuffleNet V2 as torchvision defines it.

Source: Ma et al., "ShuffleNet V2: practical guidelines for efficient CNN architecture design",
2018, table 5; its recipe is that of Zhang et al., "ShuffleNet", 2018.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dptrain.network.combining import Concatenate
from dptrain.network.functional import Input, Tensor, name_scope
from dptrain.network.initializers import Uniform
from dptrain.network.layers import MaxPool2d, Shape
from dptrain.network.maps.channels import ChannelShuffle, ChannelSlice
from dptrain.network.network import Network
from dptrain.network.zoo.blocks import classify, conv_norm
from dptrain.network.zoo.recipes import IMAGENET, IMAGENET_SIZE, Entry

_STAGES = ((4, 116), (8, 232), (4, 464))
"""Blocks and channels of the stages of width 1."""


def _convolution(
    x: Tensor, filters: int, kernel: int, stride: int, first: int, **more: Any
) -> Tensor:
    """Return a convolution with the normalisation and the ReLU that follow, from layer `first`."""
    names = tuple(str(first + i) for i in range(3))
    return conv_norm(x, filters, kernel, stride, names=names, init=Uniform(), **more)


def _depthwise(x: Tensor, stride: int, first: int) -> Tensor:
    return _convolution(x, x.shape[0], 3, stride, first, groups=x.shape[0], activation=None)


def _block(x: Tensor, channels: int, stride: int) -> Tensor:
    """Return half of the channels of x, or of a projection, and a function of the other half."""
    half = channels // 2
    if stride == 1:
        kept, x = ChannelSlice(0, half)(x), ChannelSlice(half, channels)(x)
    else:
        with name_scope("branch1"):
            kept = _convolution(_depthwise(x, stride, 0), half, 1, 1, 2)
    with name_scope("branch2"):
        y = _depthwise(_convolution(x, half, 1, 1, 0), stride, 3)
        y = _convolution(y, half, 1, 1, 5)
    return ChannelShuffle(2)(Concatenate()(kept, y))


def shufflenet(input_shape: Shape, outputs: int) -> Network:
    """Return ShuffleNet V2 with width 1 for images of some shape and some number of classes."""
    with name_scope("conv1"):
        y = _convolution(Input(input_shape), 24, 3, 2, 0)
    y = MaxPool2d(3, 2, padding=1)(y, name="maxpool")
    for stage, (count, channels) in enumerate(_STAGES, 2):
        for number in range(count):
            with name_scope(f"stage{stage}.{number}"):
                y = _block(y, channels, 1 if number else 2)
    with name_scope("conv5"):
        y = _convolution(y, 1024, 1, 1, 0)
    return classify(y, outputs, "shufflenet-v2-x1", init=Uniform())


NETWORKS = {
    # Published for minibatches of 1024 with the rate 0.5: 300,000 steps are 240 epochs.
    "shufflenet-v2-x1": Entry(
        "3×224×224, shuffled channels",
        shufflenet,
        *IMAGENET_SIZE,
        replace(
            IMAGENET,
            learning_rate=0.125,
            epochs=240,
            schedule="polynomial",
            step_at=None,
            weight_decay=4e-5,
        ),
    ),
}
