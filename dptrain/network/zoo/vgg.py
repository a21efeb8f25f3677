"""VGG networks with batch normalisation, as torchvision defines them.

Source: Simonyan and Zisserman, "Very deep convolutional networks for large-scale image
recognition", 2014, configurations A and D; their fully connected layers have dropout.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from dptrain.network.activations import ReLU
from dptrain.network.initializers import Normal
from dptrain.network.layers import Conv2d, Dense, Dropout, Flatten, Layer, MaxPool2d, Shape
from dptrain.network.network import Network, NodeSpec
from dptrain.network.normalization import BatchNorm2d
from dptrain.network.zoo.recipes import IMAGENET, IMAGENET_SIZE, Entry

DECAY = 1e-4


def sequence(scope: str, layers: Sequence[Layer]) -> list[NodeSpec]:
    """Return a chain of layers with the names of a PyTorch `Sequential`, ``features.0``, …."""
    return [NodeSpec(layer, f"{scope}.{number}") for number, layer in enumerate(layers)]


def vgg(name: str, stages: Sequence[Sequence[int]], input_shape: Shape, outputs: int) -> Network:
    """Return a network for images.

    Args:
        name: name of the network.
        stages: filters of the convolutions before each pooling.
        input_shape: (C, H, W).
        outputs: number of classes.
    """
    features: list[Layer] = []
    for stage in stages:
        for filters in stage:
            convolution = Conv2d(filters, padding=1, weight_decay=DECAY)
            features += [convolution, BatchNorm2d(), ReLU()]
        features.append(MaxPool2d(2))
    dense = partial(Dense, weight_init=Normal(0.01), weight_decay=DECAY)
    classifier = [dense(4096), ReLU(), Dropout(), dense(4096), ReLU(), Dropout(), dense(outputs)]
    nodes = [
        *sequence("features", features),
        NodeSpec(Flatten(), "flatten"),
        *sequence("classifier", classifier),
    ]
    return Network.from_nodes(input_shape, nodes, name=name)


_CONFIGURATIONS = {
    "vgg11-bn": ((64,), (128,), (256, 256), (512, 512), (512, 512)),
    "vgg16-bn": ((64, 64), (128, 128), (256,) * 3, (512,) * 3, (512,) * 3),
}

NETWORKS = {
    name: Entry("3×224×224, batch norm", partial(vgg, name, stages), *IMAGENET_SIZE, IMAGENET)
    for name, stages in _CONFIGURATIONS.items()
}
