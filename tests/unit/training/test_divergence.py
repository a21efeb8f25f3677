"""The advice after a divergence helps: with it, training that diverged does not."""

from __future__ import annotations

import math
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dptrain import Dense, MeanSquaredError, Network
from dptrain.comm.world import DivergedError
from dptrain.errors import UserError
from dptrain.report.files import write_report
from dptrain.runs.records import read_record
from dptrain.training.divergence import StableRate, advice
from dptrain.training.persistence.rundir import RunDirectory
from dptrain.training.trainer import Trainer

RATE = re.compile(r"--learning-rate (\S+)")


def descend(rates: list[float], curvature: float) -> tuple[int, StableRate] | None:
    """Minimise a parabola, for which rates above 2 / curvature diverge.

    Returns:
        The step whose loss is not finite, and what was recorded before; None if there is none.
    """
    stable, position = StableRate(), 1.0
    for step, rate in enumerate(rates):
        loss = curvature * position * position if abs(position) < 1e150 else math.inf
        if not math.isfinite(loss):
            return step, stable
        stable.add(loss, rate)
        position -= rate * curvature * position
    return None


@pytest.mark.more
def test_the_suggested_rate_does_not_diverge() -> None:
    """Random schedules that rise to a rate far above the limit, or begin there."""
    suggestions = 0
    for seed in range(400):
        random_ = random.Random(seed)
        curvature = 10 ** random_.uniform(-3, 3)
        base = 10 ** random_.uniform(0.5, 4) / curvature
        warmup = random_.choice((0, 10, 300, 3000))
        rates = [base * min(1.0, (step + 1) / max(warmup, 1)) for step in range(4000)]
        found = descend(rates, curvature)
        if found is None:  # The position became exactly 0 while the rate was small.
            continue
        step, stable = found
        factor = random_.choice((1.0, 0.25))
        text = advice(step, stable, factor)
        suggested = RATE.search(text)
        if suggested is None:
            assert "`dptrain find-rate`" in text, seed
            assert f"rate {stable.last * factor:.2g} is too large" in text, seed
            continue
        suggestions += 1
        rate = float(suggested[1]) / factor
        assert 0 < rate < base, seed
        assert descend([rate] * 4000, curvature) is None, seed
    assert suggestions > 50


def test_without_an_update_the_rate_is_not_blamed() -> None:
    assert "learning rate is not the cause" in advice(0, StableRate(), 1.0)
    assert "--learning-rate" not in advice(0, StableRate(), 1.0)


def train(**settings: Any) -> None:
    train_on(np.random.default_rng(0).standard_normal((64, 50), dtype=np.float32), **settings)


def train_on(x: np.ndarray, network: str | Network = "mlp-5", **settings: Any) -> None:
    trainer = Trainer(network, (x, x[:, :1]), steps=1000, batch_size=16, backend="reference",
                      schedule="constant", optimizer="sgd", progress=False, **settings)  # fmt: skip
    with np.errstate(all="ignore"):
        trainer.fit()


@pytest.mark.parametrize(
    ("rate", "warmup", "text"),
    [(1e6, 0, "rate 1e+06 is too large"), (20.0, 40000, "at larger ones, so try --learning-rate")],
)
def test_a_run_that_diverges_says_what_helps(rate: float, warmup: int, text: str) -> None:
    with pytest.raises(DivergedError) as caught:
        train(learning_rate=rate, warmup_steps=warmup)
    message = str(caught.value)
    assert text in message
    assert "smaller learning rate, for example" not in message
    if suggested := RATE.search(message):
        train(learning_rate=float(suggested[1]))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_the_directory_of_a_run_that_diverged_says_so_until_it_is_resumed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings: dict[str, Any] = {
        "backend": "reference", "steps": 40, "progress": False, "schedule": "constant",
        "momentum": 0.0, "optimizer": "sgd", "run_dir": run,
    }  # fmt: skip
    with pytest.raises(DivergedError) as caught:
        Trainer("model-small", "digits", learning_rate=1e30, **settings).fit()
    assert read_record(run)["state"] == "diverged"
    with pytest.raises(UserError, match="has no results") as refused:
        write_report(run)
    assert str(refused.value).endswith(str(caught.value))
    RunDirectory.open(run).remove_summary()
    assert read_record(run)["state"] == "unfinished"


def test_data_that_is_not_finite_is_named() -> None:
    x = np.full((64, 50), 1e38, dtype=np.float32)
    with pytest.raises(DivergedError, match=r"no update was made yet.*`dptrain data check`"):
        # Columns of numbers of any size are standardised for networks of the zoo only.
        train_on(x, Network((50,), [Dense(1)], MeanSquaredError()), precision="fp32")
