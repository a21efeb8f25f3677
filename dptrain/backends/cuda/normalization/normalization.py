"""Local response normalization; see ``normalization.cu``."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np

from dptrain.backends.cuda.device.launching import launch
from dptrain.backends.cuda.operation import Operation, SingleLayerOperation
from dptrain.backends.replica import Context, Kernel
from dptrain.network.layers import LocalResponseNorm
from dptrain.network.network import Node


class NormalizationKernels:
    """Kernels of a local response normalization layer.

    Args:
        operation: of the group that contains the layer.
        node: the layer.

    Attributes:
        width: channels that a thread processes.
        channels: of the layer, int32.
        defines: macros that the kernels are compiled with.
        hyperparameters: bias, alpha and beta, float32.
    """

    def __init__(self, operation: Operation[Any], node: Node) -> None:
        layer = node.layer_of(LocalResponseNorm)
        channels = node.output_maps[0]
        self._operation, self._size = operation, math.prod(node.output_shape)
        self.width, self.channels = operation.vector_width(channels), np.int32(channels)
        self.defines = {"RADIUS": layer.radius, "BETA_THREE_QUARTERS": int(layer.beta == 0.75)}
        self.hyperparameters = [np.float32(v) for v in (layer.bias, layer.alpha, layer.beta)]

    def stage(self, name: str, *args: Any) -> Kernel:
        """Return a stage of a kernel that computes the normalization only."""
        defines = {"VECTOR": self.width, **self.defines}
        if self._operation.device.specializes:
            defines["FIXED_CHANNELS"] = int(self.channels)
        function = self._operation.function("normalization.cu", name, **defines)

        def run(context: Context) -> None:
            count = context.n * self._size
            rest = np.int32(count), self.channels, *self.hyperparameters
            launch(function, count // self.width, *args, *rest)

        return run


class NormalizationOperation(SingleLayerOperation[LocalResponseNorm]):
    """y = x · s^−beta with s = bias + alpha · Σ x² over neighbouring channels."""

    reads: ClassVar[tuple[str, ...]] = ("x",)

    def forward(self) -> Kernel:
        a, kernels = self.arrays, NormalizationKernels(self, self.group.head)
        return kernels.stage("lrn_forward", a["x"], a["y"])

    def backward(self) -> Kernel:
        a, kernels = self.arrays, NormalizationKernels(self, self.group.head)
        return kernels.stage("lrn_backward", a["x"], a["dy"], a["dx"], np.int32(0))
