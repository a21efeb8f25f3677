"""Whether input limits training, from measured times."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dptrain.data.base import Samples
from dptrain.data.loader import Loader
from dptrain.data.sharding import Sampler
from dptrain.files import parse_json
from dptrain.measure.gathering import gather_measured
from dptrain.measure.input_times import InputLimit, InputTimes
from dptrain.training.callbacks import AfterStep
from dptrain.training.trainer import Trainer


@pytest.mark.parametrize(
    ("times", "part", "text"),
    [
        ((10.0, 0.7, 0.2, 3.0, 1.0), None, "input did not limit training: it took 9.0% of a step"),
        ((10.0, 4.0, 0.1, 8.0, 2.0), "reading", "41% of a step, mostly reading and decoding"),
        ((10.0, 4.0, 0.1, 2.0, 8.0), "assembling", "mostly assembling minibatches on the host"),
        ((10.0, 0.1, 4.0, 8.0, 2.0), "copying", "mostly copying minibatches to the network"),
        ((10.0, 0.1, 0.2, 7.0, 1.1), None, "minibatches were read ahead for 80% of the time"),
        ((0.0, 0.0, 0.0, 0.0, 0.0), None, "did not limit"),
        # Copies that overlap with steps cost nothing until they take as long.
        ((10.0, 0.1, 0.2, 2.0, 1.0, 4.0), None, "it took 3.0% of a step"),
        ((10.0, 0.1, 0.2, 2.0, 1.0, 9.5), "copying", "it took 95% of a step, mostly copying"),
        ((10.0, 4.0, 0.0, 8.0, 2.0, 5.0), "reading", "it took 40% of a step, mostly reading"),
    ],
)
def test_the_longest_part_is_named_if_input_takes_more_than_a_tenth(
    times: tuple[float, ...], part: str | None, text: str
) -> None:
    limit = InputLimit(*times)
    assert limit.to_dict()["part"] == part
    assert text in str(limit)
    assert "\n" not in str(limit)


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
    for module in ("data.loader", "measure.input_times"):
        monkeypatch.setattr(f"dptrain.{module}.perf_counter_ns", CLOCK)
    times = InputTimes()
    sampler = Sampler(20, 4, seed=0)
    with Loader(SlowSamples(), sampler, range(10), (2,), depth=depth, times=times) as batches:
        assert len(list(batches)) == 10
    assert times.batches == 9  # Without the first, which may compile a kernel.
    assert times.mean_ms() == (3.0, 0.0)


def test_a_run_reports_its_limit(tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal((40, 50), dtype=np.float32)
    trainer = Trainer("mlp-5", (x, x[:, :1]), steps=11, run_dir=str(tmp_path / "r"))
    trainer.fit()
    facts = parse_json((tmp_path / "r" / "summary.json").read_text())["input_limit"]
    assert set(facts) == {
        "limits", "part", "share", "wait_ms", "reading_ms", "assembling_ms", "copying_ms",
    }  # fmt: skip
    assert facts["limits"] == (facts["share"] > 0.1)


@pytest.mark.parametrize("backend", ["numba", "cuda"])
def test_a_run_of_few_steps_reports_no_limit(backend: str) -> None:
    x = np.random.default_rng(0).standard_normal((40, 50), dtype=np.float32)
    trainer = Trainer("mlp-5", (x, x[:, :1]), steps=10, backend=backend, progress=False)
    trainer.fit()
    assert trainer.summary is not None
    assert trainer.summary["input_limit"] is None


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
