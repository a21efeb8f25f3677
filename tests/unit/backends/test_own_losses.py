"""Losses that users define: every backend computes the derivative that PyTorch finds."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dptrain.api
from dptrain import Trainer, UserError
from dptrain.comm.world import World
from dptrain.interchange.onnx_import import read_onnx
from dptrain.interchange.own_functions import KEY, LOSS_KEY, known_functions, known_loss
from dptrain.network import Dense, Network
from dptrain.network.files import network_from_dict, network_to_dict, read_network, write_network
from dptrain.network.losses import ElementwiseLoss
from dptrain.network.own_functions import OWN_LOSSES, loss
from tests.lazy import LazyModule
from tests.unit.backends.cases import variants
from tests.unit.interchange.models import model_of, plain

torch = LazyModule("torch")

every_variant = pytest.mark.parametrize(("backend", "precision"), variants())

HUBER = loss("huber", "where(abs(z - y) < d, (z - y) ** 2 / 2, d * (abs(z - y) - d / 2))", d=1.0)(
    0.7
)
QUANTILE = loss("quantile", lambda z, y, q=0.8: np.maximum(q * (y - z), (q - 1) * (y - z)))()
FOCAL = loss(
    "focal",
    "-(y * (1 - sigmoid(z)) ** 2 * -softplus(-z) + (1 - y) * sigmoid(z) ** 2 * -softplus(z))",
    targets="binary",
)()


def _huber(z: Any, y: Any) -> Any:
    return torch.nn.functional.huber_loss(z, y, reduction="none", delta=0.7)


def _quantile(z: Any, y: Any) -> Any:
    return torch.maximum(0.8 * (y - z), -0.2 * (y - z))


def _focal(z: Any, y: Any) -> Any:
    """Return the focal loss as torchvision's `sigmoid_focal_loss` with gamma 2 and alpha −1."""
    p = torch.sigmoid(z)
    entropy = torch.nn.functional.binary_cross_entropy_with_logits(z, y, reduction="none")
    return entropy * (1 - (p * y + (1 - p) * (1 - y))) ** 2


LOSSES = [(HUBER, _huber), (QUANTILE, _quantile), (FOCAL, _focal)]
every_loss = pytest.mark.parametrize(
    ("own", "expected"), LOSSES, ids=["huber", "quantile", "focal"]
)


def _network(own: ElementwiseLoss, outputs: int = 3) -> Network:
    return Network((5,), [Dense(outputs)], own, "own")


@every_variant
@every_loss
@pytest.mark.parametrize("weighted", [False, True])
def test_own_losses_equal_pytorch(
    own: ElementwiseLoss, expected: Any, weighted: bool, backend: str, precision: str
) -> None:
    """Gradients of the biases of the last layer are sums of dz over the samples."""
    rng = np.random.default_rng(4)
    x = rng.standard_normal((9, 5))
    y = rng.integers(0, 2, (9, 3)) if own.targets == "binary" else rng.standard_normal((9, 3))
    y = y.astype(np.float32)
    weights = np.float32(rng.integers(0, 4, 9)) if weighted else np.ones(9, np.float32)
    replica = dptrain.api.make_replica(
        _network(own), backend, 9, precision=precision, weighted=weighted
    )
    options = {"weights": weights} if weighted else {}
    found = replica.forward_backward(x, y, **options)
    z = torch.tensor(np.float64(replica.output()), requires_grad=True)
    target = torch.tensor(np.float64(y))
    losses = expected(z, target).mean(1)
    total = (losses * torch.tensor(np.float64(weights))).mean()
    total.backward()
    assert z.grad is not None
    eps = float(np.finfo(replica.plan.dtype).eps)
    rounding = {"bf16": 2.0**-8, "tf32": 2.0**-11}.get(precision, 0.0)
    assert abs(found - float(total.detach())) <= 64 * eps * (1.0 + float(total.detach()))
    tolerance = (64 * eps + 2 * rounding) * (z.grad.abs().sum(0).numpy() + eps)
    difference = np.abs(replica.gradients["dense1.bias"] - z.grad.sum(0).numpy())
    assert (difference <= tolerance).all()
    each, right = replica.evaluate_samples(x, y)
    np.testing.assert_allclose(each, losses.detach().numpy(), 64 * eps, 64 * eps)
    correct = ((z > 0) == (target > 0.5)).all(1).numpy() & (own.targets == "binary")
    np.testing.assert_array_equal(right, correct)
    value, count = replica.evaluate(x, y)
    assert value == pytest.approx(float(losses.sum().detach()), rel=64 * eps)
    assert count == correct.sum()


@every_loss
def test_own_losses_can_be_copied(own: ElementwiseLoss, expected: Any) -> None:
    assert copy.deepcopy(own) == own
    assert copy.deepcopy(_network(own)) == _network(own)


