"""Steps whose sums are enqueued as NCCL's are, with MPI in NCCL's place and an emulated device."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from numpy.typing import NDArray

import dptrain.api as api
from dptrain.backends.replica import Replica
from dptrain.batch import Batch
from dptrain.comm import STRATEGIES, make_gradient_sum, make_statistics_sum
from dptrain.comm.sums import nccl
from dptrain.comm.transport import choose_transport
from dptrain.comm.world import World
from dptrain.errors import UserError
from dptrain.measure.recorder import StepRecorder
from dptrain.measure.step_record import EXPOSED
from dptrain.network import BatchNorm2d, Conv2d, Dense, Dropout, Flatten, MaxPool2d, Network, ReLU
from dptrain.plan import SGD, make_buckets
from dptrain.training.engines import StepResult, device, device_steps, make_engine
from tests.emulator.emulator import Emulator

pytestmark = pytest.mark.mpi

NETWORK = Network(
    (2, 6, 6), [Conv2d(3), ReLU(), MaxPool2d(2), Flatten(), Dropout(0.25), Dense(5), ReLU(),
                Dense(3)],
)  # fmt: skip

FLOAT32, FLOAT64 = 7, 8
"""Numbers of NCCL's types."""


class Communicator:
    """NCCL's calls, on memory that the host has: blocking, and in the order of the calls."""

    def __init__(self, size: int, number: bytes, rank: int) -> None:
        self.comm = MPI.COMM_WORLD
        assert (size, rank) == (self.comm.Get_size(), self.comm.Get_rank())
        assert number == b"12"

    def destroy(self) -> None:
        self.comm = None

    @staticmethod
    def _array(address: int, count: int) -> NDArray[np.float32]:
        return np.ctypeslib.as_array((ctypes.c_float * count).from_address(address))

    def allReduce(self, source: int, target: int, count: int, kind: int, *_: Any) -> None:
        assert source == target
        number = {FLOAT32: ctypes.c_float, FLOAT64: ctypes.c_double}[kind]
        array = np.ctypeslib.as_array((number * count).from_address(source))
        self.comm.Allreduce(MPI.IN_PLACE, array)

    def reduce(
        self, source: int, target: int, count: int, kind: int, op: int, root: int, *_: Any
    ) -> None:
        mine = self._array(source, count)
        if self.comm.Get_rank() == root:
            self.comm.Reduce(MPI.IN_PLACE, mine, root=root)
        else:
            self.comm.Reduce(mine, None, root=root)

    def broadcast(
        self, source: int, target: int, count: int, kind: int, root: int, *_: Any
    ) -> None:
        self.comm.Bcast(self._array(source, count), root)


class Device(Emulator):
    """An emulated device that says it is a GPU; the n-th has identity n."""

    on_gpu = True


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank has a device of its own, and NCCL is what `Communicator` makes of it."""

    def open_device(rank: int) -> Device:
        device = Device()
        device.identity = f"device {MPI.COMM_WORLD.Get_rank()}"
        return device

    module = SimpleNamespace(
        get_unique_id=lambda: b"12", NCCL_FLOAT32=FLOAT32, NCCL_FLOAT64=FLOAT64, NCCL_SUM=0,
        NcclCommunicator=Communicator,
    )  # fmt: skip
    monkeypatch.setattr("dptrain.backends.cuda.backend.open_device", open_device)
    monkeypatch.setattr(nccl, "import_nccl", lambda: module)


def train(
    world: World, strategy: str, number: int, network: Network = NETWORK
) -> tuple[Replica, list[StepResult], StepRecorder]:
    """Some steps of 7 samples in all, by the engine that training uses."""
    replica = api.make_replica(network, "cuda", 7, seed=3, optimizer=SGD(momentum=0.9))
    buckets = make_buckets(replica.plan, 100)
    sums = make_gradient_sum(strategy, world, replica, buckets)
    assert sums.enqueues
    recorder = StepRecorder(replica.plan.stages)
    statistics_sum = make_statistics_sum(world, replica, sums.transport)
    engine = make_engine(replica, sums, buckets, recorder, statistics_sum)
    random = np.random.default_rng(7)
    cut = [7 * rank // world.size for rank in range(world.size + 1)]
    mine = slice(cut[world.rank], cut[world.rank + 1])
    results = []
    with engine:
        for step in range(number):
            x = random.normal(size=(7, 2, 6, 6)).astype(np.float32)
            y = random.integers(0, 3, size=7).astype(np.int32)
            batch = Batch(step, 0, x[mine], y[mine], np.arange(7)[mine], 7)
            engine.step(iter([batch]), 0.05, stop=step == 3 and world.rank == world.size - 1)
            results += engine.results()
        results += engine.results(wait=True)
    return replica, results, recorder


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ranks_with_devices_train_as_one(
    connected: World, devices: None, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "FIRST_TIMED", 2)
    # Steps that are timed otherwise wait for a turn that was captured.
    monkeypatch.setattr(device_steps.DeviceSteps, "_is_ready", lambda *arguments: True)
    alone, expected, _ = train(World.single(), strategy, 5)
    replica, results, recorder = train(connected, strategy, 5)
    connected.check_equal(replica.memory.download(replica.flat_parameters), "parameters")
    assert replica.updates == 5
    # As in test_equals_one_rank, with 5 steps and ε = 6e-8.
    for name, value in alone.parameters.items():
        scale = 3e-5 * np.abs(value).max()
        np.testing.assert_allclose(replica.parameters[name], value, rtol=0, atol=scale)
    assert [result.step for result in results] == [0, 1, 2, 3, 4]
    # The wish of step 3 is known behind step 4, which is the last one then.
    assert [result.stop for result in results] == [False, False, False, False, True]
    for one, other in zip(results, expected, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=3e-5)
        assert (one.correct, one.samples) == (other.correct, 7)
    assert recorder.all_rows()[2].sum() == 1
    assert EXPOSED in recorder.names


@pytest.mark.more
def test_batch_normalisation_over_all_ranks(connected: World, devices: None) -> None:
    network = Network((2, 6, 6), [Conv2d(3), BatchNorm2d(), ReLU(), Flatten(), Dense(3)])
    alone, expected, _ = train(World.single(), "mirrored", 3, network)
    replica, results, _ = train(connected, "mirrored", 3, network)
    for one, other in zip(results, expected, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-4)
    for name, values in replica.statistics.items():
        connected.check_equal(values, name)
        np.testing.assert_allclose(values, alone.statistics[name], rtol=1e-4, atol=1e-5)


def test_ranks_that_share_a_device_sum_through_the_host(connected: World, devices: None) -> None:
    replica = api.make_replica(NETWORK, "cuda", 2)
    replica.memory.identity = "one for all"
    assert choose_transport(connected, replica) == "host"
    if connected.size > 1:
        with pytest.raises(UserError, match="NCCL needs a GPU for every rank"):
            choose_transport(connected, replica, "nccl")
        with pytest.raises(UserError, match="does not report support for GPU memory"):
            choose_transport(connected, replica, "mpi")
    with pytest.raises(UserError, match="--transport mpi does not support --strategy central"):
        choose_transport(connected, replica, "mpi", strategy="central")


def test_transports_between_gpus_are_refused_on_the_cpu(world: World) -> None:
    replica = api.make_replica(NETWORK, "reference", 2)
    for accepted in ("auto", "mpi", "host"):
        assert choose_transport(world, replica, accepted) == "mpi"
    for wanted in ("peer", "nccl"):
        with pytest.raises(UserError, match="transfers gradients between GPUs"):
            choose_transport(world, replica, wanted)
