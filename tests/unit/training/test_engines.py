"""Engines, the replicas that they drive, and gradient sums that update slice by slice."""

from __future__ import annotations

import inspect
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import dptrain
from dptrain.backends import BACKENDS, load_backend
from dptrain.backends.device_replica import DeviceReplica
from dptrain.backends.null.backend import NULL_LOSS
from dptrain.backends.replica import CropWindowReplica, Replica
from dptrain.batch import Batch
from dptrain.comm import make_gradient_sum
from dptrain.comm.deadline import RankTimeoutError
from dptrain.comm.sums.base import GradientSum, UpdateSlice
from dptrain.comm.sums.none import NoSum
from dptrain.comm.transport import check_strategy, choose_transport
from dptrain.comm.world import World
from dptrain.errors import UserError
from dptrain.measure.recorder import StepRecorder
from dptrain.measure.step_record import DELAYS, STEP
from dptrain.network import Dense, Dropout, Flatten, Network, ReLU
from dptrain.plan import SGD, Adam, Optimizer, make_buckets, make_plan
from dptrain.plan.flat import ALIGNMENT
from dptrain.training.callbacks import stage_times
from dptrain.training.engines import DeviceEngine, HostEngine, make_engine

NETWORK = Network((6,), [Dense(40, weight_decay=0.01), ReLU(), Dropout(0.5), Dense(3)])


def make(optimizer: Optimizer | None = None, backend: str = "reference") -> Replica:
    return dptrain.make_replica(NETWORK, backend, batch_size=8, seed=1, optimizer=optimizer)


def minibatch(seed: int = 0) -> tuple[Any, Any]:
    random = np.random.default_rng(seed)
    return random.standard_normal((8, 6), np.float32), random.integers(0, 3, 8).astype(np.int32)


@pytest.mark.parametrize("backend", ["reference", "numba", "cuda"])
def test_dropout_masks_advance_in_a_python_loop(backend: str) -> None:
    """Without an update the parameters stay the same, so that only the masks differ."""
    replica, explicit = make(backend=backend), make(backend=backend)
    x, y = minibatch()
    losses = []
    for step in range(4):
        losses.append(replica.forward_backward(x, y))
        assert replica.forward_backward(x, y) == losses[-1], "the step has not advanced"
        replica.update(learning_rate=0.0)
        assert explicit.forward_backward(x, y, step=step) == losses[-1]
    assert len(set(losses)) == 4


def run_steps(replica: Replica, gradient_sum: GradientSum, steps: int = 3) -> list[float]:
    """Make steps; the loss of the last one is not finite."""
    buckets = gradient_sum.buckets
    losses = []
    with make_engine(replica, gradient_sum, buckets, StepRecorder(replica.plan.stages)) as engine:
        for step in range(steps):
            x, y = minibatch(step)
            if step == steps - 1:
                x[0] = np.inf
            engine.step(iter([Batch(step, 0, x, y, np.arange(8), 8)]), 0.05)
            losses += [result.loss for result in engine.results(wait=True)]
    return losses


