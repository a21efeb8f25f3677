"""The interface of an operation: a layer bound to arrays, with a kernel for each phase."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from dptrain.backends.replica import Arrays, Context, Kernel
from dptrain.network.network import Node
from dptrain.plan.lowering import Access, BufferSpec, GroupNeeds, Phase, Setting


class Operation(ABC):
    """A layer bound to arrays.

    Class attributes:
        backward_reads: arrays that backward reads: ``x``, ``y``, or both.
        saved: buffers with the shape of the output that forward writes for backward, with dtypes.
    """

    backward_reads: ClassVar[tuple[str, ...]] = ()
    saved: ClassVar[Mapping[str, str]] = {}

    def __init__(self, node: Node, arrays: Arrays) -> None:
        self.node, self.arrays = node, arrays

    @classmethod
    def needs(cls, node: Node, setting: Setting) -> GroupNeeds:
        """Return what each phase reads and writes; here of a layer without parameters."""
        shape = (setting.batch_size, *node.output_maps)
        buffers = {k: BufferSpec(shape, v) for k, v in cls.saved.items()}
        buffers = buffers if setting.training else {}
        phases = {Phase.FORWARD: Access(("x",), ("y", *buffers))}
        if setting.training:
            phases[Phase.BACKWARD] = Access(("dy", *cls.backward_reads, *buffers), ("dx",))
        return GroupNeeds(phases, buffers)

    def kernels(self) -> Mapping[Phase, Kernel]:
        """Return the kernel of each phase."""
        return {Phase.FORWARD: self.forward, Phase.BACKWARD: self.backward}

    @abstractmethod
    def forward(self, context: Context) -> None:
        """Write y from x."""

    def backward(self, context: Context) -> None:
        """Write dx from dy."""


class WeightedOperation(Operation):
    """A layer with a weight, and in general a bias."""

    @classmethod
    def needs(cls, node: Node, setting: Setting) -> GroupNeeds:
        phases = {Phase.FORWARD: Access(("x",), ("y",))}
        if setting.training:
            phases[Phase.BACKWARD_WEIGHT] = Access(("x", "dy"))
            phases[Phase.BACKWARD_INPUT] = Access(("dy",), ("dx",))
        return GroupNeeds(phases)

    def kernels(self) -> Mapping[Phase, Kernel]:
        return {
            Phase.FORWARD: self.forward,
            Phase.BACKWARD_WEIGHT: self.backward_weight,
            Phase.BACKWARD_INPUT: self.backward_input,
        }

    @abstractmethod
    def backward_weight(self, context: Context) -> None:
        """Write the gradients of the parameters from x and dy."""

    @abstractmethod
    def backward_input(self, context: Context) -> None:
        """Write dx from dy and the parameters."""


class Alias(Operation):
    """Flatten: the same memory in another shape."""

    @classmethod
    def needs(cls, node: Node, setting: Setting) -> GroupNeeds:
        return GroupNeeds(alias=True)

    def kernels(self) -> Mapping[Phase, Kernel]:
        return {}

    def forward(self, context: Context) -> None:
        raise AssertionError("an alias has no stage")
