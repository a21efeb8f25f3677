"""Networks as descriptions: layers, losses, initialisation. Knows no other room of the house."""

import sys
from types import ModuleType

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


class _CallableModule(ModuleType):
    """This package, which is also the function `dptrain.network`.

    Importing any of its modules binds the name `network` in `dptrain` to the package, so a
    function of that name would not survive: the package itself has to be what users call.
    """

    def __call__(self, name: str) -> Network:
        """Build the network called `name`; see `dptrain.network.zoo.network`."""
        from dptrain.network.zoo import network

        return network(name)


sys.modules[__name__].__class__ = _CallableModule
