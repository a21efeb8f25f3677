"""The interface between the planner and a backend.

A *group* consists of consecutive layers that a backend computes together. For each group and
phase the backend declares which buffers are read and written. From that the planner derives the
order of the stages, the lifetimes of the buffers, the memory needed and the bytes moved.

Buffers have local names inside a group:

- ``x``, ``y``: input and output activation; ``dx``, ``dy``: gradients of the loss with respect to
  them. A group with several inputs names them ``x``, ``x2``, ``x3``, …, and their gradients ``dx``,
  ``dx2``, …: first the inputs of its first layer, then those of later layers from outside;
- any name in `GroupNeeds.buffers`: memory of the group alone, such as an arg-max mask;
- ``input_sums``: the buffer ``sums`` of the group that writes the input (`Group.sums_of`);
- ``gradient_sums``: of the group that finishes the gradient of the output
  (`Group.gradient_sums_of`), or that this group writes (`Group.normalization`);
- ``normalized``, ``normalized_moments``: the input of `Group.normalization` and its buffer
  ``moments``.

Parameters and their gradients are not declared: the stage of a phase in `GRADIENT_PHASES` finishes
the gradients of every parameter of its group.

If several groups read a tensor, the first of them in the order of the backward pass writes its
gradient, and the others add to it (`Group.adds`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import Any, ClassVar, Protocol

from dptrain.network.layers import Layer, Parameter, RandomMask, Shape
from dptrain.network.network import Network, Node
from dptrain.network.normalization import LayerNorm
from dptrain.plan.limits import DeviceLimits
from dptrain.plan.selection import Choice, KernelSelection


class Phase(str, Enum):
    """The kind of work of a stage. The values appear in reports, files and traces."""

    LOAD = "load"
    STATISTICS = "statistics"
    """Mean and variance of the input over the minibatch, before `FORWARD`, in training only."""
    FORWARD = "forward"
    LOSS = "loss"
    BACKWARD_RECOMPUTE = "backward_recompute"
    """`FORWARD` again, see `dptrain.plan.recomputation`."""
    BACKWARD = "backward"
    """Gradients of layers without parameters, also of those fused after a layer with parameters."""
    BACKWARD_STATISTICS = "backward_statistics"
    """Gradients of the parameters of a normalisation over the minibatch, which the gradient of its
    input needs."""
    BACKWARD_WEIGHT = "backward_weight"
    BACKWARD_INPUT = "backward_input"
    BACKWARD_ADD = "backward_add"
    """Contributions to gradients of tensors that several groups read."""
    UPDATE = "update"


def stage_name(group: str, phase: Phase) -> str:
    """Return the name of a stage: group and phase, or ``loss`` and ``update`` alone."""
    return group if group == phase.value else f"{group}.{phase.value}"


FORWARD_PHASES = (Phase.STATISTICS, Phase.FORWARD)
"""Phases of the forward pass in training."""

BACKWARD_ORDER = (
    Phase.BACKWARD,
    Phase.BACKWARD_STATISTICS,
    Phase.BACKWARD_WEIGHT,
    Phase.BACKWARD_INPUT,
)
"""Weights first, so that their all-reduce overlaps with the gradient of the input."""

GRADIENT_PHASES = (Phase.BACKWARD_STATISTICS, Phase.BACKWARD_WEIGHT)
"""Phases that finish the gradients of parameters."""

STATISTICS_PHASES = (Phase.STATISTICS, Phase.BACKWARD_STATISTICS)
"""Phases that make one sum of batch statistics over the ranks."""


def join_names(layers: Iterable[str]) -> str:
    """Return names of layers joined with ``+``, a common scope once: ``layer1.0.conv1+bn1``."""
    names: list[str] = []
    before = ""
    for layer in layers:
        scope, _, short = layer.rpartition(".")
        names.append(short if names and scope == before else layer)
        before = scope
    return "+".join(names)


@dataclass(frozen=True)
class Group:
    """Layers that the same stages compute; each of them but the first reads the one before it.

    Attributes:
        nodes: the layers. No layer outside of the group reads the output of one but the last.
        adds: local names of input gradients, such as ``dx``, to which the group adds, because
            another group has written them before.
        separate: local names of input gradients that the group writes to buffers of their own,
            which a further stage adds.
        sums: True if the forward stage also writes the buffer ``sums``, from which a group that
            reads the output computes its statistics.
        sums_of: name of the group whose ``sums`` this group reads as ``input_sums``; empty if its
            statistics are computed from its input.
        normalization: the group that writes the input, for which the stage of the input gradient
            also sets dx to 0 where a ReLU blocked it, and writes the sums ``gradient_sums``; None
            if it does not.
        gradient_sums_of: name of the group whose ``gradient_sums`` this group reads. Its dy is then
            the gradient before the ReLU. Empty if it computes them from dy.
        untrained: local names of the inputs whose gradient is not read: those that depend on no
            trained parameter, and all in a plan without training.
        trained: True if the output depends on a trained parameter. Otherwise there is no backward
            pass; False in a plan without training.
    """

    nodes: tuple[Node, ...]
    adds: frozenset[str] = frozenset()
    separate: frozenset[str] = frozenset()
    sums: bool = False
    sums_of: str = ""
    normalization: Group | None = None
    gradient_sums_of: str = ""
    untrained: frozenset[str] = frozenset()
    trained: bool = True

    @cached_property
    def name(self) -> str:
        """Names of the layers, see `join_names`."""
        return join_names(node.name for node in self.nodes)

    def stage(self, phase: Phase) -> str:
        """Return the name of the stage of a phase."""
        return stage_name(self.name, phase)

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

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """Names of the nodes outside of the group that it reads, or ``"input"``, in the order of
        the local names ``x``, ``x2``, ….
        """
        own = {node.name for node in self.nodes}
        return tuple(name for node in self.nodes for name in node.inputs if name not in own)

    @cached_property
    def tensors(self) -> dict[str, str]:
        """Names of the tensors by local name: inputs, output and the gradients that are read."""
        locals_ = {"y": self.tail.name}
        for number, name in enumerate(self.inputs, 1):
            locals_[input_name(number)] = name
        gradients = {
            f"d{local}": f"d{name}"
            for local, name in locals_.items()
            if local not in self.untrained
        }
        gradients.update({local: f"{self.name}.{local}" for local in self.separate})
        others: dict[str, str] = {}
        if self.sums_of:
            others["input_sums"] = f"{self.sums_of}.sums"
        if self.gradient_sums_of:
            others["gradient_sums"] = f"{self.gradient_sums_of}.gradient_sums"
        if self.normalization is not None:
            others["normalized"] = self.normalization.inputs[0]
            others["normalized_moments"] = f"{self.normalization.name}.moments"
        return {**locals_, **gradients, **others}

    @cached_property
    def gradients(self) -> tuple[str, ...]:
        """Local names of the input gradients that the group computes: ``dx``, ``dx2``, ….

        Phases write no others, and a phase that computes nothing else is absent without them.
        """
        numbers = range(1, len(self.inputs) + 1)
        return tuple(f"d{name}" for name in map(input_name, numbers) if name not in self.untrained)

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Parameters of all layers."""
        return tuple(p for node in self.nodes for p in node.parameters)

    @property
    def trains(self) -> bool:
        """True if parameters of the group are trained."""
        return any(p.is_trained for p in self.parameters)

    @property
    def infers(self) -> bool:
        """True if the group is computed as in inference: it is not trained and drops nothing."""
        draws = any(issubclass(kind, RandomMask) for kind in self.kinds)
        return not self.trained and not draws


