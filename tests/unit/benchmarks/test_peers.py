"""Peers other than PyTorch: they compute the same network, and a missing one is reported."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import find_spec

import numpy as np
import pytest

from benchmarks.batch import dropout_factors, random_batch
from benchmarks.coarse_check import WrongResultError, require_agreement
from benchmarks.outside import OUTSIDE, find_network
from benchmarks.programs.onnx_programs import onnxruntime_inference, openvino_inference
from benchmarks.programs.own_programs import dptrain_inference, dptrain_training, first_step
from benchmarks.programs.peers import inference_peers, training_peers
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


def test_missing_peers_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("jax", "benchmarks.programs.jax_programs", "benchmarks.programs.jax_network",
    "onnxruntime",
                   "openvino"):  # fmt: skip
        monkeypatch.setitem(sys.modules, module, None)
    x, y = random_batch(NETWORK, 2)
    programs, missing = training_peers(NETWORK, x, y, {}, "case")
    assert not programs
    assert set(missing) == {"JAX"}
    programs, missing = inference_peers(NETWORK, x, {}, "case")
    assert not programs
    assert set(missing) == {"ONNX Runtime", "OpenVINO"}


def test_a_peer_with_other_outputs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.programs import onnx_programs

    wrong = np.full((2, 4), 0.5)
    monkeypatch.setattr(onnx_programs, "onnxruntime_inference", lambda *_: lambda: wrong)
    with pytest.raises(WrongResultError, match="case, ONNX Runtime"):
        inference_peers(NETWORK, random_batch(NETWORK, 2)[0], {"output": np.ones((2, 4))}, "case")


def test_networks_outside_the_set_are_found_by_name() -> None:
    assert len(OUTSIDE) == 5
    assert all(find_network(name).name == name for name in OUTSIDE)
    assert find_network("model0").num_parameters == 210_998
