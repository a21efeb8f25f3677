"""The layers that a network file can name."""

from __future__ import annotations

from dptrain.network.activations import GELU, LeakyReLU, SiLU, Tanh
from dptrain.network.combining import Add, Concatenate, GlobalAveragePool2d
from dptrain.network.layers import (
    AveragePool2d,
    Conv2d,
    Dense,
    Dropout,
    Flatten,
    Layer,
    LocalResponseNorm,
    MaxPool2d,
    ReLU,
    Sigmoid,
    SumPool2d,
)
from dptrain.network.normalization import BatchNorm2d, GroupNorm, LayerNorm

LAYERS: dict[str, type[Layer]] = {
    layer.kind: layer
    for layer in (
        Conv2d, MaxPool2d, AveragePool2d, SumPool2d, GlobalAveragePool2d, Flatten, Dense,
        ReLU, LeakyReLU, Sigmoid, Tanh, GELU, SiLU, Dropout,
        BatchNorm2d, GroupNorm, LayerNorm, LocalResponseNorm, Add, Concatenate,
    )
}  # fmt: skip
"""Classes of layers by their names in TOML files."""
