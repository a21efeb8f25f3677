"""Operations: groups of layers bound to arrays, and the kernels that each phase launches.

Activations are contiguous (N, H, W, C), so kernels can treat them as flat arrays, rows or pixels.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Generic, TypeVar, cast

import numpy as np

from dptrain.backends.cuda.device.device import Device, Function, Macro
from dptrain.backends.cuda.device.hardware import VECTOR_BYTES
from dptrain.backends.cuda.device.launching import launch
from dptrain.backends.cuda.replica import CudaReplica
from dptrain.backends.replica import Arrays, Context, Kernel
from dptrain.network.biases import BiasAdd
from dptrain.network.layers import Flatten, Layer, Reshape
from dptrain.plan.lowering import (
    Access,
    BufferSpec,
    Explanation,
    Group,
    GroupNeeds,
    Phase,
    Setting,
)

Kernels = Mapping[Phase, Kernel]
L = TypeVar("L", bound=Layer)


def vector_width(length: int, itemsize: int) -> int:
    """Return the elements of a row that a thread accesses at once, ``VECTOR`` of ``vector.cuh``.

    Args:
        length: elements of a row.
        itemsize: bytes of an element.
    """
    width = VECTOR_BYTES // itemsize
    return width if length % width == 0 else 1


class Operation(ABC, Generic[L]):
    """A group of layers bound to arrays; L is the type of the first layer.

    Args:
        group: the layers.
        arrays: device arrays by local name.
        replica: provides the device, the batch size and the context.

    Attributes:
        setting: of the plan.
        size: elements of the group's output, per sample.
        itemsize: bytes of an activation.

    Class attributes:
        reads_bias: kernels of a convolution read a bias and write its gradient in any case.
    """

    reads_bias: ClassVar[bool] = True

    @classmethod
    def explain(cls, group: Group, setting: Setting) -> Mapping[Phase, Explanation]:
        """Return how phases are computed for which there are several kernels."""
        return {}

    @classmethod
    def joins_shards(cls, group: Group, setting: Setting) -> bool:
        """Return whether one launch computes the weight gradients of all micro-shards."""
        return False

    @classmethod
    def sum_rows(cls, group: Group, setting: Setting) -> int:
        """Return the rows of sums of the output that forward can write; 0 if it cannot."""
        return 0

    @classmethod
    def gradient_sum_rows(cls, group: Group, setting: Setting) -> int:
        """Return the rows of sums of the input gradient that a stage can write; 0 if it cannot."""
        return 0

    @classmethod
    def adds_gradient(cls, group: Group, local: str) -> bool:
        """Return whether the kernel of an input gradient can add to what is stored."""
        return False

    def __init__(self, group: Group, arrays: Arrays, replica: CudaReplica) -> None:
        self.group, self.arrays, self.replica = group, arrays, replica
        self.device: Device = replica.device
        self.batch_size = replica.plan.batch_size
        # The table of operations has their types.
        self.layer = cast("L", group.head.layer)
        self.size = math.prod(group.tail.output_shape)
        self.setting = replica.plan.setting.of(group)
        self.itemsize = np.dtype(self.setting.activations).itemsize

    def function(self, file: str, name: str, **defines: Macro) -> Function:
        """Return a kernel compiled for the storage type of activations (``precision.cuh``)."""
        bfloat16 = self.setting.activations == "uint16"
        return self.device.function(file, name, PRECISION=2 if bfloat16 else 0, **defines)

    def _adding(self, local: str) -> dict[str, int]:
        """Return the macro of a kernel that writes an array, or adds to a gradient."""
        return {"ADD_GRADIENT": 1} if local in self.group.adds else {}

    def vector_width(self, length: int) -> int:
        """Return ``VECTOR`` for rows of activations of `length` elements."""
        return vector_width(length, self.itemsize)

    def elementwise(
        self, name: str, *args: Any, file: str = "elementwise.cu", **defines: Macro
    ) -> Kernel:
        """Return a stage that launches a kernel on `size` · n elements.

        Args:
            name: of the kernel. Its last parameter is the number of elements.
            args: the other arguments.
            file: source of the kernel.
            defines: further macros that it is compiled with.
        """
        width = self.vector_width(self.size)
        function = self.function(file, name, VECTOR=width, **defines)

        def run(context: Context) -> None:
            count = context.n * self.size
            launch(function, count // width, *args, np.int32(count))

        return run

    @classmethod
    @abstractmethod
    def needs(cls, group: Group, setting: Setting) -> GroupNeeds:
        """Return the buffers of the group, and what each phase reads and writes."""

    def kernels(self, phases: Iterable[Phase]) -> Kernels:
        """Return the bound kernel of each phase, from the method with the name of the phase."""
        return {phase: getattr(self, phase.value)() for phase in phases}

    def relu_backward(self, factor: float) -> Kernel:
        """Return a stage that replaces dy by dy · factor if y > 0 and by 0 otherwise."""
        dy, y = self.arrays["dy"], self.arrays["y"]
        return self.elementwise("relu_dropout_backward", dy, y, np.float32(factor))


class SingleLayerOperation(Operation[L]):
    """A layer without parameters.

    Class attributes:
        reads: arrays that backward reads in addition to dy and the layer's own buffers.
    """

    reads: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def backward_reads(cls, group: Group) -> tuple[str, ...]:
        """Return `reads`, if it depends on the layer."""
        return cls.reads

    @classmethod
    def buffers(cls, shape: tuple[int, ...], setting: Setting) -> dict[str, BufferSpec]:
        """Return the buffers for an output of `shape`, in addition to x and y.

        Args:
            shape: of the output, with the batch dimension.
            setting: of the plan.
        """
        return {}

    @classmethod
    def needs(cls, group: Group, setting: Setting) -> GroupNeeds:
        shape = (setting.batch_size, *group.tail.output_maps)
        buffers = cls.buffers(shape, setting)
        phases = {Phase.FORWARD: Access(("x",), ("y", *buffers))}
        if group.gradients:
            phases[Phase.BACKWARD] = Access(("dy", *cls.backward_reads(group), *buffers), ("dx",))
        return GroupNeeds(phases, buffers)

    @abstractmethod
    def forward(self) -> Kernel:
        """Return the stage that writes y."""

    @abstractmethod
    def backward(self) -> Kernel:
        """Return the stage that writes dx."""


class FlattenOperation(Operation[Flatten | Reshape]):
    """Flatten and Reshape: the output is the input in another shape."""

    @classmethod
    def needs(cls, group: Group, setting: Setting) -> GroupNeeds:
        return GroupNeeds(alias=True)


class BiasAddOperation(Operation[BiasAdd]):
    """y = x + bias of the channel or unit."""

    @classmethod
    def needs(cls, group: Group, setting: Setting) -> GroupNeeds:
        assert not setting.training, "biases are layers only in inference"
        return GroupNeeds({Phase.FORWARD: Access(("x",), ("y",))})

    def forward(self) -> Kernel:
        """Return the stage that writes y."""
        a, channels = self.arrays, np.int32(self.group.tail.output_shape[0])
        return self.elementwise("add_bias", a["x"], a["bias"], a["y"], channels)
