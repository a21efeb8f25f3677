"""Max, average and sum pooling; see ``pooling.cu``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from dptrain.backends.cuda.dense.gemm_tiles import ceil_div
from dptrain.backends.cuda.device.device import Function
from dptrain.backends.cuda.device.launching import launch
from dptrain.backends.cuda.geometry import geometry, geometry_defines
from dptrain.backends.cuda.operation import Operation, SingleLayerOperation
from dptrain.backends.pooling import sum_factor
from dptrain.backends.replica import Context, Kernel
from dptrain.network.layers import MaxPool2d, Pool2d
from dptrain.network.network import Node
from dptrain.plan.lowering import Access, BufferSpec, Group, GroupNeeds, Phase, Setting


class PoolingKernels:
    """Kernels of a pooling layer.

    Args:
        operation: of the group that contains the layer.
        node: the layer.

    Attributes:
        geometry: kernel arguments that describe the layer.
        width: channels that a thread processes.
        defines: macros that the kernels are compiled with.
    """

    def __init__(self, operation: Operation[Any], node: Node) -> None:
        self._operation, self._node = operation, node
        layer = node.layer_of(Pool2d)
        self.geometry = geometry(node, layer, layer.windows)
        self.width = operation.vector_width(node.output_shape[0])
        self.defines = {"VECTOR": self.width, **geometry_defines(operation.device, self.geometry)}
        if argmax_dtype(node) != "uint8":
            self.defines["WIDE_ARGMAX"] = 1

    def function(self, file: str, name: str, **defines: int) -> Function:
        """Return a kernel compiled for this layer."""
        return self._operation.function(file, name, **self.defines, **defines)

    def forward(self, name: str, *args: Any, trailing: Sequence[Any] = ()) -> Kernel:
        """Return a stage with one thread for each vector of output channels.

        Args:
            name: of the kernel.
            args: arguments before the number of samples.
            trailing: arguments after the geometry.
        """
        return self._stage(name, math.prod(self._node.output_shape), args, trailing)

    def backward(self, name: str, *args: Any) -> Kernel:
        """Return a stage with one thread for each input cell of the size of the strides."""
        h, w, c, *_, stride_h, stride_w, top, left, _, _ = map(int, self.geometry)
        cells = ceil_div(h + top, stride_h) * ceil_div(w + left, stride_w)
        return self._stage(name, cells * c, args)

    def _stage(
        self, name: str, items: int, args: tuple[Any, ...], trailing: Sequence[Any] = ()
    ) -> Kernel:
        function, threads = self.function("pooling.cu", name), items // self.width
        rest = *self.geometry, *trailing

        def run(context: Context) -> None:
            launch(function, context.n * threads, *args, np.int32(context.n), *rest)

        return run


def argmax_dtype(node: Node) -> str:
    """Return the dtype of the index of an element in a pooling window.

    The largest value of the dtype means that no element was selected.
    """
    return "uint8" if math.prod(node.layer_of(Pool2d).windows) <= 255 else "int32"


class MaxPoolOperation(SingleLayerOperation[MaxPool2d]):
    """Maximum of each window. The gradient is added to the first maximum."""

    @classmethod
    def needs(cls, group: Group, setting: Setting) -> GroupNeeds:
        argmax = BufferSpec((setting.batch_size, *group.head.output_maps), argmax_dtype(group.head))
        phases = {Phase.FORWARD: Access(("x",), ("y", "argmax"))}
        if group.gradients:
            phases[Phase.BACKWARD] = Access(("dy", "argmax"), ("dx",))
        return GroupNeeds(phases, {"argmax": argmax})

    def forward(self) -> Kernel:
        a, pooling = self.arrays, PoolingKernels(self, self.group.head)
        return pooling.forward("max_pool2d_forward", a["x"], a["y"], a["argmax"])

    def backward(self) -> Kernel:
        a, pooling = self.arrays, PoolingKernels(self, self.group.head)
        return pooling.backward(
            "max_pool2d_backward", a["dy"], a["argmax"], a["dx"], np.float32(1.0)
        )


class SumPoolOperation(SingleLayerOperation[Pool2d]):
    """Sum or mean of each window."""

    def forward(self) -> Kernel:
        a, pooling = self.arrays, PoolingKernels(self, self.group.head)
        return pooling.forward(
            "sum_pool2d_forward", a["x"], a["y"], np.float32(sum_factor(self.layer))
        )

    def backward(self) -> Kernel:
        a, pooling = self.arrays, PoolingKernels(self, self.group.head)
        return pooling.backward(
            "sum_pool2d_backward", a["dy"], a["dx"], np.float32(sum_factor(self.layer))
        )
