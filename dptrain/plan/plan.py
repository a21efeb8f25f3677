"""The plan of a training step: buffers with sizes, and an ordered list of stages.

Planning allocates nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dptrain.errors import UserError
from dptrain.network.elementwise import Activation
from dptrain.network.initializers import Constant
from dptrain.network.layers import Layer, Parameter, Shape
from dptrain.network.network import INPUT as INPUT
from dptrain.network.network import Network, Node
from dptrain.plan.arena import Buffer, assign_offsets
from dptrain.plan.flat import ALIGNMENT, FlatLayout, make_layout
from dptrain.plan.freezing import planned_nodes, trained_nodes
from dptrain.plan.gradients import Addition, Gradients, collect_gradients
from dptrain.plan.lowering import (
    BACKWARD_ORDER,
    GRADIENT_PHASES,
    Access,
    BufferSpec,
    Group,
    Lowering,
    Phase,
    Setting,
    canonical_storage,
    group_needs,
    input_name,
    stage_name,
)
from dptrain.plan.optimizers import SGD, Optimizer
from dptrain.plan.recomputation import SECOND, Recomputation, Recomputer
from dptrain.plan.selection import KernelSelection
from dptrain.plan.shards import MicroShards, merge_table

STAGED = "input.staged"
"""Name of the buffer that holds minibatches in the form in which the host sends them."""
TARGET = "target"
"""Name of the buffer that holds the targets of the minibatch."""
NEXT_INPUT, NEXT_TARGET = "input.next", "target.next"
"""Names of the second buffers of inputs and targets, if a minibatch is loaded during the step
before."""


@dataclass(frozen=True)
class Stage:
    """One entry in the list of which a training step consists.

    Attributes:
        index: position in `Plan.stages`.
        group: names of the layers (``conv1+relu1+pool1``), or ``input``, ``loss``, ``update``.
        phase: kind of work.
        reads, writes: names of buffers.
        parameters: names of the parameters that are read; in `BACKWARD_WEIGHT`, of those whose
            gradients this stage finishes.
        flops: number of operations for a full batch.
        bytes_moved: size of all buffers and parameters that are read or written, each counted
            once, for a full batch.
    """

    index: int
    group: str
    phase: Phase
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    parameters: tuple[str, ...]
    flops: int
    bytes_moved: int

    @property
    def name(self) -> str:
        """Group and phase, ``conv1+relu1.forward``, or ``loss`` and ``update`` alone."""
        return stage_name(self.group, self.phase)


@dataclass(frozen=True)
class Plan:
    """The stages and buffers of a network for a backend, a batch size and a precision.

    Attributes:
        network: the network.
        backend: name of the backend.
        setting: batch size, precision, training or inference, threads. A step may use fewer
            samples than the batch size.
        optimizer: update rule.
        groups: groups of layers that the backend computes together, in order.
        buffers: the buffers in the arena, by name.
        aliases: name of the tensor whose memory a tensor shares, by the name of the latter.
        layout: slots of the parameters.
        stages: stages of a step, in order.
        arena_bytes: size of the arena in bytes.
        micro_shards: the micro-shards of this rank; None for the fastest order of summation.
        additions: what stages of `BACKWARD_ADD` add, by the name of their group.
        statistics: slots of the arrays that training updates without gradients.
        recomputed: names of the buffers whose content is computed again in the backward pass, to a
            second buffer, see `dptrain.plan.recomputation`.
        cuts: positions of the groups between which activations are computed again.
        passes: forward and backward passes for an update; the batch size is that of one pass.
    """

    network: Network
    backend: str
    setting: Setting
    optimizer: Optimizer
    groups: tuple[Group, ...]
    buffers: dict[str, Buffer]
    aliases: dict[str, str]
    layout: FlatLayout
    stages: tuple[Stage, ...]
    arena_bytes: int
    micro_shards: MicroShards | None = None
    additions: Mapping[str, tuple[Addition, ...]] = field(default_factory=dict)
    statistics: FlatLayout = FlatLayout((), 0)
    recomputed: frozenset[str] = frozenset()
    cuts: tuple[int, ...] = ()
    passes: int = 1

    @cached_property
    def shapes(self) -> Mapping[str, Shape]:
        """(C, H, W) of the outputs of layers, and of the gradients with respect to them."""
        maps = {node.name: node.output_maps for group in self.groups for node in group.nodes}
        return maps | {f"d{name}": shape for name, shape in maps.items()}

    @property
    def batch_size(self) -> int:
        """Largest number of samples in a pass; a step has one pass unless gradients accumulate."""
        return self.setting.batch_size

    @property
    def precision(self) -> str:
        """Name of the precision, such as ``"fp32"``."""
        return self.setting.precision

    @property
    def dtype(self) -> str:
        """NumPy name of the dtype of parameters, gradients and optimizer state."""
        return self.setting.dtype

    @property
    def training(self) -> bool:
        """True if the plan contains backward, gradients and the update."""
        return self.setting.training

    @property
    def gradient_slots(self) -> int:
        """Number of gradients that this rank contributes to the sum over ranks."""
        return 1 if self.micro_shards is None else len(self.micro_shards.subtrees)

    @property
    def merges(self) -> NDArray[np.int64]:
        """The order in which micro-shards are summed, see `dptrain.plan.shards`."""
        return np.zeros(1, np.int64) if self.micro_shards is None else self.micro_shards.merges

    @property
    def pass_merges(self) -> NDArray[np.int64]:
        """The order in which the gradients of passes are added, see `dptrain.plan.shards`.

        One after the other; with micro-shards along their tree, of which each pass is a subtree.
        """
        if self.micro_shards is None:
            return np.minimum(np.arange(self.passes, dtype=np.int64), 1)
        return merge_table(self.passes, [(i, i + 1) for i in range(self.passes)])

    @property
    def stored_gradients(self) -> int:
        """Number of sums of gradients of earlier passes that are stored during a pass."""
        if self.passes == 1:
            return 0
        return 1 if self.micro_shards is None else self.passes.bit_length() - 1

    def with_update_share(self, ranks: int) -> Plan:
        """Return the plan of a rank that updates one of `ranks` slices of the parameters.

        Its update counts so much less work; nothing else differs.
        """
        stages = (
            replace(stage, flops=stage.flops // ranks, bytes_moved=stage.bytes_moved // ranks)
            if stage.phase is Phase.UPDATE
            else stage
            for stage in self.stages
        )
        return replace(self, stages=tuple(stages))

    @property
    def trained(self) -> FlatLayout:
        """Slots of the trained parameters, which begin all flat arrays."""
        return self.layout.trained

    @property
    def num_trained(self) -> int:
        """Number of trained numbers."""
        return sum(slot.parameter.size for slot in self.trained.slots)

    @property
    def itemsize(self) -> int:
        """Size of one parameter in bytes."""
        return np.dtype(self.dtype).itemsize

    @property
    def memory(self) -> dict[str, int]:
        """Bytes by purpose; a replica allocates their sum, less on a GPU that clips gradients."""
        flat = self.layout.size * self.itemsize
        memory = {"parameters": flat, "buffers": self.arena_bytes}
        if self.statistics.size:
            memory["statistics"] = self.statistics.size * self.itemsize
        if self.training:
            slots = self.gradient_slots + self.stored_gradients
            memory["gradients"] = slots * self.layout.gradient_pitch * self.itemsize
            memory["optimizer"] = self.trained.size * self.itemsize * len(self.optimizer.state)
            memory["optimizer"] += 8 * math.prod(self.squares_shape)
        return memory

    @property
    def squares_shape(self) -> tuple[int, int]:
        """Shape of `FlatArrays.squares`: a row for clipping, and two for scaling layers."""
        rule = self.optimizer
        rows = (rule.clip_norm is not None) + 2 * rule.scales_layers
        return rows, self.trained.size // ALIGNMENT

    def resolve(self, tensor: str) -> str:
        """Return the name of the buffer that holds `tensor`."""
        while tensor in self.aliases:
            tensor = self.aliases[tensor]
        return tensor

    def tensor_name(self, group: Group, local: str) -> str:
        """Return the buffer of a local name of a group (see `dptrain.plan.lowering`)."""
        return self.resolve(_tensor_name(group, local))

    def backward_tensor_name(self, group: Group, local: str) -> str:
        """Return the same buffer for the backward pass: the second one if it was accessed."""
        name = self.tensor_name(group, local)
        second = f"{SECOND}{name}"
        return second if name in self.recomputed and second in self.buffers else name


def _tensor_name(group: Group, local: str) -> str:
    return group.tensors.get(local, f"{group.name}.{local}")


def _check_names(network: Network) -> None:
    """Raise a `UserError` unless the tensors of `network` and their gradients differ in name."""
    names = {INPUT, *(node.name for node in network.nodes)}
    for name in sorted(names):
        if f"d{name}" in names:
            raise UserError(
                f"the name d{name} is reserved for a gradient; choose another name for that layer"
            )


def _make_groups(
    nodes: Sequence[Node], backend: Lowering, trained: Set[str], *, fused: bool
) -> tuple[Group, ...]:
    """Divide the layers into groups, from the input on; the longest fusion is preferred.

    A group stands where its last layer stands, because only then all of its inputs exist. Its
    layers are all trained (`Group.trained`), or none of them is.

    Args:
        nodes: the layers.
        backend: declares the fusions; those of inference are for layers that are not trained.
        trained: names of the layers whose output depends on a trained parameter.
        fused: False makes a group of each layer.
    """
    readers: dict[str, list[Node]] = {}
    for node in nodes:
        for name in node.inputs:
            readers.setdefault(name, []).append(node)
    patterns = sorted(backend.fusions if fused else (), key=len, reverse=True)
    further = backend.inference_fusions if fused else ()
    patterns_of_inference = sorted((*patterns, *further), key=len, reverse=True)
    groups: list[Group] = []
    grouped: set[str] = set()
    for head in nodes:
        if head.name in grouped:
            continue
        members: tuple[Node, ...] = (head,)
        is_trained = head.name in trained
        for pattern in patterns if is_trained else patterns_of_inference:
            found = _match(head, pattern, readers)
            is_free = grouped.isdisjoint(n.name for n in found)
            are_alike = all((n.name in trained) == is_trained for n in found)
            if found and is_free and are_alike and backend.fuses(found):
                members = found
                break
        groups.append(Group(members, trained=is_trained))
        grouped.update(node.name for node in members)
    return tuple(sorted(groups, key=lambda group: group.tail.index))


def _with_untrained(groups: tuple[Group, ...]) -> tuple[Group, ...]:
    """Return the groups with the inputs whose gradient is not read, see `Group.untrained`."""
    trained = {group.tail.name for group in groups if group.trained}
    return tuple(
        replace(
            group,
            untrained=frozenset(
                input_name(number)
                for number, name in enumerate(group.inputs, 1)
                if name not in trained
            ),
        )
        for group in groups
    )


def _with_sums(groups: tuple[Group, ...], backend: Lowering, setting: Setting) -> tuple[Group, ...]:
    """Return the groups, of which some compute the sums for the statistics of others."""
    places = {group.tail.name: place for place, group in enumerate(groups)}
    found = list(groups)
    for place, reader in enumerate(groups):
        writer = places.get(reader.inputs[0])
        if writer is None or found[writer].sums or not reader.trained:
            continue
        if backend.sums_output(groups[writer], reader, setting.of(groups[writer])):
            found[writer] = replace(found[writer], sums=True)
            found[place] = replace(found[place], sums_of=groups[writer].name)
    return tuple(found)


def _with_gradient_sums(gradients: Gradients, backend: Lowering, setting: Setting) -> Gradients:
    """Return the gradients, of which some are summed for a normalisation by their last writer."""
    places = {group.tail.name: place for place, group in enumerate(gradients.groups)}
    first_readers: dict[str, int] = {}
    for place, group in enumerate(gradients.groups):
        for name in group.inputs:
            first_readers.setdefault(name, place)
    found = list(gradients.groups)
    for name, place in first_readers.items():
        # The first reader is the last one in the backward pass. Its dx is then complete.
        group, reads = found[place], found[place].inputs
        if name not in places or name != reads[0] or name in reads[1:] or "dx" in group.separate:
            continue
        if name not in gradients.trained:
            continue
        normalization = found[places[name]]
        # The gradient of an addend is dy, which is then the gradient before the ReLU.
        addends = normalization.inputs[1:]
        shares = all(
            gradients.shared.get(f"d{each}") == f"d{name}" or each not in gradients.trained
            for each in addends
        )
        if shares and backend.sums_gradient(group, normalization, setting):
            found[place] = replace(group, normalization=normalization)
            found[places[name]] = replace(normalization, gradient_sums_of=group.name)
    return replace(gradients, groups=tuple(found))


def _match(
    head: Node, pattern: tuple[type[Layer], ...], readers: Mapping[str, list[Node]]
) -> tuple[Node, ...]:
    """Return the layers that match a fusion, each the only reader of the one before it; or ()."""
    nodes = [head]
    while len(nodes) < len(pattern):
        following = readers.get(nodes[-1].name, [])
        if len(following) != 1:
            return ()
        nodes.append(following[0])
    matches = all(_is_of(node.layer, cls) for node, cls in zip(nodes, pattern, strict=True))
    return tuple(nodes) if matches else ()


def _is_of(layer: Layer, cls: type[Layer]) -> bool:
    """Return whether a class in a fusion means a layer; `Activation` means all functions."""
    return type(layer) is cls or (cls is Activation and isinstance(layer, Activation))


def _group_flops(group: Group, phase: Phase, phases: Iterable[Phase]) -> int:
    """Return the operations of a phase for one sample, in a group that has `phases`.

    Backward of the layers after the first one counts for `BACKWARD`, or for `BACKWARD_WEIGHT` in a
    group without that phase.
    """
    head, rest = group.nodes[0].flops, [node.flops for node in group.nodes[1:]]
    rest_backward = sum(f.backward_input for f in rest)
    # Half of a normalisation over the minibatch are the sums before it.
    sums = head.forward // 2 if Phase.STATISTICS in phases else 0
    if phase is Phase.STATISTICS:
        return sums
    if phase is Phase.FORWARD:
        return head.forward - sums + sum(f.forward for f in rest)
    if phase in GRADIENT_PHASES:
        return head.backward_weight + (0 if Phase.BACKWARD in phases else rest_backward)
    if phase is Phase.BACKWARD_INPUT:
        return head.backward_input
    return rest_backward if group.parameters else head.backward_input + rest_backward


class _Planner:
    """Collects the stages and the buffers for `make_plan`."""

    def __init__(
        self,
        network: Network,
        backend: Lowering,
        setting: Setting,
        optimizer: Optimizer,
        *,
        segment_share: float | None = None,
        cuts: Sequence[int] = (),
    ) -> None:
        """Collect the groups.

        Args:
            network, backend, setting, optimizer: of the plan.
            segment_share: activations are computed again in segments that write this share of the
                bytes of the forward pass; None uses `cuts`.
            cuts: activations are computed again between these groups; none keeps all activations.
        """
        self.network, self.backend, self.setting = network, backend, setting
        self.optimizer = optimizer
        self.segment_share, self.cuts = segment_share, tuple(cuts)
        self.recomputation = Recomputation()
        nodes = planned_nodes(network, optimizer) if setting.training else network.nodes
        trained = trained_nodes(nodes) if setting.training else frozenset[str]()
        groups = _with_untrained(_make_groups(nodes, backend, trained, fused=setting.fused))
        if setting.training:
            groups = _with_sums(groups, backend, setting)
        needs = {g.name: group_needs(backend, g, setting) for g in groups}
        self.gradients = Gradients(groups, frozenset(), {}, {})
        if setting.training:
            self.gradients = collect_gradients(
                groups,
                needs,
                lambda group, local: backend.adds_gradient(group, local, setting),
                concurrent_weight_gradients=self.is_concurrent,
            )
            self.gradients = _with_gradient_sums(self.gradients, backend, setting)
        self.groups = self.gradients.groups
        self.producers = {group.tail.name: group for group in self.groups}
        self.readers: dict[str, list[Group]] = {}
        for group in self.groups:
            for name in group.inputs:
                self.readers.setdefault(name, []).append(group)
        self.needs = {
            new.name: needs[old.name] if new is old else group_needs(backend, new, setting)
            for old, new in zip(groups, self.groups, strict=True)
        }
        self._check_buffer_names()
        self.staged = backend.staging_shape(network, setting)
        self.double_buffers = setting.training and backend.double_buffers_input
        self.specs: dict[str, BufferSpec] = {}
        self.aliases: dict[str, str] = {}
        self.stages: list[Stage] = []

    def _check_buffer_names(self) -> None:
        """Raise a `UserError` if a tensor has the name of a buffer, ``bn1.moments`` of ``bn1``."""
        buffers = {STAGED, NEXT_INPUT, NEXT_TARGET}
        for group in self.groups:
            own = (*self.needs[group.name].buffers, *group.separate)
            buffers.update(f"{group.name}.{local}" for local in own)
        for node in self.network.nodes:
            if not buffers.isdisjoint((node.name, f"d{node.name}")):
                raise UserError(
                    f"the name {node.name} is reserved for a buffer of backend "
                    f"{self.backend.name}; choose another name for that layer"
                )

    @property
    def is_concurrent(self) -> bool:
        """True if weight gradients may be computed while later stages run."""
        return self.backend.concurrent_weight_gradients and not self.setting.recompute

    def plan(self, micro_shards: MicroShards | None) -> Plan:
        """Return the plan: declare the buffers, lay out the parameters, and add the stages."""
        self.declare()
        if self.segment_share is not None or self.cuts:
            self._recompute()
        _check_sizes(self.specs, self.backend)
        parameters = (
            (node, parameter, self.backend.storage(node, parameter))
            for group in reversed(self.groups)
            for node in group.nodes
            for parameter in node.parameters
        )
        layout = make_layout(parameters, self._unread_gradients())
        self.add_all(layout)
        output = self.resolve(self.groups[-1].tail.name)
        # The minibatch is kept, and its statistics, so that a step can run again to find the layer
        # that failed, or for timing.
        kept = {INPUT, TARGET, NEXT_INPUT, NEXT_TARGET, STAGED, output, *self._moments()}
        permanent = {
            f"{group}.{local}" for group, needs in self.needs.items() for local in needs.kept
        }
        buffers, arena_bytes = assign_offsets(self.specs, self.accesses(), kept, permanent)
        return Plan(
            self.network, self.backend.name, self.setting, self.optimizer, self.groups, buffers,
            self.aliases, layout, tuple(self.stages), arena_bytes, micro_shards,
            {name: each for name, each in self.gradients.additions.items() if each},
            self.statistics_layout(), self.recomputation.buffers, self.cuts,
        )  # fmt: skip

    def _unread_gradients(self) -> frozenset[str]:
        """Return the frozen parameters whose gradients stages compute with those of others."""
        return frozenset(
            parameter.name
            for group in self.groups
            if not self.needs[group.name].phases.keys().isdisjoint(GRADIENT_PHASES)
            for parameter in group.parameters
            if not parameter.is_trained
        )

    def _recompute(self) -> None:
        """Select what is computed again, and declare its second buffers."""
        recomputer = Recomputer(
            self.groups,
            self.needs,
            self.gradients.trained,
            lambda group, local: self.resolve(_tensor_name(group, local)),
        )
        if self.segment_share is not None:
            sizes = [self._forward_bytes(group) for group in self.groups]
            limit = math.ceil(self.segment_share * sum(sizes))
            self.cuts = tuple(recomputer.select(sizes, limit))
        self.recomputation = recomputer.collect(self.cuts)
        for name in self.recomputation.buffers:
            self.specs[self.recomputation.second(name)] = self.specs[name]

    def _forward_bytes(self, group: Group) -> int:
        """Return the bytes that the forward pass of a group writes."""
        access = self.needs[group.name].phases.get(Phase.FORWARD, Access())
        names = {self.resolve(_tensor_name(group, local)) for local in access.writes}
        return self._bytes(tuple(names))

    def _moments(self) -> set[str]:
        """Return the buffers with statistics of the minibatch, which forward stages read."""
        found: set[str] = set()
        for group in self.groups:
            phases = self.needs[group.name].phases
            if Phase.STATISTICS in phases:
                locals_ = {*phases[Phase.STATISTICS].writes} & {*phases[Phase.FORWARD].reads}
                found |= {self.resolve(_tensor_name(group, local)) for local in locals_}
        return found

    def statistics_layout(self) -> FlatLayout:
        """Return the layout of the arrays that training updates without gradients."""
        return make_layout(
            (node, parameter, canonical_storage(parameter))
            for node in self.network.nodes
            for parameter in (
                Parameter(s.name, s.shape, 1, Constant(s.initial)) for s in node.statistics
            )
        )

    def resolve(self, name: str) -> str:
        while name in self.aliases:
            name = self.aliases[name]
        return name

    def _tensor(self, name: str, shape: Shape) -> None:
        self.specs[name] = BufferSpec((self.setting.batch_size, *shape), self.setting.activations)

    def declare(self) -> None:
        """Record the shapes of all tensors and of the buffers of groups."""
        # The first layer may combine the input with itself, so its shape is that of the network.
        maps: dict[str, Shape] = {INPUT: (*self.network.input_shape, 1, 1)[:3]}
        self._tensor(INPUT, maps[INPUT])
        if self.staged:
            self.specs[STAGED] = BufferSpec(self.staged, "uint8")
        for group in self.groups:
            needs, y = self.needs[group.name], group.tail.name
            maps[y] = group.tail.output_maps
            if needs.alias:
                self.aliases[y] = group.inputs[0]
            elif self._works_in_place(group):
                self.aliases[y] = group.inputs[0]
                if self.setting.training:
                    self.aliases[f"d{group.inputs[0]}"] = f"d{y}"
            else:
                self._tensor(y, maps[y])
            for local, spec in needs.buffers.items():
                self.specs[f"{group.name}.{local}"] = spec
        if self.setting.training:
            self._declare_gradients(maps)
        classes = self.network.loss.targets == "classes"
        n = self.setting.batch_size
        self.specs[TARGET] = (
            BufferSpec((n,), "int32")
            if classes
            else BufferSpec((n, self.network.num_outputs), self.setting.dtype)
        )
        if self.double_buffers:
            self.specs[NEXT_INPUT], self.specs[NEXT_TARGET] = self.specs[INPUT], self.specs[TARGET]

    def _works_in_place(self, group: Group) -> bool:
        """Return whether the output of a group may overwrite its input, and dx be dy."""
        if not self.needs[group.name].in_place:
            return False
        y, x = group.tail.name, group.inputs[0]
        if any(self.needs[reader.name].shares_gradient for reader in self.readers.get(y, ())):
            return False
        # The memory of x may have further names before this group.
        while x in self.producers:
            if len(self.readers[x]) > 1:
                return False
            if x not in self.aliases:
                phases = self.needs[self.producers[x].name].phases.values()
                return all("y" not in access.reads for access in phases)
            x = self.aliases[x]
        return False

    def _declare_gradients(self, maps: Mapping[str, Shape]) -> None:
        """Record the shapes of the gradients with respect to tensors."""
        self.aliases.update(self.gradients.shared)
        for name, shape in maps.items():
            self._tensor(f"d{name}", shape)
        for group in self.groups:
            for local in group.separate:
                number = next(
                    i for i in range(1, len(group.inputs) + 1) if f"d{input_name(i)}" == local
                )
                self._tensor(group.tensors[local], maps[group.inputs[number - 1]])

    def _bytes(self, names: tuple[str, ...]) -> int:
        return sum(
            math.prod(self.specs[name].shape) * np.dtype(self.specs[name].dtype).itemsize
            for name in names
        )

    def add(
        self,
        group: str,
        phase: Phase,
        reads: tuple[str, ...],
        writes: tuple[str, ...],
        flops: int,
        parameters: tuple[tuple[str, int], ...] = (),
    ) -> None:
        """Append a stage; `parameters` are names and element counts."""
        reads = tuple(self.resolve(name) for name in reads)
        writes = tuple(self.resolve(name) for name in writes)
        if phase in (Phase.BACKWARD_RECOMPUTE, *BACKWARD_ORDER):
            reads = tuple(map(self.recomputation.second, reads))
            writes = tuple(map(self.recomputation.second, writes))
        itemsize = np.dtype(self.setting.dtype).itemsize
        moved = self._bytes(tuple({*reads, *writes}))
        moved += itemsize * sum(size for _, size in parameters)
        names = tuple(name for name, _ in parameters)
        self.stages.append(
            Stage(len(self.stages), group, phase, reads, writes, names, flops, moved)
        )

    def add_group(self, group: Group, phase: Phase) -> None:
        """Append the stage of `group` in `phase`, if it has one."""
        again = phase is Phase.BACKWARD_RECOMPUTE
        access = self.needs[group.name].phases.get(Phase.FORWARD if again else phase)
        if access is None:
            return
        work = Phase.FORWARD if again else phase
        uses = work in (Phase.FORWARD, *GRADIENT_PHASES, Phase.BACKWARD_INPUT)
        parameters = tuple(
            (p.name, p.size)
            for p in group.parameters
            if uses
            and not (phase is Phase.BACKWARD_INPUT and p.name.endswith(".bias"))
            and (p.is_trained or work not in GRADIENT_PHASES)
        )
        added = tuple(local for local in access.writes if local in group.adds)
        self.add(
            group.name,
            phase,
            tuple(_tensor_name(group, local) for local in (*access.reads, *added)),
            tuple(_tensor_name(group, local) for local in access.writes),
            self.setting.batch_size * _group_flops(group, work, self.needs[group.name].phases),
            parameters,
        )

    def add_all(self, layout: FlatLayout) -> None:
        """Append every stage of a step."""
        n, output = self.setting.batch_size, self.groups[-1].tail.name
        staged = (STAGED,) if self.staged else ()
        self.add(INPUT, Phase.LOAD, (), (INPUT, TARGET, *staged), 0)
        for group in self.groups:
            if self.setting.training:
                self.add_group(group, Phase.STATISTICS)
            self.add_group(group, Phase.FORWARD)
        gradient = (f"d{output}",) if self.setting.training else ()
        flops = n * self.network.loss.flops(self.network.output_shape)
        self.add("loss", Phase.LOSS, (output, TARGET), gradient, flops)
        if not self.setting.training:
            return
        for position in range(len(self.groups) - 1, -1, -1):
            for again in self.recomputation.before(position):
                self.add_group(self.groups[again], Phase.BACKWARD_RECOMPUTE)
            self.add_backward(self.groups[position])
        size, state = layout.trained.size, len(self.optimizer.state)
        flat = (("parameters", size * (2 + state)),)  # Parameters, gradients and state.
        self.add("update", Phase.UPDATE, (), (), size * (2 + 4 * state), flat)

    def add_backward(self, group: Group) -> None:
        """Append the stages of the backward pass of `group`."""
        for phase in BACKWARD_ORDER:
            self.add_group(group, phase)
        additions = self.gradients.additions.get(group.name, ())
        if not additions:
            return
        sums = [addition for addition in additions if not addition.copies]
        sizes = [math.prod(self.specs[self.resolve(a.target)].shape) for a in sums]
        reads = (*(a.source for a in additions), *(a.target for a in sums))
        writes = tuple(a.target for a in additions)
        self.add(group.name, Phase.BACKWARD_ADD, reads, writes, sum(sizes))

    def accesses(self) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
        """Return the names of the buffers that each stage reads, and of those that it writes.

        Weight gradients that run concurrently with later stages hold their buffers until the
        update.
        """
        accesses = [(stage.reads, stage.writes) for stage in self.stages]
        if self.is_concurrent and self.setting.training:
            concurrent = [s for s in self.stages if s.phase is Phase.BACKWARD_WEIGHT]
            reads, writes = accesses[-1]
            held = tuple(name for stage in concurrent for name in (*stage.reads, *stage.writes))
            accesses[-1] = (*reads, *held), writes
        if self.double_buffers:
            reads, writes = accesses[0]
            accesses[0] = reads, (*writes, NEXT_INPUT, NEXT_TARGET)
        return accesses


def _check_sizes(specs: Mapping[str, BufferSpec], backend: Lowering) -> None:
    """Raise a `UserError` if a buffer has more elements than kernels of the backend can index."""
    # The staging buffer is indexed by slot and 32-bit word.
    counted = {name: spec for name, spec in specs.items() if name != STAGED}
    name, spec = max(counted.items(), key=lambda item: math.prod(item[1].shape))
    count, limit = math.prod(spec.shape), backend.max_elements
    if limit is not None and count > limit:
        raise UserError(
            f"with batch size {specs[INPUT].shape[0]} the tensor {name} has {count:,} elements; "
            f"backend {backend.name} supports up to {limit:,}, so use a smaller batch size"
        )


def _check_label_smoothing(network: Network, smoothing: float) -> None:
    """Raise a `UserError` unless labels of the network can be smoothed so much."""
    if not 0.0 <= smoothing < 1.0:
        raise UserError(f"label smoothing is {smoothing}; expected 0 ≤ label smoothing < 1")
    if smoothing and not network.loss.smooths_labels:
        raise UserError(
            "label smoothing needs softmax_cross_entropy, but the loss of network "
            f"'{network.name}' is {network.loss.kind}; remove --label-smoothing"
        )


def require_shards(backend: Lowering) -> None:
    """Raise a `UserError` unless plans of a backend may have micro-shards."""
    if not backend.supports_shards:
        raise UserError(
            f"backend {backend.name} does not support micro-shards; remove --shards, or use "
            "--backend numba, cuda or reference"
        )


def make_plan(
    network: Network,
    backend: Lowering,
    batch_size: int,
    *,
    precision: str | None = None,
    optimizer: Optimizer | None = None,
    training: bool = True,
    threads: int = 1,
    micro_shards: MicroShards | None = None,
    selection: KernelSelection | None = None,
    fused: bool = True,
    recompute: bool = False,
    cuts: Sequence[int] | None = None,
    label_smoothing: float = 0.0,
    weighted: bool = False,
    passes: int = 1,
) -> Plan:
    """Return the plan of a network for a backend. Nothing is allocated.

    Args:
        network: the network.
        backend: the backend.
        batch_size: largest number of samples in a pass.
        precision: a precision of the backend, such as ``"fp32"``; None for its default.
        optimizer: update rule, which also decides what is trained; None for SGD without momentum.
        training: False omits backward, gradients and update.
        threads: number of compute threads of the replica.
        micro_shards: the micro-shards of this rank, in the first pass if there are several; None
            for the fastest order of summation.
        selection: selects a kernel for each stage; None for those with the lowest estimates.
        fused: False computes each layer by stages of its own, to time kinds of layers.
        recompute: True computes activations again in the backward pass, in segments of the size
            that needs the least memory; if none needs less, all activations are kept.
        cuts: with `recompute`, the `cuts` of another plan of the network for the backend, which are
            used instead.
        label_smoothing, weighted: see `Setting`.
        passes: forward and backward passes for an update, whose gradients are added.

    Raises:
        UserError: batch size or threads is less than 1, two names are in conflict, a pattern of the
            update rule matches nothing, the network
            predicts no classes whose labels can be smoothed, or the backend does not support the
            precision, micro-shards or the size of a buffer.
    """
    if batch_size < 1:
        raise UserError(f"batch size is {batch_size}; expected at least 1")
    if threads < 1:
        raise UserError(f"threads is {threads}; expected at least 1")
    _check_names(network)
    _check_label_smoothing(network, label_smoothing)
    if micro_shards is not None:
        require_shards(backend)
    precision = next(iter(backend.precisions)) if precision is None else precision
    dtypes = backend.precision(precision)
    shards, all_shards, shard_size = 0, 0, 0
    if micro_shards is not None:
        shards, all_shards = micro_shards.count, micro_shards.total
        shard_size = micro_shards.largest(batch_size)
    setting = Setting(
        batch_size, precision, dtypes.dtype, dtypes.activations, training, threads, shards,
        backend.limits, selection or KernelSelection(), fused, recompute and training,
        label_smoothing if training else 0.0, weighted and training,
        all_shards, shard_size,
    )  # fmt: skip
    rule = optimizer or SGD()

    def plan(segment_share: float | None = None, cuts: Sequence[int] = ()) -> Plan:
        planner = _Planner(network, backend, setting, rule, segment_share=segment_share, cuts=cuts)
        return replace(planner.plan(micro_shards), passes=passes if training else 1)

    if not setting.recompute:
        return plan()
    if cuts is not None:
        return plan(cuts=cuts)
    plans = [plan()]
    # Halving the size of segments doubles their number; there are at most as many as groups.
    halvings = range(1, len(plans[0].groups).bit_length() + 1)
    plans += [plan(0.5**n) for n in halvings]
    return min(plans, key=lambda each: each.arena_bytes)


def with_selection(plan: Plan, backend: Lowering, selection: KernelSelection) -> Plan:
    """Return the same plan with other kernels, whose buffers may have other sizes."""
    return _plan_again(plan, backend, plan.batch_size, plan.micro_shards, selection)


def with_micro_shards(
    plan: Plan, backend: Lowering, micro_shards: MicroShards, batch_size: int
) -> Plan:
    """Return the same plan for other micro-shards, which have so many samples."""
    return _plan_again(plan, backend, batch_size, micro_shards, plan.setting.selection)


def _plan_again(
    plan: Plan,
    backend: Lowering,
    batch_size: int,
    micro_shards: MicroShards | None,
    selection: KernelSelection,
) -> Plan:
    return make_plan(
        plan.network,
        backend,
        batch_size,
        precision=plan.precision,
        optimizer=plan.optimizer,
        training=plan.training,
        threads=plan.setting.threads,
        micro_shards=micro_shards,
        selection=selection,
        fused=plan.setting.fused,
        recompute=plan.setting.recompute,
        cuts=plan.cuts,
        label_smoothing=plan.setting.label_smoothing,
        weighted=plan.setting.weighted,
        passes=plan.passes,
    )
