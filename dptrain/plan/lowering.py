"""What a backend tells the planner about the layers it computes: the vocabulary between the two.

A *group* is a run of layers that a backend computes as one. For each group the backend states,
phase by phase, which buffers are read and written. From that alone the planner derives the order
of the stages, how long each buffer lives, the memory needed and the bytes moved.

Buffers go by local names inside a group:

- ``x``, ``y``: input and output activation; ``dx``, ``dy``: gradients of the loss by them;
- any name in `GroupNeeds.buffers`: memory of the group's own, such as an arg-max mask.

Parameters and their gradients need no declaration: a stage that computes `BACKWARD_WEIGHT`
finishes the gradients of every parameter of its group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import ClassVar, Protocol

from dptrain.network.layers import Layer, Parameter, Shape
from dptrain.network.network import Network, Node


class Phase(str, Enum):
    """What a stage does. The values appear in reports, files and traces."""

    LOAD = "load"
    FORWARD = "forward"
    LOSS = "loss"
    BACKWARD = "backward"
    """Gradients of the layers without parameters, and of what is fused behind a layer with them."""
    BACKWARD_WEIGHT = "backward_weight"
    BACKWARD_INPUT = "backward_input"
    UPDATE = "update"


BACKWARD_ORDER = (Phase.BACKWARD, Phase.BACKWARD_WEIGHT, Phase.BACKWARD_INPUT)
"""Weights before input: their sum over the ranks then travels while the input's is computed."""


@dataclass(frozen=True)
class Group:
    """Consecutive layers that one set of stages computes."""

    nodes: tuple[Node, ...]

    @cached_property
    def name(self) -> str:
        """Layer names joined with ``+``."""
        return "+".join(node.name for node in self.nodes)

    @property
    def kinds(self) -> tuple[type[Layer], ...]:
        """Classes of the layers."""
        return tuple(type(node.layer) for node in self.nodes)

    @property
    def head(self) -> Node:
        """First layer."""
        return self.nodes[0]

    @property
    def tail(self) -> Node:
        """Last layer."""
        return self.nodes[-1]

    @property
    def input(self) -> str:
        """Name of the node whose output the group reads, or ``"input"``."""
        return self.head.inputs[0]

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Parameters of all layers."""
        return tuple(p for node in self.nodes for p in node.parameters)


@dataclass(frozen=True)
class BufferSpec:
    """Memory that a group asks for: full shape (batch included) and dtype name."""

    shape: Shape
    dtype: str


@dataclass(frozen=True)
class Access:
    """Local names of the buffers that one phase reads and writes."""

    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()


@dataclass(frozen=True)
class GroupNeeds:
    """What computing a group takes.

    Attributes:
        phases: accesses by phase. Phases that are absent have nothing to do.
        buffers: memory of the group's own, by local name. It is reused by other groups outside
            the span from its first write to its last read.
        alias: the output is the input seen in another shape; no phase does anything.
        in_place: phases allow that y is x and dy is dx. They are where nobody else needs x.
    """

    phases: Mapping[Phase, Access] = field(default_factory=dict)
    buffers: Mapping[str, BufferSpec] = field(default_factory=dict)
    alias: bool = False
    in_place: bool = False


@dataclass(frozen=True)
class Storage:
    """How a parameter lies in the flat array: ``canonical.reshape(view).transpose(axes)``."""

    view: Shape
    axes: tuple[int, ...]

    @property
    def shape(self) -> Shape:
        """Shape as stored."""
        return tuple(self.view[axis] for axis in self.axes)


def canonical_storage(parameter: Parameter) -> Storage:
    """Storage that leaves the canonical layout as it is."""
    return Storage(parameter.shape, tuple(range(len(parameter.shape))))


@dataclass(frozen=True)
class Precision:
    """How the numbers of a replica are kept.

    Attributes:
        dtype: NumPy name of the dtype of parameters, gradients, optimizer state and targets.
        activations: that of activations and the gradients by them; ``uint16`` holds the bits of a
            bfloat16, which NumPy does not know.
    """

    dtype: str
    activations: str


@dataclass(frozen=True)
class Setting:
    """What a plan is made for, besides the network.

    Attributes:
        batch_size: largest number of samples in a step.
        precision: the user's word for the arithmetic, such as ``"fp32"``.
        dtype, activations: see `Precision`.
        training: whether backward and update are wanted.
        threads: compute threads of the replica.
    """

    batch_size: int
    precision: str
    dtype: str
    activations: str
    training: bool = True
    threads: int = 1


class Lowering(Protocol):
    """The part of a backend that planning needs. Nothing here allocates or computes."""

    name: ClassVar[str]
    fusions: ClassVar[tuple[tuple[type[Layer], ...], ...]]
    weights_beside: ClassVar[bool]
    """Stages of `BACKWARD_WEIGHT` may run beside all that follow them, up to the update."""
    most_elements: ClassVar[int | None]
    """Largest number of elements of a buffer that kernels can count; None for any."""

    def precision(self, name: str) -> Precision:
        """How numbers are kept under the precision called `name`; `UserError` if unsupported."""

    def fuses(self, nodes: tuple[Node, ...]) -> bool:
        """Whether these layers, which match one of `fusions`, are computed as one group."""

    def staged(self, network: Network, setting: Setting) -> Shape:
        """Messages to steps that may be under way, and bytes of each; () where steps get none."""

    def needs(self, group: Group, setting: Setting) -> GroupNeeds:
        """What computing `group` takes."""

    def storage(self, node: Node, parameter: Parameter) -> Storage:
        """How `parameter` of `node` is stored."""
