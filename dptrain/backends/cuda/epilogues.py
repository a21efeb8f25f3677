"""What may follow a convolution and its rectifier in one group: pooling, dropout, normalisation.

The convolution leaves its rectified output in `maps`; a tail makes y of that, and `dmaps`, the
gradient in front of the rectifier, of dy.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from dptrain.backends.cuda.gemm_tiles import WANTED_BLOCKS, ceil_div
from dptrain.backends.cuda.launching import THREADS, launch
from dptrain.backends.cuda.operations import DropoutKernels, Norm, Operation, Windows, argmax_dtype
from dptrain.backends.replica import Context, Kernel
from dptrain.network.layers import Dropout, Layer, LocalResponseNorm, MaxPool2d
from dptrain.network.network import Node
from dptrain.plan.lowering import BufferSpec, Group, Setting

SHARED_BYTES = 48 << 10
"""Shared memory that every GPU gives a block without asking."""


class Epilogue(ABC):
    """The layers of a group behind its rectifier, bound to arrays.

    Args:
        operation: of the group.

    Class attributes:
        reads: what backward reads besides dy, and forward writes unless it is `maps`.
    """

    reads: ClassVar[tuple[str, ...]]

    def __init__(self, operation: Operation) -> None:
        self.operation, self.arrays = operation, operation.arrays
        self.nodes = operation.group.nodes[2:]

    @classmethod
    def fits(cls, nodes: tuple[Node, ...]) -> bool:
        """Whether the kernels can compute these layers at once."""
        return True

    @classmethod
    def buffers(cls, group: Group, setting: Setting) -> dict[str, BufferSpec]:
        """Memory besides the maps and their gradient."""
        if MaxPool2d not in group.kinds:
            return {}
        pool = group.nodes[group.kinds.index(MaxPool2d)]
        shape = setting.batch_size, *pool.output_maps
        return {"argmax": BufferSpec(shape, argmax_dtype(pool))}

    @abstractmethod
    def forward(self) -> Kernel:
        """Stage that writes y."""

    @abstractmethod
    def backward(self) -> Kernel:
        """Stage that writes dmaps."""


class PoolEpilogue(Epilogue):
    """MaxPool2d, perhaps with Dropout: neither what is rectified nor what is dropped was chosen."""

    reads = ("argmax",)

    @classmethod
    def fits(cls, nodes: tuple[Node, ...]) -> bool:
        """The half of a number that says which element is the largest holds 16 bits."""
        layer: Any = nodes[0].layer
        elements: int = math.prod(layer.windows)
        return elements < 1 << 16

    def forward(self) -> Kernel:
        a, windows = self.arrays, Windows(self.operation, self.nodes[0])
        arrays = a["maps"], a["y"], a["argmax"]
        if len(self.nodes) == 1:
            return windows.forward("relu_max_pool2d_forward", *arrays)
        return self._dropped(windows, arrays)

    def _dropped(self, windows: Windows, arrays: tuple[Any, ...]) -> Kernel:
        dropping = DropoutKernels(self.operation, self.nodes[1])
        keep, drop = (dropping.arguments(training=training) for training in (False, True))
        if self.operation.replica.samples is None:
            return windows.forward("relu_max_pool2d_forward", *arrays)
        stages = {
            training: windows.forward("relu_max_pool2d_dropout_forward", *arrays, behind=arguments)
            for training, arguments in ((False, keep), (True, drop))
        }
        return lambda context: stages[context.training](context)

    def backward(self) -> Kernel:
        a, windows = self.arrays, Windows(self.operation, self.nodes[0])
        dropped = [DropoutKernels(self.operation, node).factor for node in self.nodes[1:]]
        factor = dropped[0] if dropped else np.float32(1.0)
        return windows.backward("max_pool2d_backward", a["dy"], a["argmax"], a["dmaps"], factor)


class NormEpilogue(Epilogue):
    """LocalResponseNorm."""

    reads = ("maps",)

    def forward(self) -> Kernel:
        norm = Norm(self.operation, self.nodes[0])
        return norm.stage("lrn_forward", self.arrays["maps"], self.arrays["y"])

    def backward(self) -> Kernel:
        a, norm = self.arrays, Norm(self.operation, self.nodes[0])
        return norm.stage("lrn_backward", a["maps"], a["dy"], a["dmaps"], np.int32(1))


class NormPoolEpilogue(Epilogue):
    """LocalResponseNorm and MaxPool2d: what is normalised never comes to memory."""

    reads = ("maps", "argmax")

    @classmethod
    def fits(cls, nodes: tuple[Node, ...]) -> bool:
        return _band_bytes(nodes[1], 1) <= SHARED_BYTES

    def forward(self) -> Kernel:
        a, (norm, pool) = self.arrays, self._layers()
        node = self.nodes[1]
        height, batch_size = node.output_shape[1], self.operation.batch_size
        # Two rows at a time read less twice, if that leaves enough blocks.
        large = batch_size * ceil_div(height, 2) >= WANTED_BLOCKS
        band = 2 if large and _band_bytes(node, 2) <= SHARED_BYTES else 1
        bands, shared = ceil_div(height, band), _band_bytes(node, band)
        function = pool.function("normalization.cu", "lrn_max_pool2d_forward", **norm.defines)
        arrays = a["maps"], a["y"], a["argmax"]
        args = [*arrays, np.int32(band), *norm.numbers, *pool.geometry]

        def run(context: Context) -> None:
            if context.n:
                grid = context.n * bands, 1, 1
                function(grid, (THREADS, 1, 1), args, shared_bytes=shared)

        return run

    def backward(self) -> Kernel:
        a, (norm, pool) = self.arrays, self._layers()
        function = pool.function("normalization.cu", "lrn_max_pool2d_backward", **norm.defines)
        vectors = math.prod(self.nodes[0].output_shape) // norm.width
        arrays = a["maps"], a["dy"], a["argmax"], a["dmaps"]

        def run(context: Context) -> None:
            rest = np.int32(context.n), *norm.numbers, *pool.geometry
            launch(function, context.n * vectors, *arrays, *rest)

        return run

    def _layers(self) -> tuple[Norm, Windows]:
        return Norm(self.operation, self.nodes[0]), Windows(self.operation, self.nodes[1])


def _band_bytes(node: Node, band: int) -> int:
    """Shared memory for what `band` rows of a pooling layer's output look at."""
    layer: Any = node.layer
    channels, height, width = node.input_shape
    rows: int = min((band - 1) * layer.strides[0] + layer.windows[0], height)
    return 4 * rows * width * channels


EPILOGUES: Mapping[tuple[type[Layer], ...], type[Epilogue]] = {
    (MaxPool2d,): PoolEpilogue,
    (MaxPool2d, Dropout): PoolEpilogue,
    (LocalResponseNorm,): NormEpilogue,
    (LocalResponseNorm, MaxPool2d): NormPoolEpilogue,
}
"""By the layers behind the rectifier."""


def epilogue_of(group: Group) -> type[Epilogue] | None:
    """What follows the rectifier of a convolution's group, if anything does."""
    return EPILOGUES.get(group.kinds[2:])
