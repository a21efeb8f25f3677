"""Steps in series have the bits of single steps, and their own losses, durations and failures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from dptrain.backends.cuda.backend import CudaBackend
from dptrain.backends.cuda.device.device import LOAD_STREAM, WEIGHT_STREAM, Array, Device, Function
from dptrain.backends.cuda.device.message import Message
from dptrain.backends.cuda.replica import CudaReplica
from dptrain.backends.pixels import PixelFormat
from dptrain.batch import Batch
from dptrain.comm import make_gradient_sum
from dptrain.comm.world import World
from dptrain.measure.recorder import StepRecorder
from dptrain.measure.step_record import STEP
from dptrain.network import Conv2d, Dense, Dropout, Flatten, MaxPool2d, Network, ReLU
from dptrain.plan import SGD, Adam, make_buckets, make_plan
from dptrain.plan.plan import INPUT
from dptrain.training.engines import FIRST_TIMED, DeviceEngine, StepResult, make_engine
from dptrain.training.engines.series import Series
from tests.emulator.emulator import Emulator
from tests.tiers import tiered

NETWORK = Network(
    (2, 6, 6),
    [Conv2d(4), ReLU(), MaxPool2d(2), Flatten(), Dense(8), ReLU(), Dropout(0.5), Dense(3)],
    name="small",
)  # fmt: skip
IMAGES = np.random.default_rng(1).integers(0, 256, (40, 2, 6, 6), dtype=np.uint8)
PIXELS = PixelFormat("uint8", 1 / 255, -0.5)


class LatestLoads(Emulator):
    """Runs loads of minibatches as late as they may run: when streams are joined."""

    def __init__(self) -> None:
        super().__init__()
        self._late: list[Callable[[], None]] = []
        self._is_late = False

    @contextmanager
    def side_stream(self, name: str = WEIGHT_STREAM) -> Iterator[None]:
        before, self._is_late = self._is_late, name == LOAD_STREAM
        yield
        self._is_late = before

    def function(self, file: str, name: str, **defines: int) -> Function:
        function = super().function(file, name, **defines)

        def run(grid: Any, block: Any, args: Sequence[Any], *, shared_bytes: int = 0) -> None:
            def launch() -> None:
                function(grid, block, args, shared_bytes=shared_bytes)

            self._late.append(launch) if self._is_late else launch()

        return run

    def join_streams(self) -> None:
        late, self._late = self._late, []
        for launch in late:
            launch()

    def download(self, source: Array, out: Any = None) -> Any:
        self.join_streams()
        return super().download(source, out)


def engine_on(
    device: Device, optimizer: SGD | Adam | None = None, *, streams: bool = False
) -> DeviceEngine:
    """Return an engine of one rank for up to four crop windows of cached or streamed images."""
    backend = CudaBackend(device)
    plan = make_plan(
        NETWORK, backend, 4, optimizer=SGD(momentum=0.9) if optimizer is None else optimizer
    )
    replica = backend.make_replica(plan, seed=0)
    if streams:
        assert replica.prepare_images(IMAGES.shape[1:], PIXELS)
    else:
        replica.cache_images(IMAGES, PIXELS)
    buckets = make_buckets(plan)
    alone = make_gradient_sum("mirrored", World.single(), replica, buckets)
    engine = make_engine(replica, alone, buckets, StepRecorder(plan.stages))
    assert isinstance(engine, DeviceEngine)
    return engine


def batches(
    replica: CudaReplica, counts: Sequence[int], *, encoded: bool, fails: int | None = None,
    cuts: bool = False, recolours: bool = True, streams: bool = False,
) -> Iterator[Batch]:  # fmt: skip
    """Yield minibatches of crop windows; the change of colours of one may be infinite."""
    rng = np.random.default_rng(0)
    for number, n in enumerate(counts):
        windows = rng.integers(0, 2, (1, n, 8 if cuts else 4))
        windows[:, :, 0] = rng.integers(0, len(IMAGES), (1, n))
        if cuts:
            windows[:, :, 6:] += 3
        colours = rng.standard_normal((1, n, 2), np.float32) if recolours else None
        if number == fails and colours is not None:
            colours[0, 0, 1] = np.inf
        y, samples = rng.integers(0, 3, (1, n)).astype(np.int32), rng.integers(0, 1000, (1, n))
        x = None
        if streams:
            x = IMAGES[windows[0, :, 0]]
            windows[:, :, 0] = np.arange(n)
        message = replica.encode_windows(samples, windows, colours) if encoded else None
        yield Batch(
            number, 0, x, y[0], samples[0], n, windows[0],
            None if colours is None else colours[0],
            message=None if message is None else message[0],
        )  # fmt: skip


def train(
    device: Device, counts: Sequence[int], optimizer: SGD | Adam | None = None, *,
    encoded: bool = True, evaluate: Sequence[int] = (), timed: tuple[int | None, int] = (None, 1),
    stop: int | None = None, **kind: Any,
) -> tuple[DeviceEngine, list[StepResult]]:  # fmt: skip
    """Make steps, read the parameters after some of them, and request a stop at one."""
    engine = engine_on(device, optimizer, streams=kind.get("streams", False))
    results = list[StepResult]()
    engine.time_stages(*timed)
    replica = engine.replica
    assert isinstance(replica, CudaReplica)
    source = batches(replica, counts, encoded=encoded, **kind)
    for number in range(len(counts)):
        engine.step(source, 0.05 / (1 + number), stop=number == stop)
        results += engine.results(wait=number in evaluate)
        if number in evaluate:
            replica.evaluate(np.ones((3, *NETWORK.input_shape), np.float32), np.zeros(3, np.int32))
        if any(result.stop for result in results):
            return engine, results
    return engine, results + engine.results(wait=True)


@pytest.fixture
def lengths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which the number of steps is added whenever a series is enqueued."""
    found = list[int]()
    enqueue = Series.enqueue

    def counted(series: Series, *args: Any) -> None:
        found.append(len(series.slots))
        enqueue(series, *args)

    monkeypatch.setattr(Series, "enqueue", counted)
    return found


