"""The interface of an operation: a layer bound to arrays, with a kernel for each phase."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import ClassVar, Generic, TypeVar, cast

from dptrain.backends.replica import Arrays, Context, Kernel
from dptrain.network.layers import Layer
from dptrain.plan.lowering import Access, BufferSpec, Group, GroupNeeds, Phase, Setting

L = TypeVar("L", bound=Layer)


class Operation(ABC, Generic[L]):
    """A layer of type L bound to arrays.

    Class attributes:
        backward_reads: arrays that backward reads: ``x``, ``y``, or both.
        saved: buffers with the shape of the output that forward writes for backward, with dtypes.
    """

    backward_reads: ClassVar[tuple[str, ...]] = ()
    saved: ClassVar[Mapping[str, str]] = {}

    def __init__(self, group: Group, arrays: Arrays) -> None:
        self.group, self.node, self.arrays = group, group.head, arrays
        # The table of operations has their types.
        self.layer = cast("L", group.head.layer)

    @classmethod
    def needs(cls, group: Group, setting: Setting) -> GroupNeeds:
        """Return what each phase reads and writes; here of a layer without parameters."""
        shape = (setting.batch_size, *group.head.output_maps)
        buffers = {k: BufferSpec(shape, v) for k, v in cls.saved.items()}
        buffers = buffers if setting.training else {}
        phases = {Phase.FORWARD: Access(("x",), ("y", *buffers))}
        if group.gradients:
            phases[Phase.BACKWARD] = Access(("dy", *cls.backward_reads, *buffers), group.gradients)
        return GroupNeeds(phases, buffers)

    def kernels(self, phases: Iterable[Phase]) -> Mapping[Phase, Kernel]:
        """Return the kernel of each phase: the method with the name of the phase."""
        return {phase: getattr(self, phase.value) for phase in phases}

    @abstractmethod
    def forward(self, context: Context) -> None:
        """Write y from x."""

    def backward(self, context: Context) -> None:
        """Write dx from dy."""


class WeightedOperation(Operation[L]):
    """A layer with a weight, and in general a bias."""

    @classmethod
    def needs(cls, group: Group, setting: Setting) -> GroupNeeds:
        phases = {Phase.FORWARD: Access(("x",), ("y",))}
        if setting.training:
            phases[Phase.BACKWARD_WEIGHT] = Access(("x", "dy"))
        if group.gradients:
            phases[Phase.BACKWARD_INPUT] = Access(("dy",), ("dx",))
        return GroupNeeds(phases)

    @abstractmethod
    def backward_weight(self, context: Context) -> None:
        """Write the gradients of the parameters from x and dy."""

    @abstractmethod
    def backward_input(self, context: Context) -> None:
        """Write dx from dy and the parameters."""


class Alias(Operation[Layer]):
    """Flatten and Reshape: the same memory in another shape."""

    @classmethod
    def needs(cls, group: Group, setting: Setting) -> GroupNeeds:
        return GroupNeeds(alias=True)

    def forward(self, context: Context) -> None:
        raise AssertionError("an alias has no stage")
