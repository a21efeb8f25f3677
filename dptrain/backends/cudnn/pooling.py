"""Max and average pooling by cuDNN."""

from __future__ import annotations

from typing import Any

from dptrain.backends.cuda.operation import SingleLayerOperation
from dptrain.backends.cudnn.primitives import AVERAGE_POOLING, MAX_POOLING
from dptrain.backends.cudnn.replica import CudnnReplica, primitive_calls
from dptrain.backends.replica import Kernel
from dptrain.network.layers import AveragePool2d, MaxPool2d, Pool2d
from dptrain.network.network import Node

MODES = {AveragePool2d: AVERAGE_POOLING, MaxPool2d: MAX_POOLING}
"""Modes of cuDNN by layer. CuDNN has no sums; it averages over elements inside the map, as
`AveragePool2d` does."""

MAX_WINDOW = 8
"""Largest window; backward kernels of some versions of cuDNN support no larger ones."""


def pools(node: Node) -> bool:
    """Return whether cuDNN computes a pooling layer: symmetric padding and small windows."""
    if type(node.layer) not in MODES:
        return False
    layer = node.layer_of(Pool2d)
    if isinstance(layer, AveragePool2d) and layer.count_padding:
        return False
    symmetric = all(before == after for before, after in layer.pads(node.input_shape))
    return symmetric and max(layer.windows) <= MAX_WINDOW


class CudnnPooling(SingleLayerOperation[Pool2d]):
    """MaxPool2d or AveragePool2d. Backward reads x and y instead of the index of the maximum."""

    reads = ("x", "y")
    replica: CudnnReplica

    def forward(self) -> Kernel:
        return primitive_calls(self.replica, "Pooling").forward(
            self._described, self.arrays["x"], self.arrays["y"]
        )

    def backward(self) -> Kernel:
        a = self.arrays
        return primitive_calls(self.replica, "Pooling").backward(
            self._described, a["y"], a["dy"], a["x"], a["dx"]
        )

    @property
    def _described(self) -> tuple[Any, ...]:
        layer, node = self.layer, self.group.head
        (top, _), (left, _) = layer.pads(node.input_shape)
        primitives = self.replica.engines.library.primitives
        return (primitives.pooling(MODES[type(layer)], layer.windows, (top, left), layer.strides),)
