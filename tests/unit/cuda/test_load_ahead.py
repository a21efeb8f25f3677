"""A minibatch is unpacked during the step before, and never while a step reads its buffer."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from dptrain.backends.cuda import replica as cuda_replica
from dptrain.backends.cuda.backend import CudaBackend
from dptrain.backends.cuda.device.device import Array, Device, Function, StagingBuffer
from dptrain.backends.cuda.device.pinned import TIMED_UPLOADS, PinnedStagingBuffer
from dptrain.backends.cuda.replica import CudaReplica
from dptrain.batch import Batch
from dptrain.comm import make_gradient_sum
from dptrain.comm.world import World
from dptrain.data.loading.sharding import pass_shards
from dptrain.measure.recorder import StepRecorder
from dptrain.network import Conv2d, Dense, Dropout, Flatten, MaxPool2d, Network, ReLU
from dptrain.plan import SGD, Adam, make_buckets, make_plan
from dptrain.training.engines import DeviceEngine, StepResult, make_engine
from dptrain.training.engines import device as device_engine
from tests.emulator.emulator import Emulator
from tests.tiers import tiered


@pytest.fixture(autouse=True)
def every_step_is_long_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_engine, "LOAD_AHEAD_FLOPS", 0.0)


NETWORK = Network(
    (2, 6, 6),
    [Conv2d(4), ReLU(), MaxPool2d(2), Flatten(), Dense(8), ReLU(), Dropout(0.5), Dense(3)],
    name="small",
)  # fmt: skip


class LatestWork(Emulator):
    """Runs steps as late as the host allows, and loads of minibatches as early as they may run.

    Attributes:
        order: what ran: the slot of a load, or a kernel of a step (None).
    """

    def __init__(self) -> None:
        super().__init__()
        self._waiting: deque[Callable[[], None] | int] = deque()
        self._is_loading = False
        self.order: list[int | None] = []

    side_stream = Device.side_stream  # type: ignore[assignment]

    def function(self, file: str, name: str, **defines: int) -> Function:
        function = super().function(file, name, **defines)

        def run(grid: Any, block: Any, args: Sequence[Any], *, shared_bytes: int = 0) -> None:
            def launch() -> None:
                if not self._is_loading:
                    self.order.append(None)
                function(grid, block, args, shared_bytes=shared_bytes)

            launch() if self._is_loading else self._waiting.append(launch)

        return run

    def run_until(self, slot: int | None) -> None:
        """Run what waits: until the step of a slot has ended, or everything."""
        if slot is not None and slot not in self._waiting:
            return
        while self._waiting:
            item = self._waiting.popleft()
            if not isinstance(item, int):
                item()
            elif item == slot:
                return

    def end_step(self, slot: int) -> None:
        """Mark the end of a step."""
        self._waiting.append(slot)

    @contextmanager
    def loading(self, slot: int) -> Iterator[None]:
        """Run the work of the context now."""
        self.order.append(slot)
        self._is_loading = True
        yield
        self._is_loading = False

    def upload(self, target: Array, source: NDArray[Any]) -> None:
        self.run_until(None)
        super().upload(target, source)

    def download(self, source: Array, out: NDArray[Any] | None = None) -> NDArray[Any]:
        self.run_until(None)
        return super().download(source, out)

    def synchronize(self) -> None:
        self.run_until(None)

    def staging_buffer(self, memory: Array, sums: Array) -> StagingBuffer:
        return EarlyLoads(self, memory, sums)


class EarlyLoads(StagingBuffer):
    """Staging slots of `LatestWork`."""

    _device: LatestWork

    def open_slot(self, slot: int | None = None) -> int:
        slot = super().open_slot(slot)
        self._device.run_until(slot)
        return slot

    def _copy_message(self) -> None:
        span = slice(self._nbytes)
        Emulator.upload(self._device, self._memory[self.slot][span], self.host[self.slot][span])

    @contextmanager
    def load_stream(self, free_after: int | None) -> Iterator[None]:
        self._device.run_until(free_after)
        with self._device.loading(self.slot):
            yield

    def sums_future(self) -> Callable[[float], list[float]]:
        device, slot = self._device, self.slot
        device.end_step(slot)

        def wait(timeout: float) -> list[float]:
            device.run_until(slot)
            return self.sums_of(slot)

        return wait


def engine_on(device: Emulator, optimizer: SGD | Adam, passes: int = 1) -> DeviceEngine:
    """Return an engine of one rank for minibatches of up to four samples."""
    backend = CudaBackend(device)
    plan = make_plan(NETWORK, backend, -(-4 // passes), optimizer=optimizer, passes=passes)
    replica = backend.make_replica(plan, seed=0)
    buckets = make_buckets(plan)
    alone = make_gradient_sum("mirrored", World.single(), replica, buckets)
    engine = make_engine(replica, alone, buckets, StepRecorder(plan.stages))
    assert isinstance(engine, DeviceEngine)
    return engine


def batches(
    counts: Sequence[int], fails: int | None = None, *, passes: int = 1, failing: int = -1
) -> Iterator[Batch]:
    """Yield minibatches of so many samples, in parts; one may have a sample that is infinite."""
    rng = np.random.default_rng(0)
    for number, n in enumerate(counts):
        x = rng.standard_normal((n, *NETWORK.input_shape), np.float32)
        if number == fails:
            x[failing, 1, 2, 3] = np.inf
        y = rng.integers(0, 3, n).astype(np.int32)
        samples = rng.integers(0, 1000, n)
        for part, span in enumerate(pass_shards(n, 0, 1, passes)):
            yield Batch(number, 0, x[span], y[span], samples[span], n, part=part)


def train(
    device: Emulator, counts: Sequence[int], optimizer: SGD | Adam | None = None,
    *, evaluate: Sequence[int] = (), timed: tuple[int | None, int] = (None, 1), passes: int = 1,
) -> tuple[CudaReplica, list[StepResult]]:  # fmt: skip
    """Make steps, and evaluate after some of them."""
    engine = engine_on(device, SGD(momentum=0.9) if optimizer is None else optimizer, passes)
    engine.time_stages(*timed)
    replica, results = engine.replica, list[StepResult]()
    assert isinstance(replica, CudaReplica)
    source = batches(counts, passes=passes)
    for number in range(len(counts)):
        engine.step(source, 0.05)
        if number in evaluate:
            other = next(batches([3]))
            replica.evaluate(other.x, other.y)
        results += engine.results()
    return replica, results + engine.results(wait=True)


CASES = {
    "whole minibatches": {"counts": [4] * 9},
    "a smaller one at the end of an epoch": {"counts": [4, 4, 3, 4, 4, 3, 4, 4, 3]},
    "small ones only": {"counts": [4, 2, 2, 2, 4, 2]},
    "a rank without samples": {"counts": [4, 4, 0, 4, 4]},
    "evaluation": {"counts": [4] * 9, "evaluate": [1, 4, 5]},
    "evaluation after a smaller one": {"counts": [4, 4, 3] * 3, "evaluate": [2, 5]},
    "timed steps": {"counts": [4] * 12, "timed": (5, 2)},
    "adam": {"counts": [4, 4, 3] * 2, "optimizer": Adam()},
    "two passes": {"counts": [4, 4, 3] * 3, "passes": 2},
    "three passes": {"counts": [4, 4, 2, 0] * 2, "passes": 3},
    "timed steps of two passes": {"counts": [4] * 12, "timed": (5, 2), "passes": 2},
}


@pytest.mark.parametrize("case", tiered(CASES, ["evaluation after a smaller one"]))
def test_the_bits_are_those_of_loads_between_steps(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments: dict[str, Any] = CASES[case]
    device = LatestWork()
    found, results = train(device, **arguments)
    monkeypatch.setattr(CudaBackend, "double_buffers_input", False)
    expected, losses = train(Emulator(), **arguments)
    assert [r.loss for r in results] == [r.loss for r in losses]
    for name in expected.parameters:
        np.testing.assert_array_equal(found.parameters[name], expected.parameters[name], name)
    # At least one load was over before the step before it began.
    loads = [i for i, item in enumerate(device.order) if item is not None]
    assert any(b == a + 1 for a, b in pairwise(loads))


@pytest.mark.parametrize("passes", tiered([2, 3, 4], [3]))
@pytest.mark.parametrize("timed", tiered([((None, 1),), ((0, 1),)], [((None, 1),)]))
def test_several_passes_make_the_update_of_one(passes: int, timed: tuple[int | None, int]) -> None:
    counts = [4, 4, 3, 4, 4, 1, 4]
    expected, losses = train(Emulator(), counts, Adam(clip_norm=0.5))
    found, results = train(Emulator(), counts, Adam(clip_norm=0.5), timed=timed, passes=passes)
    for one, other in zip(results, losses, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-5)
        assert (one.correct, one.samples, one.step) == (other.correct, other.samples, other.step)
    for name, value in expected.parameters.items():
        # Adam divides by the gradient, which may be small: see the bound in test_operations.
        np.testing.assert_allclose(found.parameters[name], value, rtol=0, atol=1e-4)


@pytest.mark.parametrize("failing", [0, 3])
def test_a_failure_in_any_pass_ends_training_and_its_minibatch_remains(failing: int) -> None:
    engine = engine_on(Emulator(), SGD(momentum=0.9), passes=2)
    engine.time_stages(None)
    source = batches([4] * 9, 3, passes=2, failing=failing)
    results = list[StepResult]()
    while not any(not np.isfinite(result.loss) for result in results):
        engine.step(source, 0.05)
        results += engine.results()
    results += engine.results(wait=True)
    assert [bool(np.isfinite(result.loss)) for result in results[:4]] == [True] * 3 + [False]
    expected, _ = train(Emulator(), [4] * 3, passes=2)
    for name in expected.parameters:
        np.testing.assert_array_equal(
            engine.replica.parameters[name], expected.parameters[name], name
        )
    assert engine.replica.first_non_finite() == "the input"


def test_a_single_buffer_would_be_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the test above would show nothing."""
    expected, _ = train(Emulator(), [4] * 5)
    select = CudaReplica._select_buffer
    monkeypatch.setattr(CudaReplica, "_select_buffer", lambda replica, index: select(replica, 0))
    found, _ = train(LatestWork(), [4] * 5)
    same = [np.array_equal(found.parameters[n], expected.parameters[n]) for n in found.parameters]
    assert not all(same)


