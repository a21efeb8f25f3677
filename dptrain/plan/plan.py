"""Planning: from a network to buffers with sizes and stages in order. Nothing is allocated."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from dptrain.errors import UserError
from dptrain.network.layers import Shape
from dptrain.network.network import INPUT as INPUT
from dptrain.network.network import Network
from dptrain.plan.arena import Buffer, place
from dptrain.plan.flat import FlatLayout, lay_out
from dptrain.plan.lowering import (
    BACKWARD_ORDER,
    BufferSpec,
    Group,
    GroupNeeds,
    Lowering,
    Phase,
    Setting,
)
from dptrain.plan.optimizers import SGD, Optimizer

STAGED = "input.staged"
TARGET = "target"


@dataclass(frozen=True)
class Stage:
    """One step of the list that a training step is.

    Attributes:
        index: position in `Plan.stages`.
        group: name of the layers computed (``conv1+relu1+pool1``), or ``input``, ``loss``,
            ``update``.
        phase: what is computed for them.
        reads, writes: names of buffers.
        parameters: names of the parameters read, or (in `BACKWARD_WEIGHT`) whose gradients this
            stage finishes.
        flops: operations for a full batch.
        bytes_moved: every buffer and parameter that is read or written, once, for a full batch.
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
        """``conv1+relu1.forward``; stages that stand alone go by their group."""
        return self.group if self.group == self.phase.value else f"{self.group}.{self.phase.value}"


@dataclass(frozen=True)
class Plan:
    """A network made concrete for a backend, a batch size and a precision.

    Attributes:
        network: what is computed.
        backend: name of the backend it was planned for.
        setting: batch size, precision, training or not, threads. A step may use fewer samples than
            the batch size.
        optimizer: update rule.
        groups: layers as the backend computes them, in order.
        buffers: everything that lives in the arena, by name.
        aliases: name of a tensor that is another one seen in a different shape, to that one.
        layout: slots of the parameters.
        stages: what a step runs, in order.
        arena_bytes: size of the arena.
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

    @property
    def batch_size(self) -> int:
        """Samples that a replica has room for."""
        return self.setting.batch_size

    @property
    def precision(self) -> str:
        """The user's word for the arithmetic."""
        return self.setting.precision

    @property
    def dtype(self) -> str:
        """NumPy name of the dtype of parameters, gradients and optimizer state."""
        return self.setting.dtype

    @property
    def training(self) -> bool:
        """Whether backward stages and gradients are there."""
        return self.setting.training

    @property
    def itemsize(self) -> int:
        """Bytes of one parameter."""
        return np.dtype(self.dtype).itemsize

    @property
    def memory(self) -> dict[str, int]:
        """Bytes by purpose; their sum is what a replica allocates."""
        flat = self.layout.size * self.itemsize
        memory = {"parameters": flat, "buffers": self.arena_bytes}
        if self.training:
            memory["gradients"] = self.layout.gradient_size * self.itemsize
            memory["optimizer"] = flat * len(self.optimizer.state)
        return memory

    def resolve(self, tensor: str) -> str:
        """Name of the buffer that holds `tensor`, aliases followed."""
        while tensor in self.aliases:
            tensor = self.aliases[tensor]
        return tensor

    def tensor_name(self, group: Group, local: str) -> str:
        """Buffer name of a group's local name (see `dptrain.plan.lowering`)."""
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


def _make_groups(network: Network, backend: Lowering) -> tuple[Group, ...]:
    """Longest match first, from the input on."""
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
    """Operations of a phase for one sample, in a group that has `phases`.

    What lies behind the first layer is differentiated in `BACKWARD`, or on the way where a group
    has no such phase: then it counts for the weights.
    """
    head, rest = group.nodes[0].flops, [node.flops for node in group.nodes[1:]]
    behind = sum(f.backward_input for f in rest)
    if phase is Phase.FORWARD:
        return head.forward + sum(f.forward for f in rest)
    if phase is Phase.BACKWARD_WEIGHT:
        return head.backward_weight + (0 if Phase.BACKWARD in phases else behind)
    if phase is Phase.BACKWARD_INPUT:
        return head.backward_input
    return behind if group.parameters else head.backward_input + behind


