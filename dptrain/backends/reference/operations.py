"""The operation of each layer.

Operations compute layers and their exact derivatives in NumPy, written as directly as possible.
Arrays are (N, C, H, W). An operation reads and writes the arrays that it was bound to, for the
first n samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dptrain.backends.reference.activations import ActivationOperation
from dptrain.backends.reference.combining import (
    Addition,
    ChannelSelection,
    Concatenation,
    Multiplication,
)
from dptrain.backends.reference.convolution import Convolution
from dptrain.backends.reference.dense import BiasAddition, FullyConnected
from dptrain.backends.reference.dropout import Drop, DropSamples
from dptrain.backends.reference.normalization import (
    BatchNormalization,
    FrozenBatchNormalization,
    GroupNormalization,
    LayerNormalization,
    ResponseNorm,
)
from dptrain.backends.reference.operation import Alias, Operation
from dptrain.backends.reference.pooling import (
    AveragePooling,
    GlobalAveragePooling,
    GlobalMaxPooling,
    MaxPooling,
    SumPooling,
)
from dptrain.backends.reference.resampling import Resampled
from dptrain.network.biases import BiasAdd
from dptrain.network.combining import (
    Add,
    Concatenate,
    GlobalAveragePool2d,
    GlobalMaxPool2d,
    Multiply,
)
from dptrain.network.elementwise import Activation
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
    entry_of,
)
from dptrain.network.maps.channels import ChannelShuffle, ChannelSlice
from dptrain.network.maps.resampling import Resampling
from dptrain.network.normalization import BatchNorm2d, FrozenBatchNorm2d, GroupNorm, LayerNorm

OPERATIONS: Mapping[type[Layer], type[Operation[Any]]] = {
    Conv2d: Convolution,
    Dense: FullyConnected,
    BiasAdd: BiasAddition,
    MaxPool2d: MaxPooling,
    AveragePool2d: AveragePooling,
    SumPool2d: SumPooling,
    GlobalAveragePool2d: GlobalAveragePooling,
    GlobalMaxPool2d: GlobalMaxPooling,
    Flatten: Alias,
    Reshape: Alias,
    Activation: ActivationOperation,
    Dropout: Drop,
    StochasticDepth: DropSamples,
    BatchNorm2d: BatchNormalization,
    FrozenBatchNorm2d: FrozenBatchNormalization,
    GroupNorm: GroupNormalization,
    LayerNorm: LayerNormalization,
    LocalResponseNorm: ResponseNorm,
    Add: Addition,
    Concatenate: Concatenation,
    Resampling: Resampled,
    Multiply: Multiplication,
    ChannelSlice: ChannelSelection,
    ChannelShuffle: ChannelSelection,
}


def operation_of(layer: Layer) -> type[Operation[Any]]:
    """Return the operation of a layer."""
    operation = entry_of(OPERATIONS, layer)
    assert operation is not None, layer.kind
    return operation
