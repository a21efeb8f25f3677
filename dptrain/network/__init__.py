"""Descriptions of networks: layers, losses and initialisation, without arithmetic on data."""

from dptrain.network.files import get_network, read_network, write_network
from dptrain.network.initial import initial_parameters
from dptrain.network.initializers import Constant, He, Normal
from dptrain.network.layers import (
    LAYERS,
    AveragePool2d,
    Conv2d,
    Dense,
    Dropout,
    Flatten,
    Flops,
    Layer,
    LocalResponseNorm,
    MaxPool2d,
    Parameter,
    ReLU,
    Shape,
    Sigmoid,
    SumPool2d,
)
from dptrain.network.losses import (
    LOSSES,
    Loss,
    MeanSquaredError,
    SigmoidBinaryCrossEntropy,
    SoftmaxCrossEntropy,
)
from dptrain.network.network import Network, Node, NodeSpec

__all__ = [
    "LAYERS",
    "LOSSES",
    "AveragePool2d",
    "Constant",
    "Conv2d",
    "Dense",
    "Dropout",
    "Flatten",
    "Flops",
    "He",
    "Layer",
    "LocalResponseNorm",
    "Loss",
    "MaxPool2d",
    "MeanSquaredError",
    "Network",
    "Node",
    "NodeSpec",
    "Normal",
    "Parameter",
    "ReLU",
    "Shape",
    "Sigmoid",
    "SigmoidBinaryCrossEntropy",
    "SoftmaxCrossEntropy",
    "SumPool2d",
    "get_network",
    "initial_parameters",
    "read_network",
    "write_network",
]
