"""What a run prints: three lines, at most ten epochs, the result; everything with ``verbose``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dptrain import Trainer
from dptrain.network import Dense, Flatten, MeanSquaredError, Network, SoftmaxCrossEntropy
from dptrain.training.callbacks import Progress
from dptrain.training.output.display import MOST_EPOCHS, epoch_stride

RNG = np.random.default_rng(0)
X, LABELS = RNG.normal(size=(90, 1, 4, 4)).astype(np.float32), np.arange(90) % 3


def printed(
    capsys: pytest.CaptureFixture[str], *, verbose: bool = False, values: bool = False, **more: Any
) -> tuple[list[str], Trainer]:
    """Train, and return the lines of the output."""
    loss = MeanSquaredError() if values else SoftmaxCrossEntropy()
    network = Network((1, 4, 4), [Flatten(), Dense(1 if values else 3)], loss)
    y = X[:, 0, 0, :1].astype(np.float32) if values else LABELS
    settings: dict[str, Any] = {
        "epochs": 25, "batch_size": 10, "validation": 0.2, "backend": "reference",
        "baseline_steps": 0, **more,
    }  # fmt: skip
    callbacks = [Progress(verbose=verbose)]
    with Trainer(network, (X, y), progress=False, callbacks=callbacks, **settings) as trainer:
        trainer.fit()
    return capsys.readouterr().out.splitlines(), trainer


def test_a_long_run_fits_on_one_screen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    lines, trainer = printed(capsys, run_dir=run)
    header, epochs, last = lines[:3], lines[3:-3], lines[-3:]
    assert len(lines) <= 3 + MOST_EPOCHS + 3
    assert header[0].startswith(f"{run}: network (51 parameters), reference fp64, 1 rank × ")
    assert header[1] == "data: arrays, 58 training, 14 validation and 18 test samples of 3 classes"
    assert header[2].startswith("150 steps (25 epochs): minibatch 10, ")
    assert [int(line.split()[1]) for line in epochs] == [1, 5, 10, 15, 20, 25]
    assert last[0].startswith("test accuracy ")
    assert re.search(r"%, 95% interval, 18 samples\), AUC 0\.\d+; parameters of epoch \d", last[0])
    assert last[1].startswith("a step ")
    assert last[2] == f"report: dptrain report {run}"
    assert len(trainer.history) == 25


def test_verbose_prints_everything_and_the_summary_has_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines, trainer = printed(capsys, verbose=True)
    text, summary = "\n".join(lines), trainer.summary
    assert summary is not None
    assert sum(line.startswith("epoch ") for line in lines) == 25
    for phrase in ("part ", "Computation by layer", "MiB per rank", summary["data_description"]):
        assert phrase in text
    assert summary["limit"]["text"] in lines
    energy = summary["energy"]
    assert energy["missing"] or energy["joules_per_sample"]
    assert summary["scaling"]["why"] is None or summary["scaling"]["why"] in lines


def test_the_result_of_a_regression_is_in_its_unit(capsys: pytest.CaptureFixture[str]) -> None:
    lines, trainer = printed(capsys, values=True, epochs=2)
    assert trainer.summary is not None
    rmse = trainer.summary["test_rmse"]
    assert lines[-2].startswith(f"test RMSE {rmse:.4g}, R² ")


@given(st.integers(1, 10**7))
def test_at_most_ten_epochs_have_a_line(count: int) -> None:
    stride = epoch_stride(count)
    assert len({1, count, *range(stride, count + 1, stride)}) <= MOST_EPOCHS
