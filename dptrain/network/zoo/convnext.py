"""ConvNeXt-T as torchvision defines it.

Source: Liu et al., "A ConvNet for the 2020s", 2022.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from dptrain.network.activations import GELU
from dptrain.network.combining import GlobalAveragePool2d
from dptrain.network.functional import Input, Tensor, name_scope
from dptrain.network.initializers import Constant, Normal
from dptrain.network.layers import Conv2d, Dense, Flatten, Shape, StochasticDepth
from dptrain.network.network import Network
from dptrain.network.normalization import LayerNorm
from dptrain.network.zoo.recipes import IMAGENET, IMAGENET_SIZE, Entry

STAGES = ((3, 96), (3, 192), (9, 384), (3, 768))
"""Blocks and channels of the stages."""

RATE = 0.1
"""Share of samples that skip the last block in training; earlier blocks have smaller ones."""

_INIT = Normal(0.02)
_convolution = partial(Conv2d, padding="valid", rounding="floor", weight_init=_INIT)
_norm = partial(LayerNorm, epsilon=1e-6)


def _block(x: Tensor, rate: float) -> Tensor:
    """Return x and a depthwise 7×7 convolution with two 1×1 convolutions, scaled per channel."""
    channels = x.shape[0]
    with name_scope("block"):
        y = _convolution(channels, 7, padding=3, groups=channels)(x, name="0")
        y = _convolution(4 * channels, 1)(_norm()(y, name="2"), name="3")
        y = _convolution(channels, 1)(GELU()(y, name="4"), name="5")
    # The published factor per channel is a depthwise 1×1 convolution.
    scale = Conv2d(channels, 1, groups=channels, bias=False, weight_init=Constant(1e-6))
    y = scale(y, name="layer_scale")
    return x + (StochasticDepth(rate)(y) if rate else y)


def convnext(input_shape: Shape, outputs: int) -> Network:
    """Return the network for images of at least 32×32 pixels and some number of classes."""
    y, done, blocks = Input(input_shape), 0, sum(count for count, _ in STAGES)
    for stage, (count, channels) in enumerate(STAGES):
        with name_scope(f"features.{2 * stage}"):
            if stage:
                y = _convolution(channels, 2, 2)(_norm()(y, name="0"), name="1")
            else:
                y = _norm()(_convolution(channels, 4, 4)(y, name="0"), name="1")
        for number in range(count):
            with name_scope(f"features.{2 * stage + 1}.{number}"):
                y = _block(y, RATE * done / (blocks - 1))
            done += 1
    y = Flatten()(_norm()(GlobalAveragePool2d()(y), name="classifier.0"))
    output = Dense(outputs, weight_init=_INIT)(y, name="classifier.2")
    return Network.from_output(output, name="convnext-tiny")


NETWORKS = {
    # Published for minibatches of 1024 with the rate 0.001 after five epochs of warm-up.
    "convnext-tiny": Entry(
        "3×224×224, depthwise 7×7",
        convnext,
        *IMAGENET_SIZE,
        replace(
            IMAGENET,
            optimizer="adamw",
            learning_rate=2.5e-4,
            momentum=0.0,
            epochs=600,
            schedule="cosine",
            step_at=None,
            weight_decay=0.05,
        ),
    ),
}
