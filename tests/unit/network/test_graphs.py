"""Networks whose layers have names and inputs: order, shapes, files, and one line per mistake."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from dptrain.backends import load_backend
from dptrain.errors import UserError
from dptrain.network import (
    LAYERS,
    BatchNorm2d,
    Conv2d,
    Dense,
    Flatten,
    Flops,
    Layer,
    Network,
    NodeSpec,
    ReLU,
    Shape,
    initial_parameters,
    read_network,
    write_network,
)
from dptrain.plan import make_plan


@dataclass(frozen=True)
class Add(Layer):
    """Sum of two inputs of one shape."""

    kind: ClassVar[str] = "add"

    @property
    def num_inputs(self) -> int:
        return 2

    def combine_shapes(self, input_shapes: tuple[Shape, ...]) -> Shape:
        if len(set(input_shapes)) > 1:
            raise UserError(f"add needs inputs of one shape, got {input_shapes}")
        return input_shapes[0]

    def output_shape(self, input_shape: Shape) -> Shape:
        return input_shape

    def flops(self, input_shape: Shape) -> Flops:
        size = int(np.prod(input_shape))
        return Flops(size, 0)


RESIDUAL = (
    NodeSpec(Conv2d(4), "stem", ("input",)),
    NodeSpec(ReLU(), "act", ("stem",)),
    NodeSpec(Conv2d(4), "inner", ("act",)),
    NodeSpec(Add(), "sum", ("inner", "stem")),
    NodeSpec(Flatten(), "flat", ("sum",)),
    NodeSpec(Dense(3), "head", ("flat",)),
)


@pytest.fixture(autouse=True)
def _known_addition(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LAYERS, "add", Add)


def test_a_graph_has_the_shapes_parameters_and_operations_of_its_layers() -> None:
    network = Network.from_nodes((3, 5, 6), RESIDUAL, name="residual")
    assert not network.is_chain
    assert [node.inputs for node in network.nodes] == [spec.inputs for spec in RESIDUAL]
    assert [node.output_shape for node in network.nodes] == [*[(4, 5, 6)] * 4, (120,), (3,)]
    assert network.nodes[4].output_maps == (4, 5, 6)
    assert [p.name for p in network.parameters] == [
        f"{layer}.{kind}" for layer in ("stem", "inner", "head") for kind in ("weight", "bias")
    ]
    assert network.num_parameters == (27 * 4 + 4) + (36 * 4 + 4) + (120 * 3 + 3)
    assert network.flops.forward == sum(node.flops.forward for node in network.nodes)
    assert network.flops.forward == 30 * (2 * 108 + 4) + 2 * 120 + 30 * (2 * 144 + 4) + 720 + 3


def test_nodes_may_be_written_in_any_order() -> None:
    expected = Network.from_nodes((3, 5, 6), RESIDUAL)
    shuffler = random.Random(0)
    for _ in range(20):
        written = shuffler.sample(RESIDUAL, len(RESIDUAL))
        network = Network.from_nodes((3, 5, 6), written)
        assert network == expected
        assert network.nodes == expected.nodes


def test_a_chain_is_the_special_case() -> None:
    layers = [Conv2d(4), ReLU(), Conv2d(2), Flatten(), Dense(3)]
    chain = Network((3, 5, 6), layers)
    names = ["conv1", "relu1", "conv2", "flatten1", "dense1"]
    assert chain.is_chain
    assert [node.name for node in chain.nodes] == names
    assert [node.inputs for node in chain.nodes] == [(name,) for name in ["input", *names[:-1]]]
    nodes = [
        NodeSpec(layer, name, (before,))
        for layer, name, before in zip(layers, names, ["input", *names], strict=False)
    ]
    graph = Network.from_nodes((3, 5, 6), reversed(nodes))
    assert graph == chain
    assert graph.nodes == chain.nodes
    assert graph.connections is None
    ours, theirs = initial_parameters(graph, 1), initial_parameters(chain, 1)
    assert list(ours) == list(theirs)
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours)


def test_a_name_of_one_layer_leaves_the_other_names_as_they_are() -> None:
    network = Network.from_nodes(
        (5,), [NodeSpec(Dense(4)), NodeSpec(Dense(4), "middle"), NodeSpec(Dense(3))]
    )
    assert [node.name for node in network.nodes] == ["dense1", "middle", "dense3"]
    other = replace(network, layers=[Dense(7), Dense(6), Dense(5)])
    assert [node.name for node in other.nodes] == ["dense1", "middle", "dense3"]
    assert network != Network((5,), [Dense(4), Dense(4), Dense(3)])


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ([NodeSpec(Dense(2), "a", ("b",))], "node a: input 'b' does not exist"),
        (
            [NodeSpec(Dense(2), "a"), NodeSpec(Dense(2), "a")],
            "2 layers have the name 'a'; names must differ",
        ),
        (
            [NodeSpec(ReLU(), "a", ("b",)), NodeSpec(ReLU(), "b", ("a",))],
            "nodes form a cycle: a → b → a",
        ),
        (
            [NodeSpec(ReLU(), "first"), NodeSpec(ReLU(), "a", ("b",)),
             NodeSpec(ReLU(), "b", ("a",)), NodeSpec(ReLU(), "c", ("b",))],
            "nodes form a cycle: a → b → a",
        ),
        ([NodeSpec(ReLU(), "a", ("a",))], "nodes form a cycle: a → a"),
        (
            [NodeSpec(Dense(2), f"n{i}", (f"n{(i + 1) % 50}",)) for i in range(50)],
            "nodes form a cycle: n0 → n49 → n48 → n47 → … → n2 → n1 → n0",
        ),
        (
            [NodeSpec(ReLU(), "a"), NodeSpec(ReLU(), "b", ("a",)), NodeSpec(ReLU(), "c", ("a",))],
            "the output of node b is not used; only the last node (c) may",
        ),
        ([NodeSpec(Add(), "a", ("input",))], "node a has 1 input; add expects 2"),
        ([NodeSpec(ReLU(), "a", ())], "node a has 0 inputs; relu expects 1"),
        (
            [NodeSpec(Dense(2), "a"), NodeSpec(Add(), "s", ("a", "input"))],
            "layer 2 (s): add needs inputs of one shape, got ((2,), (5,))",
        ),
        ([NodeSpec(ReLU(), "input")], "the reserved name 'input'"),
        ([NodeSpec(ReLU(), "a..b")], "the name 'a..b'; expected a letter, then up to 63"),
        ([NodeSpec(ReLU(), "a\n")], "the name 'a\\n'; expected a letter"),
        ([NodeSpec(ReLU(), "a" * 100_000)], "aaa… (100,000 characters)'; expected a letter"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_that_names_the_node(nodes: list[NodeSpec], message: str) -> None:
    with pytest.raises(UserError) as caught:
        Network.from_nodes((5,), nodes, name="mine")
    assert str(caught.value).startswith("network mine")
    assert message in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("name", ["", "a\x1b[31m", "two\nlines", "n" * 201])
def test_names_that_break_a_line_are_refused(name: str) -> None:
    with pytest.raises(UserError, match="expected 1 to 200 printable characters") as caught:
        Network((5,), [Dense(2)], name=name)
    assert str(caught.value).isprintable()


def test_connections_that_do_not_match_the_layers_are_refused() -> None:
    network = Network.from_nodes((5,), [NodeSpec(Dense(4)), NodeSpec(Dense(4), "last")])
    with pytest.raises(UserError, match="2 connections for 1 layers"):
        replace(network, layers=[Dense(7)])


def test_graphs_survive_a_file(tmp_path: Path) -> None:
    path = tmp_path / "residual.toml"
    network = Network.from_nodes((3, 5, 6), RESIDUAL, name="residual")
    write_network(network, path)
    assert read_network(path) == network
    assert path.read_text().count("inputs = ") == 1
    chain = Network((3, 5, 6), [Conv2d(4), ReLU(), Flatten(), Dense(3)])
    write_network(chain, path)
    assert "inputs" not in path.read_text()
    assert path.read_text().count("name = ") == 1


def test_a_file_states_names_and_inputs(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        'input = [5]\n[[layer]]\ntype = "dense"\nunits = 3\nname = "last"\n'
        'inputs = ["relu1"]\n[[layer]]\ntype = "relu"\ninputs = ["input"]\n'
    )
    network = read_network(path)
    assert [(node.name, node.inputs) for node in network.nodes] == [
        ("relu1", ("input",)), ("last", ("relu1",)),
    ]  # fmt: skip
    plan = make_plan(network, load_backend("reference"), 2, precision="fp64")
    assert plan.stages[1].reads == ("input",)


def test_a_name_of_a_gradient_is_refused() -> None:
    reference = load_backend("reference")
    clash = Network.from_nodes((5,), [NodeSpec(Dense(3), "x"), NodeSpec(Dense(3), "dx")])
    with pytest.raises(UserError, match="the name dx is reserved for a gradient"):
        make_plan(clash, reference, 2, precision="fp64")


@pytest.mark.parametrize("name", ["bn.moments", "bn.backward_sums", "input.next", "input.staged"])
def test_a_name_of_a_buffer_is_refused(name: str) -> None:
    nodes = [NodeSpec(BatchNorm2d(), "bn"), NodeSpec(Conv2d(4), name), NodeSpec(Flatten())]
    clash = Network.from_nodes((3, 5, 6), nodes)
    with pytest.raises(UserError, match=f"the name {name} is reserved for a buffer of backend ref"):
        make_plan(clash, load_backend("reference"), 2, precision="fp64")


def test_the_names_of_layers_do_not_change_the_plan() -> None:
    reference = load_backend("reference")
    layers = [Conv2d(4), ReLU(), Flatten(), Dense(3)]
    plain = make_plan(Network((3, 5, 6), layers), reference, 2, precision="fp64")
    names = ["stem", "act", "flat", "head"]
    specs = [NodeSpec(layer, name) for layer, name in zip(layers, names, strict=True)]
    named = make_plan(Network.from_nodes((3, 5, 6), specs), reference, 2, precision="fp64")
    assert [s.phase for s in named.stages] == [s.phase for s in plain.stages]
    assert named.arena_bytes == plain.arena_bytes
    assert [b.offset for b in named.buffers.values()] == [b.offset for b in plain.buffers.values()]
