"""Convolutions that add the gradient of their input to that of other layers, on the emulator."""

from __future__ import annotations

import numpy as np
import pytest

from dptrain.api import make_replica
from dptrain.backends.cuda.backend import CudaBackend
from dptrain.network import (
    Concatenate,
    Conv2d,
    Dense,
    Flatten,
    GlobalAveragePool2d,
    Network,
    NodeSpec,
)
from dptrain.plan.lowering import Phase
from tests.emulator.emulator import Emulator
from tests.unit.backends.pytorch_reference import ROUNDOFFS

pytestmark = pytest.mark.more

READERS = {
    "wide": Conv2d(32, 3),
    "strided": Conv2d(32, 3, stride=2, padding=1, rounding="floor"),
    "projection": Conv2d(16, 1, stride=2, padding=0, rounding="floor", bias=False),
    "narrow": Conv2d(8, 1),
}
"""Layers that read the same tensor; the last one is the first of the backward pass."""


def branches(channels: int) -> Network:
    nodes = [NodeSpec(Conv2d(channels, 3), "shared")]
    for name, layer in READERS.items():
        nodes.append(NodeSpec(layer, name, ("shared",)))
        nodes.append(NodeSpec(GlobalAveragePool2d(), f"{name}-mean", (name,)))
    means = tuple(f"{name}-mean" for name in READERS)
    nodes += [NodeSpec(Concatenate(len(means)), "all", means), NodeSpec(Flatten())]
    return Network.from_nodes((3, 8, 8), [*nodes, NodeSpec(Dense(4))])


@pytest.mark.parametrize(("precision", "channels"), [("fp32", 5), ("tf32", 16), ("bf16", 16)])
def test_adding_in_the_kernel_equals_adding_afterwards(
    precision: str, channels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulator = Emulator(seed=3)
    monkeypatch.setattr("dptrain.backends.cuda.backend.open_device", lambda rank: emulator)
    network = branches(channels)
    ours = make_replica(network, "cuda", 3, precision=precision, seed=1)
    monkeypatch.setattr(CudaBackend, "adds_gradient", lambda *arguments: False)
    exact = make_replica(network, "cuda", 3, precision=precision, seed=1)
    stages = [sum(s.phase is Phase.BACKWARD_ADD for s in r.plan.stages) for r in (ours, exact)]
    assert stages == [0, 3]
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((3, 3, 8, 8)), np.array([1, 3, 0])
    assert ours.forward_backward(x, y) == exact.forward_backward(x, y)
    unit = 2e-6 + 4.0 * ROUNDOFFS.get(precision, 0.0)
    for name, gradient in exact.gradients.items():
        largest = np.abs(gradient).max()
        np.testing.assert_allclose(ours.gradients[name], gradient, atol=unit * largest, rtol=0.0)
