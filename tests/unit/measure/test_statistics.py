"""Intervals of too few steps, blocks and runs; `tests/unit/audit` has their coverage."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dptrain.measure.statistics import FEWEST_STEPS, Estimate, median_of_steps, ratio_of_walls


def test_few_steps_have_no_interval() -> None:
    found = median_of_steps(np.ones(FEWEST_STEPS - 1))
    assert (found.low, found.value, found.high) == (-math.inf, 1.0, math.inf)
    found = median_of_steps(np.ones(FEWEST_STEPS))
    assert (found.low, found.high) == (1.0, 1.0)


def test_two_blocks_have_no_interval() -> None:
    found = ratio_of_walls([2.0, 8.0], [4.0, 4.0])
    assert (found.low, found.value, found.high) == pytest.approx((0.0, 1.25, math.inf))


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (1.0, 4.0, (5.0, 20.0)),
        (0.0, 4.0, (5.0, math.inf)),
        (-math.inf, math.inf, (0.0, math.inf)),
        (-1.0, 4.0, (5.0, math.inf)),
    ],
)
def test_the_interval_of_a_quotient_contains_its_value(
    low: float, high: float, expected: tuple[float, float]
) -> None:
    """A step without an interval has a rate without one, not from 0 to 0."""
    found = Estimate(2.0, low, high, 5).below(20.0)
    assert (found.low, found.high) == expected
    assert found.low <= found.value <= found.high
