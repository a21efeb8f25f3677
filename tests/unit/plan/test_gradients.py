"""Gradients in graphs: every stage reads the sum of all contributions that the graph demands."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import ClassVar

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dptrain.backends.null import backend as null
from dptrain.network import Add, Conv2d, Dropout, Flatten, Layer, Network, NodeSpec, ReLU, Sigmoid
from dptrain.network.layers import Shape
from dptrain.plan import Phase, Plan, make_plan
from dptrain.plan.lowering import Access, Group, GroupNeeds, Precision, Setting

Value = Counter[tuple[str, ...]]
"""A gradient as a sum of paths: tuples of local names of gradients, from the loss on."""


class Lowering(null.NullBackend):
    """Layers of all kinds with regard to gradients.

    A convolution reads dy in its weight gradient; with ReLU it overwrites dy first. A dropout works
    in place, a flatten is an alias, and a sum shares its gradient. A sigmoid overwrites dy with dx,
    and a sum after ReLU with the gradient of its second input. ReLU does none of these.
    """

    precisions: ClassVar[Mapping[str, Precision]] = {"fp32": Precision("float32", "float32")}
    fusions: ClassVar[tuple[tuple[type[Layer], ...], ...]] = ((Conv2d, ReLU), (ReLU, Add))

    def __init__(self, adds: bool, concurrent: bool) -> None:
        self.adds = adds
        self.concurrent_weight_gradients = concurrent  # type: ignore[misc]

    def adds_gradient(self, group: Group, local: str, setting: Setting) -> bool:
        return self.adds

    def needs(self, group: Group, setting: Setting) -> GroupNeeds:
        forward = {Phase.FORWARD: Access(("x",), ("y",))}
        kind = group.kinds[0]
        if kind is Conv2d:
            phases = {**forward, Phase.BACKWARD_WEIGHT: Access(("x", "dy"))}
            if group.gradients:
                phases[Phase.BACKWARD_INPUT] = Access(("dy",), ("dx",))
            if len(group.nodes) > 1:
                phases[Phase.BACKWARD] = Access(("dy", "y"), ("dy",))
            return GroupNeeds(phases)
        if kind is Flatten:
            return GroupNeeds(alias=True)
        if kind is Add:
            return GroupNeeds(forward, shares_gradient=True)
        overwrites = "dx2" if Add in group.kinds else "dx" if kind is Sigmoid else None
        backward = {Phase.BACKWARD: Access(("dy",), group.gradients)} if group.gradients else {}
        return GroupNeeds(
            {**forward, **backward},
            in_place=kind is Dropout,
            overwrites_dy=overwrites,
        )


class Memory:
    """The gradients in memory, by the buffer that holds them."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.values = plan, dict[str, Value]()

    def __getitem__(self, name: str) -> Value:
        return self.values[self.plan.resolve(name)]

    def __setitem__(self, name: str, value: Value) -> None:
        self.values[self.plan.resolve(name)] = value


def step(value: Value, name: str) -> Value:
    """Return the value after one more derivative."""
    return Counter({(*path, name): count for path, count in value.items()})


def expected_gradients(plan: Plan) -> dict[str, Value]:
    """Return the gradient of every output of a group, straight from the graph."""
    expected: dict[str, Value] = {group.tail.name: Counter() for group in plan.groups}
    expected[plan.groups[-1].tail.name] = Counter({(): 1})
    for group in reversed(plan.groups):
        dy = expected[group.tail.name]
        passes = group.kinds[0] in (Add, Flatten)
        if group.kinds == (Conv2d, ReLU):
            dy = step(dy, f"{group.name} relu")
        for local, tensor in group.tensors.items():
            if local.startswith("x") and tensor in expected:
                expected[tensor] += dy if passes else step(dy, f"{group.name} d{local}")
    return expected


def run_backward(plan: Plan) -> tuple[dict[str, Value], list[tuple[str, str, Value]]]:
    """Run the stages of the backward pass.

    Returns:
        What each group reads as ``dy`` first, and (group, buffer, value) of every weight gradient.
    """
    memory, found, weights = Memory(plan), dict[str, Value](), []
    groups = {group.name: group for group in plan.groups}
    memory[f"d{plan.groups[-1].tail.name}"] = Counter({(): 1})
    for stage in plan.stages:
        if not stage.phase.value.startswith("backward"):
            continue
        group = groups[stage.group]
        dy_name = f"d{group.tail.name}"
        found.setdefault(group.tail.name, memory[dy_name])
        if stage.phase is Phase.BACKWARD_ADD:
            for addition in plan.additions[group.name]:
                source = memory[addition.source]
                memory[addition.target] = (
                    source if addition.copies else memory[addition.target] + source
                )
            continue
        dy = memory[dy_name]
        if stage.phase is Phase.BACKWARD_WEIGHT:
            weights.append((group.name, plan.resolve(dy_name), dy))
        elif group.kinds == (Conv2d, ReLU) and stage.phase is Phase.BACKWARD:
            memory[dy_name] = step(dy, f"{group.name} relu")
        else:
            for local, tensor in group.tensors.items():
                if local.startswith("dx") and tensor in stage.writes + tuple(plan.aliases):
                    value = step(dy, f"{group.name} {local}")
                    memory[tensor] = memory[tensor] + value if local in group.adds else value
    return found, [(name, root, value) for name, root, value in weights
                   if memory.values[root] != value]  # fmt: skip