CASES: dict[str, tuple[dict[str, Any], list[int]]] = {
    "whole series": ({"counts": [4] * 24}, [8, 8, 8]),
    "too few for the last one": ({"counts": [4] * 19}, [8, 8]),
    "a smaller minibatch ends an epoch": ({"counts": [4] * 10 + [3] + [4] * 12}, [8, 8]),
    "small ones first": ({"counts": [2] * 3 + [4] * 9}, [8]),
    "a rank without samples": ({"counts": [4] * 4 + [0] + [4] * 9}, [8]),
    "evaluation": ({"counts": [4] * 20, "evaluate": [4, 5, 14]}, [8]),
    # Steps 0 to 10 are single, and 11, 23 and 35 are timed.
    "timed steps": ({"counts": [4] * 40, "timed": (11, 12)}, [8, 8]),
    "adam with a moving average": (
        {"counts": [4] * 12, "optimizer": Adam(average_decay=0.9, clip_norm=0.5)}, [8],
    ),
    "cutouts": ({"counts": [4] * 9, "cuts": True}, [8]),
    "without colours": ({"counts": [4] * 9, "recolours": False}, [8]),
    "streamed images": (
        {"counts": [4] * 10 + [3] + [4] * 17, "streams": True, "evaluate": [4]}, [8, 8],
    ),
    "streamed images with cutouts": ({"counts": [4] * 8, "streams": True, "cuts": True}, [8]),
}  # fmt: skip


def test_streamed_images_are_the_cached_ones() -> None:
    cached, expected = train(Emulator(), [4] * 9)
    streamed, results = train(Emulator(), [4] * 9, streams=True)
    assert [result[:6] for result in results] == [result[:6] for result in expected]
    for name, value in cached.replica.parameters.items():
        np.testing.assert_array_equal(streamed.replica.parameters[name], value, name)


@pytest.mark.parametrize("device", tiered([Emulator, LatestLoads], [LatestLoads]))
@pytest.mark.parametrize("case", tiered(CASES, ["evaluation", "streamed images with cutouts"]))
def test_the_bits_are_those_of_single_steps(
    case: str, device: Callable[[], Device], lengths: list[int]
) -> None:
    arguments, expected_lengths = CASES[case]
    single, expected = train(Emulator(), encoded=False, **arguments)
    assert not lengths
    engine, results = train(device(), **arguments)
    assert [result[:6] for result in results] == [result[:6] for result in expected]
    for name, value in single.replica.parameters.items():
        np.testing.assert_array_equal(engine.replica.parameters[name], value, name)
    assert lengths == expected_lengths


def test_a_stop_request_ends_the_series(lengths: list[int]) -> None:
    engine, results = train(Emulator(), [4] * 40, stop=10)
    assert results[-1].stop
    assert [result.step for result in results] == list(range(len(results)))
    # The steps that were staged when the result arrived were made.
    assert engine.replica.updates == len(results) < 40
    assert lengths


