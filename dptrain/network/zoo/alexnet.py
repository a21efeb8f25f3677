"""AlexNet as torchvision defines it.

Source: Krizhevsky, "One weird trick for parallelizing convolutional neural networks", 2014.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from dptrain.network.activations import ReLU
from dptrain.network.layers import Conv2d, Dense, Dropout, Flatten, MaxPool2d, Shape
from dptrain.network.network import Network, NodeSpec
from dptrain.network.zoo.recipes import IMAGENET, IMAGENET_SIZE, Entry
from dptrain.network.zoo.vgg import sequence

DECAY = 1e-4


def alexnet(input_shape: Shape, outputs: int) -> Network:
    """Return the network for images of some shape, (C, H, W), and some number of classes."""
    convolution = partial(Conv2d, rounding="floor", weight_decay=DECAY)
    dense = partial(Dense, weight_decay=DECAY)
    features = [
        convolution(64, 11, 4, padding=2),
        ReLU(),
        MaxPool2d(3, 2),
        convolution(192, 5, padding=2),
        ReLU(),
        MaxPool2d(3, 2),
        convolution(384, 3, padding=1),
        ReLU(),
        convolution(256, 3, padding=1),
        ReLU(),
        convolution(256, 3, padding=1),
        ReLU(),
        MaxPool2d(3, 2),
    ]
    classifier = [Dropout(), dense(4096), ReLU(), Dropout(), dense(4096), ReLU(), dense(outputs)]
    nodes = [
        *sequence("features", features),
        NodeSpec(Flatten(), "flatten"),
        *sequence("classifier", classifier),
    ]
    return Network.from_nodes(input_shape, nodes, name="alexnet")


NETWORKS = {
    "alexnet": Entry(
        "3×224×224, five convolutions",
        alexnet,
        *IMAGENET_SIZE,
        replace(IMAGENET, learning_rate=0.01),
    ),
}
