"""The learning-rate range test."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dptrain.comm.world import World
from dptrain.errors import UserError
from dptrain.report.runs.rate_plot import write_rates
from dptrain.training.rate_range import (
    RangeOptions,
    RangeTest,
    find_rate,
    moving_average,
    select_rates,
)
from dptrain.training.settings import load_settings

SETTINGS = {
    "network": "mlp-8", "data": "irradiance?samples=200", "backend": "reference", "threads": "1",
    "optimizer": "sgd",
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def small_pictures() -> None:
    """Draw PNG files as reports have them, unlike other modules."""


def run(options: RangeOptions, output: Path | None = None) -> RangeTest:
    write = None if output is None else lambda result: write_rates(result, output)
    settings = load_settings(SETTINGS, {})
    found = find_rate(settings, World.single(), options, write=write, quiet=True)
    assert found is not None
    return found


def test_rates_grow_by_the_same_factor() -> None:
    options = RangeOptions(1e-4, 1.0, 21)
    assert [options.rate(step) for step in (0, 5, 20)] == pytest.approx([1e-4, 1e-3, 1.0])


def test_the_average_has_no_bias_at_the_beginning() -> None:
    assert moving_average([3.0] * 9) == [3.0] * 9
    assert moving_average([0.0, 1.0])[1] == pytest.approx(0.1 / 0.19)


def test_the_steepest_fall_before_the_lowest_loss_is_selected() -> None:
    averages = [9.0, 9.0, 9.0, 9.0, 9.0, 9.0, 8.0, 6.0, 3.0, 2.0, 1.9, 5.0, 0.1 + 8.0]
    rates = [10.0**i for i in range(len(averages))]
    assert select_rates(rates, averages) == (1e7, 1e10)
    assert select_rates(rates, sorted(averages)) == (None, 1e5)


def test_a_run_diverges_and_writes_its_files(tmp_path: Path) -> None:
    found = run(RangeOptions(1e-5, 1e4, 60), tmp_path / "rates")
    assert found.diverged is not None
    assert found.steepest is not None
    assert 1e-5 < found.steepest < found.lowest < found.diverged < 1e4
    assert len(found.rates) == len(found.losses) == len(found.averages) < 60
    rows = (tmp_path / "rates" / "rates.csv").read_text().splitlines()
    assert rows[0] == "learning_rate,loss,average_loss"
    assert len(rows) == 1 + len(found.rates)
    facts = json.loads((tmp_path / "rates" / "rates.json").read_text())
    assert facts["steepest"] == found.steepest
    assert "losses" not in facts
    svg = (tmp_path / "rates" / "rates.svg").read_text()
    assert "falls fastest" in svg
    assert (tmp_path / "rates" / "rates.png").stat().st_size > 1000


def test_small_rates_make_all_steps() -> None:
    found = run(RangeOptions(1e-9, 1e-8, 12))
    assert found.diverged is None
    assert len(found.rates) == 12
    assert found.rates[-1] == pytest.approx(1e-8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"low": 1.0, "high": 0.1}, "expected 0 < --from < --to"),
        ({"low": 0.0}, "the learning rates are 0 to 10"),
        ({"steps": 9}, "--steps is 9; expected at least 10"),
    ],
)
def test_options_out_of_range_are_named(options: dict[str, float], message: str) -> None:
    with pytest.raises(UserError, match=message):
        RangeOptions(**options)  # type: ignore[arg-type]


def test_the_advice_follows_from_the_losses() -> None:
    def advice(steepest: float | None, diverged: float | None, factor: float = 1.0) -> str:
        return RangeTest("net", "data", "sgd", 32, 1, steepest, 0.1, diverged, (1e-3, 0.1), (), (),
                         factor).advice  # fmt: skip

    assert advice(0.04, None) == advice(0.04, 1.0) == "try --learning-rate 0.04"
    # With --scale-rate linear and twice the reference batch, the flag is half of the rate.
    assert advice(0.04, None, 0.5) == "try --learning-rate 0.02"
    assert "smaller --from than 0.001" in advice(None, 1.0)
    assert "larger learning rates (--to)" in advice(None, None)


def test_the_flag_is_scaled_with_the_minibatch() -> None:
    values = {**SETTINGS, "batch_size": "16", "scale_rate": "linear", "reference_batch": "4"}
    settings = load_settings(values, {})
    found = find_rate(settings, World.single(), RangeOptions(steps=30), quiet=True)
    assert found is not None
    assert found.flag_factor == 0.25
    assert "flag_factor" not in found.facts()
