"""Efficiencies follow their definitions."""

from __future__ import annotations

import pytest

from dptrain.measure.efficiency import Baseline, Pair, efficiency


def test_an_efficiency_is_the_ratio_of_wall_times() -> None:
    pairs = (
        Pair(8e6, 30e6, 10e6),
        Pair(8e6, 36e6, 10e6),
        Pair(16e6, 54e6, 20e6),
    )
    found = efficiency(Baseline(pairs, 3_000_000, 3_000_000), 4, possible=1.0)
    assert found.weak is not None
    assert found.strong is not None
    # Ratios that do not vary leave no doubt, though the machine was half as fast in one block.
    assert (found.weak.low, found.weak.value, found.weak.high) == pytest.approx(
        (0.8, 0.8, 0.8), rel=1e-5
    )
    assert found.strong.value == pytest.approx((30 + 36 + 54) / (10 + 10 + 20) / 4)
    assert found.weak.n == 3


def test_few_steps_leave_room_for_interruptions_that_they_do_not_show() -> None:
    pairs = (Pair(8e6, 30e6, 10e6),) * 3
    found = efficiency(Baseline(pairs, 100, 1000), 4, possible=1.0).weak
    assert found is not None
    assert found.high == pytest.approx(0.8 * (1 + 2 * 5 / 100))
    assert found.low == pytest.approx(0.8 / (1 + 2 * 5 / 1000))


def test_two_blocks_have_no_efficiency() -> None:
    pair = Pair(8_000, 30_000, 10_000)
    for baseline in (Baseline((pair, pair), 20, 200), Baseline(why="the run is short")):
        found = efficiency(baseline, 2, possible=0.5)
        assert found.weak is None
        assert found.strong is None
