"""What input takes, and what limits training, from measured times."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dptrain.data.base import Samples
from dptrain.data.loading.loader import Loader
from dptrain.data.loading.sharding import Sampler
from dptrain.files import parse_json
from dptrain.measure.input_times import InputCost, InputTimes
from dptrain.measure.profile.gathering import gather_measured
from dptrain.training.callbacks import AfterStep
from dptrain.training.trainer import Trainer


@pytest.mark.parametrize(
    ("times", "part", "share"),
    [
        ((10.0, 4.0, 0.1, 8.0, 2.0), "reading", 0.41),
        ((10.0, 4.0, 0.1, 2.0, 8.0), "assembling", 0.41),
        ((10.0, 0.1, 4.0, 8.0, 2.0), "copying", 0.41),
        ((0.0, 0.0, 0.0, 0.0, 0.0), "reading", 0.0),
        # Copies that overlap with steps cost nothing until they take as long.
        ((10.0, 0.1, 0.2, 2.0, 1.0, 4.0), "copying", 0.03),
        ((10.0, 0.1, 0.2, 2.0, 1.0, 9.5), "copying", 0.95),
        ((10.0, 4.0, 0.0, 8.0, 2.0, 5.0), "reading", 0.4),
    ],
)
def test_the_longest_part_and_the_share_of_a_step(
    times: tuple[float, ...], part: str, share: float
) -> None:
    cost = InputCost(*times)
    assert cost.part == part
    assert cost.share == pytest.approx(share)


def test_reading_ahead_is_reported_if_it_takes_time() -> None:
    assert "read ahead for 80% of the time" in InputCost(10.0, 0.1, 0.2, 7.0, 1.1).ahead_line()
    assert not InputCost(10.0, 0.7, 0.2, 0.3, 1.0).ahead_line()


class Clock(threading.local):
    """A clock that only reading samples advances, by 3 ms on the thread that reads."""

    now_ns = 0

    def __call__(self) -> int:
        return self.now_ns


CLOCK = Clock()


class SlowSamples(Samples):
    """Samples of which each read takes 3 ms."""

    def __len__(self) -> int:
        return 20

    def read(self, indices: np.ndarray, x: np.ndarray, y: np.ndarray) -> None:
        CLOCK.now_ns += 3_000_000
        x[...], y[...] = 0, 0


@pytest.mark.parametrize("depth", [0, 2])
def test_a_loader_counts_reading_and_batches(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("data.loading.loader", "measure.input_times"):
        monkeypatch.setattr(f"dptrain.{module}.perf_counter_ns", CLOCK)
    times = InputTimes()
    sampler = Sampler(20, 4, seed=0)
    with Loader(SlowSamples(), sampler, range(10), (2,), depth=depth, times=times) as batches:
        assert len(list(batches)) == 10
    assert times.batches == 9  # Without the first, which may compile a kernel.
    assert times.mean_ms() == (3.0, 0.0)


def test_a_run_reports_its_longest_part(tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal((40, 50), dtype=np.float32)
    trainer = Trainer("mlp-5", (x, x[:, :1]), steps=11, run_dir=str(tmp_path / "r"))
    trainer.fit()
    summary = parse_json((tmp_path / "r" / "summary.json").read_text())
    assert set(summary["input_times"]) == {
        "part", "share", "wait_ms", "reading_ms", "assembling_ms", "copying_ms",
    }  # fmt: skip
    parts = summary["step_parts"]["all_steps"]
    limit = summary["limit"]
    assert limit["part"] == max(parts, key=parts.get)
    assert limit["share"] == pytest.approx(parts[limit["part"]] / sum(parts.values()))


@pytest.mark.parametrize("backend", ["numba", "cuda"])
def test_a_run_of_few_steps_reports_no_input_times(backend: str) -> None:
    x = np.random.default_rng(0).standard_normal((40, 50), dtype=np.float32)
    trainer = Trainer("mlp-5", (x, x[:, :1]), steps=10, backend=backend, progress=False)
    trainer.fit()
    assert trainer.summary is not None
    assert trainer.summary["input_times"] is None


def test_the_first_step_after_a_start_does_not_count() -> None:
    """It waits for the first minibatch, while later ones are read ahead."""
    x = np.random.default_rng(0).standard_normal((80, 50), dtype=np.float32)
    trainer = Trainer("mlp-5", (x, x[:, :1]), epochs=20, backend="numba", progress=False)
    trainer.callbacks.insert(0, AfterStep(_stop_at_step_20))
    trainer.fit()
    start = trainer.step
    trainer.fit()
    job = trainer.job
    assert job.input_times.starts == [0, start]
    options = [{}, {"without": job.input_times.starts}]
    found = [gather_measured(job.world, job.recorder, ahead=0, **o) for o in options]
    counted, others = (measured.steps[0].tolist() for measured in found if measured is not None)
    assert others == counted[1:start] + counted[start + 1 :]


def _stop_at_step_20(trainer: Trainer, result: Any) -> None:
    if trainer.step == 20:
        signal.raise_signal(signal.SIGTERM)