@pytest.mark.parametrize("device", [LatestWork, Emulator])
def test_no_step_after_a_failure_counts_and_its_minibatch_remains(
    device: Callable[[], Emulator],
) -> None:
    """Whether the next minibatch was loaded before, or not."""
    fails, counts = 5, [4] * 9
    engine = engine_on(device(), SGD(momentum=0.9))
    engine.time_stages(None)
    source, results = batches(counts, fails), list[StepResult]()
    while not any(not np.isfinite(result.loss) for result in results):
        engine.step(source, 0.05)
        results += engine.results()
    results += engine.results(wait=True)
    losses = [result.loss for result in results]
    assert np.isfinite(losses[:fails]).all()
    assert not np.isfinite(losses[fails:]).any()
    expected, _ = train(Emulator(), counts[:fails])
    replica = engine.replica
    for name in expected.parameters:
        np.testing.assert_array_equal(replica.parameters[name], expected.parameters[name], name)
    assert replica.first_non_finite() == "the input"
    # Another minibatch is computed as if nothing had happened.
    good = next(batches([4]))
    loss = replica.forward_backward(good.x, good.y, samples=good.samples, step=7)
    assert loss == expected.forward_backward(good.x, good.y, samples=good.samples, step=7)


@pytest.mark.parametrize(("early", "passes"), [(False, 1), (True, 1), (False, 2)])
def test_nothing_is_bound_while_a_graph_may_be_captured(
    early: bool, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An upload ends the capture with an error."""
    if early:
        monkeypatch.setattr(cuda_replica, "EARLY_ELEMENTS", 1)
        monkeypatch.setattr(cuda_replica, "EARLY_FLOPS", 1)
    device = Emulator()
    engine = engine_on(device, SGD(momentum=0.9), passes)
    monkeypatch.setattr(device, "upload", None)
    monkeypatch.setattr(device, "zeros", None)
    engine.time_stages(4, 2)
    source = batches([4] * 12, passes=passes)
    for _ in range(12):
        engine.step(source, 0.05)
    assert len(engine.results(wait=True)) == 12


def test_short_steps_load_their_own_minibatch(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, _ = train(LatestWork(), [4, 4, 3, 4])
    monkeypatch.setattr(device_engine, "LOAD_AHEAD_FLOPS", 1e9)
    device = LatestWork()
    found, _ = train(device, [4, 4, 3, 4])
    assert not any(item is not None for item in device.order)
    for name in expected.parameters:
        np.testing.assert_array_equal(found.parameters[name], expected.parameters[name], name)


def test_repeated_sums_do_not_end_training() -> None:
    engine = engine_on(Emulator(), SGD())
    source = batches([4] * 4)
    engine.step(source, 0.05)
    engine.replica.memory.upload(
        engine.replica._loss_sums, np.array([np.inf, 0.0, 0.0], np.float32)
    )
    assert engine.time_sum_alone(0) > 0
    engine.step(source, 0.05)
    assert np.isfinite([result.loss for result in engine.results(wait=True)][1:]).all()


class Stream:
    """A stream that records what happens before its work.

    Attributes:
        past: names of the work that is over when the stream's next work begins.
    """

    def __init__(self, ptr: int = 0) -> None:
        self.past: frozenset[str] = frozenset()
        self.ptr = ptr

    def run(self, name: str) -> frozenset[str]:
        """Enqueue work; return what happens before it."""
        before = self.past
        self.past |= {name}
        return before

    def record(self, event: SimpleNamespace) -> SimpleNamespace:
        event.past = self.past
        return event

    def wait_event(self, event: SimpleNamespace) -> None:
        self.past |= event.past


class StreamDevice(Emulator):
    """Has the streams and events of a GPU that a staging buffer uses."""

    def __init__(self) -> None:
        super().__init__()
        self.streams = [Stream()]
        self.stream = self.current = self.streams[0]
        self.uploads = list[frozenset[str]]()
        runtime = SimpleNamespace(memcpyAsync=self._copy, memcpyHostToDevice=1)
        cuda = SimpleNamespace(
            Stream=self._make, Event=self.event, runtime=runtime,
            get_elapsed_time=lambda begin, end: 0.25,
        )  # fmt: skip
        self.cupy = SimpleNamespace(cuda=cuda)

    def _make(self, non_blocking: bool) -> Stream:
        self.streams.append(Stream(len(self.streams)))
        return self.streams[-1]

    def _copy(self, target: int, source: int, nbytes: int, kind: int, stream: int) -> None:
        self.uploads.append(self.streams[stream].run(f"copy {len(self.uploads)}"))

    def event(self) -> SimpleNamespace:
        return SimpleNamespace(past=frozenset(), done=True, synchronize=lambda: None)

    @contextmanager
    def on_stream(self, stream: Stream) -> Iterator[None]:
        self.current = stream
        yield
        self.current = self.stream


class Slots(list[SimpleNamespace]):
    """Device memory of staging slots, without content."""

    shape = (4, 8192)


def test_events_order_uploads_loads_and_steps() -> None:
    """A load follows the last reader of its buffer and its upload, but not the step before."""
    device = StreamDevice()
    memory = Slots(SimpleNamespace(data=SimpleNamespace(ptr=slot)) for slot in range(4))
    staging = PinnedStagingBuffer(device, memory, device.zeros((3,), "float32"))  # type: ignore[arg-type]
    replica: Any = SimpleNamespace(_buffers=[0, 1], _buffer=0, _staged_slots=(None, None))
    replica._select_buffer = lambda index: setattr(replica, "_buffer", index)
    readers: list[list[str]] = [[], []]
    # The slots of steps, 0 for a smaller minibatch; None is an evaluation, which loads as usual.
    slots = [1, 2, 3, 0, 1, 0, 1, 2, None, 3, 0, 1, 2, None, 3, 0, 0, 1, 2, 3]
    overlaps = list[int]()
    for number, slot in enumerate(slots):
        staging.open_slot(slot)
        CudaReplica._choose_buffer(replica, slot)
        staging.submit(8192)
        copied, buffer = f"copy {number}", replica._buffer
        if slot is None:
            before = device.stream.run(f"load {number}")
        else:
            with staging.load_stream(replica._free_after):
                before = device.current.run(f"load {number}")
            if f"step {number - 1}" not in before:
                overlaps.append(number)
        assert {copied, *readers[buffer]} <= before
        assert f"load {number}" in device.stream.past
        if slot is None:  # The work of an evaluation has no event of its own.
            staging.sums_future()
        device.stream.run(f"step {number}")
        readers[buffer].append(f"step {number}")
        if slot is not None:
            staging.sums_future()
    # Neither the two loads after an evaluation overlap, nor two in a row to the same buffer.
    assert overlaps == [0, 2, 3, 4, 5, 6, 7, 11, 12, 18, 19]


def test_some_uploads_are_timed() -> None:
    device = StreamDevice()
    memory = Slots(SimpleNamespace(data=SimpleNamespace(ptr=slot)) for slot in range(4))
    staging = PinnedStagingBuffer(device, memory, device.zeros((3,), "float32"))  # type: ignore[arg-type]
    for number in range(2 * TIMED_UPLOADS + 1):
        assert staging.upload_ms == 0.0
        staging.open_slot(number % 4)
        staging.submit(8192)
    assert staging.upload_ms == 0.25