def input_name(number: int) -> str:
    """Return the local name of the input with a number from 1 on: ``x``, ``x2``, ``x3``, …."""
    return "x" if number == 1 else f"x{number}"


@dataclass(frozen=True)
class BufferSpec:
    """A buffer that a group needs: shape with the batch, and NumPy name of the dtype."""

    shape: Shape
    dtype: str


@dataclass(frozen=True)
class Access:
    """Local names of the buffers that one phase reads and writes."""

    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()


@dataclass(frozen=True)
class GroupNeeds:
    """The buffers that a group needs, and how its phases access them.

    Attributes:
        phases: accesses by phase. The plan has a stage for each phase that is present, and the
            backend binds exactly the stages of the plan. Input gradients that are written are those
            of `Group.gradients`.
        buffers: buffers of the group alone, by local name. Other groups reuse the memory before the
            first write and after the last read.
        kept: names of buffers whose content the next step reads; no other group uses their memory.
        alias: the output is the input in another shape; no phase does anything.
        in_place: the phases allow that y is x and that dy is dx. The planner uses this if no other
            group needs x.
        shares_gradient: the gradient of every input is dy, and the backward pass has no phase.
            The planner lets them share memory where it can, and else copies or adds.
        overwrites_dy: local name of the input gradient that may be dy: its phase reads each element
            of dy before it writes that element, and no later phase reads dy. The planner uses this
            if no other gradient shares dy.
    """

    phases: Mapping[Phase, Access] = field(default_factory=dict)
    buffers: Mapping[str, BufferSpec] = field(default_factory=dict)
    alias: bool = False
    in_place: bool = False
    shares_gradient: bool = False
    overwrites_dy: str | None = None
    kept: tuple[str, ...] = ()


