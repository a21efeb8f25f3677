"""The plan of a training step: buffers with sizes, and an ordered list of stages.

Planning allocates nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from dptrain.errors import UserError
from dptrain.network.layers import Shape
from dptrain.network.network import INPUT as INPUT
from dptrain.network.network import Network
from dptrain.plan.arena import Buffer, assign_offsets
from dptrain.plan.flat import FlatLayout, make_layout
from dptrain.plan.lowering import (
    BACKWARD_ORDER,
    BufferSpec,
    Group,
    GroupNeeds,
    Lowering,
    Phase,
    Setting,
    stage_name,
)
from dptrain.plan.optimizers import SGD, Optimizer
from dptrain.plan.selection import KernelSelection
from dptrain.plan.shards import MicroShards

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

    @property
    def batch_size(self) -> int:
        """Largest number of samples in a step."""
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
    def itemsize(self) -> int:
        """Size of one parameter in bytes."""
        return np.dtype(self.dtype).itemsize

    @property
    def memory(self) -> dict[str, int]:
        """Bytes by purpose; a replica allocates their sum."""
        flat = self.layout.size * self.itemsize
        memory = {"parameters": flat, "buffers": self.arena_bytes}
        if self.training:
            slots = self.gradient_slots
            memory["gradients"] = slots * self.layout.gradient_size * self.itemsize
            memory["optimizer"] = flat * len(self.optimizer.state)
        return memory

    def resolve(self, tensor: str) -> str:
        """Return the name of the buffer that holds `tensor`."""
        while tensor in self.aliases:
            tensor = self.aliases[tensor]
        return tensor

    def tensor_name(self, group: Group, local: str) -> str:
        """Return the buffer of a local name of a group (see `dptrain.plan.lowering`)."""
        return self.resolve(_tensor_name(group, local))


def _tensor_name(group: Group, local: str) -> str:
    x = group.input
    names = {"x": x, "y": group.tail.name, "dx": f"d{x}", "dy": f"d{group.tail.name}"}
    return names.get(local, f"{group.name}.{local}")


def _refuse_graph(network: Network) -> None:
    """Raise a `UserError` unless `network` is a chain whose tensors have distinct names."""
    readers: dict[str, list[str]] = {}
    for node in network.nodes:
        if len(node.inputs) != 1:
            raise UserError(
                f"only chains of layers can be planned; node {node.name} has {len(node.inputs)} "
                "inputs"
            )
        readers.setdefault(node.inputs[0], []).append(node.name)
    for name, nodes in readers.items():
        if len(nodes) > 1:
            what = "the input" if name == INPUT else f"the output of node {name}"
            raise UserError(
                f"only chains of layers can be planned; {what} is read by {', '.join(nodes)}"
            )
    names = {INPUT, *(node.name for node in network.nodes)}
    for name in sorted(names):
        if f"d{name}" in names:
            raise UserError(
                f"the name d{name} is reserved for a gradient; choose another name for that layer"
            )


def _make_groups(network: Network, backend: Lowering, *, fused: bool) -> tuple[Group, ...]:
    """Divide the layers into groups, from the input on; the longest fusion is preferred."""
    if not fused:
        return tuple(Group((node,)) for node in network.nodes)
    groups: list[Group] = []
    patterns = sorted(backend.fusions, key=len, reverse=True)
    start = 0
    while start < len(network.nodes):
        stop = start + 1
        for pattern in patterns:
            nodes = network.nodes[start : start + len(pattern)]
            if tuple(type(node.layer) for node in nodes) == pattern and backend.fuses(nodes):
                stop = start + len(pattern)
                break
        groups.append(Group(network.nodes[start:stop]))
        start = stop
    return tuple(groups)


def _group_flops(group: Group, phase: Phase, phases: Iterable[Phase]) -> int:
    """Return the operations of a phase for one sample, in a group that has `phases`.

    Backward of the layers after the first one counts for `BACKWARD`, or for `BACKWARD_WEIGHT` in a
    group without that phase.
    """
    head, rest = group.nodes[0].flops, [node.flops for node in group.nodes[1:]]
    rest_backward = sum(f.backward_input for f in rest)
    if phase is Phase.FORWARD:
        return head.forward + sum(f.forward for f in rest)
    if phase is Phase.BACKWARD_WEIGHT:
        return head.backward_weight + (0 if Phase.BACKWARD in phases else rest_backward)
    if phase is Phase.BACKWARD_INPUT:
        return head.backward_input
    return rest_backward if group.parameters else head.backward_input + rest_backward


class _Planner:
    """Collects the stages and the buffers for `make_plan`."""

    def __init__(self, network: Network, backend: Lowering, setting: Setting) -> None:
        self.network, self.backend, self.setting = network, backend, setting
        self.groups = _make_groups(network, backend, fused=setting.fused)
        self.staged = backend.staging_shape(network, setting)
        self.double_buffers = setting.training and backend.double_buffers_input
        self.needs: dict[str, GroupNeeds] = {g.name: backend.needs(g, setting) for g in self.groups}
        self.specs: dict[str, BufferSpec] = {}
        self.aliases: dict[str, str] = {}
        self.stages: list[Stage] = []

    def plan(self, optimizer: Optimizer, micro_shards: MicroShards | None) -> Plan:
        """Return the plan: declare the buffers, lay out the parameters, and add the stages."""
        self.declare()
        _check_sizes(self.specs, self.backend)
        layout = make_layout(
            (node, parameter, self.backend.storage(node, parameter))
            for group in reversed(self.groups)
            for node in group.nodes
            for parameter in node.parameters
        )
        self.add_all(optimizer, layout)
        output = self.resolve(self.groups[-1].tail.name)
        # The minibatch is kept, so that a step can run again to find the layer that failed, or for
        # timing.
        kept = {INPUT, TARGET, NEXT_INPUT, NEXT_TARGET, STAGED, output}
        permanent = {
            f"{group}.{local}" for group, needs in self.needs.items() for local in needs.kept
        }
        buffers, arena_bytes = assign_offsets(self.specs, self.accesses(), kept, permanent)
        return Plan(
            self.network, self.backend.name, self.setting, optimizer, self.groups, buffers,
            self.aliases, layout, tuple(self.stages), arena_bytes, micro_shards,
        )  # fmt: skip

    def resolve(self, name: str) -> str:
        while name in self.aliases:
            name = self.aliases[name]
        return name

    def _tensor(self, name: str, shape: Shape) -> None:
        self.specs[name] = BufferSpec((self.setting.batch_size, *shape), self.setting.activations)
        if self.setting.training:
            self.specs[f"d{name}"] = self.specs[name]

    def declare(self) -> None:
        """Record the shapes of all tensors and of the buffers of groups."""
        self._tensor(INPUT, self.network.nodes[0].input_maps)
        if self.staged:
            self.specs[STAGED] = BufferSpec(self.staged, "uint8")
        # True if no later stage of the group that wrote x reads it, so that x may be overwritten.
        x_is_free = False
        for group in self.groups:
            needs = self.needs[group.name]
            if needs.alias or (needs.in_place and x_is_free):
                for local, other in (("y", "x"), ("dy", "dx")):
                    name = _tensor_name(group, local)
                    self.aliases[name] = _tensor_name(group, other)
            else:
                self._tensor(group.tail.name, group.tail.output_maps)
                x_is_free = all("y" not in access.reads for access in needs.phases.values())
            for local, spec in needs.buffers.items():
                self.specs[f"{group.name}.{local}"] = spec
        classes = self.network.loss.targets == "classes"
        n = self.setting.batch_size
        self.specs[TARGET] = (
            BufferSpec((n,), "int32")
            if classes
            else BufferSpec((n, self.network.num_outputs), self.setting.dtype)
        )
        if self.double_buffers:
            self.specs[NEXT_INPUT], self.specs[NEXT_TARGET] = self.specs[INPUT], self.specs[TARGET]

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
        itemsize = np.dtype(self.setting.dtype).itemsize
        moved = self._bytes(tuple({*reads, *writes}))
        moved += itemsize * sum(size for _, size in parameters)
        names = tuple(name for name, _ in parameters)
        self.stages.append(
            Stage(len(self.stages), group, phase, reads, writes, names, flops, moved)
        )

    def add_group(self, group: Group, phase: Phase) -> None:
        """Append the stage of `group` in `phase`, if it has one."""
        access = self.needs[group.name].phases.get(phase)
        if access is None:
            return
        uses = phase in (Phase.FORWARD, Phase.BACKWARD_WEIGHT, Phase.BACKWARD_INPUT)
        parameters = tuple(
            (p.name, p.size)
            for p in group.parameters
            if uses and not (phase is Phase.BACKWARD_INPUT and p.name.endswith(".bias"))
        )
        self.add(
            group.name,
            phase,
            tuple(_tensor_name(group, local) for local in access.reads),
            tuple(_tensor_name(group, local) for local in access.writes),
            self.setting.batch_size * _group_flops(group, phase, self.needs[group.name].phases),
            parameters,
        )

    def add_all(self, optimizer: Optimizer, layout: FlatLayout) -> None:
        """Append every stage of a step."""
        n, output = self.setting.batch_size, self.groups[-1].tail.name
        staged = (STAGED,) if self.staged else ()
        self.add(INPUT, Phase.LOAD, (), (INPUT, TARGET, *staged), 0)
        for group in self.groups:
            self.add_group(group, Phase.FORWARD)
        gradient = (f"d{output}",) if self.setting.training else ()
        flops = n * self.network.loss.flops(self.network.output_shape)
        self.add("loss", Phase.LOSS, (output, TARGET), gradient, flops)
        if not self.setting.training:
            return
        first = next((i for i, g in enumerate(self.groups) if g.parameters), len(self.groups))
        for i in range(len(self.groups) - 1, first - 1, -1):
            for phase in BACKWARD_ORDER:
                if i > first or phase is not Phase.BACKWARD_INPUT:
                    self.add_group(self.groups[i], phase)
        arrays = 2 + len(optimizer.state)  # Parameters, gradients and state.
        flat = (("parameters", layout.size * arrays),)
        self.add("update", Phase.UPDATE, (), (), layout.size * (2 + 4 * len(optimizer.state)), flat)

    def accesses(self) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
        """Return the names of the buffers that each stage reads, and of those that it writes.

        Weight gradients that run concurrently with later stages hold their buffers until the
        update.
        """
        accesses = [(stage.reads, stage.writes) for stage in self.stages]
        if self.backend.concurrent_weight_gradients and self.setting.training:
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


def require_shards(backend: Lowering) -> None:
    """Raise a `UserError` unless plans of a backend may have micro-shards."""
    if not backend.supports_shards:
        raise UserError(
            f"backend {backend.name} does not support micro-shards; remove --shards, or use "
            "--backend numba or reference"
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
) -> Plan:
    """Return the plan of a network for a backend. Nothing is allocated.

    Args:
        network: the network, which must be a chain.
        backend: the backend.
        batch_size: largest number of samples in a step.
        precision: a precision of the backend, such as ``"fp32"``; None for its default.
        optimizer: update rule; None for SGD without momentum.
        training: False omits backward, gradients and update.
        threads: number of compute threads of the replica.
        micro_shards: the micro-shards of this rank; None for the fastest order of summation.
        selection: selects a kernel for each stage; None for those with the lowest estimates.
        fused: False computes each layer by stages of its own, to time kinds of layers.

    Raises:
        UserError: the network is not a chain, batch size or threads is less than 1, or the backend
            does not support the precision, micro-shards or the size of a buffer.
    """
    if batch_size < 1:
        raise UserError(f"batch size is {batch_size}; expected at least 1")
    if threads < 1:
        raise UserError(f"threads is {threads}; expected at least 1")
    _refuse_graph(network)
    if micro_shards is not None:
        require_shards(backend)
    precision = next(iter(backend.precisions)) if precision is None else precision
    dtypes = backend.precision(precision)
    shards = 0 if micro_shards is None else micro_shards.count
    setting = Setting(
        batch_size, precision, dtypes.dtype, dtypes.activations, training, threads, shards,
        backend.limits, selection or KernelSelection(), fused,
    )  # fmt: skip
    return _Planner(network, backend, setting).plan(optimizer or SGD(), micro_shards)


def with_selection(plan: Plan, backend: Lowering, selection: KernelSelection) -> Plan:
    """Return the same plan with other kernels, whose buffers may have other sizes."""
    return make_plan(
        plan.network,
        backend,
        plan.batch_size,
        precision=plan.precision,
        optimizer=plan.optimizer,
        training=plan.training,
        threads=plan.setting.threads,
        micro_shards=plan.micro_shards,
        selection=selection,
        fused=plan.setting.fused,
    )
