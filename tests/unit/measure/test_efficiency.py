"""Efficiencies follow their definitions."""

from __future__ import annotations

import math

import pytest

from dptrain.measure.efficiency import Baseline, Pair, efficiency


def test_an_efficiency_is_the_geometric_mean_of_its_blocks() -> None:
    pairs = (
        Pair(8_000, 10_000, 30_000, 10_000),
        Pair(8_000, 10_000, 36_000, 12_000),
        Pair(16_000, 20_000, 27_000, 9_000),
    )
    found = efficiency(Baseline(pairs), 4, possible=1.0)
    assert found.weak is not None
    assert found.strong is not None
    # Ratios that do not vary leave no doubt, though the machine was half as fast in one block.
    assert (found.weak.low, found.weak.value, found.weak.high) == pytest.approx((0.8, 0.8, 0.8))
    assert found.strong.value == pytest.approx(30 / 40)
    assert found.weak.n == 3


def test_two_blocks_have_no_interval_and_none_no_efficiency() -> None:
    pair = Pair(8_000, 10_000, 30_000, 10_000)
    found = efficiency(Baseline((pair, pair)), 2, possible=0.5)
    assert found.weak is not None
    assert math.isinf(found.weak.high)
    found = efficiency(Baseline(why="the run is short"), 2, possible=0.5)
    assert found.weak is None
    assert found.strong is None
