"""Differences and ratios from two intervals: known values, and simulated coverage."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dptrain.measure.statistics import Estimate, share
from dptrain.report.differences import difference, ratio


def test_the_interval_of_a_share_is_wilsons() -> None:
    # Newcombe, Statistics in Medicine 17 (1998), table I: 81 of 263 and 15 of 148, method 3.
    one, two = share(81 / 263, 263), share(15 / 148, 148)
    assert (one.low, one.high) == pytest.approx((0.2553, 0.3662), abs=1e-4)
    assert (two.low, two.high) == pytest.approx((0.0624, 0.1605), abs=1e-4)


@pytest.mark.parametrize(
    ("one", "two", "limits"),
    [
        # Newcombe, Statistics in Medicine 17 (1998), 873: table II, method 10.
        ((56, 70), (48, 80), (0.0524, 0.3339)),
        ((9, 10), (3, 10), (0.1705, 0.8090)),
        ((10, 10), (0, 10), (0.6075, 1.0000)),
    ],
)
def test_the_interval_of_a_difference_of_shares_is_newcombes(
    one: tuple[int, int], two: tuple[int, int], limits: tuple[float, float]
) -> None:
    found = difference(share(one[0] / one[1], one[1]), share(two[0] / two[1], two[1]))
    assert (found.low, found.high) == pytest.approx(limits, abs=1e-4)


@pytest.mark.parametrize("n", [100, 360, 10_000])
@pytest.mark.parametrize(("one", "two"), [(0.983, 0.969), (0.9, 0.9), (0.995, 0.6)])
def test_intervals_of_accuracies_contain_the_difference(n: int, one: float, two: float) -> None:
    generator = np.random.default_rng(0)
    inside, trials = 0, 2000
    for a, b in zip(generator.binomial(n, one, trials), generator.binomial(n, two, trials),
                    strict=True):  # fmt: skip
        found = difference(share(a / n, n), share(b / n, n))
        inside += found.low <= one - two <= found.high
    assert 0.92 <= inside / trials <= 0.995


def test_intervals_of_ratios_contain_the_truth() -> None:
    generator = np.random.default_rng(0)
    inside, trials = 0, 4000
    for _ in range(trials):
        logs = generator.normal((0.0, math.log(1.3)), (0.05, 0.1))
        base, one = (
            Estimate(math.exp(x), math.exp(x - 1.96 * s), math.exp(x + 1.96 * s), 100)
            for x, s in zip(logs, (0.05, 0.1), strict=True)
        )
        found = ratio(one, base)
        inside += found.low <= 1.3 <= found.high
    assert 0.94 <= inside / trials <= 0.96


def test_an_unbounded_interval_remains_unbounded() -> None:
    known, unknown = Estimate(2.0, 1.9, 2.1, 100), Estimate(3.0, -math.inf, math.inf, 5)
    assert ratio(unknown, known) == Estimate(1.5, 0.0, math.inf, 5)
    assert ratio(Estimate(2.0, -0.5, 4.5, 100), known).high == math.inf
    assert math.isinf(difference(unknown, known).high)
