"""How often something is timed, and what counts as an outlier."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np
import pytest

from dptrain.experiments.timing import MIN_RUNS, WARM_UP, find_outliers, time_runs


class Clock:
    """Time that passes when something runs, and not else."""

    def __init__(self, seconds: Iterable[float]) -> None:
        self.now = 0.0
        self.runs = 0
        self._seconds: Iterator[float] = iter(seconds)

    def __call__(self) -> float:
        return self.now

    def run(self) -> float:
        taken = next(self._seconds)
        self.now += taken
        self.runs += 1
        return 1e3 * taken


def forever(draw: Callable[[], float]) -> Iterator[float]:
    while True:
        yield draw()


def noisy(scale: float) -> Iterator[float]:
    random = np.random.default_rng(0)
    return forever(lambda: 0.01 * float(1 + scale * random.random()))


def test_what_does_not_vary_is_known_before_the_budget_is_spent() -> None:
    clock = Clock(noisy(0.001))
    timing = time_runs(clock.run, 10.0, clock)
    assert clock.now < 3.0
    assert timing.time_ms.median == pytest.approx(10.0, rel=1e-3)
    assert timing.time_ms.n == clock.runs - WARM_UP


def test_what_varies_takes_the_budget_and_no_more() -> None:
    clock = Clock(noisy(5.0))
    time_runs(clock.run, 2.0, clock)
    assert 2.0 <= clock.now < 2.1


def test_what_takes_longer_than_the_budget_is_timed_once() -> None:
    clock = Clock(forever(lambda: 30.0))
    timing = time_runs(clock.run, 3.0, clock)
    assert (clock.runs, timing.warm_up, timing.time_ms.n) == (2, 1, 1)


def test_a_few_runs_are_made_even_if_they_take_a_little_more_than_the_budget() -> None:
    clock = Clock(forever(lambda: 0.3))
    timing = time_runs(clock.run, 1.0, clock)
    assert timing.time_ms.n == MIN_RUNS - 1 or timing.time_ms.n == MIN_RUNS
    assert clock.now <= 2.3


def test_outliers_are_beyond_three_deviations() -> None:
    # Distances from the median 10 are 1, 1, 0, 1, 1 and 4, 5: their median is 1, and three scaled
    # deviations are 3 · 1.4826 = 4.45.
    values = [9.0, 11.0, 10.0, 9.0, 11.0, 14.0, 15.0, 9.0, 10.0]
    assert find_outliers(values).tolist() == [value == 15.0 for value in values]


def test_equal_values_have_no_outliers_and_a_far_one_is() -> None:
    assert not find_outliers([2.0] * 9).any()
    assert find_outliers([2.0] * 9 + [2.001, 2.5]).sum() == 1
