"""Wide residual networks, whose blocks begin with normalisation and ReLU.

Source: Zagoruyko and Komodakis, "Wide residual networks", 2016; parameters have the names of
https://github.com/xternalz/WideResNet-pytorch.
"""

from __future__ import annotations

from functools import partial

from dptrain.network.activations import ReLU
from dptrain.network.combining import Add, GlobalAveragePool2d
from dptrain.network.functional import Input, Tensor, name_scope
from dptrain.network.layers import Dense, Flatten, Shape
from dptrain.network.network import Network
from dptrain.network.normalization import BatchNorm2d
from dptrain.network.zoo.recipes import CIFAR_SIZE, Entry, Recipe
from dptrain.network.zoo.resnet import convolution

DECAY = 5e-4


def _block(x: Tensor, width: int, stride: int) -> Tensor:
    active = ReLU()(BatchNorm2d()(x, name="bn1"))
    y = convolution(active, width, 3, stride, "conv1", DECAY)
    y = convolution(ReLU()(BatchNorm2d()(y, name="bn2")), width, 3, 1, "conv2", DECAY)
    if x.shape[0] != width:
        x = convolution(active, width, 1, stride, "convShortcut", DECAY)
    return Add()(y, x)


def wide_resnet(depth: int, widening: int, input_shape: Shape, outputs: int) -> Network:
    """Return WRN-depth-widening for images of some shape, without dropout."""
    count = (depth - 4) // 6
    y = convolution(Input(input_shape), 16, 3, 1, "conv1", DECAY)
    for stage, width in enumerate((16 * widening, 32 * widening, 64 * widening), 1):
        for number in range(count):
            with name_scope(f"block{stage}.layer.{number}"):
                y = _block(y, width, 2 if stage > 1 and number == 0 else 1)
    y = ReLU()(BatchNorm2d()(y, name="bn1"), name="relu")
    y = Flatten()(GlobalAveragePool2d()(y))
    output = Dense(outputs, weight_decay=DECAY)(y, name="fc")
    return Network.from_output(output, name=f"wrn-{depth}-{widening}")


_RECIPE = Recipe(
    "sgd", 0.1, momentum=0.9, nesterov=True, epochs=200, data="shapes", schedule="step",
    step_at="0.3,0.6,0.8", step_factor=0.2, crop=4, flip=True, batch_size=128,
)  # fmt: skip
"""Section 3 of the paper: a fifth of the rate after 60, 120 and 160 epochs."""

NETWORKS = {
    "wrn-28-10": Entry(
        "3×32×32, wide residual", partial(wide_resnet, 28, 10), *CIFAR_SIZE, _RECIPE
    ),
}
