"""Whether input limits training, from measured times."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from dptrain.data.base import Samples
from dptrain.data.loader import Loader
from dptrain.data.sharding import Sampler
from dptrain.files import parse_json
from dptrain.measure.input_times import InputLimit, InputTimes
from dptrain.training.trainer import Trainer


@pytest.mark.parametrize(
    ("times", "part", "text"),
    [
        ((10.0, 0.7, 0.2, 3.0, 1.0), None, "input did not limit training: it took 9.0% of a step"),
        ((10.0, 4.0, 0.1, 8.0, 2.0), "reading", "41% of a step, mostly reading and decoding"),
        ((10.0, 4.0, 0.1, 2.0, 8.0), "assembling", "mostly assembling minibatches on the host"),
        ((10.0, 0.1, 4.0, 8.0, 2.0), "copying", "mostly copying minibatches to the network"),
        ((0.0, 0.0, 0.0, 0.0, 0.0), None, "did not limit"),
    ],
)
def test_the_longest_part_is_named_if_input_takes_more_than_a_tenth(
    times: tuple[float, ...], part: str | None, text: str
) -> None:
    limit = InputLimit(*times)
    assert limit.to_dict()["part"] == part
    assert text in str(limit)
    assert "\n" not in str(limit)


class SlowSamples(Samples):
    """Samples of which each read takes a few milliseconds."""

    def __len__(self) -> int:
        return 20

    def read(self, indices: np.ndarray, x: np.ndarray, y: np.ndarray) -> None:
        time.sleep(0.003)
        x[...], y[...] = 0, 0


@pytest.mark.parametrize("depth", [0, 2])
def test_a_loader_counts_reading_and_batches(depth: int) -> None:
    times = InputTimes()
    sampler = Sampler(20, 4, seed=0)
    with Loader(SlowSamples(), sampler, range(10), (2,), depth=depth, times=times) as batches:
        assert len(list(batches)) == 10
    assert times.batches == 10
    reading_ms, assembling_ms = times.mean_ms()
    assert reading_ms >= 3 > assembling_ms


def test_a_run_reports_its_limit(tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal((40, 50), dtype=np.float32)
    trainer = Trainer("mlp-5", (x, x[:, :1]), steps=4, run_dir=str(tmp_path / "r"))
    trainer.fit()
    facts = parse_json((tmp_path / "r" / "summary.json").read_text())["input_limit"]
    assert set(facts) == {
        "limits", "part", "share", "wait_ms", "reading_ms", "assembling_ms", "copying_ms",
    }  # fmt: skip
    assert facts["limits"] == (facts["share"] > 0.1)
