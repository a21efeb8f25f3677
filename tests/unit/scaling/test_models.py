"""Models find the parameters that points were made with, and refuse to guess."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dptrain.scaling.forecast import judge, make_forecast, make_series
from dptrain.scaling.models import (
    Setting,
    Timed,
    TooFewPointsError,
    fit_amdahl,
    fit_gustafson,
    fit_usl,
    nonnegative,
)
from dptrain.scaling.points import Measured, base_of, make_groups
from tests.unit.scaling.synthetic import Law, make_launches, make_profile

RANKS = (1, 2, 4, 8, 16)


def timed(n: int, step_ms: float, *, batch_size: int = 64) -> Timed:
    return Timed(Setting(n, n, 1, 1, batch_size, batch_size / n, 1.0), step_ms)


def series_of(launches: list[Measured], scaling: str):
    groups = make_groups(launches)
    found = make_series(groups, base_of(groups))
    return next(series for series in found if series.scaling == scaling)


def planted(step_ms: dict[int, float], *, weak: bool, **law) -> list[Measured]:
    """Launches whose steps take what is said, by ranks."""
    return [
        Measured(f"r{ranks}", ranks, make_profile(
            Law(**law), ranks=ranks, batch_size=32 * ranks if weak else 32, step_ms=time))
        for ranks, time in step_ms.items()
    ]  # fmt: skip


def test_amdahl_finds_the_serial_fraction() -> None:
    model = fit_amdahl([timed(n, 10 * (0.1 + 0.9 / n)) for n in RANKS])
    assert model.parameters["serial_fraction"] == pytest.approx(0.1)
    assert model.parameters["step_1_ms"] == pytest.approx(10)
    assert model.step_ms(timed(100, 0).setting) == pytest.approx(10 * 0.109)


def test_gustafson_finds_the_serial_fraction() -> None:
    points = [timed(n, 8 * n / (0.2 + 0.8 * n), batch_size=8 * n) for n in RANKS]
    model = fit_gustafson(points)
    assert model.parameters["serial_fraction"] == pytest.approx(0.2)
    assert model.parameters["samples_per_s_1"] == pytest.approx(1000)
    at = timed(64, 0, batch_size=8 * 64).setting
    assert model.step_ms(at) == pytest.approx(8 * 64 / (0.2 + 0.8 * 64))


def test_usl_finds_contention_and_coherence() -> None:
    def step(n: int) -> float:
        return 5 * (1 + 0.05 * (n - 1) + 0.002 * n * (n - 1)) / n

    model = fit_usl([timed(n, step(n)) for n in RANKS])
    assert model.parameters["contention"] == pytest.approx(0.05)
    assert model.parameters["coherence"] == pytest.approx(0.002)
    assert model.step_ms(timed(40, 0).setting) == pytest.approx(step(40))


def test_parameters_are_never_negative() -> None:
    # A superlinear speed-up, which Amdahl's law cannot describe but by no serial part at all.
    model = fit_amdahl([timed(1, 10), timed(2, 4), timed(4, 1.5)])
    assert model.parameters["serial_fraction"] == 0
    random = np.random.default_rng(0)
    for _ in range(50):
        a, y = random.standard_normal((8, 3)), random.standard_normal(8)
        x = nonnegative(a, y)
        assert (x >= 0).all()
        # The conditions of Karush, Kuhn and Tucker: no slope downhill that is allowed.
        slope = a.T @ (a @ x - y)
        assert np.abs(slope[x > 0]).max(initial=0) < 1e-9
        assert (slope[x == 0] > -1e-9).all()


@pytest.mark.parametrize(("fit", "n"), [(fit_amdahl, 1), (fit_gustafson, 1), (fit_usl, 2)])
def test_too_few_points_are_refused(fit, n: int) -> None:
    with pytest.raises(TooFewPointsError, match=rf"needs {n + 1} different numbers"):
        fit([timed(k + 1, 10.0) for k in range(n)] * 3)


@pytest.mark.parametrize("scaling", ["weak", "strong"])
def test_the_model_of_parts_finds_what_the_law_was_made_with(scaling: str) -> None:
    law = Law()
    series = series_of(make_launches(law, RANKS, launches=1), scaling)
    judged, _ = judge(series)
    found = next(f for f in judged if f.model.name == "alpha-beta")
    parameters = found.model.parameters
    assert parameters["update_ms"] == pytest.approx(law.update)
    assert parameters["compute_per_sample_ms"] == pytest.approx(law.sample)
    assert parameters["alpha_us"] == pytest.approx(1e3 * law.alpha)
    assert parameters["beta_gb_per_s"] == pytest.approx(1e-6 / law.beta)
    assert parameters["overlap"] == pytest.approx(law.overlap)
    assert parameters["imbalance_ms"] == pytest.approx(law.imbalance)
    assert found.hindcast_error == pytest.approx(0, abs=1e-9)
    text = " ".join(found.model.assumptions)
    assert "Rabenseifner's algorithm" in text
    assert "do not distinguish" not in text


def test_sharing_of_cores_is_part_of_every_model() -> None:
    law = Law(cores=4)
    for scaling in ("weak", "strong"):
        series = series_of(make_launches(law, (1, 2, 4, 8), launches=1), scaling)
        judged, _ = judge(series)
        found = next(f for f in judged if f.model.name == "alpha-beta")
        assert found.hindcast_error == pytest.approx(0, abs=1e-9)
        # Only 2 and 4 ranks have cores of their own, and any algorithm explains two times.
        assert "do not distinguish it from a ring" in " ".join(found.model.assumptions)


def test_the_largest_point_is_not_seen_by_the_hindcast() -> None:
    steps = {1: 10.0, 2: 10.1, 4: 10.3, 8: 10.7}
    for last in (11.5, 23.0):
        series = series_of(planted({**steps, 16: last}, weak=True), "weak")
        for found in judge(series)[0]:
            blind = series_of(planted(steps, weak=True), "weak")
            without = next(f for f in judge(blind)[0] if f.model.name == found.model.name)
            at = series.setting(series.groups[-1])
            assert found.hindcast_error == pytest.approx(abs(without.model.step_ms(at) / last - 1))


def test_two_points_determine_nothing() -> None:
    series = series_of(planted({1: 10.0, 2: 10.5}, weak=True), "weak")
    judged, reasons = judge(series)
    assert judged == []
    assert any("Gustafson" in reason for reason in reasons)
    assert any("universal scalability" in reason for reason in reasons)
    assert "three numbers of ranks" in make_forecast(series).withheld


def test_ranks_between_the_measured_ones_run_on_the_measured_nodes() -> None:
    launches = [
        replace(m, profile=replace(m.profile, job={
            **m.profile.job, "nodes": -(-m.profile.job["ranks"] // 4)}))
        for m in make_launches(Law(), RANKS, launches=1)
    ]  # fmt: skip
    series = series_of(launches, "weak")
    largest = max(RANKS)
    between = series.setting_at(largest - 1)
    assert between.nodes == largest // 4
    assert between.batch_size == 32 * (largest - 1)
    assert between.possible == 1
