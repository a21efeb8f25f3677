"""The functional API: layers called on tensors, names, scopes, and one line per mistake."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dptrain.errors import UserError
from dptrain.network import (
    Add,
    BatchNorm2d,
    Concatenate,
    Conv2d,
    Dense,
    Flatten,
    GroupNorm,
    Input,
    Network,
    NodeSpec,
    ReLU,
    Tensor,
    name_scope,
    read_network,
    write_network,
)
from dptrain.plan.lowering import Group


def block(x: Tensor, filters: int) -> Tensor:
    y = Conv2d(filters, bias=False)(x, name="conv1")
    y = ReLU()(BatchNorm2d()(y))
    y = BatchNorm2d()(Conv2d(filters, bias=False)(y))
    return ReLU()(y + x)


def residual() -> Network:
    x = Input((3, 8, 8))
    y = ReLU()(Conv2d(4)(x, name="stem"))
    for number in range(2):
        with name_scope("layer1"), name_scope(str(number)):
            y = block(y, 4)
    return Network.from_output(Dense(5)(Flatten()(y), name="fc"), name="residual")


def test_blocks_are_functions_with_names_in_scopes() -> None:
    network = residual()
    inside = ["conv1", "batchnorm1", "relu1", "conv2", "batchnorm2", "add1", "relu2"]
    names = [f"layer1.{number}.{name}" for number in (0, 1) for name in inside]
    assert [node.name for node in network.nodes] == ["stem", "relu1", *names, "flatten1", "fc"]
    inputs = {node.name: node.inputs for node in network.nodes}
    assert inputs["layer1.0.add1"] == ("layer1.0.batchnorm2", "relu1")
    assert inputs["layer1.1.add1"] == ("layer1.1.batchnorm2", "layer1.0.relu2")
    assert "layer1.0.conv1.weight" in [p.name for p in network.parameters]
    assert network.statistics[0].name == "layer1.0.batchnorm1.running_mean"


def test_the_same_functions_make_equal_networks_that_survive_a_file(tmp_path: Path) -> None:
    network = residual()
    assert network == residual()
    path = tmp_path / "residual.toml"
    write_network(network, path)
    assert read_network(path) == network
    assert read_network(path).nodes == network.nodes


def test_a_chain_of_calls_equals_a_chain_of_layers() -> None:
    y = Dense(3)(Flatten()(ReLU()(Conv2d(4)(Input((3, 5, 6))))))
    chain = Network((3, 5, 6), [Conv2d(4), ReLU(), Flatten(), Dense(3)])
    assert Network.from_output(y) == chain


def test_a_tensor_knows_its_shape() -> None:
    x = Input([3, 8, 8])
    y = Conv2d(4, stride=2)(x)
    assert (x.shape, y.shape) == ((3, 8, 8), (4, 4, 4))
    assert repr(y) == "<Tensor conv: 4×4×4>"
    assert repr(x) == "<Tensor input: 3×8×8>"


def test_inputs_are_arguments_or_a_list_of_any_number() -> None:
    x = Input((2, 4, 4))
    a, b, c = (Conv2d(count)(x) for count in (1, 2, 3))
    assert Concatenate()(a, b, c).shape == Concatenate()([a, b, c]).shape == (6, 4, 4)
    network = Network.from_output(Flatten()(Add()(a, a, a)))
    assert network.nodes[1].inputs == ("conv1",) * 3
    assert network.nodes[1].layer == Add(3)


def test_layers_that_the_output_does_not_need_are_left_out() -> None:
    x = Input((5,))
    y = Dense(3)(x)
    Dense(4)(x)
    assert [node.name for node in Network.from_output(ReLU()(y)).nodes] == ["dense1", "relu1"]


def test_mistakes_are_one_line() -> None:
    x, dense = Input((5,)), Dense(5)
    with pytest.raises(UserError, match="conv needs an input of shape"):
        Conv2d(4)(x)
    with pytest.raises(UserError, match="dense is called on ndarray; expected tensors, such as"):
        dense(np.zeros(5))  # type: ignore[arg-type]
    with pytest.raises(UserError, match="dense is called on 2 tensors; expected 1"):
        dense(x, x)
    with pytest.raises(UserError, match="add is called on 1 tensor; expected at least 2"):
        Add()(x)
    with pytest.raises(UserError, match=r"multiply: the inputs have the shapes \(2, 4, 4\) and"):
        Conv2d(2)(Input((1, 4, 4))) * Conv2d(3)(Input((1, 4, 4)))
    with pytest.raises(UserError, match="the inputs have the shapes"):
        x + Dense(3)(x)
    with pytest.raises(UserError, match="input shape 3; expected whole numbers such as"):
        Input(3)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"input shape \(0, 8, 8\); expected \(C, H, W\) or"):
        Input((0, 8, 8))
    with pytest.raises(UserError, match="the network has 2 inputs; expected one Input"):
        Network.from_output(x + Dense(5)(Input((5,))))
    with pytest.raises(UserError, match="the output of the network is an input; expected the"):
        Network.from_output(x)
    with pytest.raises(UserError, match="the same dense is called twice, but calls do not share"):
        Network.from_output(dense(dense(x)))
    with pytest.raises(UserError, match="2 layers have the name 'a'"):
        Network.from_output(ReLU()(Dense(5)(x, name="a"), name="a"))
    with pytest.raises(TypeError):
        x + 1  # type: ignore[operator]


@pytest.mark.parametrize("name", ["a.", ".a", "a..b", "1.a", "a. b", "a" * 65])
def test_a_part_of_a_name_is_not_empty(name: str) -> None:
    with pytest.raises(UserError, match="digits, - or _, in parts that dots separate"):
        Network.from_nodes((5,), [NodeSpec(Dense(2), name)])


def test_names_may_have_64_characters() -> None:
    name = ".".join(["a" * 21] * 2 + ["0" * 20])
    assert Network.from_nodes((5,), [NodeSpec(Dense(2), name)]).nodes[0].name == name


def test_a_group_names_a_scope_once() -> None:
    nodes = {node.name: node for node in residual().nodes}
    inside = [nodes[f"layer1.0.{name}"] for name in ("conv1", "batchnorm1", "relu1")]
    assert Group(tuple(inside)).name == "layer1.0.conv1+batchnorm1+relu1"
    across = (nodes["stem"], nodes["layer1.0.conv1"], nodes["layer1.1.conv1"])
    assert Group(across).name == "stem+layer1.0.conv1+layer1.1.conv1"
    assert Group((nodes["stem"], nodes["relu1"])).name == "stem+relu1"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Conv2d(4, bias=0), "conv bias is 0; expected True or False"),
        (lambda: Conv2d(4, (3,)), "conv kernel is (3,); expected a whole number or (a whole "),
        (lambda: Conv2d(4, weight_init="he"), "conv weight_init is 'he'; expected He() or Nor"),
        (lambda: BatchNorm2d(momentum="x"), "batchnorm momentum is 'x'; expected a number"),
        (lambda: GroupNorm(groups=2.0), "groupnorm groups is 2.0; expected a whole number"),
        (lambda: GroupNorm(groups=0), "groupnorm groups is 0; expected a whole number from 1"),
        (lambda: Network((5,), [Dense(2)], "mse"), "the loss of the network is 'mse'; expected an"),
        (lambda: Network((5.0,), [Dense(2)]), "input shape (5.0,); expected whole numbers"),
        (lambda: Network((5,), Dense(2)), "expected a list"),
        (lambda: Network.from_nodes((5,), [Dense(2)]), "expected NodeSpec"),
        (
            lambda: Network.from_nodes((5,), [NodeSpec(Dense(2), inputs="input")]),
            "node dense1: inputs is 'input'; expected a tuple of names",
        ),
        (lambda: ReLU()(Input((5,)), name=5), "relu: name is 5; expected text"),
    ],
)
def test_values_of_other_types_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        make()