class _Planner:
    """Collects stages and buffer shapes; `make_plan` is the way in."""

    def __init__(self, network: Network, backend: Lowering, setting: Setting) -> None:
        self.network, self.setting = network, setting
        self.groups = _make_groups(network, backend)
        self.weights_beside = backend.weights_beside
        self.staged = backend.staged(network, setting)
        self.needs: dict[str, GroupNeeds] = {g.name: backend.needs(g, setting) for g in self.groups}
        self.specs: dict[str, BufferSpec] = {}
        self.aliases: dict[str, str] = {}
        self.stages: list[Stage] = []

    def resolve(self, name: str) -> str:
        while name in self.aliases:
            name = self.aliases[name]
        return name

    def _tensor(self, name: str, shape: Shape) -> None:
        self.specs[name] = BufferSpec((self.setting.batch_size, *shape), self.setting.activations)
        if self.setting.training:
            self.specs[f"d{name}"] = self.specs[name]

    def declare(self) -> None:
        """Shapes of every tensor and group buffer."""
        self._tensor(INPUT, self.network.nodes[0].input_maps)
        if self.staged:
            self.specs[STAGED] = BufferSpec(self.staged, "uint8")
        # Whether what the last group of its own memory wrote may be changed behind it.
        free = False
        for group in self.groups:
            needs = self.needs[group.name]
            if needs.alias or (needs.in_place and free):
                for local, other in (("y", "x"), ("dy", "dx")):
                    name = _tensor_name(group, local)
                    self.aliases[name] = _tensor_name(group, other)
            else:
                self._tensor(group.tail.name, group.tail.output_maps)
                free = all("y" not in access.reads for access in needs.phases.values())
            for local, spec in needs.buffers.items():
                self.specs[f"{group.name}.{local}"] = spec
        classes = self.network.loss.targets == "classes"
        n = self.setting.batch_size
        self.specs[TARGET] = (
            BufferSpec((n,), "int32")
            if classes
            else BufferSpec((n, self.network.num_outputs), self.setting.dtype)
        )

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
        moved = self._bytes(reads) + self._bytes(writes)
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
        # Parameter read and written, gradient read, state read and written.
        passes = 3 + 2 * len(optimizer.state)
        flat = (("parameters", layout.size * passes),)
        self.add("update", Phase.UPDATE, (), (), layout.size * (2 + 4 * len(optimizer.state)), flat)

    def accesses(self) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
        """What each stage keeps busy: names of buffers read, and written."""
        accesses = [(stage.reads, stage.writes) for stage in self.stages]
        if self.weights_beside and self.setting.training:
            beside = [s for s in self.stages if s.phase is Phase.BACKWARD_WEIGHT]
            reads, writes = accesses[-1]
            late = tuple(name for stage in beside for name in (*stage.reads, *stage.writes))
            accesses[-1] = (*reads, *late), writes
        return accesses


def _refuse_uncountable(specs: Mapping[str, BufferSpec], backend: Lowering) -> None:
    # What is staged holds bytes, a message at a time, and is counted in words.
    counted = {name: spec for name, spec in specs.items() if name != STAGED}
    name, spec = max(counted.items(), key=lambda item: math.prod(item[1].shape))
    count, most = math.prod(spec.shape), backend.most_elements
    if most is not None and count > most:
        raise UserError(
            f"batch size is {specs[INPUT].shape[0]}, for which {name} has {count:,} elements; "
            f"kernels of {backend.name} count up to {most:,}, so try a smaller batch"
        )


def make_plan(
    network: Network,
    backend: Lowering,
    batch_size: int,
    *,
    precision: str,
    optimizer: Optimizer | None = None,
    training: bool = True,
    threads: int = 1,
) -> Plan:
    """Plan `network` for `backend`.

    Args:
        network: what to compute.
        backend: the backend's planning half.
        batch_size: largest number of samples in a step.
        precision: a word that the backend knows, such as ``"fp32"``.
        optimizer: update rule; plain SGD where left out.
        training: False leaves out backward, gradients and update.
        threads: compute threads of the replica.

    Raises:
        UserError: batch size or threads below 1, a precision that the backend does not have, or
            a buffer of more elements than its kernels can count.
    """
    if batch_size < 1:
        raise UserError(f"batch size is {batch_size}; expected at least 1")
    if threads < 1:
        raise UserError(f"threads is {threads}; expected at least 1")
    _refuse_graph(network)
    optimizer = SGD() if optimizer is None else optimizer
    kept = backend.precision(precision)
    setting = Setting(batch_size, precision, kept.dtype, kept.activations, training, threads)
    planner = _Planner(network, backend, setting)
    planner.declare()
    _refuse_uncountable(planner.specs, backend)
    layout = lay_out(
        (node, parameter, backend.storage(node, parameter))
        for group in reversed(planner.groups)
        for node in group.nodes
        for parameter in node.parameters
    )
    planner.add_all(optimizer, layout)
    output = planner.resolve(planner.groups[-1].tail.name)
    # The batch stays, so that a step can be run again: to find what went wrong, or to time it.
    outlive = {INPUT, TARGET, STAGED, output}
    buffers, arena_bytes = place(planner.specs, planner.accesses(), outlive=outlive)
    return Plan(
        network,
        backend.name,
        setting,
        optimizer,
        planner.groups,
        buffers,
        planner.aliases,
        layout,
        tuple(planner.stages),
        arena_bytes,
    )
