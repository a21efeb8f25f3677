"""N ranks train to the parameters of one rank, however samples fall on ranks."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dptrain import AfterStep, Trainer, UserError
from dptrain.backends import load_backend
from dptrain.backends.replica import Replica
from dptrain.batch import Batch
from dptrain.comm import STRATEGIES, make_gradient_sum, make_statistics_sum
from dptrain.comm.sums.shared import share_arrays
from dptrain.comm.world import World
from dptrain.data.loading.sharding import pass_shards
from dptrain.measure.recorder import StepRecorder
from dptrain.network import (
    BatchNorm2d,
    Conv2d,
    Dense,
    Dropout,
    Flatten,
    Loss,
    MaxPool2d,
    Network,
    ReLU,
    SoftmaxSquaredError,
    StochasticDepth,
)
from dptrain.network.own_functions import loss
from dptrain.plan import LAMB, LARS, SGD, Adam, AdamW, Optimizer, make_buckets, make_plan
from dptrain.training.averaging import averaged_parameters
from dptrain.training.engines import make_engine
from tests.emulator.emulator import Emulator
from tests.tiers import tiered

pytestmark = pytest.mark.mpi

STEPS = 20
CLIPPED = SGD(momentum=0.9, clip_norm=0.2)
"""Gradients of the first steps have a norm of about 1."""
AVERAGED = Adam(average_decay=0.6)
NETWORK = Network(
    (2, 6, 6), [Conv2d(3), ReLU(), MaxPool2d(2), StochasticDepth(0.25), Flatten(), Dropout(0.25),
                Dense(5), ReLU(), Dense(3)],
)  # fmt: skip

NORMALIZED_STEPS = 20
NORMALIZED = Network(
    (2, 6, 6), [Conv2d(3), BatchNorm2d(), ReLU(), MaxPool2d(2), Conv2d(4, 2), BatchNorm2d(),
                Flatten(), Dense(3)],
)  # fmt: skip


def _train(
    world: World, strategy: str, optimizer: Optimizer, batch: int,
    backend: str = "reference", precision: str = "fp64", steps: int = STEPS,
    network: Network = NETWORK, passes: int = 1,
) -> tuple[Replica, list]:  # fmt: skip
    loaded = load_backend(backend)
    plan = make_plan(
        network, loaded, -(-batch // passes), precision=precision, optimizer=optimizer,
        passes=passes,
    )  # fmt: skip
    shares = strategy == "shared" and world.size > 1
    arrays = share_arrays(world, plan) if shares else None
    replica = loaded.make_replica(plan, seed=3, arrays=arrays)
    world.barrier()  # The first rank of a node has drawn the shared parameters.
    buckets = make_buckets(replica.plan, 100)
    assert len({bucket.after for bucket in buckets}) == len(buckets) > 1
    sums = make_gradient_sum(
        "mirrored" if strategy == "shared" else strategy, world, replica, buckets
    )
    statistics_sum = make_statistics_sum(world, replica, sums.transport)
    recorder = StepRecorder(replica.plan.stages)
    random = np.random.default_rng(7)
    losses = []
    spans = pass_shards(batch, world.rank, world.size, passes)
    with make_engine(replica, sums, buckets, recorder, statistics_sum) as engine:
        for step in range(steps):
            x = random.normal(size=(batch, 2, 6, 6))
            y = random.integers(0, 3, size=batch)
            samples = np.arange(batch, dtype=np.int64)
            engine.step(
                iter(
                    [
                        Batch(step, 0, x[mine], y[mine], samples[mine], batch, part=part)
                        for part, mine in enumerate(spans)
                    ]
                ),
                0.05,
            )
            losses += [(r.loss, r.correct) for r in engine.results(wait=step + 1 == steps)]
    return replica, losses


METHODS = (
    *((name, "connected") for name in STRATEGIES), ("shared", "connected"),
    ("shared", "two_per_node"),
)  # fmt: skip
BATCHES = (1, 2, 7, 10)
OPTIMIZERS = {
    "sgd": SGD(momentum=0.9), "adam": Adam(), "adamw": AdamW(), "clipped": CLIPPED,
    "lars": LARS(trust=0.02, weight_decay=0.1, clip_norm=0.2), "lamb": LAMB(clip_norm=0.2),
}  # fmt: skip


@pytest.mark.parametrize(
    ("strategy", "ranks", "optimizer", "batch"),
    [
        pytest.param(
            *method, OPTIMIZERS[name], BATCHES[(i + j) % 4], id=f"{'-'.join(method)}-{name}",
            marks=[] if (i + j) % 4 > 1 else pytest.mark.more,
        )
        for i, method in enumerate(METHODS)
        for j, name in enumerate(OPTIMIZERS)
    ],
)  # fmt: skip
def test_parameters_after_many_steps(
    request: pytest.FixtureRequest, ranks: str, strategy: str, optimizer: Optimizer, batch: int
) -> None:
    world: World = request.getfixturevalue(ranks)
    alone, expected = _train(World.single(), strategy, optimizer, batch)
    replica, losses = _train(world, strategy, optimizer, batch)
    world.barrier()  # All ranks of a node have updated the shared parameters.
    world.check_equal(replica.flat_parameters, "parameters")
    assert replica.updates == STEPS
    # Only the order of additions differs. That changes a step's gradient by some 10 ε (ε = 1.1e-16)
    # of its size; 20 steps, each counted ten times by momentum 0.9, make that 2.2e-13 at the most.
    scale = np.abs(alone.flat_parameters).max()
    np.testing.assert_allclose(
        replica.flat_parameters, alone.flat_parameters, rtol=0, atol=4e-13 * scale
    )
    np.testing.assert_allclose(losses, expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize(
    ("strategy", "ranks", "batch", "passes", "optimizer"),
    [
        pytest.param(
            *method, *batch, (AVERAGED, CLIPPED)[(i + j) % 2],
            marks=[] if (i + j) % 4 == 2 else pytest.mark.more,
        )
        for i, method in enumerate(METHODS[:3])
        for j, batch in enumerate([(2, 2), (3, 4), (7, 2), (10, 3)])
    ],
)  # fmt: skip
def test_several_passes_equal_one_pass_of_one_rank(
    request: pytest.FixtureRequest, ranks: str, strategy: str, optimizer: Optimizer, batch: int,
    passes: int,
) -> None:  # fmt: skip
    world: World = request.getfixturevalue(ranks)
    alone, expected = _train(World.single(), strategy, optimizer, batch, steps=20)
    replica, losses = _train(world, strategy, optimizer, batch, steps=20, passes=passes)
    world.barrier()
    world.check_equal(replica.flat_parameters, "parameters")
    assert replica.updates == 20
    # As above: passes are further partial sums.
    scale = np.abs(alone.flat_parameters).max()
    np.testing.assert_allclose(
        replica.flat_parameters, alone.flat_parameters, rtol=0, atol=1e-12 * scale
    )
    before = np.array(replica.flat_parameters)
    with averaged_parameters(world, replica, strategy):
        if optimizer is AVERAGED:
            world.check_equal(replica.flat_parameters, "averages")
            found = np.array(replica.flat_parameters)
            np.testing.assert_allclose(
                found, alone.flat_state["average"], rtol=0, atol=1e-12 * scale
            )
            assert np.abs(found - before).max() > 1e-4
    np.testing.assert_array_equal(replica.flat_parameters, before)
    np.testing.assert_allclose(losses, expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("strategy", tiered(STRATEGIES, ["central"]))
def test_no_rank_predicts_with_an_old_average(connected: World, strategy: str) -> None:
    random = np.random.default_rng(5)
    x, y = random.normal(size=(12, 2, 6, 6)).astype(np.float32), random.integers(0, 3, size=12)
    found: list[np.ndarray] = []
    has_average = strategy == "mirrored" or connected.is_rank_zero

    def predict(trainer: Trainer, result: object) -> None:
        with nullcontext() if has_average else pytest.raises(UserError, match="--strategy central"):
            found.append(trainer.predict(x))

    trainer = Trainer(
        NETWORK, (x, y, x, y), world=connected, progress=False, callbacks=[AfterStep(predict)],
        backend="reference", precision="fp64", batch_size=6, steps=4, average_weights=0.6,
        strategy=strategy, validation=0.0,
    )  # fmt: skip
    trainer.fit()
    assert len(found) == (4 if has_average else 0)
    connected.check_equal(trainer.predict(x), "predictions after training")


@pytest.mark.parametrize(
    ("strategy", "ranks", "batch", "passes"),
    [
        *(pytest.param(*method, 7, 1) for method in METHODS[1:]),
        pytest.param(*METHODS[0], 10, 3),
        pytest.param(*METHODS[0], 7, 1, marks=pytest.mark.more),
        *(
            pytest.param(*method, *batch, marks=pytest.mark.more)
            for i, method in enumerate(METHODS)
            for batch in ((1, 1), (2, 3), *[(7, 2), (2, 1), (10, 3), (10, 1)][i : i + 1])
        ),
    ],
)  # fmt: skip
def test_batch_normalisation_over_all_ranks(
    request: pytest.FixtureRequest, ranks: str, strategy: str, batch: int, passes: int
) -> None:
    world: World = request.getfixturevalue(ranks)
    options = (
        strategy, SGD(momentum=0.9), batch, "reference", "fp64", NORMALIZED_STEPS, NORMALIZED,
        passes,
    )  # fmt: skip
    alone, expected = _train(World.single(), *options)
    replica, losses = _train(world, *options)
    world.barrier()
    world.check_equal(replica.flat_parameters, "parameters")
    # As above. Normalisation divides by deviations of about 0.1, so errors grow faster.
    scale = np.abs(alone.flat_parameters).max()
    np.testing.assert_allclose(
        replica.flat_parameters, alone.flat_parameters, rtol=0, atol=1e-11 * scale
    )
    np.testing.assert_allclose(losses, expected, rtol=0, atol=1e-10)
    for name, values in replica.statistics.items():
        world.check_equal(values, name)
        assert np.abs(values - alone.statistics[name]).max() < 1e-11 * (1 + np.abs(values).max())


FROZEN = SGD(
    momentum=0.9, clip_norm=0.2, average_decay=0.6, rate_factor="dense1.*=0.5",
    freeze="conv1,batchnorm1,conv2.weight",
)  # fmt: skip
"""A frozen layer, a frozen normalisation, and a layer of which one parameter is trained."""


@pytest.mark.parametrize(
    ("strategy", "ranks", "passes"),
    [
        pytest.param(*method, passes, marks=[] if (i + passes) % 2 else pytest.mark.more)
        for i, method in enumerate(METHODS)
        for passes in (1, 2)
    ],
)
def test_frozen_parameters_keep_their_bits(
    request: pytest.FixtureRequest, ranks: str, strategy: str, passes: int
) -> None:
    world: World = request.getfixturevalue(ranks)
    options = strategy, FROZEN, 7, "reference", "fp64", STEPS, NORMALIZED, passes
    alone, expected = _train(World.single(), *options)
    replica, losses = _train(world, *options)
    world.barrier()
    world.check_equal(replica.flat_parameters, "parameters")
    initial = load_backend("reference").make_replica(
        make_plan(NORMALIZED, load_backend("reference"), 7, precision="fp64"), seed=3
    )
    for name, value in initial.parameters.items():
        if name in replica.gradients:
            assert not np.array_equal(replica.parameters[name], value), name
        else:
            np.testing.assert_array_equal(replica.parameters[name], value)
    scale = np.abs(alone.flat_parameters).max()
    for name, value in alone.parameters.items():
        np.testing.assert_allclose(replica.parameters[name], value, rtol=0, atol=1e-11 * scale)
    np.testing.assert_allclose(losses, expected, rtol=0, atol=1e-10)
    for name, value in replica.statistics.items():
        is_frozen = np.array_equal(value, initial.statistics[name])
        assert is_frozen == name.startswith("batchnorm1.")
    before = np.array(replica.flat_parameters)
    with averaged_parameters(world, replica, strategy):
        world.check_equal(replica.flat_parameters, "averages")
        for name, value in initial.parameters.items():
            assert np.array_equal(replica.parameters[name], value) == (
                name not in replica.gradients
            )
    np.testing.assert_array_equal(replica.flat_parameters, before)


@pytest.mark.more
def test_batch_normalisation_of_devices_by_mpi(
    connected: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dptrain.backends.cuda.backend.open_device", lambda rank: Emulator())
    options = "mirrored", SGD(momentum=0.9), 7, "cuda", "fp32", 3, NORMALIZED
    alone, expected = _train(World.single(), *options)
    replica, losses = _train(connected, *options)
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    for name, values in replica.statistics.items():
        connected.check_equal(values, name)
        np.testing.assert_allclose(values, alone.statistics[name], rtol=1e-4, atol=1e-5)


@pytest.mark.more
@pytest.mark.parametrize(
    ("optimizer", "passes"),
    [
        pytest.param(SGD(momentum=0.9), 1, id="sgd"),
        pytest.param(CLIPPED, 1, id="clipped"),
        pytest.param(CLIPPED, 2, id="passes"),
        pytest.param(SGD(average_decay=0.5), 2, id="averaged"),
        pytest.param(SGD(momentum=0.9, freeze="conv1,dense1.bias"), 1, id="frozen"),
    ],
)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_parameters_in_the_memory_of_a_device(
    connected: World, strategy: str, optimizer: Optimizer, passes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("dptrain.backends.cuda.backend.open_device", lambda rank: Emulator())
    options = strategy, optimizer, 7, "cuda", "fp32", 5
    alone, expected = _train(World.single(), *options)
    replica, losses = _train(connected, *options, passes=passes)
    connected.check_equal(replica.memory.download(replica.flat_parameters), "parameters")
    # As above, with 5 steps and ε = 6e-8.
    for name, value in alone.parameters.items():
        scale = 3e-5 * np.abs(value).max()
        np.testing.assert_allclose(replica.parameters[name], value, rtol=0, atol=scale)
    np.testing.assert_allclose(losses, expected, rtol=3e-5)
    with averaged_parameters(connected, replica, strategy):
        for name, value in alone.state.get("average", alone.parameters).items():
            scale = 3e-5 * np.abs(value).max()
            np.testing.assert_allclose(replica.parameters[name], value, rtol=0, atol=scale)


@pytest.mark.parametrize(
    "options",
    [
        {"backend": "reference", "precision": "fp64"},
        {"backend": "reference", "precision": "fp64", "accumulate": 2},
        {"backend": "numba", "shards": 8},
    ],
)
@pytest.mark.parametrize("sampling", ["shuffle", "balanced"])
def test_weights_of_the_global_minibatch(
    connected: World, sampling: str, options: dict[str, Any]
) -> None:
    """Ranks have minibatches of unequal weights, and the last one of an epoch has 3 samples."""
    random = np.random.default_rng(5)
    x, y = random.normal(size=(23, 2, 6, 6)).astype(np.float32), random.integers(0, 3, size=23)
    losses, found, scores = [], [], []
    weights = random.random(23)
    data = {"x_train": x, "y_train": y, "x_test": x, "y_test": y, "sample_weight_train": weights}
    for world in (World.single(), connected):
        trainer = Trainer(
            NETWORK, data, world=world, progress=False, batch_size=10, epochs=3,
            validation=0.0, class_weights="1=5,2=0.3", sampling=sampling, **options,
        )  # fmt: skip
        trainer.fit()
        scores.append(trainer.evaluate(x, y, sample_weight=weights)["loss"])
        connected.barrier()
        losses.append(trainer.history["train_loss"])
        found.append(np.concatenate([each.reshape(-1) for each in trainer.parameters.values()]))
    tolerance = 0 if "shards" in options else 1e-12
    np.testing.assert_allclose(*losses, rtol=tolerance)
    np.testing.assert_allclose(*scores, rtol=tolerance)
    np.testing.assert_allclose(*found, rtol=0, atol=tolerance * np.abs(found[0]).max())


OWN = loss("ranks_huber", "where(abs(z - y) < d, (z - y) ** 2, d * abs(z - y))", d=1.0)(0.5)


@pytest.mark.parametrize("own", [OWN, SoftmaxSquaredError()], ids=lambda own: own.kind)
@pytest.mark.parametrize("backend", ["reference", "numba"])
def test_losses_have_the_same_bits_with_micro_shards(
    connected: World, own: Loss, backend: str
) -> None:
    random = np.random.default_rng(5)
    x, y = random.normal(size=(23, 6)).astype(np.float32), random.integers(0, 3, size=23)
    targets = y if own.targets == "classes" else x[:, :3] ** 2
    network, found = Network((6,), [Dense(3)], own, "losses"), []
    for world in (World.single(), connected):
        trainer = Trainer(
            network, (x, targets), world=world, progress=False, batch_size=10, epochs=2,
            validation=0.0, shards=8, backend=backend,
        )  # fmt: skip
        trainer.fit()
        connected.barrier()
        found.append(np.concatenate([each.reshape(-1) for each in trainer.parameters.values()]))
    np.testing.assert_array_equal(*found)


def test_ranks_read_their_samples_from_one_file(connected: World, tmp_path: Path) -> None:
    import h5py

    random = np.random.default_rng(5)
    x, y = random.normal(size=(23, 2, 6, 6)).astype(np.float32), random.integers(0, 3, size=23)
    path = connected.broadcast_json(str(tmp_path / "samples.h5"))
    if connected.is_rank_zero:
        with h5py.File(path, "w") as file:
            for name in ("train", "test"):
                file[f"{name}/x"], file[f"{name}/y"] = x, y
    connected.barrier()
    found = []
    for world, data in ((World.single(), (x, y, x, y)), (connected, f"hdf5:{path}")):
        trainer = Trainer(
            NETWORK, data, world=world, progress=False, backend="numba", shards=4, batch_size=10,
            epochs=2, validation=0.0,
        )  # fmt: skip
        trainer.fit()
        connected.barrier()
        found.append(np.concatenate([each.reshape(-1) for each in trainer.parameters.values()]))
    np.testing.assert_array_equal(*found)