@dataclass(frozen=True)
class Storage:
    """Storage order of a parameter: ``canonical.reshape(view).transpose(axes)``."""

    view: Shape
    axes: tuple[int, ...]

    @property
    def shape(self) -> Shape:
        """Shape as stored."""
        return tuple(self.view[axis] for axis in self.axes)


def canonical_storage(parameter: Parameter) -> Storage:
    """Return the storage that keeps the canonical layout."""
    return Storage(parameter.shape, tuple(range(len(parameter.shape))))


def channels_last_storage(node: Node, parameter: Parameter) -> Storage:
    """Return the storage for activations (N, H, W, C): the summed dimensions of weights come first.

    Weights of convolutions are (R, S, C, K), those of dense layers (H·W·C, out), and those of the
    elements of a flattened map have the order of the map.
    """
    if len(parameter.shape) == 4:
        return Storage(parameter.shape, (2, 3, 1, 0))
    if len(parameter.shape) == 2:
        return Storage((parameter.shape[0], *node.input_maps), (2, 3, 1, 0))
    if isinstance(node.layer, LayerNorm) and len(node.input_shape) == 1:
        return Storage(node.input_maps, (1, 2, 0))
    return canonical_storage(parameter)


@dataclass(frozen=True)
class Precision:
    """The dtypes of a replica.

    Attributes:
        dtype: NumPy name of the dtype of parameters, gradients, optimizer state and targets.
        activations: NumPy name of the dtype of activations and of gradients with respect to them;
            ``uint16`` holds the bits of a bfloat16, which NumPy does not have.
    """

    dtype: str
    activations: str


@dataclass(frozen=True)
class Explanation:
    """How a backend computes a stage.

    Attributes:
        algorithm: name of the algorithm.
        tile: sizes of its tiles; empty if it has none.
        units: the division of the stage among threads.
        reason: why the backend selected it.
        others: other algorithms, with their estimated time divided by that of the selected one;
            None if their times cannot be compared.
        estimated_ms: estimated time of the algorithm for a full batch, on the machine of
            `dptrain.backends.base.Backend.estimated_roofs`; None if there is none.
    """

    algorithm: str
    tile: str = ""
    units: str = ""
    reason: str = ""
    others: tuple[tuple[str, float | None], ...] = ()
    estimated_ms: float | None = None

    @classmethod
    def of(
        cls,
        choice: Choice[Any],
        candidates: Sequence[Choice[Any]],
        selection: KernelSelection,
        stage: str,
        *,
        tile: str = "",
        units: str = "",
        note: str = "",
        per_ms: float | None = None,
    ) -> Explanation:
        """Return the explanation of a choice.

        Args:
            choice: what `dptrain.plan.selection.select` returned.
            candidates: what `dptrain.plan.selection.fastest` returned.
            selection, stage: as passed to `select`.
            tile, units: as above.
            note: the reason unless `selection` names the choice, if it says more than estimates.
            per_ms: units of the estimates in a ms; None if they are no times.
        """
        name = choice.algorithm.name
        others = tuple(
            (each.algorithm.name, each.estimate / choice.estimate)
            if math.isfinite(each.estimate)
            else (each.algorithm.name, None)
            for each in candidates
            if each.algorithm.name != name
        )
        reason = note or ("lowest estimated time" if others else "the only algorithm")
        if selection.named(stage) in (str(choice), name):
            reason = selection.reason
        is_known = per_ms is not None and math.isfinite(choice.estimate)
        time = choice.estimate / per_ms if is_known and per_ms else None
        return cls(name, tile, units, reason, others, time)


