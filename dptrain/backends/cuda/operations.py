"""Groups of layers bound to arrays: which kernels each phase launches, and on what.

Activations are (N, H, W, C) and contiguous, so kernels may see them flat, as rows or as pixels.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from dptrain.backends.cuda.device import Array, Device, Function
from dptrain.backends.cuda.gemm_tiles import ceil_div
from dptrain.backends.cuda.geometry import fixed, geometry
from dptrain.backends.cuda.launching import launch
from dptrain.backends.cuda.replica import CudaReplica
from dptrain.backends.replica import Arrays, Context, Kernel
from dptrain.network.layers import Dropout
from dptrain.network.network import Node
from dptrain.plan.lowering import Access, BufferSpec, Group, GroupNeeds, Phase, Setting
from dptrain.plan.random import threshold

Kernels = Mapping[Phase, Kernel]

ACCESS_BYTES = 16
"""What a thread reads or writes at once, where it can."""


def vector(length: int, itemsize: int) -> int:
    """How many elements of rows of this length a thread takes, `VECTOR` of ``vector.cuh``."""
    width = ACCESS_BYTES // itemsize
    return width if length % width == 0 else 1


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
        self.itemsize = np.dtype(replica.plan.setting.activations).itemsize

    def function(self, file: str, name: str, **defines: int) -> Function:
        """A kernel that moves activations as the plan keeps them (``precision.cuh``)."""
        bfloat16 = self.replica.plan.setting.activations == "uint16"
        return self.device.function(file, name, PRECISION=2 if bfloat16 else 0, **defines)

    def vector(self, length: int) -> int:
        """`VECTOR` for rows of this length."""
        return vector(length, self.itemsize)

    def each(self, name: str, *args: Any) -> Kernel:
        """A stage of one launch of an elementwise kernel, for `size` elements a sample.

        The kernel's last parameter is the number of elements.
        """
        width = self.vector(self.size)
        function = self.function("elementwise.cu", name, VECTOR=width)

        def run(context: Context) -> None:
            count = context.n * self.size
            launch(function, count // width, *args, np.int32(count))

        return run

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
        return self.each("relu_dropout_backward", dy, y, np.float32(factor))


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
    kind: ClassVar[str]

    def forward(self) -> Kernel:
        return self.each(f"{self.kind}_forward", self.arrays["x"], self.arrays["y"])

    def backward(self) -> Kernel:
        a = self.arrays
        return self.each(f"{self.kind}_backward", a["dy"], a["y"], a["dx"])


class Rectifier(_Elementwise):
    """max(x, 0)."""

    kind = "relu"


class Logistic(_Elementwise):
    """σ(x)."""

    kind = "sigmoid"


class DropoutKernels:
    """How a dropout layer drops; see ``philox.cuh``.

    Args:
        operation: of the group that the layer is in.
        node: the layer.
    """

    BYTE = 8
    """Elements of a sample that a thread drops, and that a byte of a mask stands for."""

    def __init__(self, operation: Operation, node: Node) -> None:
        assert isinstance(node.layer, Dropout)
        self._operation, self._replica = operation, operation.replica
        self.rate, self._index = node.layer.rate, node.index
        self._size = math.prod(node.output_shape)
        self.factor = np.float32(1.0 / (1.0 - self.rate))

    @classmethod
    def mask(cls, shape: tuple[int, ...]) -> BufferSpec:
        """Memory of the mask of activations of `shape`, batch included: a bit an element."""
        return BufferSpec((shape[0], ceil_div(math.prod(shape[1:]), cls.BYTE)), "uint8")

    def arguments(self, *, training: bool) -> list[Any]:
        """Of the parameters `DROPOUT`; without training all is kept as it is."""
        seed = self._replica.context.seed
        key = np.uint32(seed & 0xFFFFFFFF), np.uint32((seed >> 32) & 0xFFFFFFFF)
        limit, factor = (threshold(self.rate), self.factor) if training else (0, np.float32(1.0))
        pointers = self._replica.samples, self._replica.numbers
        return [*pointers, np.uint64(limit), np.uint32(self._index), *key, factor]

    def stage(self, name: str, *arrays: Array) -> Kernel:
        """Stage of a kernel of ``dropout.cu`` for training: it draws, unless it goes backward."""
        width = self._operation.vector(self._size)
        function = self._operation.function("dropout.cu", name, VECTOR=width)
        backward = name == "dropout_backward"
        rest = [self.factor] if backward else self.arguments(training=True)
        bytes_each, size = ceil_div(self._size, self.BYTE), np.int32(self._size)

        def run(context: Context) -> None:
            launch(function, context.n * bytes_each, *arrays, np.int32(context.n), size, *rest)

        return run


class Drop(_Single):
    """Dropout by `dptrain.plan.random`; without training it passes x on."""

    @classmethod
    def buffers(cls, shape: tuple[int, ...], setting: Setting) -> dict[str, BufferSpec]:
        return {"mask": DropoutKernels.mask(shape)} if setting.training else {}

    def forward(self) -> Kernel:
        a = self.arrays
        keep = self.each("copy", a["x"], a["y"])
        if "mask" not in a:
            return keep
        drop = DropoutKernels(self, self.group.head).stage(
            "dropout_forward", a["x"], a["y"], a["mask"]
        )

        def run(context: Context) -> None:
            (drop if context.training else keep)(context)

        return run

    def backward(self) -> Kernel:
        a = self.arrays
        dropping = DropoutKernels(self, self.group.head)
        return dropping.stage("dropout_backward", a["dy"], a["mask"], a["dx"])


class Windows:
    """Pooling kernels of a node.

    Args:
        operation: of the group that the layer is in.
        node: the layer.
    """

    def __init__(self, operation: Operation, node: Node) -> None:
        layer: Any = node.layer
        self._operation, self._node = operation, node
        self.geometry = geometry(node, layer.windows)
        self.width = operation.vector(node.output_shape[0])
        self.defines = {"VECTOR": self.width, **fixed(operation.device, self.geometry)}
        if argmax_dtype(node) != "uint8":
            self.defines["WIDE_ARGMAX"] = 1

    def function(self, file: str, name: str, **defines: int) -> Function:
        """A kernel compiled for this layer."""
        return self._operation.function(file, name, **self.defines, **defines)

    def forward(self, name: str, *args: Any, behind: Sequence[Any] = ()) -> Kernel:
        """Stage of a kernel with a thread for each vector of channels of the output.

        Args:
            name: of the kernel.
            args: arguments before the number of samples.
            behind: arguments behind the geometry.
        """
        return self._stage(name, math.prod(self._node.output_shape), args, behind)

    def backward(self, name: str, *args: Any) -> Kernel:
        """Stage of a kernel with a thread for each cell as large as the strides."""
        h, w, c, *_, down, across, top, left = map(int, self.geometry)
        return self._stage(name, ceil_div(h + top, down) * ceil_div(w + left, across) * c, args)

    def _stage(
        self, name: str, items: int, args: tuple[Any, ...], behind: Sequence[Any] = ()
    ) -> Kernel:
        function, threads = self.function("pooling.cu", name), items // self.width
        rest = *self.geometry, *behind

        def run(context: Context) -> None:
            launch(function, context.n * threads, *args, np.int32(context.n), *rest)

        return run


def argmax_dtype(node: Node) -> str:
    """Of the number of an element of a window: the largest one means none of them."""
    layer: Any = node.layer
    return "uint8" if math.prod(layer.windows) <= 255 else "int32"


class MaxPooling(_Single):
    """Largest of each window; the gradient goes to it alone."""

    @classmethod
    def needs(cls, group: Group, setting: Setting) -> GroupNeeds:
        argmax = BufferSpec((setting.batch_size, *group.head.output_maps), argmax_dtype(group.head))
        phases = {Phase.FORWARD: Access(("x",), ("y", "argmax"))}
        if setting.training:
            phases[Phase.BACKWARD] = Access(("dy", "argmax"), ("dx",))
        return GroupNeeds(phases, {"argmax": argmax})

    def forward(self) -> Kernel:
        a, windows = self.arrays, Windows(self, self.group.head)
        return windows.forward("max_pool2d_forward", a["x"], a["y"], a["argmax"])

    def backward(self) -> Kernel:
        a, windows = self.arrays, Windows(self, self.group.head)
        return windows.backward(
            "max_pool2d_backward", a["dy"], a["argmax"], a["dx"], np.float32(1.0)
        )


class SumPooling(_Single):
    """Sum of each window."""

    average: ClassVar[bool] = False

    def forward(self) -> Kernel:
        a, windows = self.arrays, Windows(self, self.group.head)
        return windows.forward("sum_pool2d_forward", a["x"], a["y"], np.int32(self.average))

    def backward(self) -> Kernel:
        a, windows = self.arrays, Windows(self, self.group.head)
        return windows.backward("sum_pool2d_backward", a["dy"], a["dx"], np.int32(self.average))


class AveragePooling(SumPooling):
    """Mean of each window over what lies inside the map."""

    average: ClassVar[bool] = True


class Norm:
    """Kernels of local response normalisation.

    Args:
        operation: of the group that the layer is in.
        node: the layer.
    """

    def __init__(self, operation: Operation, node: Node) -> None:
        layer: Any = node.layer
        channels = node.output_maps[0]
        self._operation, self._size = operation, math.prod(node.output_shape)
        self.width, self.channels = operation.vector(channels), np.int32(channels)
        self.defines = {"RADIUS": layer.radius, "BETA_THREE_QUARTERS": int(layer.beta == 0.75)}
        self.numbers = [np.float32(value) for value in (layer.bias, layer.alpha, layer.beta)]

    def stage(self, name: str, *args: Any) -> Kernel:
        """Stage of a kernel that normalises and nothing else."""
        defines = {"VECTOR": self.width, **self.defines}
        if self._operation.device.specializes:
            defines["FIXED_CHANNELS"] = int(self.channels)
        function = self._operation.function("normalization.cu", name, **defines)

        def run(context: Context) -> None:
            count = context.n * self._size
            rest = np.int32(count), self.channels, *self.numbers
            launch(function, count // self.width, *args, *rest)

        return run


class ResponseNorm(_Single):
    """y = x · s^−beta with s = bias + alpha · Σ x² over neighbouring channels."""

    reads: ClassVar[tuple[str, ...]] = ("x",)

    def forward(self) -> Kernel:
        a, norm = self.arrays, Norm(self, self.group.head)
        return norm.stage("lrn_forward", a["x"], a["y"])

    def backward(self) -> Kernel:
        a, norm = self.arrays, Norm(self, self.group.head)
        return norm.stage("lrn_backward", a["x"], a["dy"], a["dx"], np.int32(0))
