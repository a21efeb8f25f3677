"""A stage reads and writes only the buffers that the plan lists for it.

The planner gives the memory of a buffer to others before the first and after the last stage that
lists it. Here each stage runs while the memory of all buffers that it does not read contains NaN,
and must compute the same bits.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import pytest

import dptrain.api
from dptrain.backends.replica import Replica
from dptrain.batch import Batch
from dptrain.network import (
    Add,
    BatchNorm2d,
    Concatenate,
    Conv2d,
    Dense,
    Flatten,
    GlobalAveragePool2d,
    Network,
    NodeSpec,
    ReLU,
    SoftmaxCrossEntropy,
)
from dptrain.plan import MicroShards
from dptrain.plan.lowering import Phase
from tests.fuzz.networks import random_network
from tests.tiers import tiered
from tests.unit.backends.test_recomputation import CHAIN

BATCH = 5
EVALUATION = {Phase.FORWARD, Phase.LOSS}


def convolutions_with_batch_norm() -> Network:
    """Residual, grouped and depthwise convolutions, and a concatenation."""
    nodes = [NodeSpec(Conv2d(16, 3, bias=False), "start"), NodeSpec(BatchNorm2d(), "start.bn")]
    before = "start.bn"
    for i, groups in enumerate((1, 4, 16)):
        nodes += [
            NodeSpec(Conv2d(16, 3, groups=groups, bias=i == 1), f"a{i}", (before,)),
            NodeSpec(BatchNorm2d(), f"n{i}"), NodeSpec(ReLU(), f"r{i}"),
            NodeSpec(Conv2d(16, 1, bias=False), f"b{i}"), NodeSpec(BatchNorm2d(), f"m{i}"),
            NodeSpec(Add(), f"sum{i}", (f"m{i}", before)), NodeSpec(ReLU(), f"end{i}"),
        ]  # fmt: skip
        before = f"end{i}"
    nodes += [
        NodeSpec(Conv2d(16, 3, stride=2, bias=False), "half", (before,)),
        NodeSpec(BatchNorm2d(), "half.bn"), NodeSpec(ReLU(), "left"),
        NodeSpec(Conv2d(8, 1, stride=2, bias=False), "right", (before,)),
        NodeSpec(Concatenate(), "both", ("left", "right")),
        NodeSpec(GlobalAveragePool2d()), NodeSpec(Flatten()), NodeSpec(Dense(4)),
    ]  # fmt: skip
    return Network.from_nodes((3, 10, 8), nodes, name="batch norm")


NETWORKS = {
    "chain": CHAIN,
    "batch norm": convolutions_with_batch_norm(),
    **{f"random graph {seed}": random_network(seed, SoftmaxCrossEntropy()) for seed in range(4)},
}


def _kept(replica: Replica) -> set[str]:
    """Return the names of the buffers whose content the next step reads."""
    plan, backend = replica.plan, replica.backend
    return {
        plan.tensor_name(group, local)
        for group in plan.groups
        for local in backend.needs(group, plan.setting).kept
    }


def _run_guarded(replica: Replica, phases: Collection[Phase]) -> None:
    """Run stages of some phases, each with NaN in the memory of the buffers that it does not read.

    What a stage writes to a buffer that it does not list fails the test.
    """
    arena, buffers, kept = replica._arena, replica.plan.buffers, _kept(replica)

    def select(names: Collection[str]) -> np.ndarray:
        selected = np.zeros(len(arena), bool)
        for name in names:
            selected[buffers[name].offset :][: buffers[name].nbytes] = True
        return selected

    for stage, kernel in replica.stages:
        if stage.phase in phases:
            before = arena.copy()
            arena[~select({*stage.reads, *kept})] = 0xFF  # NaN in each floating-point type
            guarded = arena.copy()
            kernel(replica.context)
            listed = select({*stage.writes, *kept})
            np.testing.assert_array_equal(arena[~listed], guarded[~listed], stage.name)
            arena[~listed] = before[~listed]


def _state(replica: Replica) -> dict[str, Any]:
    arrays = replica.parameters, replica.gradients, replica.statistics
    found = [{name: named[name].tobytes() for name in named} for named in arrays]
    return {"parameters": found[0], "gradients": found[1], "statistics": found[2]}


@pytest.mark.parametrize("backend", tiered(["reference", "numba"], ["numba"]))
@pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS)
@pytest.mark.parametrize(
    "options", tiered([{}, {"recompute": True}, {"shards": 3}], [{"shards": 3}]), ids=str
)
def test_training_reads_and_writes_the_listed_buffers(
    network: Network, backend: str, options: dict[str, Any]
) -> None:
    shards = {"micro_shards": MicroShards.of_rank(3)} if "shards" in options else options
    plain, guarded = (
        dptrain.api.make_replica(network, backend, BATCH, threads=2, **shards) for _ in range(2)
    )
    rng = np.random.default_rng(1)
    for n in (BATCH, 3, BATCH):
        x = rng.standard_normal((n, *network.input_shape)).astype(np.float32)
        y = rng.integers(0, network.num_outputs, n)
        for replica in (plain, guarded):
            replica.gradient_slots[...] = np.nan
            replica.load(Batch.of(x, y))
        plain.run()
        _run_guarded(guarded, set(Phase))
        assert _state(guarded) == _state(plain)
        for replica in (plain, guarded):
            replica.update(0.01)
            replica.load(Batch.of(x, y), training=False)
        plain.run_forward(loss=True)
        _run_guarded(guarded, EVALUATION)
        assert guarded.loss_sums()[:2] == plain.loss_sums()[:2]
        assert guarded.output().tobytes() == plain.output().tobytes()


@pytest.mark.parametrize("backend", tiered(["reference", "numba"], ["numba"]))
@pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS)
def test_inference_reads_and_writes_the_listed_buffers(network: Network, backend: str) -> None:
    """Folded weights are kept until parameters or statistics change."""
    plain, guarded = (
        dptrain.api.make_replica(network, backend, BATCH, threads=2, training=False)
        for _ in range(2)
    )
    rng = np.random.default_rng(1)
    for n, factor in ((BATCH, 1.0), (2, 1.0), (BATCH, 1.5)):
        x = rng.standard_normal((n, *network.input_shape)).astype(np.float32)
        for replica in (plain, guarded):
            for named in (replica.parameters, replica.statistics):
                for name in named if factor != 1.0 else ():
                    named[name] = factor * named[name]
            replica.load(Batch.of(x), training=False)
        plain.run_forward(loss=False)
        _run_guarded(guarded, {Phase.FORWARD})
        assert guarded.output().tobytes() == plain.output().tobytes()
