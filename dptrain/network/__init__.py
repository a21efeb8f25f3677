"""Descriptions of networks: layers, losses and initialisation, without arithmetic on data.

All classes of `dptrain.network.activations` are attributes of this package, too.
"""

from typing import Any

from dptrain.network.activations import (
    ACTIVATIONS,
    GELU,
    LeakyReLU,
    ReLU,
    Sigmoid,
    SiLU,
    Tanh,
)
from dptrain.network.combining import (
    Add,
    Concatenate,
    GlobalAveragePool2d,
    GlobalMaxPool2d,
    Multiply,
)
from dptrain.network.files import get_network, read_network, write_network
from dptrain.network.functional import Input, Tensor, name_scope
from dptrain.network.initial import initial_parameters
from dptrain.network.initializers import Constant, He, Normal, Uniform
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
    Reshape,
    Shape,
    Statistic,
    StochasticDepth,
    SumPool2d,
)
from dptrain.network.losses import (
    LOSSES,
    Loss,
    MeanSquaredError,
    SigmoidBinaryCrossEntropy,
    SoftmaxCrossEntropy,
    SoftmaxSquaredError,
)
from dptrain.network.maps.channels import ChannelShuffle, ChannelSlice
from dptrain.network.maps.resampling import (
    Crop2d,
    Dilate2d,
    Pad2d,
    Resize2d,
    transposed_convolution,
)
from dptrain.network.network import Network, Node, NodeSpec
from dptrain.network.normalization import BatchNorm2d, GroupNorm, LayerNorm

__all__ = [
    "ACTIVATIONS",
    "GELU",
    "LAYERS",
    "LOSSES",
    "Add",
    "AveragePool2d",
    "BatchNorm2d",
    "ChannelShuffle",
    "ChannelSlice",
    "Concatenate",
    "Constant",
    "Conv2d",
    "Crop2d",
    "Dense",
    "Dilate2d",
    "Dropout",
    "Flatten",
    "Flops",
    "GlobalAveragePool2d",
    "GlobalMaxPool2d",
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
    "Multiply",
    "Network",
    "Node",
    "NodeSpec",
    "Normal",
    "Pad2d",
    "Parameter",
    "ReLU",
    "Reshape",
    "Resize2d",
    "Shape",
    "SiLU",
    "Sigmoid",
    "SigmoidBinaryCrossEntropy",
    "SoftmaxCrossEntropy",
    "SoftmaxSquaredError",
    "Statistic",
    "StochasticDepth",
    "SumPool2d",
    "Tanh",
    "Tensor",
    "Uniform",
    "get_network",
    "initial_parameters",
    "name_scope",
    "read_network",
    "transposed_convolution",
    "write_network",
]


def __getattr__(name: str) -> Any:
    """Return a class of `dptrain.network.activations`."""
    found = next((cls for cls in ACTIVATIONS.values() if cls.__name__ == name), None)
    if found is None:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return found
