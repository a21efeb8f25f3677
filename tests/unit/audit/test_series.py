"""Intervals of means of series, the resolution of a clock, and heavy tails."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dptrain.audit.noise import Noise, autoregressive
from dptrain.measure.efficiency import Baseline, Pair, efficiency, efficiency_table
from dptrain.measure.series import correlation_time, degrees_of_freedom, half_width_of_mean
from dptrain.measure.statistics import median_of_runs, resolution, unseen_at_most
from dptrain.measure.student import student
from dptrain.measure.tail_index import HEAVY, tail_index, tail_note


def test_independent_values_have_about_the_t_interval() -> None:
    series = np.random.default_rng(0).standard_normal((200, 100))
    found = [half_width_of_mean(row) for row in series]
    expected = student(99) / 10
    # The larger of two intervals, one of them with three degrees of freedom.
    assert expected < np.median(found) < 1.6 * expected


def test_a_few_values_that_determine_the_mean_leave_few_degrees_of_freedom() -> None:
    many, few = np.random.default_rng(0).standard_normal(400), np.zeros(400)
    few[[90, 300]] = 20.0
    assert degrees_of_freedom(many, 400) == pytest.approx(400, rel=0.2)
    assert degrees_of_freedom(few, 400) == pytest.approx(4, rel=0.1)
    assert degrees_of_freedom(np.ones(400), 400) == 399


def test_equal_values_have_no_error() -> None:
    assert half_width_of_mean(np.full(100, 0.1)) == 0
    assert correlation_time(np.full(100, 0.1)) == 1


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.8, 0.95])
def test_the_correlation_time_is_that_of_the_series(rho: float) -> None:
    series = autoregressive(np.random.default_rng(1), (50, 4000), rho)
    expected = (1 + rho) / (1 - rho)
    assert np.median([correlation_time(row) for row in series]) == pytest.approx(expected, rel=0.3)


def test_correlation_beyond_neighbours_counts() -> None:
    """Long bursts with independent noise: neighbours are correlated little, distant values too."""
    random = np.random.default_rng(2)
    level = np.repeat(random.standard_normal(20), 50)
    time = correlation_time(level + 2 * random.standard_normal(1000))
    assert time > 5


def test_a_coarse_clock_widens_the_interval_of_a_median() -> None:
    ticks = np.tile([2.0, 3.0, 2.0], 100)
    assert resolution(ticks) == pytest.approx(1.0)
    found = median_of_runs(ticks)
    assert found.low <= 7 / 3 <= found.high
    assert resolution(np.random.default_rng(0).random(300)) == 0


def marked(noise: Noise, steps: int) -> float:
    """Return the share of series whose tail is marked as heavy."""
    series = noise.job(np.random.default_rng(3), 200, 4, steps)
    return float(np.mean([tail_index(row) < HEAVY for row in series]))


def test_heavy_tails_are_recognised() -> None:
    heavy, light = Noise(late=0.05, tail=1.5), Noise(late=0.05, tail=3.0)
    assert marked(heavy, 1000) >= 0.95
    assert marked(heavy, 250) >= 0.8
    assert marked(light, 1000) <= 0.15
    for noise in (Noise(late=0.05), Noise(), Noise(correlation=0.8)):
        assert marked(noise, 250) <= 0.01


def test_a_remark_names_the_steps_of_a_heavy_tail() -> None:
    steps = Noise(late=0.05, tail=1.5).job(np.random.default_rng(0), 1, 4, 2000)[0]
    assert "mean step of weak-r4-t1 (tail index 1." in tail_note(steps, "weak-r4-t1")
    assert tail_note(np.ones(1000), "a") == tail_note(steps[:100], "a") == ""
    assert math.isinf(tail_index(steps[:100]))


@pytest.mark.parametrize(("tail", "is_marked"), [(1.3, True), (math.inf, False)])
def test_an_efficiency_of_training_with_a_heavy_tail_is_marked(
    tail: float, is_marked: bool
) -> None:
    steps = 1e6 * Noise(late=0.1, tail=tail).job(np.random.default_rng(1), 1, 4, 2000)[0]
    pairs = tuple(Pair(1e6, 1e6, float(block.mean())) for block in np.split(steps, 4))
    found = efficiency(Baseline(pairs, 40, 2000), 4, possible=1.0, steps=steps)
    assert bool(found.note) == is_marked
    assert ("tail index" in efficiency_table(found, size=4).note) == is_marked


def test_launches_that_were_not_seen_have_a_binomial_limit() -> None:
    assert (1 - unseen_at_most(5)) ** 5 == pytest.approx(0.05)
    assert unseen_at_most(29) < 0.1 < unseen_at_most(28)
