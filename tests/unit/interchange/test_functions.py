"""Functions of single elements in ONNX files and PyTorch modules, in both directions."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from dptrain.errors import UserError
from dptrain.interchange.canonical import canonical, is_close
from dptrain.interchange.onnx_functions import in_operators
from dptrain.interchange.onnx_import import read_onnx
from dptrain.network import ACTIVATIONS, ELU, Clip, Dense, LeakyReLU, MeanSquaredError, Network
from dptrain.network.elementwise import Activation
from dptrain.network.expressions import apply, constant, evaluate, parse, variable
from dptrain.network.own_functions import OWN, activation
from tests.lazy import LazyModule
from tests.tiers import tiered
from tests.unit.backends.test_functions import POINTS, expressions
from tests.unit.interchange.models import assert_agree, model_of, plain, run_onnx, run_torch

torch = LazyModule("torch")

SWISH = activation("swish", "x * sigmoid(beta * x)", beta=1.0)(1.5)
LOGISTIC = activation("logistic", "1 / (1 + exp(-x)) + 0.5", derivative="(y - 0.5) * (1.5 - y)")()
EVERY = activation(
    "every",
    "expm1(-abs(x)) + log1p(x * x) + log(1 + sqrt(x * x + 1)) * erf(x) - cos(x) * sin(x) / 3"
    "+ normal_cdf(x) * normal_pdf(x) + softplus(x) + tanh(x) ** 2 + max(x, -x / 2) + min(0, x)"
    "+ where(x < 1, x, 1) + clip(x, -1, 2)",
)()
LAYERS: list[Activation] = [
    *(cls() for cls in ACTIVATIONS.values()), LeakyReLU(0.3), Clip(-0.5, 2.0), ELU(0.3),
    SWISH, LOGISTIC, EVERY,
]  # fmt: skip


def network_of(*layers: Activation) -> Network:
    between = [each for layer in layers for each in (layer, Dense(4))]
    return Network((6,), [Dense(4), *between], MeanSquaredError(), "functions")


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_exports_compute_the_same_and_are_read_again(layer: Activation, tmp_path: Path) -> None:
    network = network_of(layer)
    model = model_of(network, plain(network))
    x = 3.0 * np.random.default_rng(0).standard_normal((50, 6)).astype(np.float32)
    expected = model.predict(x)
    (path,) = model.export(tmp_path / "model.onnx")
    assert_agree(run_onnx(path, x), expected, 2e-5, 5e-7)
    assert_agree(run_torch(model.export(tmp_path / "model.py")[0], x), expected, 2e-5)
    OWN.clear()  # As in another process.
    assert read_onnx(path).network.layers == network.layers


def test_a_file_with_all_functions_needs_no_script(tmp_path: Path) -> None:
    network = network_of(*LAYERS)
    (path,) = model_of(network, plain(network)).export(tmp_path / "model.onnx")
    OWN.clear()
    found = read_onnx(path).network
    assert found.layers == network.layers
    assert [node.name for node in found.nodes] == [node.name for node in network.nodes]


@pytest.mark.parametrize(
    "damage",
    [
        "[{]",
        '[{"name": "f"}]',
        '[{"name": "f", "expression": "exit()", "values": {}}]',
        "3",
        "[" * 10**5,
    ],
)
def test_damaged_functions_are_one_line(damage: str, tmp_path: Path) -> None:
    network = network_of(SWISH)
    (path,) = model_of(network, plain(network)).export(tmp_path / "model.onnx")
    file = onnx.load(path)
    (entry,) = (each for each in file.metadata_props if each.key == "dptrain.functions")
    entry.value = damage
    onnx.save(file, path)
    with pytest.raises(UserError, match="the functions in the metadata are damaged") as caught:
        read_onnx(path)
    assert "\n" not in str(caught.value)


@pytest.mark.filterwarnings("ignore")
def test_functions_of_pytorch_are_recognised(tmp_path: Path) -> None:
    nn = torch.nn
    modules = {
        "relu": nn.ReLU(), "leaky_relu": nn.LeakyReLU(0.2), "sigmoid": nn.Sigmoid(),
        "tanh": nn.Tanh(), "gelu": nn.GELU(), "silu": nn.SiLU(), "relu6": nn.ReLU6(),
        "clip": nn.Hardtanh(-0.5, 0.75), "hardsigmoid": nn.Hardsigmoid(),
        "hardswish": nn.Hardswish(), "elu": nn.ELU(0.4), "softplus": nn.Softplus(),
        "mish": nn.Mish(),
    }  # fmt: skip

    class Function(nn.Module):  # type: ignore[name-defined, misc]
        def __init__(self, compute: Any) -> None:
            super().__init__()
            self.compute = compute

        def forward(self, x: Any) -> Any:
            return self.compute(x)

    modules |= {"square": Function(torch.square), "abs": Function(torch.abs)}
    assert set(modules) <= set(ACTIVATIONS)
    layers = [each for module in modules.values() for each in (module, nn.Linear(4, 4))]
    model = nn.Sequential(nn.Linear(6, 4), *layers).eval()
    path = tmp_path / "model.onnx"
    torch.onnx.export(model, torch.zeros(1, 6), str(path), dynamo=False, input_names=["x"])
    found = read_onnx(path).network.layers
    assert [layer.kind for layer in found[1::2]] == list(modules)
    assert found[3] == LeakyReLU(0.2)
    assert Clip(-0.5, 0.75) in found
    assert ELU(0.4) in found


def test_canonical_forms_of_generated_expressions() -> None:
    """Equal functions in another order have one form, and other functions another one."""
    random_ = random.Random(5)

    def shuffled(tree: Any) -> Any:
        operands = tuple(map(shuffled, tree.operands))
        if tree.operator in ("+", "*", "min", "max"):
            operands = tuple(random_.sample(operands, 2))
        if tree.operator == "-":
            return apply("+", operands[0], -operands[1])
        if tree.operator == "sigmoid":
            return 1 / (apply("exp", -operands[0]) + 1)
        if tree.operator in (">", ">="):
            return apply({">": "<", ">=": "<="}[tree.operator], *reversed(operands))
        return type(tree)(tree.operator, operands, tree.value)

    count = 0
    for tree in expressions(3):
        try:
            form = canonical(tree)
        except ArithmeticError:
            continue
        count += 1
        assert is_close(form, canonical(shuffled(tree))), tree
        assert is_close(form, canonical(parse(str(tree), ["x"]))), tree
        for other in (tree + 1.01 * variable("x"), tree * 1.01 + constant(1.0)):
            x = {"x": POINTS.astype(float)}
            if not np.allclose(evaluate(other, x), evaluate(tree, x), 1e-3):
                assert not is_close(form, canonical(other)), tree
        lowered = evaluate(in_operators(tree), {"x": POINTS.astype(float)})
        np.testing.assert_allclose(
            lowered, evaluate(tree, {"x": POINTS.astype(float)}), 1e-9, 1e-12
        )
    assert count > 190


def _graph_of(nodes: list[onnx.NodeProto]) -> onnx.ModelProto:
    """Return a model of nodes from ``x`` to ``y``, with the constant ``c`` and a dense layer."""
    helper = onnx.helper
    dense = helper.make_node("MatMul", ["y", "w"], ["z"])
    values = {"w": np.ones((3, 2), np.float32), "c": np.float32(0.5)}
    constants = [onnx.numpy_helper.from_array(np.asarray(v), name) for name, v in values.items()]
    ends = [
        [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["N", width])]
        for name, width in (("x", 3), ("z", 2))
    ]
    graph = helper.make_graph([*nodes, dense], "graph", *ends, constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)


def _read_or_refuse(nodes: list[onnx.NodeProto], path: Path) -> bool:
    """Return whether a model is read; otherwise it must be refused in one line."""
    onnx.save(_graph_of(nodes), path)
    try:
        read_onnx(path)
    except UserError as error:
        assert "\n" not in str(error)  # noqa: PT017
        return False
    return True


OPERATORS = (
    "Add", "Mul", "Sub", "Div", "Sigmoid", "Relu", "Clip", "Min", "Max", "Where", "Less", "Neg",
    "Pow", "Exp", "Tanh", "LeakyRelu", "Elu", "Gelu", "Softplus", "Reciprocal", "HardSigmoid",
)  # fmt: skip
SETTINGS: tuple[dict[str, Any], ...] = (
    {}, {}, {}, {}, {"alpha": "a"}, {"alpha": 3}, {"alpha": [1.0]}, {"alpha": float("nan")},
    {"approximate": b"\xff"}, {"approximate": 1.5}, {"beta": "b"}, {"min": "a"},
)  # fmt: skip


def test_damaged_operators_of_functions_are_one_line(tmp_path: Path) -> None:
    """Absent inputs, too few and too many, cycles, and attributes of other types."""
    random_, verdicts = random.Random(3), set()
    for _ in range(300):
        nodes, tensors = [], ["x"]
        length = random_.randint(1, 4)
        for index in range(length):
            operator = random_.choice(OPERATORS)
            names = random_.choices([tensors[0], "c", tensors[-1], "", "y"], (9, 9, 18, 3, 1),
                                    k=random_.choice((1, 1, 2, 2, 2, 3, 0)))  # fmt: skip
            tensors.append("y" if index == length - 1 else f"t{index}")
            settings = random_.choice(SETTINGS)
            nodes.append(onnx.helper.make_node(operator, names, tensors[-1:], **settings))
        verdicts.add(_read_or_refuse(nodes, tmp_path / "model.onnx"))
    assert verdicts == {True, False}


@pytest.mark.parametrize(("operator", "repeats"), [("Neg", 1), ("Add", 2), ("Mul", 2), ("Pow", 0)])
@pytest.mark.parametrize("length", tiered([20, 120, 600], [20]))
def test_long_chains_of_operators_are_read_or_refused(
    operator: str, repeats: int, length: int, tmp_path: Path
) -> None:
    """Trees that are deep, or that have many equal parts: x + x, the sum of it with itself, …"""
    names = ["x", *(f"t{index}" for index in range(length - 1)), "y"]
    nodes = [
        onnx.helper.make_node(operator, [before] * repeats or [before, "two"], [after])
        for before, after in itertools.pairwise(names)
    ]
    two = onnx.numpy_helper.from_array(np.float32(2), "two")
    nodes.insert(0, onnx.helper.make_node("Constant", [], ["two"], value=two))
    activation("swish", "x * sigmoid(beta * x)", beta=1.5)
    _read_or_refuse(nodes, tmp_path / "model.onnx")


@pytest.mark.more
def test_functions_whose_form_is_large_are_exported(tmp_path: Path) -> None:
    layer = activation("nested", "normal_pdf(" * 9 + "x" + ")" * 9)()
    with pytest.raises(UserError, match="operations"):
        canonical(parse("normal_pdf(" * 40 + "x" + ")" * 40, ["x"]))
    network = network_of(layer)
    assert model_of(network, plain(network)).export(tmp_path / "model.onnx")
