"""Sums by kernels that write into other ranks' memory, which emulated devices share as files."""

from __future__ import annotations

import mmap
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI
from numpy.typing import NDArray

from dptrain.backends import load_backend
from dptrain.backends.cuda.device.device import Array
from dptrain.backends.device_replica import DeviceReplica, SummedStatistics
from dptrain.backends.replica import Replica
from dptrain.batch import Batch
from dptrain.comm import STRATEGIES, make_gradient_sum, make_statistics_sum
from dptrain.comm.sums import peer
from dptrain.comm.sums.enqueued import Shared
from dptrain.comm.sums.peer import Peers
from dptrain.comm.transport import choose_transport
from dptrain.comm.world import World
from dptrain.data.loading.sharding import pass_shards
from dptrain.errors import UserError
from dptrain.measure.recorder import StepRecorder
from dptrain.measure.step_record import DELAYS, EXPOSED, STATISTICS, STEP
from dptrain.network import BatchNorm2d, Conv2d, Dense, Flatten, Network, ReLU
from dptrain.plan import SGD, make_buckets, make_plan
from dptrain.plan.flat import STOP
from dptrain.training.engines import StepResult, make_engine
from tests.emulator.emulator import DeviceArray, Emulator
from tests.tiers import tiered

pytestmark = pytest.mark.mpi

NETWORK = Network((11,), [Dense(29), ReLU(), Dense(3)])
NORMALIZED = Network(
    (1, 4, 3), [Conv2d(5), BatchNorm2d(), ReLU(), Conv2d(3), BatchNorm2d(), Flatten(), Dense(3)]
)


class Device(Emulator):
    """An emulated GPU whose memory other processes can map."""

    on_gpu = True

    def __init__(self) -> None:
        super().__init__()
        self.identity = f"device {MPI.COMM_WORLD.Get_rank()}"
        self._mapped: dict[int, NDArray[np.uint8]] = {}
        self._files: list[Path] = []

    def _map(self, path: Path) -> int:
        with path.open("r+b") as file:
            memory = np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8)
        start = int(memory.ctypes.data)
        self._mapped[start], self._memory[start] = memory, start + memory.size
        return start

    def share(self, nbytes: int) -> tuple[Array, bytes]:
        descriptor, name = tempfile.mkstemp(prefix="dptrain-peer-")
        os.ftruncate(descriptor, nbytes)
        os.close(descriptor)
        self._files.append(Path(name))
        return self._mapped[self._map(Path(name))].view(DeviceArray), name.encode()

    def unshare(self, memory: Array) -> None:
        self._files.pop().unlink()
        self.close_shared(self.address(memory))

    def open_shared(self, handle: bytes) -> int:
        path = Path(handle.decode())
        if not path.exists():
            raise UserError("no such memory")
        return self._map(path)

    def close_shared(self, address: int) -> None:
        del self._mapped[address], self._memory[address]


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank has a device of its own, and sums take several blocks."""
    monkeypatch.setattr("dptrain.backends.cuda.backend.open_device", lambda rank: Device())
    monkeypatch.setattr(peer, "THREADS", 32)
    monkeypatch.setattr(peer, "BLOCKS", 3)


def small_replica(network: Network = NETWORK, passes: int = 1) -> Replica:
    backend = load_backend("cuda")
    backend.choose_device(0)
    plan = make_plan(network, backend, -(-7 // passes), optimizer=SGD(momentum=0.9), passes=passes)
    return backend.make_replica(plan, seed=3)


def numbers_of(rank: int, turn: int, count: int) -> NDArray[np.float32]:
    """Of very different sizes, so that another order of addition gives other bits."""
    random = np.random.default_rng((rank, turn))
    x = random.normal(size=count) * 10.0 ** random.integers(-4, 4, size=count)
    return x.astype(np.float32)


def in_order(parts: list[NDArray[np.float32]]) -> NDArray[np.float32]:
    total = parts[0].copy()
    for part in parts[1:]:
        total += part
    return total


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("two_shot", [False, True], ids=["one-shot", "two-shot"])
@pytest.mark.parametrize(
    "count",
    tiered([4, 20, 400, 1028], [20, 1028]),
)
def test_sums_are_added_in_the_order_of_ranks(
    connected: World, devices: None, count: int, two_shot: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1028 numbers take every thread of three blocks of 32 three times."""
    monkeypatch.setattr(peer, "TWO_SHOT_BYTES", -1 if two_shot else 1 << 30)
    replica = small_replica()
    memory = replica.memory
    arrays = [memory.zeros((count,), "float32") for _ in range(2)]
    peers = Peers(connected, replica, Shared(arrays))
    for turn in range(5):
        for place, array in enumerate(arrays):
            memory.upload(array, numbers_of(connected.rank, 2 * turn + place, count))
        for place, array in enumerate(arrays):
            peers.all_reduce(array)
            parts = [numbers_of(rank, 2 * turn + place, count) for rank in range(connected.size)]
            np.testing.assert_array_equal(memory.download(array), in_order(parts))
    peers.close()


