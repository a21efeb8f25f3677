"""Networks as descriptions: layers, losses, initialisation. Knows no other room of the house."""

from dptrain.network.initializers import Constant, He, Normal, initial_parameters
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
from dptrain.network.network import Network, Node

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
    "Normal",
    "Parameter",
    "ReLU",
    "Shape",
    "Sigmoid",
    "SigmoidBinaryCrossEntropy",
    "SoftmaxCrossEntropy",
    "SumPool2d",
    "initial_parameters",
]
