"""Dropout with counter-based random numbers (Philox); see ``headers/philox.cuh``."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from dptrain.backends.cuda.dense.gemm_tiles import ceil_div
from dptrain.backends.cuda.device.device import Array
from dptrain.backends.cuda.device.launching import launch
from dptrain.backends.cuda.operation import Operation, SingleLayerOperation
from dptrain.backends.replica import Context, Kernel
from dptrain.network.layers import Dropout, RandomMask, StochasticDepth
from dptrain.network.network import Node
from dptrain.philox import threshold
from dptrain.plan.lowering import BufferSpec, Setting


class DropoutKernels:
    """Kernels of a dropout layer, and the arguments of kernels that dropout is fused into.

    Args:
        operation: of the group that contains the layer.
        node: the layer.

    Attributes:
        rate: probability that an element is dropped.
        factor: 1 / (1 − rate), which kept elements are multiplied by.
    """

    MASK_BITS = 8
    """Elements that a byte of the mask stores, and that a thread processes."""

    def __init__(self, operation: Operation[Any], node: Node) -> None:
        self._operation, self._replica = operation, operation.replica
        self.rate, self._index = node.layer_of(RandomMask).rate, node.index
        self._size = math.prod(node.output_shape)
        self.factor = np.float32(1.0 / (1.0 - self.rate))

    @classmethod
    def mask(cls, shape: tuple[int, ...]) -> BufferSpec:
        """Return the mask of activations of `shape` (with the batch dimension): one bit each."""
        return BufferSpec((shape[0], ceil_div(math.prod(shape[1:]), cls.MASK_BITS)), "uint8")

    def arguments(self, *, training: bool) -> list[Any]:
        """Return the arguments for the kernel parameters ``DROPOUT``.

        Args:
            training: if False, all elements are kept unchanged.
        """
        seed = self._replica.context.seed
        key = np.uint32(seed & 0xFFFFFFFF), np.uint32((seed >> 32) & 0xFFFFFFFF)
        limit, factor = (threshold(self.rate), self.factor) if training else (0, np.float32(1.0))
        pointers = self._replica.samples, self._replica.numbers
        return [*pointers, np.uint64(limit), np.uint32(self._index), *key, factor]

    def stage(self, name: str, *arrays: Array) -> Kernel:
        """Return a training stage of a kernel of ``dropout.cu``.

        ``dropout_backward`` reads the mask; other kernels draw random numbers.
        """
        width = self._operation.vector_width(self._size)
        function = self._operation.function("dropout.cu", name, VECTOR=width)
        backward = name == "dropout_backward"
        rest = [self.factor] if backward else self.arguments(training=True)
        mask_bytes, size = ceil_div(self._size, self.MASK_BITS), np.int32(self._size)

        def run(context: Context) -> None:
            launch(function, context.n * mask_bytes, *arrays, np.int32(context.n), size, *rest)

        return run


class DropoutOperation(SingleLayerOperation[Dropout]):
    """Dropout with the masks of `dptrain.philox`. Without training it copies x to y."""

    @classmethod
    def buffers(cls, shape: tuple[int, ...], setting: Setting) -> dict[str, BufferSpec]:
        return {"mask": DropoutKernels.mask(shape)} if setting.training else {}

    def forward(self) -> Kernel:
        a = self.arrays
        copy = self.elementwise("copy", a["x"], a["y"])
        if not self.replica.plan.training:
            return copy
        kernels = DropoutKernels(self, self.group.head)
        drop = kernels.stage("dropout_forward", a["x"], a["y"], a["mask"])

        def run(context: Context) -> None:
            (drop if context.training else copy)(context)

        return run

    def backward(self) -> Kernel:
        a = self.arrays
        kernels = DropoutKernels(self, self.group.head)
        return kernels.stage("dropout_backward", a["dy"], a["mask"], a["dx"])


class DropSamplesOperation(SingleLayerOperation[StochasticDepth]):
    """Stochastic depth by `dptrain.philox`; backward draws again. Without training it copies."""

    def forward(self) -> Kernel:
        a = self.arrays
        copy = self.elementwise("copy", a["x"], a["y"])
        if not self.replica.plan.training:
            return copy
        drop = self._stage("x", "y")

        def run(context: Context) -> None:
            (drop if context.training else copy)(context)

        return run

    def backward(self) -> Kernel:
        return self._stage("dy", "dx")

    def _stage(self, source: str, target: str) -> Kernel:
        width, size = self.vector_width(self.size), np.int32(self.size)
        function = self.function("dropout.cu", "drop_samples", VECTOR=width)
        arrays = self.arrays[source], self.arrays[target]
        rest = DropoutKernels(self, self.group.head).arguments(training=True)

        def run(context: Context) -> None:
            count = context.n * self.size
            launch(function, count // width, *arrays, size, np.int32(count), *rest)

        return run