def statistics_of(device: Device, channels: int, *, has_count: bool) -> SummedStatistics:
    array = device.zeros((2 * channels + has_count,), "float64")
    return SummedStatistics(array, channels, 8, lambda: None)


@pytest.mark.mpi(min_size=2)
def test_statistics_are_added_in_the_order_of_ranks(connected: World, devices: None) -> None:
    """Several arrays of different lengths; 200 channels take every thread of a block 7 times."""
    replica = small_replica()
    memory, rank = replica.memory, connected.rank
    assert isinstance(memory, Device)
    every = [
        statistics_of(memory, channels, has_count=has_count)
        for channels in (200, 1, 7) for has_count in (False, True)
    ]  # fmt: skip
    peers = Peers(connected, replica, Shared(statistics=every))
    for turn in range(3):
        for statistics in every:
            array = statistics.array
            # Low words with all bits set are not flags of numbers that have not arrived.
            x = [numbers_of(r, turn, array.size) / np.float64(3.0) for r in range(connected.size)]
            for part in x:
                part[::5].view(np.uint64)[...] |= 0xFFFFFFFF
            memory.upload(array, x[rank])
            peers.sum_statistics(statistics)
            expected = x[0].copy()
            for part in x[1:]:
                expected += part
            found = memory.download(array)
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-15 * np.abs(x).max())
            exact = np.arange(array.size) % 5 != 0
            np.testing.assert_array_equal(found[exact], expected[exact])
            connected.check_equal(found, "sums")
    peers.close()


@pytest.mark.mpi(min_size=2)
def test_rank_0_reduces_and_broadcasts(connected: World, devices: None) -> None:
    replica = small_replica()
    memory = replica.memory
    given, got = (memory.zeros((size,), "float32") for size in (36, 400))
    peers = Peers(connected, replica, Shared(reduced=[given], broadcast=[got]))
    for turn in range(4):
        memory.upload(given, numbers_of(connected.rank, turn, 36))
        memory.upload(got, numbers_of(connected.rank, turn, 400))
        peers.reduce(given)
        if connected.is_rank_zero:
            parts = [numbers_of(rank, turn, 36) for rank in range(connected.size)]
            np.testing.assert_array_equal(memory.download(given), in_order(parts))
        peers.broadcast(got)
        np.testing.assert_array_equal(memory.download(got), numbers_of(0, turn, 400))
    peers.close()


@pytest.mark.mpi(min_size=2)
def test_any_bits_arrive(connected: World, devices: None) -> None:
    """The bits that mean that nothing has come are those of a NaN: it arrives as a NaN."""
    bits = np.array([peer.EMPTY, 0x80000000, 1, 0x7F800000], np.uint32)
    replica = small_replica()
    array = replica.memory.zeros((4,), "float32")
    peers = Peers(connected, replica, Shared(broadcast=[array]))
    for _ in range(3):
        sent = bits if connected.is_rank_zero else np.zeros_like(bits)
        replica.memory.upload(array, sent.view(np.float32))
        peers.broadcast(array)
        got = replica.memory.download(array)
        assert np.isnan(got[0])
        np.testing.assert_array_equal(got[1:].view(np.uint32), bits[1:])
        connected.barrier()  # Nothing comes back, by which rank 0 would know.
    peers.close()


