"""The layers that a network file can name."""

from __future__ import annotations

from dptrain.network.activations import ACTIVATIONS
from dptrain.network.combining import Add, Concatenate, GlobalAveragePool2d, Multiply
from dptrain.network.layers import (
    AveragePool2d,
    Conv2d,
    Dense,
    Dropout,
    Flatten,
    Layer,
    LocalResponseNorm,
    MaxPool2d,
    SumPool2d,
)
from dptrain.network.normalization import BatchNorm2d, GroupNorm, LayerNorm
from dptrain.network.rearranging import ChannelShuffle, ChannelSlice, Crop2d, Pad2d, Resize2d

_CLASSES: tuple[type[Layer], ...] = (
    Conv2d, MaxPool2d, AveragePool2d, SumPool2d, GlobalAveragePool2d, Flatten, Dense,
    *ACTIVATIONS.values(), Dropout,
    BatchNorm2d, GroupNorm, LayerNorm, LocalResponseNorm, Add, Concatenate, Multiply,
    ChannelSlice, ChannelShuffle, Pad2d, Resize2d, Crop2d,
)  # fmt: skip

LAYERS: dict[str, type[Layer]] = {layer.kind: layer for layer in _CLASSES}
"""Classes of layers by their names in TOML files."""