@pytest.mark.parametrize("fails", tiered([0, 5, 7, 8, 12], [7]))
def test_a_failure_within_a_series_ends_training_and_its_minibatch_remains(fails: int) -> None:
    engine = engine_on(LatestLoads())
    engine.time_stages(None)
    replica, results = engine.replica, list[StepResult]()
    assert isinstance(replica, CudaReplica)
    source = batches(replica, [4] * 40, encoded=True, fails=fails)
    while not any(not np.isfinite(result.loss) for result in results):
        engine.step(source, 0.05)
        results += engine.results()
    results += engine.results(wait=True)
    assert [bool(np.isfinite(r.loss)) for r in results[: fails + 1]] == [True] * fails + [False]
    expected = engine_on(Emulator())
    assert isinstance(expected.replica, CudaReplica)
    source = batches(expected.replica, [4] * fails, encoded=False)
    for _ in range(fails):
        expected.step(source, 0.05)
    expected.results(wait=True)
    for name, value in expected.replica.parameters.items():
        np.testing.assert_array_equal(replica.parameters[name], value, name)
    assert replica.first_non_finite() == "the input"


def test_durations_are_those_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host notices the end of a series only; the device writes when each step ends."""
    engine = engine_on(Emulator())
    engine.time_stages(None)
    replica = engine.replica
    assert isinstance(replica, CudaReplica)
    ends = iter(np.cumsum([5, 7, 11, 13, 17, 19, 23, 29] * 3) * 1000 + 10**15)
    stamps: dict[int, int] = {}
    copy = replica.enqueue_sums_copy

    def copied(self: CudaReplica) -> None:
        copy()
        stamps[replica.staging_slot] = int(next(ends))

    monkeypatch.setattr(CudaReplica, "enqueue_sums_copy", copied)
    monkeypatch.setattr(CudaReplica, "staged_time", lambda self, slot: stamps[slot])
    source = batches(replica, [4] * 24, encoded=True)
    for _ in range(24):
        engine.step(source, 0.05)
        engine.results()
    engine.results(wait=True)
    rows = engine.recorder.rows()
    times = rows[:, engine.recorder.names.index(STEP)]
    assert times[1:].tolist() == [t * 1000 for t in ([5, 7, 11, 13, 17, 19, 23, 29] * 3)[1:]]
    assert times[0] > 0


def test_all_ranks_have_as_many_steps_in_flight(
    lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise they would make different numbers of steps after a stop request."""
    monkeypatch.setattr(World, "all_gather_json", lambda world, value: [value, [False, 1]])
    engine, results = train(Emulator(), [4] * 20)
    assert engine.max_steps_in_flight == 1
    assert len(results) == 20
    assert not lengths


def test_long_messages_have_no_series() -> None:
    def message(batch_size: int) -> Message:
        plan = make_plan(NETWORK, CudaBackend(Emulator()), batch_size, optimizer=SGD())
        return Message.of(NETWORK, plan.setting)

    assert message(4).series_bytes(0) >= 4 * 4 * 10
    assert message(1024).series_bytes(0) == 0
    assert message(64).series_bytes(72) >= message(64).batch + 64 * (4 * 10 + 72)
    assert message(1024).series_bytes(3072) == 0


@pytest.mark.parametrize("n", [1, 2, 3])
def test_images_of_any_size_are_streamed_in_series(n: int) -> None:
    """Slots stay aligned, although images have an odd number of bytes."""
    backend, pixels = CudaBackend(Emulator()), PixelFormat("uint8")
    network = Network((1, 5, 5), [Flatten(), Dense(3)])
    replica = backend.make_replica(make_plan(network, backend, n, optimizer=SGD()))
    assert replica.prepare_images((1, 5, 5), pixels)
    images = np.random.default_rng(0).integers(0, 256, (n, 1, 5, 5), np.uint8)
    windows = np.stack([np.arange(n), *np.zeros((3, n), np.int64)], axis=1)
    batch = Batch.of_windows(windows, np.zeros(n, np.int32), images=images)
    for slot in replica.series_slots[:2]:
        replica.stage_batch(batch, slot=slot)
        replica.unpack_series_step(slot, ahead=False)
        loaded = np.array(replica.memory.download(replica._views[INPUT]))
        np.testing.assert_array_equal(loaded.reshape(images.shape), images)


def test_programs_of_single_steps_come_first(lengths: list[int]) -> None:
    """Otherwise their captures would be in the time of the first timed step."""
    engine, _ = train(Emulator(), [4] * (FIRST_TIMED + 1), timed=(FIRST_TIMED, 500))
    assert not lengths
    assert engine.recorder.steps == FIRST_TIMED + 1
