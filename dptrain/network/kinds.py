"""The layers that a network file can name."""

from __future__ import annotations

from dptrain.network.activations import ACTIVATIONS
from dptrain.network.combining import (
    Add,
    Concatenate,
    GlobalAveragePool2d,
    GlobalMaxPool2d,
    Multiply,
)
from dptrain.network.layers import (
    AveragePool2d,
    Conv2d,
    Dense,
    Dropout,
    Flatten,
    Layer,
    LocalResponseNorm,
    MaxPool2d,
    Reshape,
    StochasticDepth,
    SumPool2d,
)
from dptrain.network.maps.channels import ChannelShuffle, ChannelSlice
from dptrain.network.maps.resampling import Crop2d, Dilate2d, Pad2d, Resize2d
from dptrain.network.normalization import BatchNorm2d, GroupNorm, LayerNorm

_CLASSES: tuple[type[Layer], ...] = (
    Conv2d, MaxPool2d, AveragePool2d, SumPool2d, GlobalAveragePool2d, GlobalMaxPool2d, Flatten,
    Reshape, Dense, *ACTIVATIONS.values(), Dropout, StochasticDepth,
    BatchNorm2d, GroupNorm, LayerNorm, LocalResponseNorm, Add, Concatenate, Multiply,
    Pad2d, Resize2d, Crop2d, Dilate2d,
    ChannelSlice, ChannelShuffle,
)  # fmt: skip

LAYERS: dict[str, type[Layer]] = {layer.kind: layer for layer in _CLASSES}
"""Classes of layers by their names in TOML files."""