@pytest.mark.mpi(min_size=2)
def test_a_wait_ends(connected: World, devices: None) -> None:
    """The last rank does not come: the others' sums are NaN, and so are all that follow."""
    replica = small_replica()
    memory = replica.memory
    arrays = [replica.flat_gradients[:64], replica.flat_gradients[64:]]
    peers = Peers(connected, replica, Shared(arrays), timeout_s=0.05)
    if connected.rank != connected.size - 1:
        peers.all_reduce(arrays[0])
        assert np.isnan(memory.download(replica.flat_gradients[:64])).all()
        assert np.isnan(replica.loss_sums()).all()
        peers.all_reduce(arrays[1])
        assert np.isnan(replica.loss_sums()).all()
    peers.close()


def train(
    world: World,
    strategy: str,
    number: int,
    network: Network = NETWORK,
    *,
    timed: bool = False,
    passes: int = 1,
) -> tuple[Replica, list[StepResult], StepRecorder]:
    """Some steps of 7 samples in all, by the engine that training uses."""
    replica = small_replica(network, passes)
    buckets = make_buckets(replica.plan, 100)
    sums = make_gradient_sum(
        strategy, world, replica, buckets, "peer" if world.size > 1 else "auto"
    )
    assert sums.enqueues
    statistics_sum = make_statistics_sum(world, replica, sums.transport)
    recorder = StepRecorder(replica.plan.stages)
    engine = make_engine(replica, sums, buckets, recorder, statistics_sum)
    if timed:
        engine.time_stages(0)
    random = np.random.default_rng(7)
    spans = pass_shards(7, world.rank, world.size, passes)
    results = []
    with engine:
        for step in range(number):
            x = random.normal(size=(7, *network.input_shape)).astype(np.float32)
            y = random.integers(0, 3, size=7).astype(np.int32)
            engine.step(
                iter(
                    [
                        Batch(step, 0, x[mine], y[mine], np.arange(7)[mine], 7, part=part)
                        for part, mine in enumerate(spans)
                    ]
                ),
                0.05,
            )
            results += engine.results()
        results += engine.results(wait=True)
    return replica, results, recorder


@pytest.mark.parametrize(("strategy", "passes"), [*((name, 1) for name in STRATEGIES),
                                                  *((name, 2) for name in STRATEGIES)])  # fmt: skip
def test_ranks_train_as_one(connected: World, devices: None, strategy: str, passes: int) -> None:
    alone, expected, _ = train(World.single(), strategy, 4)
    replica, results, _ = train(connected, strategy, 4, passes=passes)
    connected.check_equal(replica.memory.download(replica.flat_parameters), "parameters")
    for name, value in alone.parameters.items():
        # As in test_equals_one_rank, with 4 steps and ε = 6e-8.
        scale = 3e-5 * np.abs(value).max()
        np.testing.assert_allclose(replica.parameters[name], value, rtol=0, atol=scale)
    for one, other in zip(results, expected, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=3e-5)
        assert (one.correct, one.samples) == (other.correct, 7)


@pytest.mark.more
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("timed", ["none", "all", "rank 0"])
def test_batch_normalisation_over_all_ranks(
    connected: World, devices: None, timed: str, passes: int
) -> None:
    """Timed steps sum by kernels of their own, the others in those that compute statistics."""
    is_timed = timed == "all" or (timed == "rank 0" and connected.is_rank_zero)
    alone, expected, _ = train(World.single(), "mirrored", 4, NORMALIZED, passes=passes)
    replica, results, recorder = train(
        connected, "mirrored", 4, NORMALIZED, timed=is_timed, passes=passes
    )
    for one, other in zip(results, expected, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-4)
    for name, values in replica.statistics.items():
        connected.check_equal(values, name)
        np.testing.assert_allclose(values, alone.statistics[name], rtol=1e-4, atol=1e-5)
    if is_timed and connected.size > 1:
        row = dict(zip(recorder.names, recorder.rows()[-1].tolist(), strict=True))
        assert 0 < row[STATISTICS] < row[EXPOSED] < row[STEP]
        assert all(time >= 0 for name, time in row.items() if name not in DELAYS)


