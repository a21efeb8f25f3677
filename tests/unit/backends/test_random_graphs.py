"""Random graphs: what the planner shares, adds and copies, compared with PyTorch."""

from __future__ import annotations

import random

import numpy as np
import pytest

import dptrain.api
from dptrain.backends.replica import Replica
from dptrain.network import (
    GELU,
    Add,
    AveragePool2d,
    BatchNorm2d,
    Concatenate,
    Conv2d,
    Dense,
    Dropout,
    Flatten,
    GlobalAveragePool2d,
    GroupNorm,
    MaxPool2d,
    Network,
    NodeSpec,
    ReLU,
    Sigmoid,
)
from tests.unit.backends import cases, pytorch_reference
from tests.unit.backends.cases import Case
from tests.unit.backends.gemm_tile import use_one_gemm_tile

LAYERS = (
    Conv2d(4, 3), Conv2d(4, 1, bias=False), Conv2d(4, 3, groups=4), ReLU(), ReLU(), Sigmoid(),
    GELU(), Dropout(0.3), BatchNorm2d(epsilon=0.5), BatchNorm2d(epsilon=0.5),
    GroupNorm(2, epsilon=0.5), MaxPool2d(3, 1, padding="same"),
    AveragePool2d(3, 1, padding="same"), Add(), Add(), Add(), Add(3), Concatenate(),
)  # fmt: skip
"""Layers that keep the shape (4, 6, 5); a convolution follows a concatenation."""
SAMPLES = 4


def random_network(seed: int) -> Network:
    """Up to 16 layers that read outputs of earlier ones; those that none reads are added."""
    choose = random.Random(seed)
    nodes, names, unread = [NodeSpec(Conv2d(4, 3), "t0")], ["t0"], {"t0"}
    for number in range(1, choose.randint(5, 17)):
        layer, name = choose.choice(LAYERS), f"t{number}"
        recent = names[-4:] if choose.random() < 0.8 else names
        inputs = tuple(choose.choice(recent) for _ in range(layer.num_inputs))
        if isinstance(layer, Concatenate):
            nodes += [NodeSpec(layer, f"c{number}", inputs), NodeSpec(Conv2d(4, 1), name)]
        else:
            nodes.append(NodeSpec(layer, name, inputs))
        names.append(name)
        unread = (unread - set(inputs)) | {name}
    if len(unread) > 1:
        nodes.append(NodeSpec(Add(len(unread)), "sum", tuple(sorted(unread))))
    nodes += [NodeSpec(GlobalAveragePool2d()), NodeSpec(Flatten()), NodeSpec(Dense(3))]
    return Network.from_nodes((3, 6, 5), nodes)


def _set_parameters(replica: Replica) -> None:
    rng = np.random.default_rng(1)
    for parameter in replica.plan.network.parameters:
        replica.parameters[parameter.name] = 0.4 * rng.standard_normal(parameter.shape)


def _variants() -> list[object]:
    """Seeds, backends and precisions; the emulator is slow."""
    return [
        pytest.param(seed, backend, precision, id=f"{seed}-{backend}-{precision}")
        for backend, precision in cases.variants()
        for seed in range(12 if backend in ("reference", "numba") else 2)
        if precision in ("fp64", "fp32")
        and Case("", random_network(seed), SAMPLES).is_implemented(backend)
    ]


@pytest.fixture(autouse=True)
def one_gemm_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    use_one_gemm_tile(monkeypatch)


@pytest.mark.parametrize(("seed", "backend", "precision"), _variants())
def test_gradients_and_evaluation_equal_pytorch(seed: int, backend: str, precision: str) -> None:
    """In float32 errors are 1e-6 of the largest gradient; a wrong sum is an error of order 1."""
    network, rng = random_network(seed), np.random.default_rng(seed)
    x = rng.standard_normal((SAMPLES, 3, 6, 5)).astype(np.float32)
    y = rng.integers(0, 3, SAMPLES)
    kept, again, inference = (
        dptrain.api.make_replica(network, backend, SAMPLES, precision=precision, **options)
        for options in ({}, {"recompute": True}, {"training": False})
    )
    for replica in (kept, again, inference):
        _set_parameters(replica)
    for replica in (kept, again):
        replica.forward_backward(x, y, step=2)
    keys = {"seed": 0, "step": 2, "samples": np.arange(SAMPLES)}
    parameters, statistics = dict(kept.parameters), dict(kept.statistics)
    exact = pytorch_reference.compute(network, parameters, x, y, **keys)
    tolerance = 1e-4 * max(np.abs(gradient).max() for gradient in exact.gradients.values())
    for name, gradient in exact.gradients.items():
        np.testing.assert_allclose(kept.gradients[name], gradient, 0.0, tolerance, err_msg=name)
        np.testing.assert_array_equal(again.gradients[name], kept.gradients[name])
    for name, value in statistics.items():
        np.testing.assert_array_equal(again.statistics[name], value)
        inference.statistics[name] = value
    output = pytorch_reference.evaluate(network, parameters, statistics, x)
    for replica in (kept, again, inference):
        np.testing.assert_allclose(replica.forward(x), output, 1e-4, 1e-4 * np.abs(output).max())
