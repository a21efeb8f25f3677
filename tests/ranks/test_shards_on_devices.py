"""Training with micro-shards on emulated GPUs: the same bits on all ranks of this run as on one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dptrain.backends import load_backend
from dptrain.batch import Batch
from dptrain.comm import make_gradient_sum, make_statistics_sum
from dptrain.comm.transport import choose_transport
from dptrain.comm.world import World
from dptrain.errors import UserError
from dptrain.measure.recorder import StepRecorder
from dptrain.network import (
    Add,
    BatchNorm2d,
    Conv2d,
    Dense,
    Dropout,
    Flatten,
    GroupNorm,
    MaxPool2d,
    Network,
    NodeSpec,
    ReLU,
)
from dptrain.plan import SGD, Adam, MicroShards, Optimizer, make_buckets, make_plan
from dptrain.plan.shards import rank_contributions
from dptrain.plan.shares import Counts
from dptrain.training.engines import make_engine
from tests.emulator.emulator import Emulator
from tests.ranks.test_peer import Device
from tests.tiers import tiered

pytestmark = pytest.mark.mpi

STEPS = 3
SHAPE, CLASSES = (3, 8, 8), 4


def _random_network(seed: int) -> Network:
    """A network with batch normalisation, an addition, dropout and pooling in a random order."""
    random = np.random.default_rng(seed)
    filters = int(random.choice([4, 8, 16, 32]))

    def convolution(size: int) -> Conv2d:
        groups = int(random.choice([1, 1, 2, filters]))
        return Conv2d(filters, size, groups=groups, bias=bool(random.integers(2)))

    nodes = [NodeSpec(Conv2d(filters, 3), "first"), NodeSpec(BatchNorm2d()), NodeSpec(ReLU(), "a")]
    for number in range(2):
        nodes.append(NodeSpec(convolution(int(random.choice([1, 3]))), f"conv{number}"))
        norm = random.choice([BatchNorm2d(), GroupNorm(2), ReLU()])
        nodes.append(NodeSpec(norm))
    nodes += [NodeSpec(BatchNorm2d(), "b"), NodeSpec(Add(), "sum", ("a", "b")), NodeSpec(ReLU())]
    if random.integers(2):
        nodes.append(NodeSpec(MaxPool2d(2)))
    nodes += [NodeSpec(Flatten()), NodeSpec(Dropout(0.25)), NodeSpec(Dense(16)), NodeSpec(ReLU())]
    nodes.append(NodeSpec(Dense(CLASSES)))
    return Network.from_nodes(SHAPE, nodes, name=f"random{seed}")


def _train(
    world: World, network: Network, shards: int, *, batch: int, precision: str, strategy: str,
    optimizer: Optimizer, counts: Counts = (), passes: int = 1,
) -> tuple[dict[str, Any], str]:  # fmt: skip
    """Return what training on a world computes, on every rank, and the transport of gradients."""
    backend = load_backend("cuda")
    own = MicroShards.of_rank(shards, world.rank, world.size, passes, counts, batch)
    plan = make_plan(
        network, backend, max(own.num_samples(batch), 1), precision=precision,
        optimizer=optimizer, micro_shards=own, passes=passes,
    )  # fmt: skip
    replica = backend.make_replica(plan, seed=3)
    buckets = make_buckets(plan, 1000)
    backend.choose_device(world.local_rank)
    sums = make_gradient_sum(strategy, world, replica, buckets)
    statistics_sum = make_statistics_sum(world, replica, sums.transport)
    recorder = StepRecorder(plan.stages)
    random, results = np.random.default_rng(7), []
    with make_engine(replica, sums, buckets, recorder, statistics_sum) as engine:
        for step in range(STEPS):
            # The last minibatch is smaller, so that its micro-shards have other sizes.
            count = batch if step < STEPS - 1 else batch - 3
            x = random.normal(size=(count, *SHAPE)).astype(np.float32)
            y, samples = random.integers(0, CLASSES, count), np.arange(count, dtype=np.int64)
            parts = [own.of_pass(part).span(count) for part in range(passes)]
            engine.step(
                iter([
                    Batch(step, 0, x[s], y[s], samples[s], count, part=part)
                    for part, s in enumerate(parts)
                ]),
                0.05,
            )  # fmt: skip
            results += [(r.loss, r.correct) for r in engine.results(wait=step + 1 == STEPS)]
    found: dict[str, Any] = {"losses": np.array(results), **replica.parameters}
    found |= {f"statistics of {name}": value for name, value in replica.statistics.items()}
    if strategy == "mirrored" or world.is_rank_zero:
        for kind, arrays in replica.state.items():
            found |= {f"{kind} of {name}": value for name, value in arrays.items()}
    return found, sums.transport


@pytest.fixture(autouse=True, params=["host", "peer"])
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Let the backend compute on emulated GPUs that cannot or can access each other's memory."""
    device = Device if request.param == "peer" else Emulator
    monkeypatch.setattr("dptrain.backends.cuda.backend.open_device", lambda rank: device())
    name: str = request.param
    return name