class SliceSum(NoSum):
    """Sums and updates slice by slice, as a window in shared memory is used."""

    is_identity = False
    slices = 3

    def finish_and_update(self, update_slice: UpdateSlice, learning_rate: float) -> None:
        bounds = np.linspace(0, self.num_parameters // ALIGNMENT, self.slices + 1).astype(int)
        for start, stop in pairwise(bounds):
            update_slice(slice(int(start) * ALIGNMENT, int(stop) * ALIGNMENT), learning_rate)


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("backend", ["reference", "numba"])
@pytest.mark.parametrize("optimizer", [SGD(momentum=0.9), Adam()], ids=["sgd", "adam"])
def test_an_update_by_slices_gives_the_same_bits(backend: str, optimizer: Optimizer) -> None:
    """Slices need not end where parameters do; a loss that is not finite changes nothing."""
    whole, sliced = make(optimizer, backend), make(optimizer, backend)
    buckets = make_buckets(whole.plan)
    size = whole.plan.layout.size
    expected = run_steps(whole, NoSum(World.single(), whole.flat_gradients, size, buckets))
    found = run_steps(sliced, SliceSum(World.single(), sliced.flat_gradients, size, buckets))
    np.testing.assert_array_equal(found, expected)
    assert not np.isfinite(found[-1])
    np.testing.assert_array_equal(sliced.flat_parameters, whole.flat_parameters)
    for name, flat in whole.flat_state.items():
        np.testing.assert_array_equal(sliced.flat_state[name], flat)
    assert sliced.updates == whole.updates == 2
    assert np.isfinite(whole.flat_parameters).all()


def test_stages_are_timed_and_their_times_do_not_accumulate() -> None:
    replica = make(backend="null")
    buckets = make_buckets(replica.plan)
    recorder = StepRecorder(replica.plan.stages)
    alone = make_gradient_sum("mirrored", World.single(), replica, buckets)
    engine = make_engine(replica, alone, buckets, recorder)
    x, y = minibatch()
    for step in range(200):
        engine.step(iter([Batch(step, 0, x, y, np.arange(8), 8)]), 0.05)
    rows = recorder.rows()
    parts = rows[:, : len(replica.plan.stages) + 1].sum(axis=1)
    assert (rows[:, : len(replica.plan.stages)] >= 0).all()
    assert (parts <= rows[:, recorder.names.index(STEP)]).all()
    assert [result.loss for result in engine.results()] == [NULL_LOSS] * 200


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("failing", [1, 6])
@pytest.mark.parametrize("backend", ["reference", "numba", "null"])
def test_a_step_of_several_passes(backend: str, failing: int) -> None:
    """Times are sums over passes, and a loss that is not finite in any of them ends training."""
    chosen = load_backend(backend)
    plan = make_plan(NETWORK, chosen, 4, optimizer=SGD(momentum=0.9), passes=2)
    replica = chosen.make_replica(plan, seed=1)
    buckets, recorder = make_buckets(plan), StepRecorder(plan.stages)
    alone = make_gradient_sum("mirrored", World.single(), replica, buckets)
    engine = make_engine(replica, alone, buckets, recorder)
    for step in range(4):
        x, y = minibatch(step)
        x[failing] = np.inf if step == 3 else x[failing]
        parts = [
            Batch(step, 0, x[rows], y[rows], np.arange(8)[rows], 8, part=part)
            for part, rows in enumerate((slice(0, 4), slice(4, 8)))
        ]
        engine.step(iter(parts), 0.05)
    results, rows = engine.results(), recorder.rows()
    assert [result.samples for result in results] == [8] * 4
    assert recorder.mean_samples() == 8
    assert (rows >= 0).all()
    assert (
        rows[:, : len(plan.stages) + 1].sum(axis=1) <= rows[:, recorder.names.index(STEP)]
    ).all()
    if backend != "null":
        assert [bool(np.isfinite(result.loss)) for result in results] == [True] * 3 + [False]
        assert replica.updates == 3
        assert replica.first_non_finite() == "the input"


def test_the_null_backend_trains() -> None:
    x, y = np.zeros((64, 1, 8, 8), np.uint8), np.arange(64) % 3
    network = Network((1, 8, 8), [Flatten(), Dense(3)], name="linear")
    trainer = dptrain.Trainer(
        network, (x, y, x, y), backend="null", batch_size=8, epochs=2, progress=False
    )
    history = trainer.fit()
    assert history[-1]["step"] == 16
    assert history["train_loss"] == [NULL_LOSS] * 2


def test_engines_follow_the_memory() -> None:
    for backend, expected in (("reference", HostEngine), ("cuda", DeviceEngine)):
        replica = make(backend=backend)
        buckets = make_buckets(replica.plan)
        alone = make_gradient_sum("mirrored", World.single(), replica, buckets)
        engine = make_engine(replica, alone, buckets, StepRecorder(replica.plan.stages))
        assert type(engine) is expected


def test_a_device_that_waits_too_long_names_the_rank() -> None:
    def never(timeout: float) -> list[float]:
        raise TimeoutError("the GPU has not finished its work after 300 s")

    replica = make(backend="cuda")
    buckets = make_buckets(replica.plan)
    world = World.single()
    alone = make_gradient_sum("mirrored", world, replica, buckets)
    engine = make_engine(replica, alone, buckets, StepRecorder(replica.plan.stages))
    assert isinstance(engine, DeviceEngine)
    with pytest.raises(TimeoutError, match="the GPU has not finished"):
        engine.steps.wait_for(never)
    world.size, world.rank = 2, 1
    with pytest.raises(RankTimeoutError, match=r"waited 0 s for a gradient sum") as caught:
        engine.steps.wait_for(never)
    assert caught.value.rank == 1


def public_names(kind: type) -> set[str]:
    return {name for name, _ in inspect.getmembers(kind) if not name.startswith("_")}


@pytest.mark.parametrize("backend", BACKENDS)
def test_replicas_of_all_backends_offer_the_same_names(backend: str) -> None:
    """Replicas that keep images also have what `_cache_images` needs, and those on a device what
    `DeviceEngine` needs.
    """
    if backend == "cudnn":
        from dptrain.backends.cudnn.replica import CudnnReplica

        kind: type[Replica] = CudnnReplica
    else:
        kind = type(make(backend=backend))
    kinds = (DeviceReplica, CropWindowReplica, Replica)
    common = next(each for each in kinds if issubclass(kind, each))
    assert public_names(kind) == public_names(common)
    assert public_names(DeviceReplica) > public_names(Replica)
    own = {name for name in public_names(Replica) if name in vars(Replica)}
    assert len(own) <= 22


@pytest.mark.parametrize("name", BACKENDS)
def test_every_backend_can_be_loaded(name: str) -> None:
    assert load_backend(name).name == name


@pytest.mark.parametrize("wanted", ["peer", "nccl"])
def test_transports_between_gpus_are_refused_on_one_cpu_rank(wanted: str) -> None:
    replica = make()
    for accepted in ("auto", "shared", "mpi", "host"):
        assert choose_transport(World.single(), replica, accepted) == "mpi"
    with pytest.raises(UserError, match=f"--transport {wanted} .* computes on the CPU"):
        choose_transport(World.single(), replica, wanted)


def test_mpi_on_gpus_does_not_support_the_central_strategy() -> None:
    with pytest.raises(UserError, match="--transport mpi does not support --strategy central"):
        check_strategy("mpi", "central", on_gpu=True)
    check_strategy("mpi", "central", on_gpu=False)
    for strategy in ("mirrored", "central"):
        check_strategy("nccl", strategy, on_gpu=True)
    check_strategy("mpi", "mirrored", on_gpu=True)


def test_shared_memory_does_not_support_the_central_strategy() -> None:
    with pytest.raises(UserError, match="--transport shared does not support --strategy central"):
        check_strategy("shared", "central", on_gpu=False)


def test_delays_that_no_kernel_counts_are_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dptrain.measure.machine.scheduling._File.read", lambda file: b"")
    x, y = np.zeros((64, 1, 8, 8), np.uint8), np.arange(64) % 3
    network = Network((1, 8, 8), [Flatten(), Dense(3)], name="linear")
    trainer = dptrain.Trainer(
        network, (x, y, x, y), backend="reference", batch_size=8, epochs=1, progress=False
    )
    trainer.fit()
    found = stage_times(trainer)
    delays = {tag: ms for tag, ms in found.items() if "run_delay" in tag}
    assert len(delays) == len(DELAYS)
    assert set(delays.values()) == {None}
    assert all(ms is not None for tag, ms in found.items() if tag not in delays)
    assert trainer.summary["step_parts"]["all_steps"]["without_core"] is None
