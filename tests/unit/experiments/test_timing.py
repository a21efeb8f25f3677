"""How often something is timed, and what counts as an outlier."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np
import pytest

from dptrain.audit.noise import Noise
from dptrain.experiments.timing import MIN_RUNS, WARM_UP, find_outliers, time_runs, uncertainty
from dptrain.measure.statistics import FEWEST_RUNS, median_of_runs
from tests.tiers import tiered


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


SERIES = 400


@pytest.mark.parametrize("runs", tiered([10, 20, 50, 99, 100, 250, 400, 2000], [10, 50, 400]))
@pytest.mark.parametrize("rho", [0.0, 0.5])
def test_the_interval_of_a_median_contains_it(runs: int, rho: float) -> None:
    times = Noise(spread=0.15, correlation=rho).job(np.random.default_rng(3), SERIES, 1, runs)
    found = [median_of_runs(series) for series in times]
    assert [f.value for f in found] == np.median(times, axis=1).tolist()
    assert sum(f.low <= 1 <= f.high for f in found) >= 0.92 * SERIES
    # It is not wide for the sake of coverage: 1.25 standard errors of a mean, times 1.96 to 4.
    if runs >= 400 and not rho:
        error = 1.2533 * 0.15 / np.sqrt(runs)
        assert np.median([f.high - f.low for f in found]) < 2 * 4 * error


@pytest.mark.parametrize(
    ("rho", "scale"), tiered([(0.0, 0.01), (0.0, 0.03), (0.5, 0.01), (0.5, 0.03)], [(0.5, 0.03)])
)
def test_timing_that_ends_early_knows_the_median(rho: float, scale: float) -> None:
    series = 400
    noise = Noise(spread=scale, correlation=rho)
    times = 0.01 * noise.job(np.random.default_rng(4), series, 1, 6000)
    covered = early = 0
    for values in times:
        clock = Clock(iter([0.01] * WARM_UP + values.tolist()))
        found = list[float]()

        def run(clock: Clock = clock, found: list[float] = found) -> float:
            found.append(clock.run())
            return found[-1]

        def now(clock: Clock = clock) -> float:
            # A fifth of the limit passes at once, so that the interval alone ends the timing.
            return clock.now + 10.0 * (clock.runs >= WARM_UP)

        timing = time_runs(run, 50.0, now)
        counted = found[-timing.time_ms.n :]
        early += uncertainty(counted) <= 0.005
        interval = median_of_runs(counted)
        covered += interval.low <= 10 <= interval.high
    assert early >= 0.9 * series
    assert covered >= 0.92 * series


def test_few_runs_have_no_interval() -> None:
    assert uncertainty([1.0] * (FEWEST_RUNS - 1)) == float("inf")
    assert uncertainty([1.0] * FEWEST_RUNS) == 0