@st.composite
def graphs(draw: st.DrawFn) -> Network:
    """Return a network in which layers read any outputs before them."""
    shape: Shape = (2, 4, 4)
    nodes = [NodeSpec(Conv2d(2), "n0", ("input",))]
    unread = ["n0"]
    for i in range(1, draw(st.integers(1, 12))):
        layer = draw(st.sampled_from([Conv2d(2), ReLU(), Sigmoid(), Dropout(), Add(), Add(3)]))
        inputs = tuple(
            draw(st.sampled_from([*(node.name for node in nodes), "input", *unread]))
            for _ in range(layer.num_inputs)
        )
        nodes.append(NodeSpec(layer, f"n{i}", inputs))
        unread = [name for name in unread if name not in inputs] + [f"n{i}"]
    while len(unread) > 1:
        name = f"end{len(unread)}"
        nodes.append(NodeSpec(Add(), name, (unread[0], unread[1])))
        unread = [*unread[2:], name]
    nodes.append(NodeSpec(Flatten(), "flat", (unread[0],)))
    return Network.from_nodes(shape, nodes)


# The gradient of `a` receives that of `x` before `b` has read its own, and before `a` masks it.
CHANGED_EARLY = Network.from_nodes(
    (2, 4, 4),
    [
        NodeSpec(Conv2d(2), "conv", ("input",)), NodeSpec(ReLU(), "a", ("conv",)),
        NodeSpec(Conv2d(2), "b", ("input",)), NodeSpec(Sigmoid(), "x", ("a",)),
        NodeSpec(Add(), "inner", ("a", "b")), NodeSpec(Add(), "outer", ("inner", "x")),
        NodeSpec(Flatten(), "flat", ("outer",)),
    ],
)  # fmt: skip


@example(CHANGED_EARLY, True, False)
@given(graphs(), st.booleans(), st.booleans())
def test_each_group_reads_the_sum_of_all_contributions(
    network: Network, adds: bool, concurrent: bool
) -> None:
    plan = make_plan(network, Lowering(adds, concurrent), 1)
    expected = expected_gradients(plan)
    found, overwritten = run_backward(plan)
    for name, value in found.items():
        assert value == expected[name], f"gradient of {name}"
    assert {g.tail.name for g in plan.groups if g.parameters} <= found.keys()
    if concurrent:
        assert not overwritten


def residual(depth: int) -> Network:
    """Return residual blocks of two convolutions each."""
    nodes = [NodeSpec(Conv2d(2), "stem", ("input",))]
    for i in range(depth):
        x = nodes[-1].name
        assert x is not None
        nodes += [
            NodeSpec(Conv2d(2), f"a{i}", (x,)),
            NodeSpec(Sigmoid(), f"s{i}", (f"a{i}",)),
            NodeSpec(Conv2d(2), f"b{i}", (f"s{i}",)),
            NodeSpec(Add(), f"sum{i}", (f"b{i}", x)),
        ]
    nodes.append(NodeSpec(Flatten(), "flat", (f"sum{depth - 1}",)))
    return Network.from_nodes((2, 8, 8), nodes)


def test_identity_shortcuts_need_no_stage_if_kernels_add() -> None:
    plan = make_plan(residual(3), Lowering(adds=True, concurrent=False), 1)
    assert plan.additions == {}
    assert {plan.resolve(f"d{name}") for name in ("sum0", "sum1", "b0")} == {"dflat"}


def test_a_gradient_overwrites_dy_unless_another_gradient_shares_it() -> None:
    nodes = [
        NodeSpec(Conv2d(2), "a", ("input",)),
        NodeSpec(Sigmoid(), "free", ("a",)),
        NodeSpec(Conv2d(2), "b", ("free",)),
        NodeSpec(Sigmoid(), "shares", ("b",)),
        NodeSpec(Conv2d(2), "c", ("input",)),
        NodeSpec(Add(), "sum", ("c", "shares")),
        NodeSpec(Flatten(), "flat", ("sum",)),
    ]
    network = Network.from_nodes((2, 8, 8), nodes)
    plan = make_plan(network, Lowering(adds=True, concurrent=False), 1)
    assert plan.resolve("da") == plan.resolve("dfree")
    assert plan.resolve("dshares") == plan.resolve("dc")
    assert plan.resolve("db") != plan.resolve("dshares")


def test_gradients_that_concurrent_stages_read_are_copied() -> None:
    plan = make_plan(residual(1), Lowering(adds=True, concurrent=True), 1)
    (addition,) = plan.additions["sum0"]
    assert (addition.target, addition.copies) == ("dstem", True)


@pytest.mark.parametrize("depth", [2, 8])
def test_the_memory_of_gradients_does_not_grow_with_the_depth(depth: int) -> None:
    plan = make_plan(residual(depth), Lowering(adds=True, concurrent=False), 1)
    sizes = [math.prod(b.shape) for name, b in plan.buffers.items() if name.startswith("d")]
    assert sum(sizes) <= (3 * depth + 2) * 2 * 8 * 8
    gradients = [b for name, b in plan.buffers.items() if name.startswith("d")]
    live = max(
        sum(b.nbytes for b in gradients if b.first <= stage.index <= b.last)
        for stage in plan.stages
    )
    assert live <= 3 * 4 * 2 * 8 * 8
