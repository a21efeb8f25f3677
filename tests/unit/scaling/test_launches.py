"""Medians of a handful of launches, and how often their intervals hold the truth."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dptrain.measure.statistics import Estimate, median_of_launches, ratio_of_launches
from dptrain.measure.student import STUDENT, student
from tests.tiers import tiered

TRIALS = 600


def normal(random: np.random.Generator, n: int) -> np.ndarray:
    """Logarithms of launches that differ by chance."""
    return 0.05 * random.standard_normal(n)


def heavy(random: np.random.Generator, n: int) -> np.ndarray:
    """With launches that are far slower or faster now and then."""
    return 0.05 * random.standard_t(3, n)


def disturbed(random: np.random.Generator, n: int) -> np.ndarray:
    """A tenth of the launches is slowed by another program, by 20% on average."""
    slow = random.exponential(0.2, n) * (random.random(n) < 0.1)
    return 0.05 * random.standard_normal(n) + slow


@pytest.mark.parametrize("draw", [normal, heavy, disturbed])
@pytest.mark.parametrize("n", tiered([3, 5, 8], [3]))
def test_intervals_hold_the_median_as_often_as_they_say(draw, n: int) -> None:
    random = np.random.default_rng(n)
    truth = float(np.median(draw(random, 200_000)))
    hits = 0
    for _ in range(TRIALS):
        found = median_of_launches(np.exp(draw(random, n)))
        assert found.low <= found.value <= found.high
        hits += found.low <= math.exp(truth) <= found.high
    # Binomial(600, 0.95) is below 550 once in 200. The percentile bootstrap reaches 75% at n = 3.
    assert hits >= 550


def test_ratios_of_launches_hold_the_truth() -> None:
    random = np.random.default_rng(0)
    hits = 0
    for _ in range(TRIALS):
        top, bottom = np.exp(normal(random, 5)), 2 * np.exp(3 * normal(random, 5))
        found = ratio_of_launches(top, bottom)
        hits += found.low <= 0.5 <= found.high
    assert hits >= 550


def test_two_studies_of_the_same_agree() -> None:
    random = np.random.default_rng(3)
    agreed = 0
    for _ in range(TRIALS):
        one, two = (median_of_launches(np.exp(disturbed(random, 5))) for _ in range(2))
        agreed += one.meets(two)
    assert agreed >= 0.9 * TRIALS


def test_the_value_is_a_median_or_a_ratio_of_means() -> None:
    assert median_of_launches([1.0, 2.0, 4.0, 9.0]).value == 3.0
    assert ratio_of_launches([1.0, 2.0, 4.0, 9.0], [1.5, 1.5, 2.25]).value == pytest.approx(16 / 7)


@pytest.mark.parametrize("n", [1, 2])
def test_few_launches_have_no_interval(n: int) -> None:
    found = median_of_launches([1.0, 1.1][:n])
    assert (found.low, found.high) == (0.0, math.inf)
    assert found.below(1.0) == Estimate(1 / found.value, 0.0, math.inf, n)


def test_launches_that_do_not_differ_leave_no_doubt() -> None:
    assert median_of_launches([2.0] * 5) == Estimate(2.0, 2.0, 2.0, 5)


def test_two_equal_groups_have_twice_the_degrees_of_freedom() -> None:
    times = [1.0, 1.1, 1.2, 1.3, 1.4]
    half = student(8) * math.sqrt(2 * np.var(times, ddof=1) / 5) / np.mean(times)
    assert ratio_of_launches(times, times).high == pytest.approx(math.exp(half))


def test_quantiles_are_students() -> None:
    assert [student(n) for n in (1, 4, 20)] == [STUDENT[0], STUDENT[3], STUDENT[19]]
    # From tables; between numbers of the table a little too large, never too small.
    for degrees, known in ((30, 2.0423), (100, 1.9840), (1000, 1.9623)):
        assert known <= student(degrees) + 5e-4 < known + 3e-3
