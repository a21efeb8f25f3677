"""Descriptions of networks: layers, losses and initialisation, without arithmetic on data."""

from dptrain.network.activations import GELU, LeakyReLU, SiLU, Tanh
from dptrain.network.combining import Add, Concatenate, GlobalAveragePool2d
from dptrain.network.files import get_network, read_network, write_network
from dptrain.network.functional import Input, Tensor, name_scope
from dptrain.network.initial import initial_parameters
from dptrain.network.initializers import Constant, He, Normal
from dptrain.network.kinds import LAYERS
from dptrain.network.layers import (
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
    Statistic,
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
from dptrain.network.normalization import BatchNorm2d, GroupNorm, LayerNorm

__all__ = [
    "GELU",
    "LAYERS",
    "LOSSES",
    "Add",
    "AveragePool2d",
    "BatchNorm2d",
    "Concatenate",
    "Constant",
    "Conv2d",
    "Dense",
    "Dropout",
    "Flatten",
    "Flops",
    "GlobalAveragePool2d",
    "GroupNorm",
    "He",
    "Input",
    "Layer",
    "LayerNorm",
    "LeakyReLU",
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
    "SiLU",
    "Sigmoid",
    "SigmoidBinaryCrossEntropy",
    "SoftmaxCrossEntropy",
    "Statistic",
    "SumPool2d",
    "Tanh",
    "Tensor",
    "get_network",
    "initial_parameters",
    "name_scope",
    "read_network",
    "write_network",
]
