"""Groups of layers bound to arrays: which kernels each phase launches, and on what.

Activations are (N, H, W, C) and contiguous, so kernels may see them flat, as rows or as pixels.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from dptrain.backends.base import Arrays, Context, Kernel
from dptrain.backends.cuda.device import Array, Device
from dptrain.backends.cuda.launching import launch
from dptrain.backends.cuda.replica import CudaReplica
from dptrain.backends.cuda.tiles import ceil_div
from dptrain.network.layers import Dropout, Shape
from dptrain.network.network import Node
from dptrain.plan.lowering import Access, BufferSpec, Group, GroupNeeds, Phase, Setting
from dptrain.plan.random import threshold

Kernels = Mapping[Phase, Kernel]


def vector(length: int) -> int:
    """How many elements of rows of this length a thread takes, `VECTOR` of ``vector.cuh``."""
    return 4 if length % 4 == 0 else 1


def each(device: Device, name: str, items: int, *args: Any) -> Kernel:
    """A stage of one launch of an elementwise kernel, for `items` elements a sample.

    The kernel's last parameter is the number of elements.
    """
    width = vector(items)
    function = device.function("elementwise.cu", name, VECTOR=width)

    def run(context: Context) -> None:
        count = context.n * items
        launch(function, count // width, *args, np.int32(count))

    return run


class Operation(ABC):
    """A group bound to arrays.

    Args:
        group: the layers.
        arrays: memory by local name; what no stage of the plan touches is not there.
        replica: gives the device, the batch size and the context.
    """

    def __init__(self, group: Group, arrays: Arrays, replica: CudaReplica) -> None:
        self.group, self.arrays, self.replica = group, arrays, replica
        self.device: Device = replica.device
        self.batch_size = replica.plan.batch_size
        self.layer: Any = group.head.layer
        self.size = math.prod(group.tail.output_shape)

    @classmethod
    @abstractmethod
    def needs(cls, group: Group, setting: Setting) -> GroupNeeds:
        """What the group takes."""

    @abstractmethod
    def kernels(self) -> Kernels:
        """Bound kernels of every phase that the plan may run."""

    def relu_mask(self, factor: float) -> Kernel:
        """Stage that writes dy · factor over dy where y is above 0, and 0 elsewhere."""
        dy, y = self.arrays["dy"], self.arrays["y"]
        return each(self.device, "relu_mask", self.size, dy, y, np.float32(factor))


class _Single(Operation):
    """One layer without parameters: y from x, dx from dy and what `reads` names."""

    reads: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def buffers(cls, shape: tuple[int, ...], setting: Setting) -> dict[str, BufferSpec]:
        """Memory, besides x and y, for an output of `shape`, batch included."""
        return {}

    @classmethod
    def needs(cls, group: Group, setting: Setting) -> GroupNeeds:
        shape = (setting.batch_size, *group.tail.output_maps)
        buffers = cls.buffers(shape, setting)
        phases = {Phase.FORWARD: Access(("x",), ("y", *buffers))}
        if setting.training:
            phases[Phase.BACKWARD] = Access(("dy", *cls.reads, *buffers), ("dx",))
        return GroupNeeds(phases, buffers)

    def kernels(self) -> Kernels:
        kernels = {Phase.FORWARD: self.forward()}
        if "dx" in self.arrays:
            kernels[Phase.BACKWARD] = self.backward()
        return kernels

    @abstractmethod
    def forward(self) -> Kernel:
        """Stage that writes y."""

    @abstractmethod
    def backward(self) -> Kernel:
        """Stage that writes dx."""


class Alias(Operation):
    """Flatten: the same memory in another shape."""

    @classmethod
    def needs(cls, group: Group, setting: Setting) -> GroupNeeds:
        return GroupNeeds(alias=True)

    def kernels(self) -> Kernels:
        return {}


class _Elementwise(_Single):
    """A function of each element, and its derivative from y."""

    reads: ClassVar[tuple[str, ...]] = ("y",)
    function: ClassVar[str]

    def forward(self) -> Kernel:
        a, name = self.arrays, f"{self.function}_forward"
        return each(self.device, name, self.size, a["x"], a["y"])

    def backward(self) -> Kernel:
        a, name = self.arrays, f"{self.function}_backward"
        return each(self.device, name, self.size, a["dy"], a["y"], a["dx"])


class Rectifier(_Elementwise):
    """max(x, 0)."""

    function = "relu"


class Logistic(_Elementwise):
    """σ(x)."""

    function = "sigmoid"


class DropoutMask:
    """Mask of a dropout layer for the samples of a step.

    Args:
        operation: of the group that the layer is in.
        node: the layer.
        mask: uint32 (N, blocks), a byte for each of four elements.
    """

    def __init__(self, operation: Operation, node: Node, mask: Array) -> None:
        assert isinstance(node.layer, Dropout)
        replica, rate = operation.replica, node.layer.rate
        self._mask, self._blocks, self._size = mask, mask.shape[1], math.prod(node.output_shape)
        self._factor = np.float32(1.0 / (1.0 - rate))
        self._width = vector(self._size)
        self._draw = operation.device.function("dropout.cu", "dropout_mask")
        self._apply = operation.device.function("dropout.cu", "dropout_apply", VECTOR=self._width)
        seed = replica.context.seed
        key = np.uint32(seed & 0xFFFFFFFF), np.uint32((seed >> 32) & 0xFFFFFFFF)
        self._samples = replica.samples
        self._constants = np.uint64(threshold(rate)), np.uint32(node.index), *key

    @staticmethod
    def spec(shape: tuple[int, ...]) -> BufferSpec:
        """Memory of the mask of activations of `shape`, batch included."""
        return BufferSpec((shape[0], ceil_div(math.prod(shape[1:]), 4)), "uint32")

    def draw(self, context: Context) -> None:
        """Fill the mask."""
        launch(
            self._draw, context.n * self._blocks,
            self._mask, self._samples, np.int32(context.n), np.int32(self._blocks),
            *self._constants, np.uint32(context.step & 0xFFFFFFFF),
        )  # fmt: skip

    def apply(self, x: Array, y: Array) -> Kernel:
        """Stage that writes x · factor where kept, x · 0 elsewhere."""

        def run(context: Context) -> None:
            launch(
                self._apply, context.n * self._size // self._width,
                x, self._mask, y, np.int32(context.n), np.int32(self._size),
                np.int32(self._blocks), self._factor,
            )  # fmt: skip

        return run


class Drop(_Single):
    """Dropout by `dptrain.plan.random`; without training it passes x on."""

    @classmethod
    def buffers(cls, shape: tuple[int, ...], setting: Setting) -> dict[str, BufferSpec]:
        return {"mask": DropoutMask.spec(shape)} if setting.training else {}

    def _mask(self) -> DropoutMask:
        return DropoutMask(self, self.group.head, self.arrays["mask"])

    def forward(self) -> Kernel:
        a = self.arrays
        keep = each(self.device, "copy", self.size, a["x"], a["y"])
        if "mask" not in a:
            return keep
        mask = self._mask()
        apply = mask.apply(a["x"], a["y"])

        def run(context: Context) -> None:
            if not context.training:
                return keep(context)
            mask.draw(context)
            return apply(context)

        return run

    def backward(self) -> Kernel:
        return self._mask().apply(self.arrays["dy"], self.arrays["dx"])


def _pool_geometry(node: Node) -> list[np.int32]:
    """Maps (H, W, C), pooled (H, W), window, strides and positions outside above and before."""
    layer: Any = node.layer
    (c, h, w), (_, ho, wo) = node.input_shape, node.output_shape
    (top, _), (left, _) = layer.pads(node.input_shape)
    numbers = (h, w, c, ho, wo, *layer.windows, *layer.strides, top, left)
    return [np.int32(number) for number in numbers]


def max_pool_forward(device: Device, node: Node, x: Array, y: Array, argmax: Array) -> Kernel:
    """Stage that writes y, and argmax (int32): which element of its window each maximum is."""
    return _pooling(device, "max_forward", node.output_shape, node, x, y, argmax)


def max_pool_backward(device: Device, node: Node, dy: Array, argmax: Array, dx: Array) -> Kernel:
    """Stage that writes dx."""
    return _pooling(device, "max_backward", node.input_shape, node, dy, argmax, dx)


def _pooling(device: Device, name: str, shape: Shape, node: Node, *args: Any) -> Kernel:
    """Stage of a kernel that computes vectors of channels of an array of `shape`, (C, H, W)."""
    width, items, geometry = vector(shape[0]), math.prod(shape), _pool_geometry(node)
    function = device.function("pooling.cu", name, VECTOR=width)

    def run(context: Context) -> None:
        count = context.n * items // width
        launch(function, count, *args, np.int32(context.n), *geometry)

    return run


class MaxPooling(_Single):
    """Largest of each window; the gradient goes to it alone."""

    @classmethod
    def buffers(cls, shape: tuple[int, ...], setting: Setting) -> dict[str, BufferSpec]:
        return {"argmax": BufferSpec(shape, "int32")}

    def forward(self) -> Kernel:
        a = self.arrays
        return max_pool_forward(self.device, self.group.head, a["x"], a["y"], a["argmax"])

    def backward(self) -> Kernel:
        a = self.arrays
        return max_pool_backward(self.device, self.group.head, a["dy"], a["argmax"], a["dx"])


class SumPooling(_Single):
    """Sum of each window."""

    average: ClassVar[bool] = False

    def forward(self) -> Kernel:
        a, node = self.arrays, self.group.head
        arrays = a["x"], a["y"], np.int32(self.average)
        return _pooling(self.device, "sum_forward", node.output_shape, node, *arrays)

    def backward(self) -> Kernel:
        a, node = self.arrays, self.group.head
        arrays = a["dy"], a["dx"], np.int32(self.average)
        return _pooling(self.device, "sum_backward", node.input_shape, node, *arrays)


class AveragePooling(SumPooling):
    """Mean of each window over what lies inside the map."""

    average: ClassVar[bool] = True


class ResponseNorm(_Single):
    """y = x · s^−beta with s = bias + alpha · Σ x² over neighbouring channels."""

    reads: ClassVar[tuple[str, ...]] = ("x",)

    def _stage(self, name: str, *arrays: Array) -> Kernel:
        layer, size = self.layer, self.size
        function = self.device.function("normalization.cu", name, RADIUS=layer.radius)
        channels = np.int32(self.group.head.output_maps[0])
        numbers = [np.float32(value) for value in (layer.bias, layer.alpha, layer.beta)]

        def run(context: Context) -> None:
            count = context.n * size
            launch(function, count, *arrays, np.int32(count), channels, *numbers)

        return run

    def forward(self) -> Kernel:
        return self._stage("lrn_forward", self.arrays["x"], self.arrays["y"])

    def backward(self) -> Kernel:
        a = self.arrays
        return self._stage("lrn_backward", a["x"], a["dy"], a["dx"])
