"""Evaluations during a run on a device: what they transfer, allocate and capture, in counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import DTypeLike, NDArray

from dptrain import Trainer
from dptrain.backends.cuda.device.device import Array, Function, Macro
from dptrain.network import BatchNorm2d, Conv2d, Dense, Flatten, MaxPool2d, Network, ReLU
from dptrain.training.persistence import state_copy
from tests.emulator.emulator import Emulator, _host

NETWORK = Network(
    (1, 6, 6),
    [Conv2d(4), BatchNorm2d(), ReLU(), MaxPool2d(2), Flatten(), Dense(8), ReLU(), Dense(3)],
    name="small",
)
EPOCHS = 8
CASES: dict[str, dict[str, Any]] = {
    "momentum": {"learning_rate": 0.1},
    "moving average": {"optimizer": "adam", "average_weights": 0.9, "learning_rate": 0.02},
    "frozen layers": {"freeze": "conv1,batchnorm1", "learning_rate": 0.5},
}


class CountingEmulator(Emulator):
    """Counts transfers, allocations, new kernels and new programs."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def zeros(self, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        found = super().zeros(shape, dtype)
        self.counts["allocated bytes"] += found.nbytes
        return found

    def download(self, source: Array, out: NDArray[Any] | None = None) -> NDArray[Any]:
        self.counts["downloads"] += 1
        return super().download(source, out)

    def upload(self, target: Array, source: NDArray[Any]) -> None:
        self.counts["uploads"] += 1
        super().upload(target, source)

    def copy(self, target: Array, source: Array) -> None:
        self.counts["copies"] += 1
        self.join_streams()
        _host(target)[...] = _host(source)

    def function(self, file: str, name: str, **defines: Macro) -> Function:
        self.counts["kernels"] += (
            file,
            name,
            tuple(sorted(defines.items())),
        ) not in self._functions
        return super().function(file, name, **defines)

    def program(self, start: Callable[[], None], *, warm: bool = False) -> Callable[[], None]:
        self.counts["programs"] += 1
        return super().program(start, warm=warm)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> CountingEmulator:
    device = CountingEmulator()
    monkeypatch.setattr("dptrain.backends.cuda.backend.open_device", lambda local_rank: device)
    return device


def run(**settings: Any) -> Trainer:
    """Return a trainer for images whose labels are partly noise: not the last epoch is the best."""
    random = np.random.default_rng(0)
    x = random.integers(0, 256, (90, 1, 6, 6), dtype=np.uint8)
    y = np.where(
        random.random(90) < 0.5, x[:, 0, :3].mean(axis=(1, 2)) // 86, random.integers(0, 3, 90)
    ).astype(int)
    return Trainer(
        NETWORK, (x, y), classes=["a", "b", "c"], backend="cuda", best_by="loss",
        schedule="constant", validation=0.3, epochs=EPOCHS, batch_size=16, progress=False,
        **settings,
    )  # fmt: skip


@pytest.fixture
def evaluations(
    device: CountingEmulator, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[bool, Counter[str]]]:
    """Return what each evaluation counts, and whether it was the best so far."""
    found = list[tuple[bool, Counter[str]]]()
    evaluate = Trainer._evaluate_validation_data

    def counted(trainer: Trainer) -> None:
        before = device.counts.copy()
        evaluate(trainer)
        found.append((trainer.progress.is_best, device.counts - before))

    monkeypatch.setattr(Trainer, "_evaluate_validation_data", counted)
    return found


@pytest.mark.parametrize("case", CASES)
def test_an_evaluation_copies_within_the_device_alone(
    case: str,
    evaluations: list[tuple[bool, Counter[str]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The host receives the best state when it reads it, with the bits of a copy on the host.

    What all evaluations repeat is captured and allocated before the first step.
    """
    trainer = run(**CASES[case])
    trainer.fit()
    assert sum(is_best for is_best, _ in evaluations) > 1
    assert trainer.progress.restored_step is not None
    flats = 2 + len(trainer.job.replica.state)
    average = trainer.job.replica.state.get("average")
    for is_best, counts in evaluations:
        # The loss sums of training, the average, and the best state.
        copies = 2 + 6 * (average is not None) + flats * is_best
        assert counts.pop("copies") == copies
        assert counts.pop("allocated bytes") <= 64 + (0 if average is None else 2 * average.nbytes)
        assert not counts
    monkeypatch.setattr(state_copy, "MOST_OF_FREE", 0.0)
    other = run(**CASES[case])
    other.fit()
    assert trainer.summary is not None
    assert other.summary is not None
    assert trainer.summary["memory"]["best epoch"] >= 4 * NETWORK.num_parameters
    assert "best epoch" not in other.summary["memory"]
    assert trainer.best is not None
    assert other.best is not None
    assert trainer.best.facts["updates"] == other.best.facts["updates"]
    for found, expected in (
        (trainer.best.arrays, other.best.arrays),
        (trainer.parameters, other.parameters),
        (trainer.statistics, other.statistics),
    ):
        assert list(found) == list(expected)
        for name, values in found.items():
            np.testing.assert_array_equal(values, expected[name], name)