@dataclass(frozen=True)
class Setting:
    """The settings of a plan.

    Attributes:
        batch_size: largest number of samples in a step.
        precision: name of the precision, such as ``"fp32"``.
        dtype, activations: dtypes of the precision, see `Precision`.
        training: True if the plan contains backward and update.
        threads: number of compute threads of the replica.
        shards: number of micro-shards of this rank, see `dptrain.plan.shards`; 0 selects the
            fastest order of summation. Otherwise the bits of every output and input gradient of a
            sample must follow from the shape of the layer, `shard_size` and `all_shards` alone,
            and not from `batch_size`, `threads` or other samples; parameter gradients are summed
            for each micro-shard first.
        limits: of the GPU that the plan is for; None for the backend's default.
        selection: selects a kernel for each stage.
        fused: False computes each layer by stages of its own.
        recompute: True computes activations again in the backward pass if this needs less memory.
            No stages run concurrently then.
        label_smoothing: s; in training, the target of a sample is (1 − s) onehot + s / F. 0 for
            networks that do not predict classes.
        weighted: True if each sample of a minibatch has a weight in training.
        all_shards: number of micro-shards of all ranks; 0 without micro-shards.
        shard_size: samples of the largest micro-shard of all ranks; 0 without micro-shards.
    """

    batch_size: int
    precision: str
    dtype: str
    activations: str
    training: bool = True
    threads: int = 1
    shards: int = 0
    limits: DeviceLimits | None = None
    selection: KernelSelection = field(default_factory=KernelSelection)
    fused: bool = True
    recompute: bool = False
    label_smoothing: float = 0.0
    weighted: bool = False
    all_shards: int = 0
    shard_size: int = 0

    @property
    def kernel_shards(self) -> int:
        """Number of micro-shards of a launch for which kernels are selected; 1 without them.

        The selection may not depend on the number of ranks. It is the geometric mean of what one
        rank and as many ranks as micro-shards launch together.
        """
        return max(math.isqrt(self.all_shards), 1)

    @property
    def kernel_samples(self) -> int:
        """Number of samples of a launch for which kernels are selected."""
        return self.kernel_shards * self.shard_size or self.batch_size

    @property
    def summed_samples(self) -> int:
        """Largest number of samples whose weight gradients are added: those of a micro-shard."""
        return self.shard_size or self.batch_size

    def of(self, group: Group) -> Setting:
        """Return the settings of a group: without training if it is computed as in inference."""
        is_same = not self.training or not group.infers
        return self if is_same else replace(self, training=False)


def group_needs(backend: Lowering, group: Group, setting: Setting) -> GroupNeeds:
    """Return what a group of a plan needs, without stages of gradients that nothing reads.

    Args:
        backend: computes the group.
        group: the layers.
        setting: of the plan.
    """
    needs = backend.needs(group, setting.of(group))
    if not setting.training or (group.trained and group.trains):
        return needs
    dropped = (*BACKWARD_ORDER,) if not group.trained else GRADIENT_PHASES
    phases = {phase: access for phase, access in needs.phases.items() if phase not in dropped}
    read = {name for access in phases.values() for name in access.reads}
    for phase in set(dropped) & needs.phases.keys() if group.trained else ():
        # The input gradient of some normalisations continues from sums of the weight gradient.
        if not read.isdisjoint(needs.phases[phase].writes):
            return needs
    return replace(needs, phases=phases)


class Lowering(Protocol):
    """The part of a backend that the planner uses. Nothing here allocates or computes.

    Attributes:
        name: name of the backend.
        precisions: supported precisions by name, the default first.
        fusions: sequences of layer classes that the backend can compute as one group; `Activation`
            means every function of single elements.
        inference_fusions: further ones of plans without training.
        concurrent_weight_gradients: stages of `BACKWARD_WEIGHT` may run concurrently with all
            stages that follow, up to the update.
        max_elements: largest number of elements that kernels can index in a buffer; None for no
            limit.
        supports_shards: True if plans may have micro-shards.
        double_buffers_input: True if a minibatch is loaded to one of two buffers during the step
            before.
    """

    name: ClassVar[str]
    precisions: ClassVar[Mapping[str, Precision]]
    fusions: ClassVar[tuple[tuple[type[Layer], ...], ...]]
    inference_fusions: ClassVar[tuple[tuple[type[Layer], ...], ...]]
    concurrent_weight_gradients: ClassVar[bool]
    max_elements: ClassVar[int | None]
    supports_shards: ClassVar[bool]
    double_buffers_input: ClassVar[bool]

    @property
    def limits(self) -> DeviceLimits | None:
        """Limits of the GPU; None if there is none, or it has not been opened."""

    def precision(self, name: str) -> Precision:
        """Return the dtypes of a precision; raise `UserError` if it is not supported."""

    def fuses(self, nodes: tuple[Node, ...]) -> bool:
        """Return True to compute these layers, which match one of the fusions, as one group."""

    def adds_gradient(self, group: Group, local: str, setting: Setting) -> bool:
        """Return True if the group can add to the input gradient with a local name, see
        `Group.adds`; otherwise it writes another buffer, which a further stage adds.
        """

    def sums_output(self, group: Group, reader: Group, setting: Setting) -> bool:
        """Return True if the forward stage of `group` can compute the sums from which `reader`
        computes its statistics, see `Group.sums`.
        """

    def sums_gradient(self, group: Group, normalization: Group, setting: Setting) -> bool:
        """Return True if the stage of the input gradient of `group` can compute the sums that
        `normalization` needs in the backward pass, see `Group.normalization`.
        """

    def staging_shape(self, network: Network, setting: Setting) -> Shape:
        """Return the number of staging slots and their size in bytes; () for no staging buffer."""

    def needs(self, group: Group, setting: Setting) -> GroupNeeds:
        """Return the buffers that `group` needs and the accesses of its phases."""

    def storage(self, node: Node, parameter: Parameter) -> Storage:
        """Return the storage order of a parameter."""