@pytest.mark.mpi(min_size=2)
def test_a_wait_for_statistics_ends(connected: World, devices: None) -> None:
    """The last rank computes no statistics: the loss of the others is not a number."""
    replica = small_replica(NORMALIZED)
    assert isinstance(replica, DeviceReplica)
    shared = Shared(statistics=list(replica.summed_statistics.values()))
    peers = Peers(connected, replica, shared, timeout_s=0.05)
    if connected.rank != connected.size - 1:
        replica.statistics_ranks = connected.size
        loss = replica.forward_backward(
            np.ones((7, *NORMALIZED.input_shape)), np.zeros(7, np.int64)
        )
        assert np.isnan(loss)
    peers.close()


@pytest.mark.mpi(min_size=2)
def test_receive_buffers_count_as_memory(connected: World, devices: None) -> None:
    replica = small_replica()
    buckets = make_buckets(replica.plan)
    sums = make_gradient_sum("mirrored", connected, replica, buckets, "peer")
    # Double buffering, each buffer with a part for every rank's gradient.
    assert sums.memory_bytes == 2 * connected.size * replica.flat_gradients.nbytes
    sums.close()
    statistics_sum = make_statistics_sum(connected, small_replica(NORMALIZED), "peer")
    assert statistics_sum is not None
    # A packet for two sums of each of 5 and 3 channels in both passes, and one for the count.
    assert statistics_sum.memory_bytes == 2 * connected.size * 16 * 3 * (5 + 3)
    statistics_sum.close()


def test_a_sum_that_was_given_up_ends_a_step(connected: World, devices: None) -> None:
    replica = small_replica()
    buckets = make_buckets(replica.plan)
    sums = make_gradient_sum("mirrored", World.single(), replica, buckets)
    engine = make_engine(replica, sums, buckets, StepRecorder(replica.plan.stages))
    x, y = np.zeros((7, 11), np.float32), np.zeros(7, np.int32)
    batch = Batch(0, 0, x, y, np.arange(7), 7)
    engine.step(iter([batch]), 0.05, stop=np.nan)  # type: ignore[arg-type]
    assert np.isnan(
        replica.memory.download(replica.flat_gradients)[replica.plan.layout.size + STOP]
    )
    with pytest.raises(TimeoutError, match="waited 300 s for a gradient sum: another rank hangs"):
        engine.results(wait=True)


@pytest.mark.mpi(min_size=2)
def test_missing_peer_access_is_an_error(
    connected: World, devices: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = small_replica()
    assert choose_transport(connected, replica) == "peer"

    with monkeypatch.context() as patch:
        patch.setattr("dptrain.comm.transport.PEER_BYTES", 100)
        assert choose_transport(connected, replica) != "peer"
        assert choose_transport(connected, replica, "peer") == "peer"

    def refused(match: str) -> None:
        with pytest.raises(UserError, match=match):
            choose_transport(connected, replica, "peer")
        assert choose_transport(connected, replica) != "peer"

    last = connected.rank == connected.size - 1
    with monkeypatch.context() as patch:
        patch.setattr(peer.socket, "gethostname", lambda: f"node{last}")
        refused("needs all ranks on one node")
    with monkeypatch.context() as patch:
        patch.setattr(replica.memory, "identity", "one for all")
        refused("some ranks share one")
    with monkeypatch.context() as patch:
        if last:
            patch.setattr(Device, "open_shared", Emulator.open_shared)
        refused("cannot access memory of other processes")
    with monkeypatch.context() as patch:
        patch.setattr(peer, "TEST_TIMEOUT_S", 0.05)
        if last:
            patch.setattr(Peers, "all_reduce", lambda self, array: None)
        refused("has the wrong result")