CLIPPED = SGD(momentum=0.9, clip_norm=0.5)
CASES = [
    (seed, *options)
    for seed, options in enumerate([
        (4, "fp32", "mirrored", CLIPPED), (8, "tf32", "central", Adam()),
        (8, "bf16", "mirrored", CLIPPED), (7, "fp32", "central", CLIPPED),
        (4, "tf32", "mirrored", Adam()), (6, "bf16", "central", SGD(momentum=0.9)),
    ])
]  # fmt: skip


@pytest.mark.parametrize(
    ("seed", "shards", "precision", "strategy", "optimizer"), tiered(CASES, CASES[:1])
)
def test_random_networks_have_the_bits_of_one_rank(
    connected: World, transport: str, seed: int, shards: int, precision: str, strategy: str,
    optimizer: Optimizer,
) -> None:  # fmt: skip
    network = _random_network(seed)
    options: dict[str, Any] = {
        "batch": 11, "precision": precision, "strategy": strategy, "optimizer": optimizer,
    }  # fmt: skip
    expected, _ = _train(World.single(), network, shards, **options)
    connected.barrier()
    divisions: list[Counts] = [()]
    if connected.size > 1:
        # Unequal shares: the first rank has all micro-shards that others do not need.
        divisions.append((shards - connected.size + 1, *[1] * (connected.size - 1)))
    for counts in divisions:
        found, used = _train(connected, network, shards, counts=counts, **options)
        slots, _ = rank_contributions(shards, connected.size, counts)
        if connected.size > 1:
            assert (used == "peer") == (transport == "peer" and max(slots) == 1)
        for name, value in found.items():
            np.testing.assert_array_equal(value, expected[name], err_msg=name)


PLAIN = Network(
    SHAPE, [Conv2d(8, 3), ReLU(), MaxPool2d(2), Flatten(), Dropout(0.25), Dense(CLASSES)]
)


@pytest.mark.more
def test_several_passes_have_the_bits_of_one_rank(connected: World, transport: str) -> None:
    options: dict[str, Any] = {
        "batch": 27, "precision": "fp32", "strategy": "mirrored", "optimizer": CLIPPED,
    }  # fmt: skip
    expected, _ = _train(World.single(), PLAIN, 8, **options)
    connected.barrier()
    if connected.size == 3:
        with pytest.raises(UserError, match="each pass must sum a whole subtree"):
            _train(connected, PLAIN, 8, passes=2, **options)
        return
    found, _ = _train(connected, PLAIN, 8, passes=2, **options)
    for name in found.keys() - {"losses"}:
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)


@pytest.mark.mpi(min_size=2)
def test_transports_that_cannot_follow_the_tree_are_refused(
    connected: World, transport: str
) -> None:
    if transport == "host":
        pytest.skip("these devices have no other transport")
    backend = load_backend("cuda")
    backend.choose_device(connected.local_rank)
    # The first rank has at least three micro-shards, whose sums are two nodes of the tree.
    size, counts = connected.size + 2, (3, *[1] * (connected.size - 1))
    own = MicroShards.of_rank(size, connected.rank, connected.size, counts=counts, batch_size=size)
    plan = make_plan(PLAIN, backend, own.count, micro_shards=own)
    replica = backend.make_replica(plan)
    assert choose_transport(connected, replica) == "host"
    for name in ("peer", "nccl", "mpi"):
        with pytest.raises(UserError, match=f"--transport {name} does not add these micro-shards"):
            choose_transport(connected, replica, name)
    sums = make_gradient_sum("mirrored", connected, replica, make_buckets(plan), "peer")
    assert sums.transport == "mpi"  # As after a change of the shares.


def _gradients(network: Network, precision: str, shards: int) -> dict[str, np.ndarray]:
    """Return gradients and statistics of a minibatch of nine samples on one rank."""
    backend = load_backend("cuda")
    own = MicroShards.of_rank(shards, batch_size=9) if shards else None
    plan = make_plan(network, backend, 9, precision=precision, micro_shards=own)
    replica = backend.make_replica(plan, seed=3)
    random = np.random.default_rng(7)
    loss = replica.forward_backward(random.normal(size=(9, *SHAPE)), random.integers(0, CLASSES, 9))
    return {"loss": np.array(loss), **replica.gradients, **replica.statistics}


@pytest.mark.more
@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_micro_shards_change_only_roundings(precision: str) -> None:
    network = _random_network(0)
    expected = _gradients(network, precision, 0)
    tolerance = 1e-5 if precision == "fp32" else 1e-2
    for shards in (1, 4, 9):
        for name, value in _gradients(network, precision, shards).items():
            scale = max(np.abs(expected[name]).max(), 0.1)
            np.testing.assert_allclose(
                value, expected[name], rtol=0, atol=tolerance * scale, err_msg=name
            )
