"""Snapshots of runs on a device are written next to the steps that follow."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from dptrain import AfterStep, BatchNorm2d, Conv2d, Dense, Flatten, Network, ReLU, Trainer
from dptrain.backends.cuda.device.device import Array
from dptrain.training.persistence import snapshots, snapshotting, state_copy
from dptrain.training.persistence.checkpoints import Checkpoint, replica_arrays
from dptrain.training.persistence.snapshots import SnapshotFolder
from tests.emulator.emulator import Emulator, _host

NETWORK = Network((1, 6, 6), [Conv2d(2), BatchNorm2d(), ReLU(), Flatten(), Dense(3)], name="small")
STEPS, EVERY = 14, 3


class LateEmulator(Emulator):
    """Copies to the host when a thread waits for it, and `allowed` is set.

    Attributes:
        allowed: whether copies may end.
        waiting: whether a thread has waited for a copy.
    """

    def __init__(self) -> None:
        super().__init__()
        self.allowed, self.waiting = threading.Event(), threading.Event()

    def begin_download(self, source: Array, out: NDArray[Any]) -> Callable[[], None]:
        out[...] = -1  # What was sent before is lost.

        def wait() -> None:
            self.waiting.set()
            assert self.allowed.wait(60)
            out[...] = _host(source)

        return wait


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> LateEmulator:
    device = LateEmulator()
    monkeypatch.setattr("dptrain.backends.cuda.backend.open_device", lambda local_rank: device)
    return device


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    place = tmp_path / "shm"
    place.mkdir()
    monkeypatch.setattr(snapshots, "places", lambda: (place,))
    yield place
    assert list(place.iterdir()) == []


def newest(memory: Path) -> Checkpoint | None:
    """Return the newest snapshot; None if there is none."""
    (path,) = memory.iterdir()
    store = SnapshotFolder(path).checkpoints
    return store.load() if store.steps() else None


def train(folder: Path, look: Callable[[Trainer], None]) -> Trainer:
    random = np.random.default_rng(0)
    x, y = random.standard_normal((64, 1, 6, 6)).astype(np.float32), random.integers(0, 3, 64)
    trainer = Trainer(
        NETWORK, (x, y, x[:8], y[:8]), backend="cuda", run_dir=folder, snapshots=True,
        snapshot_every=EVERY, steps=STEPS, batch_size=8, momentum=0.9, progress=False,
        checkpoint_seconds=1e6, baseline_steps=0, validation=0.0,
        callbacks=[AfterStep(lambda trainer, result: look(trainer))],
    )  # fmt: skip
    with trainer:
        trainer.fit()
    return trainer


def test_steps_do_not_wait_for_a_snapshot_which_has_the_state_of_its_step(
    tmp_path: Path, memory: Path, device: LateEmulator
) -> None:
    """The snapshot of step 6 reaches the host after step 9, whose snapshot waits for it."""
    states, found = dict[int, dict[str, NDArray[Any]]](), dict[int, int]()
    device.allowed.set()

    def look(trainer: Trainer) -> None:
        step = trainer.step
        states[step] = replica_arrays(trainer.job.replica)
        snapshot = newest(memory)
        if snapshot is not None:
            found[step] = snapshot.step
            expected = states[snapshot.step]
            assert snapshot.arrays.keys() == expected.keys()
            for name, values in snapshot.arrays.items():
                np.testing.assert_array_equal(values, expected[name], name)
        if step == 4:
            device.allowed.clear()
        if step == 9:
            assert device.waiting.is_set()
            device.allowed.set()

    train(tmp_path / "run", look)
    assert [found.get(step) for step in range(1, 10)] == [None] * 3 + [3] * 6
    assert found[10] in (6, 9)
    assert found[STEPS] >= 9


def test_a_device_with_little_memory_waits_for_snapshots(
    tmp_path: Path, memory: Path, device: LateEmulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_copy, "MOST_OF_FREE", 0.0)
    steps = list[int]()

    def look(trainer: Trainer) -> None:
        found = newest(memory)
        steps.append(-1 if found is None else found.step)

    train(tmp_path / "run", look)
    # The snapshot of a step follows the callback.
    assert steps == [-1 if n <= EVERY else (n - 1) // EVERY * EVERY for n in range(1, STEPS + 1)]
    assert not device.waiting.is_set()


def test_an_error_ends_a_run_although_the_device_sends_nothing(
    tmp_path: Path, memory: Path, device: LateEmulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshotting, "LONGEST_CLOSE_S", 0.1)
    device.allowed.set()

    def fail(trainer: Trainer) -> None:
        if trainer.step == 4:
            device.allowed.clear()
        if trainer.step == 8:
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        train(tmp_path / "run", fail)
    (path,) = memory.iterdir()
    assert SnapshotFolder(path).newest_step == 3
    device.allowed.set()
    for thread in threading.enumerate():
        if thread.name == "snapshot":
            thread.join()
    SnapshotFolder(path).remove()
