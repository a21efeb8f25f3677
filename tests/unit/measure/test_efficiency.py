"""Efficiencies and their intervals."""

from __future__ import annotations

import numpy as np
import pytest

from dptrain.measure.efficiency import Baseline, efficiency
from dptrain.measure.statistics import ratio_of_medians


def test_an_efficiency_follows_its_definition() -> None:
    alone = Baseline(np.array([8_000, 8_000]), np.array([30_000, 30_000]))
    found = efficiency(alone, np.array([10_000, 10_000, 10_000]), 4, possible=1.0)
    assert found.weak is not None
    assert found.strong is not None
    assert found.weak.value == pytest.approx(0.8)
    assert found.strong.value == pytest.approx(30 / 40)
    # Numbers that do not vary leave no doubt.
    assert (found.weak.low, found.weak.high) == pytest.approx((0.8, 0.8))


def test_without_a_baseline_nothing_is_claimed() -> None:
    none = np.zeros(0, np.int64)
    found = efficiency(Baseline(none, none), np.array([1, 2]), 2, possible=0.5)
    assert found.weak is None
    assert found.strong is None


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    random = np.random.default_rng(1)
    hits = 0
    for seed in range(200):
        top, bottom = random.lognormal(0.5, 0.2, 30), random.lognormal(0.0, 0.2, 60)
        found = ratio_of_medians(top, bottom, seed=seed)
        assert found.low <= found.value <= found.high
        hits += found.low <= np.exp(0.5) <= found.high
    # Binomial(200, 0.95) is below 180 once in 1,000; small samples cost the bootstrap a little.
    assert hits >= 176


def test_the_same_numbers_give_the_same_interval() -> None:
    values = np.random.default_rng(2).uniform(1, 2, 20)
    assert ratio_of_medians(values, values) == ratio_of_medians(values, values)