@every_loss
def test_own_losses_are_part_of_files(own: ElementwiseLoss, expected: Any, tmp_path: Path) -> None:
    network = _network(own)
    write_network(network, tmp_path / "own.toml")
    (path,) = model_of(network, plain(network)).export(tmp_path / "own.onnx")
    values = network_to_dict(network)
    OWN_LOSSES.clear()  # As in another process.
    assert network_from_dict(values) == network
    assert read_network(tmp_path / "own.toml").loss == own
    assert read_onnx(path).network.loss == own
    file = onnx.load(path)
    (entry,) = (each for each in file.metadata_props if each.key == "dptrain.loss_function")
    entry.value = '{"name": "f", "expression": "exit()", "targets": "values", "values": {}}'
    onnx.save(file, path)
    with pytest.raises(UserError, match="the loss in the metadata is damaged") as caught:
        read_onnx(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("backend", ["reference", "numba"])
def test_a_run_with_an_own_loss_is_resumed_to_the_same_bits(backend: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((40, 5)).astype(np.float32)
    data = x, x[:, :3] ** 2
    options: dict[str, Any] = {
        "progress": False, "batch_size": 8, "backend": backend, "epochs": 2, "shards": 3,
        "world": World.single(),
    }  # fmt: skip
    whole = Trainer(_network(HUBER), data, **options)
    whole.fit()
    first = Trainer(_network(HUBER), data, run_dir=tmp_path / "run", stop_after=5, **options)
    first.fit()
    first.close()
    OWN_LOSSES.clear()
    resumed = Trainer.resume(tmp_path / "run", data, progress=False, world=World.single())
    resumed.fit()
    assert resumed.network.loss == HUBER
    for name, value in whole.parameters.items():
        np.testing.assert_array_equal(resumed.parameters[name], value)
    model = dptrain.load(tmp_path / "run")
    expected = resumed.evaluate(data)["loss"]
    assert model.evaluate(data)["loss"] == pytest.approx(expected, rel=1e-6)  # Stored in float32.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("Huber", "z - y"), "the loss is called 'Huber'; expected small letters"),
        (("mean_squared_error", "z - y"), "a loss of dptrain is called mean_squared_error"),
        (("mine", "y * y"), "the loss mine does not depend on z"),
        (("mine", "x - y"), "unknown name x; expected z, y"),
        (("mine", "(z - y) ** 2", "z - y"), "the derivative of mine, for y = 0 and z as x, is"),
        (("mine", lambda z: z), "has 1 arguments; expected two, an output and its target"),
        (("mine", lambda z, y, beta: beta * (z - y)), "parameter beta has no default value"),
        (("mine", lambda z, y, y_=1.0: "z"), "the function returns str; expected an expression"),
        (("mine", lambda z, y, targets=1.0: z * targets), "a parameter of mine is called targets"),
        (("mine", "log(z - 1000)"), "is finite for 0 of"),
        (("mine", "exp(z) / (1 + exp(z)) - y"), "overflows to NaN in float32"),
        (("mine", "__import__('os')"), "calls __import__; expected abs"),
    ],
)
def test_wrong_losses_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(UserError, match=message.replace("(", r"\(")) as caught:
        loss(*arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"name": "f"}, "loss_function: key 'expression' is missing"),
        ({"name": "f", "expression": "z", "target": "values"}, "unknown key 'target'; expected"),
        ({"name": "f", "expression": "z - y", "targets": "classes"}, "expected values, or binary"),
        ({"name": "f", "expression": "z", "parameters": {"a": []}}, "and a number"),
        ({"name": "mean_squared_error", "expression": "z"}, "a loss of dptrain is called"),
        ({"name": "f", "expression": "1if z < y else z"}, "is no expression"),
        ([], "loss_function is no table"),
    ],
)
def test_wrong_tables_are_refused(table: Any, message: str) -> None:
    values = {**network_to_dict(Network((5,), [Dense(3)], HUBER)), "loss_function": table}
    with pytest.raises(UserError, match=message):
        network_from_dict(values)


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8),
    st.sampled_from([10**400, -(10**400), 1e-320, [], [1.0], {}, {"a": 10**400}, {"z": 1.0}]),
)  # fmt: skip


@given(st.sampled_from(["name", "expression", "derivative", "targets", "parameters", "values"]),
       VALUES, st.sampled_from([0, 308, 309, 400]))  # fmt: skip
def test_any_value_in_a_definition_is_a_loss_or_one_line(key: str, value: Any, zeros: int) -> None:
    """In network files, in the metadata of ONNX files and in Python."""
    table: dict[str, Any] = {
        "name": "own", "expression": f"a * (z - y) ** 2 / 1{'0' * zeros}", "targets": "values",
        "parameters": {"a": 1.0}, "values": {"a": 2.0}, key: value,
    }  # fmt: skip
    definition = {name: each for name, each in table.items() if name != "values"}
    layers = [{"type": "dense", "units": 3}]
    network = {"input": [5], "loss": "own", "loss_function": definition, "layer": layers}
    function = {**table, "expression": str(table["expression"]).replace("z - y", "x")}
    calls: list[Callable[[], Any]] = [
        lambda: network_from_dict(network),
        lambda: known_loss({LOSS_KEY: json.dumps(table)}),
        lambda: known_functions({KEY: json.dumps([function])}),
        lambda: loss("own", "a * (z - y) ** 2", a=value),
        lambda: loss("own", "a * (z - y) ** 2", a=1.0)(a=value),
    ]
    messages = []
    for call in calls:
        try:
            call()
        except UserError as error:
            messages.append(str(error))
    assert not any("\n" in message for message in messages)
