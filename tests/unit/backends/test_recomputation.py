"""Activations that are computed again in the backward pass: the same bits with less memory."""

from __future__ import annotations

import numpy as np
import pytest

import dptrain.api
from dptrain.backends import load_backend
from dptrain.backends.replica import Kernel, Replica
from dptrain.network import (
    GELU,
    Add,
    BatchNorm2d,
    Concatenate,
    Conv2d,
    Dense,
    Dropout,
    Flatten,
    GlobalAveragePool2d,
    LocalResponseNorm,
    MaxPool2d,
    Network,
    NodeSpec,
    ReLU,
    Sigmoid,
    StochasticDepth,
)
from dptrain.network.random_batch import random_batch
from dptrain.plan import Adam, MicroShards
from dptrain.plan.lowering import FORWARD_PHASES, Group, Phase
from tests.unit.backends import cases
from tests.unit.backends.cases import Case
from tests.unit.backends.cuda.gemm_tile import use_one_gemm_tile

CHAIN = Network(
    (3, 8, 6),
    [
        Conv2d(4), ReLU(), Conv2d(4), ReLU(), Dropout(0.3), Conv2d(4), Sigmoid(), MaxPool2d(2),
        LocalResponseNorm(2), Conv2d(4), ReLU(), MaxPool2d(3, 1), Conv2d(4), ReLU(), Flatten(),
        Dense(12), ReLU(), Dropout(0.5), Dense(4),
    ],
    name="chain",
)  # fmt: skip


def _blocks() -> Network:
    """Residual blocks with batch normalisation, dropout, stochastic depth, and a concatenation."""
    nodes = [NodeSpec(Conv2d(8, bias=False), "start")]
    before = "start"
    for i in range(4):
        nodes += [
            NodeSpec(Conv2d(8, bias=False), f"a{i}", (before,)), NodeSpec(BatchNorm2d(), f"n{i}"),
            NodeSpec(ReLU(), f"r{i}"), NodeSpec(Dropout(0.2), f"p{i}"),
            NodeSpec(Conv2d(8, bias=False), f"b{i}"), NodeSpec(BatchNorm2d(), f"m{i}"),
            # In the others, addition and ReLU belong to the normalisation.
            *[NodeSpec(StochasticDepth(0.4), f"m{i}-kept")][: i % 2],
            NodeSpec(Add(), f"s{i}", (f"m{i}" + "-kept" * (i % 2), before)),
            NodeSpec(ReLU(), f"end{i}"),
        ]  # fmt: skip
        before = f"end{i}"
    nodes += [
        NodeSpec(GELU(), "g", (before,)), NodeSpec(Concatenate(), "both", (before, "g")),
        NodeSpec(GlobalAveragePool2d()), NodeSpec(Flatten()), NodeSpec(Dense(4)),
    ]  # fmt: skip
    return Network.from_nodes((3, 9, 7), nodes, name="blocks")


NETWORKS = (CHAIN, _blocks())
BATCH = 5
QUICK = {
    ("chain", "cuda", "fp32"), ("chain", "cudnn", "bf16"), ("chain", "numba", "fp32"),
    ("blocks", "numba", "fp32"), ("blocks", "reference", "fp32"),
}  # fmt: skip
"""The emulator takes longest for products of matrix units and for residual blocks."""


def _variants(*, sharded: bool = False) -> list[object]:
    return [
        pytest.param(
            network, backend, precision, id=f"{network.name}-{backend}-{precision}",
            marks=() if (network.name, backend, precision) in QUICK else pytest.mark.more,
        )
        for network in NETWORKS
        for backend, precision in cases.variants()
        if Case(network.name, network, 1).is_implemented(backend)
        and (not sharded or load_backend(backend).supports_shards)
    ]  # fmt: skip


@pytest.fixture(autouse=True)
def one_gemm_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    use_one_gemm_tile(monkeypatch)


def _train(replica: Replica) -> list[np.ndarray]:
    """Losses, and all arrays after three steps; the last one has fewer samples."""
    rng = np.random.default_rng(3)
    losses = []
    for n in (BATCH, BATCH, 3):
        x = rng.standard_normal((n, *replica.plan.network.input_shape)).astype(np.float32)
        losses.append(replica.forward_backward(x, rng.integers(0, 4, n)))
        replica.update(0.01)
    arrays = [np.array(losses)]
    for named in (replica.parameters, replica.gradients, replica.statistics):
        arrays += [named[name] for name in named]
    return [*arrays, replica.forward(x)]


@pytest.mark.parametrize(("network", "backend", "precision"), _variants())
def test_results_have_the_same_bits(network: Network, backend: str, precision: str) -> None:
    kept, again = (
        dptrain.api.make_replica(
            network, backend, BATCH, precision=precision, optimizer=Adam(), recompute=recompute
        )
        for recompute in (False, True)
    )
    phases = {stage.phase for stage in again.plan.stages}
    assert Phase.BACKWARD_RECOMPUTE in phases
    assert again.plan.arena_bytes < kept.plan.arena_bytes
    for expected, actual in zip(_train(kept), _train(again), strict=True):
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.more
@pytest.mark.parametrize("backend", ["numba", "reference"])
def test_directions_share_nothing_but_buffers(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recomputation binds the directions of a group apart, whatever its layers are."""

    def gradients(case: Case) -> list[np.ndarray]:
        replica = dptrain.api.make_replica(case.network, backend, case.batch_size)
        x, y = random_batch(case.network, case.batch_size)
        replica.forward_backward(x, y, step=1)
        return [np.copy(replica.gradients[name]) for name in replica.gradients]

    together = {case: gradients(case) for case in cases.CASES if case.is_implemented(backend)}

    def bind_apart(self: Replica, group: Group) -> dict[Phase, Kernel]:
        own = [s.phase for s in self.plan.stages if s.group == group.name]
        forward = [phase for phase in own if phase in FORWARD_PHASES]
        backward = [phase for phase in own if phase not in (*forward, Phase.BACKWARD_ADD)]
        return {**self._bind_phases(group, forward), **self._bind_phases(group, backward)}

    monkeypatch.setattr(Replica, "_bind_group", bind_apart)
    for case, expected in together.items():
        for one, other in zip(expected, gradients(case), strict=True):
            np.testing.assert_array_equal(one, other, case.name)


@pytest.mark.parametrize(("network", "backend", "precision"), _variants(sharded=True))
def test_micro_shards_have_the_same_bits(network: Network, backend: str, precision: str) -> None:
    kept, again = (
        dptrain.api.make_replica(
            network, backend, BATCH, precision=precision, recompute=recompute,
            micro_shards=MicroShards.of_rank(3),
        )
        for recompute in (False, True)
    )  # fmt: skip
    for expected, actual in zip(_train(kept), _train(again), strict=True):
        np.testing.assert_array_equal(actual, expected)
