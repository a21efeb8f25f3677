"""Epilogues: layers that follow a convolution and its ReLU in one group.

An epilogue of pooling with touching 2 × 2 windows is fused into the convolution kernels
(`weighted.pools_in_kernel`). Every other epilogue is one kernel in each direction: the convolution
writes its rectified output to `maps`, forward computes y from it, and backward computes `dmaps`
(the gradient before the ReLU) from dy.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from dptrain.backends.cuda.dense.gemm_tiles import TARGET_BLOCKS, ceil_div
from dptrain.backends.cuda.device.hardware import DEFAULT_SHARED_BYTES, limits_of
from dptrain.backends.cuda.device.launching import THREADS, launch
from dptrain.backends.cuda.elementwise.dropout import DropoutKernels
from dptrain.backends.cuda.normalization.normalization import NormalizationKernels
from dptrain.backends.cuda.operation import Operation
from dptrain.backends.cuda.pooling import PoolingKernels, argmax_dtype
from dptrain.backends.replica import Context, Kernel
from dptrain.network.layers import Dropout, Layer, LocalResponseNorm, MaxPool2d, Pool2d
from dptrain.network.network import Node
from dptrain.plan.lowering import BufferSpec, Group, Setting


class Epilogue(ABC):
    """The layers of a group after its ReLU, bound to arrays.

    Args:
        operation: of the group.

    Class attributes:
        reads: arrays that backward reads in addition to dy. Forward writes them, except `maps`.
    """

    reads: ClassVar[tuple[str, ...]]

    def __init__(self, operation: Operation[Any]) -> None:
        self.operation, self.arrays = operation, operation.arrays
        self.nodes = operation.group.nodes[2:]

    @classmethod
    def supports(cls, nodes: tuple[Node, ...]) -> bool:
        """Return whether one kernel can compute these layers."""
        return True

    @classmethod
    def buffers(cls, group: Group, setting: Setting) -> dict[str, BufferSpec]:
        """Return the buffers in addition to `maps` and `dmaps`."""
        if MaxPool2d not in group.kinds:
            return {}
        pool = group.nodes[group.kinds.index(MaxPool2d)]
        shape = setting.batch_size, *pool.output_maps
        return {"argmax": BufferSpec(shape, argmax_dtype(pool))}

    @abstractmethod
    def forward(self) -> Kernel:
        """Return the stage that writes y."""

    @abstractmethod
    def backward(self) -> Kernel:
        """Return the stage that writes dmaps."""


class PoolEpilogue(Epilogue):
    """MaxPool2d, optionally with Dropout.

    The argmax of windows whose maximum is 0 or was dropped marks no element, so backward needs
    neither the ReLU's output nor the dropout mask.
    """

    reads = ("argmax",)

    @classmethod
    def supports(cls, nodes: tuple[Node, ...]) -> bool:
        """The kernel stores the index of the maximum in 16 bits."""
        elements = math.prod(nodes[0].layer_of(Pool2d).windows)
        return elements < 1 << 16

    def forward(self) -> Kernel:
        a, pooling = self.arrays, PoolingKernels(self.operation, self.nodes[0])
        arrays = a["maps"], a["y"], a["argmax"]
        if len(self.nodes) == 1 or self.operation.replica.samples is None:
            return pooling.forward("relu_max_pool2d_forward", *arrays)
        dropout = DropoutKernels(self.operation, self.nodes[1])
        stages = {
            training: pooling.forward(
                "relu_max_pool2d_dropout_forward",
                *arrays,
                trailing=dropout.arguments(training=training),
            )
            for training in (False, True)
        }
        return lambda context: stages[context.training](context)

    def backward(self) -> Kernel:
        a, pooling = self.arrays, PoolingKernels(self.operation, self.nodes[0])
        factors = [DropoutKernels(self.operation, node).factor for node in self.nodes[1:]]
        factor = factors[0] if factors else np.float32(1.0)
        return pooling.backward("max_pool2d_backward", a["dy"], a["argmax"], a["dmaps"], factor)


class NormEpilogue(Epilogue):
    """LocalResponseNorm."""

    reads = ("maps",)

    def forward(self) -> Kernel:
        norm = NormalizationKernels(self.operation, self.nodes[0])
        return norm.stage("lrn_forward", self.arrays["maps"], self.arrays["y"])

    def backward(self) -> Kernel:
        a, norm = self.arrays, NormalizationKernels(self.operation, self.nodes[0])
        return norm.stage("lrn_backward", a["maps"], a["dy"], a["dmaps"], np.int32(1))


class NormPoolEpilogue(Epilogue):
    """LocalResponseNorm and MaxPool2d. The normalized values stay in shared memory."""

    reads = ("maps", "argmax")

    @classmethod
    def supports(cls, nodes: tuple[Node, ...]) -> bool:
        return _band_bytes(nodes[1], 1) <= DEFAULT_SHARED_BYTES

    def forward(self) -> Kernel:
        a, (norm, pool) = self.arrays, self._kernels()
        node = self.nodes[1]
        height, batch_size = node.output_shape[1], self.operation.batch_size
        # Bands of two output rows read fewer input rows twice, if enough blocks remain.
        wanted = limits_of(self.operation.setting).multiprocessors * TARGET_BLOCKS
        many_blocks = batch_size * ceil_div(height, 2) >= wanted
        band = 2 if many_blocks and _band_bytes(node, 2) <= DEFAULT_SHARED_BYTES else 1
        bands, shared = ceil_div(height, band), _band_bytes(node, band)
        function = pool.function("normalization.cu", "lrn_max_pool2d_forward", **norm.defines)
        arrays = a["maps"], a["y"], a["argmax"]
        args = [*arrays, np.int32(band), *norm.hyperparameters, *pool.geometry]

        def run(context: Context) -> None:
            if context.n:
                grid = context.n * bands, 1, 1
                function(grid, (THREADS, 1, 1), args, shared_bytes=shared)

        return run

    def backward(self) -> Kernel:
        a, (norm, pool) = self.arrays, self._kernels()
        function = pool.function("normalization.cu", "lrn_max_pool2d_backward", **norm.defines)
        vectors = math.prod(self.nodes[0].output_shape) // norm.width
        arrays = a["maps"], a["dy"], a["argmax"], a["dmaps"]

        def run(context: Context) -> None:
            rest = np.int32(context.n), *norm.hyperparameters, *pool.geometry
            launch(function, context.n * vectors, *arrays, *rest)

        return run

    def _kernels(self) -> tuple[NormalizationKernels, PoolingKernels]:
        norm, pool = self.nodes
        return NormalizationKernels(self.operation, norm), PoolingKernels(self.operation, pool)


def _band_bytes(node: Node, band: int) -> int:
    """Return the bytes of the float32 input rows of `band` output rows of a pooling layer."""
    layer = node.layer_of(Pool2d)
    channels, height, width = node.input_shape
    rows = min((band - 1) * layer.strides[0] + layer.windows[0], height)
    return 4 * rows * width * channels


EPILOGUES: Mapping[tuple[type[Layer], ...], type[Epilogue]] = {
    (MaxPool2d,): PoolEpilogue,
    (MaxPool2d, Dropout): PoolEpilogue,
    (LocalResponseNorm,): NormEpilogue,
    (LocalResponseNorm, MaxPool2d): NormPoolEpilogue,
}
"""Epilogues by the layers after the ReLU."""


def epilogue_of(group: Group) -> type[Epilogue] | None:
    """Return the epilogue after the ReLU of a convolution's group, or None."""
    return EPILOGUES.get(group.kinds[2:])
