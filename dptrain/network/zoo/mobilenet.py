"""MobileNet, whose convolutions are depthwise 3×3 and 1×1 in turn.

Source: Howard et al., "MobileNets: efficient convolutional neural networks for mobile vision
applications", 2017, table 1.
"""

from __future__ import annotations

from dptrain.network.activations import ReLU
from dptrain.network.combining import GlobalAveragePool2d
from dptrain.network.functional import Input, Tensor, name_scope
from dptrain.network.layers import Dense, Flatten, Shape
from dptrain.network.network import Network
from dptrain.network.normalization import BatchNorm2d
from dptrain.network.zoo.recipes import IMAGENET, IMAGENET_SIZE, Entry
from dptrain.network.zoo.resnet import convolution

DECAY = 1e-4

_BLOCKS = (
    (64, 1),
    (128, 2),
    (128, 1),
    (256, 2),
    (256, 1),
    (512, 2),
    *[(512, 1)] * 5,
    (1024, 2),
    (1024, 1),
)
"""Filters of the 1×1 convolution and stride of the depthwise one."""


def _active(x: Tensor, name: str) -> Tensor:
    return ReLU()(BatchNorm2d()(x, name=name))


def mobilenet(input_shape: Shape, outputs: int) -> Network:
    """Return MobileNet with width 1 for images of some shape and some number of classes."""
    y = _active(convolution(Input(input_shape), 32, 3, 2, "conv1", DECAY), "bn1")
    for number, (filters, stride) in enumerate(_BLOCKS):
        with name_scope(f"block{number}"):
            # A depthwise filter has nine weights; they are not decayed.
            channels = y.shape[0]
            y = convolution(y, channels, 3, stride, "depthwise", 0.0, groups=channels)
            y = convolution(_active(y, "bn1"), filters, 1, 1, "pointwise", DECAY)
            y = _active(y, "bn2")
    y = Flatten()(GlobalAveragePool2d()(y))
    output = Dense(outputs, weight_decay=DECAY)(y, name="fc")
    return Network.from_output(output, name="mobilenet-v1")


NETWORKS = {
    # The paper trains by RMSProp on many asynchronous workers; this is the recipe of ResNets.
    "mobilenet-v1": Entry("3×224×224, depthwise", mobilenet, *IMAGENET_SIZE, IMAGENET),
}
