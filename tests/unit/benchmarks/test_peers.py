"""Peers compute the same network as dptrain."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from benchmarks.batch import dropout_factors, random_batch
from benchmarks.coarse_check import FLIPPED, WrongResultError, allowed_in_updates, require_agreement
from benchmarks.outside import OUTSIDE, find_network
from benchmarks.programs.onnx_programs import onnxruntime_inference, openvino_inference
from benchmarks.programs.own_programs import dptrain_inference, dptrain_training, first_step
from benchmarks.programs.torch_programs import MODES, Mode, torch_training
from dptrain.network import (
    AveragePool2d,
    Conv2d,
    Dense,
    Dropout,
    Flatten,
    LocalResponseNorm,
    MaxPool2d,
    Network,
    ReLU,
    Sigmoid,
    SumPool2d,
)

pytestmark = pytest.mark.more

NETWORK = Network(
    (3, 11, 10),
    [
        Conv2d(4, 3, stride=2, weight_decay=0.1), ReLU(), LocalResponseNorm(radius=1),
        MaxPool2d(3, 2, "same"), Conv2d(5, 4), Sigmoid(), AveragePool2d(2, 1, "same"),
        SumPool2d(2, 1), Flatten(), Dropout(0.25), Dense(6), ReLU(), Dense(4),
    ],
    name="every-layer",
)  # fmt: skip


@pytest.mark.parametrize("mode", MODES[:2], ids=lambda mode: mode.name)
def test_pytorch_makes_the_same_steps(mode: Mode) -> None:
    network = Network((2, 9, 8), [Conv2d(4, 3, weight_decay=0.1), ReLU(), MaxPool2d(2), Flatten(),
                                  Dense(5)], name="small")  # fmt: skip
    x, y = random_batch(network, 3)
    ours, theirs = dptrain_training(network, x, y), torch_training(network, x, y, mode)
    for _ in range(3):
        ours.step(0.1)
        theirs.step(0.1)
    expected = theirs.parameters()
    for name, value in ours.parameters().items():
        # Three steps on sums of a few hundred terms in float32.
        np.testing.assert_allclose(value, expected[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda step: lambda rate: step(0.0),
        lambda step: lambda rate: step(1.01 * rate),
        lambda step: lambda rate: 1.01 * step(rate),
    ],
    ids=["no update", "another rate", "another loss"],
)
def test_a_program_that_trains_otherwise_is_refused(spoil: Any) -> None:
    network = Network((6,), [Dense(8), ReLU(), Dense(3)], name="small")
    right = dptrain_training(network, *random_batch(network, 3))
    theirs = first_step(torch_training(network, *random_batch(network, 3), MODES[0]))
    wrong = first_step(replace(right, step=spoil(right.step)))
    with pytest.raises(WrongResultError, match="dptrain and PyTorch differ in"):
        require_agreement("case", wrong, theirs, allowed=allowed_in_updates(network))


def test_a_unit_that_rounding_decides_is_accepted_in_updates_alone() -> None:
    rng = np.random.default_rng(0)
    exact = {"loss": np.array(1.0), "conv1.weight": rng.standard_normal(100)}
    moved = {**exact, "conv1.weight": exact["conv1.weight"] * (1 + FLIPPED / 2)}
    assert require_agreement("case", moved, exact, allowed=FLIPPED) == pytest.approx(0.5)
    for wrong in (moved, {**exact, "loss": np.array(1 + FLIPPED / 2)}):
        with pytest.raises(WrongResultError, match="differ in"):
            require_agreement("case", wrong, exact, allowed=FLIPPED if wrong is not moved else 1e-4)
    assert allowed_in_updates(find_network("resnet20")) > allowed_in_updates(NETWORK)


def test_jax_makes_the_same_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    pytest.importorskip("jax")
    from benchmarks.programs.jax_programs import jax_training

    x, y = random_batch(NETWORK, 5)
    theirs = first_step(jax_training(NETWORK, x, y, dropout_factors(NETWORK, 5)))
    require_agreement("step", first_step(dptrain_training(NETWORK, x, y)), theirs, "JAX")


@pytest.mark.parametrize("library", ["onnxruntime", "openvino"])
def test_runtimes_compute_the_same_outputs(library: str) -> None:
    if not all(map(find_spec, ("onnx", library))):
        pytest.skip(f"{library} is not installed")
    inference: dict[str, Callable[..., Callable[[], np.ndarray]]] = {
        "onnxruntime": onnxruntime_inference,
        "openvino": openvino_inference,
    }
    # The program must keep its input alive.
    run = inference[library](NETWORK, random_batch(NETWORK, 5)[0].copy())
    ours = dptrain_inference(NETWORK, random_batch(NETWORK, 5)[0])
    require_agreement("outputs", {"z": np.array(ours())}, {"z": np.array(run())}, library)


def test_networks_outside_the_set_are_found_by_name() -> None:
    assert len(OUTSIDE) == 5
    assert all(find_network(name).name == name for name in OUTSIDE)
    assert find_network("model0").num_parameters == 210_998
