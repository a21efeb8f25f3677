"""Means, medians and ratios with 95% confidence intervals.

Steps of one launch depend on their neighbours, so their intervals come from blocks of steps. For
launches the bootstrap estimates the standard error, and Student's t distribution determines the
interval: those of the percentile bootstrap are too small for a few launches. With five launches
they contain the median in 93% of cases, with three in 75%.

`tests/unit/measure/test_coverage.py` simulates how often the intervals contain the truth.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

RESAMPLES = 2000
FEWEST = 3
"""Smallest number of launches or blocks with an interval. That of two would span powers of ten."""
FEWEST_STEPS = 100
"""Smallest number of steps of one launch with an interval."""
FEWEST_RUNS = 10
"""Smallest number of repeated runs with an interval of their median."""
UNSEEN, UNSEEN_STEPS, UNSEEN_MS = 2, 5.0, 100.0
"""Interruptions by which intervals of means are wider because a few steps do not show them: their
number, and how long each is at most, in steps and in milliseconds. 100 ms is the default period of
a CPU quota on Linux."""
STUDENT = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
)  # fmt: skip
"""Quantile 0.975 of Student's distribution for 1, 2, … degrees of freedom."""
_NORMAL = 1.959964


@dataclass(frozen=True)
class Estimate:
    """A value with its 95% confidence interval and the sample size."""

    value: float
    low: float
    high: float
    n: int

    def times(self, factor: float) -> Estimate:
        """Return the estimate multiplied by `factor` > 0."""
        return Estimate(factor * self.value, factor * self.low, factor * self.high, self.n)

    def below(self, numerator: float) -> Estimate:
        """Return the estimate of `numerator` > 0 divided by this positive quantity."""
        low = 0.0 if math.isinf(self.high) else numerator / self.high
        high = math.inf if self.low == 0 else numerator / self.low
        return Estimate(numerator / self.value, low, high, self.n)

    def meets(self, other: Estimate) -> bool:
        """Return True if the two intervals overlap."""
        return self.low <= other.high and other.low <= self.high

    def extended_to(self, other: Estimate) -> Estimate:
        """Return the same value with an interval that contains both intervals."""
        return Estimate(self.value, min(self.low, other.low), max(self.high, other.high), self.n)


def slowest_rank(times: NDArray[np.float64], blocks: int) -> NDArray[np.float64]:
    """Return times of the slowest rank, which other times than those returned determine.

    The largest mean of several ranks is too large on average, because it belongs to a rank that was
    slow by chance. Therefore the even blocks determine the rank whose times are returned for the
    odd blocks, and vice versa (cross-fitting). The mean of the result is unbiased if the ranks are
    equally fast or one is clearly the slowest, and too small if chance determines which of
    several slow ranks is found. The mean rank cannot be slower than the slowest, so a constant is
    added if the result would have a smaller mean than all times.

    Source: van Hasselt, "Double Q-learning", NeurIPS 2010, on estimates of a maximum of means.

    Args:
        times: (ranks, n), in the order of the measurement.
        blocks: number of blocks of neighbouring times.

    Returns:
        (n,); the times of the only column if n is 1.
    """
    n = times.shape[1]
    if n == 1:
        return np.asarray(times.max(axis=0))
    odd = np.arange(n) * min(blocks, n) // n % 2 == 1
    of_odd, of_even = times[:, odd].mean(axis=1), times[:, ~odd].mean(axis=1)
    found = np.where(odd, times[of_even.argmax()], times[of_odd.argmax()])
    return np.asarray(found + max(float(times.mean() - found.mean()), 0.0))


def _medians(values: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    chosen = generator.integers(0, len(values), (RESAMPLES, len(values)))
    return np.asarray(np.median(values[chosen], axis=1))


def unseen_share(mean_ms: float, steps: int) -> float:
    """Return by which share the mean of some steps may be too small.

    A step that is interrupted once in a thousand is probably not among a few hundred, but counts in
    the long run. `UNSEEN` interruptions are assumed that were not seen.

    Args:
        mean_ms: mean of the steps in ms, positive.
        steps: their number, at least 1.

    Example:
        >>> unseen_share(2.0, 500)
        0.02
    """
    return UNSEEN * min(UNSEEN_STEPS, UNSEEN_MS / mean_ms) / steps


def median_of_steps(values: ArrayLike) -> Estimate:
    """Return the median of a series of steps of one launch, with its 95% interval.

    Steps depend on their neighbours, so the interval comes from batches of consecutive steps: the
    median of each batch is a value, and Student's t distribution determines the interval of their
    mean, widened by √((1 + r) / (1 − r)) for the correlation r of neighbouring batches. There are
    four batches, so that they are long. With fewer than `FEWEST_STEPS` steps the interval is minus
    to plus infinity.

    In simulations with autocorrelation up to 0.9 and with bursts of slow steps, 94 to 98% of the
    intervals contain the median.

    Source: Law and Kelton, "Simulation modeling and analysis", 2000, section 9.5.3 (batch means).

    Args:
        values: durations in the order of the steps, at least one.
    """
    times = np.asarray(values, float)
    n, middle = len(times), float(np.median(times))
    if n < FEWEST_STEPS:
        return Estimate(middle, -math.inf, math.inf, n)
    batches = 4
    size = n // batches
    medians = np.median(times[n - size * batches :].reshape(batches, size), axis=1)
    deviations = medians - medians.mean()
    squares = float(deviations @ deviations)
    if not squares:
        return Estimate(middle, middle, middle, n)
    # An estimate from few values is too small. Half of this is its mean error without correlation.
    correlation = float(deviations[1:] @ deviations[:-1]) / squares + 2 / batches
    correlation = min(max(correlation, 0.0), 0.9)
    error = math.sqrt(squares / (batches - 1) / batches)
    half = student(batches - 1) * error * math.sqrt((1 + correlation) / (1 - correlation))
    return Estimate(middle, middle - half, middle + half, n)


def median_of_runs(values: ArrayLike) -> Estimate:
    """Return the median of repeated runs with its 95% interval between two order statistics.

    The number of values below the median of n independent runs has a standard deviation of √n / 2.
    Runs depend on their neighbours, so it is multiplied by √((1 + r) / (1 − r)) for the correlation
    r of neighbours, counted as above or below the median. From `FEWEST_STEPS` runs on, the interval
    contains that of `median_of_steps`, too, which slow bursts need. With fewer than `FEWEST_RUNS`
    runs it is minus to plus infinity.

    In simulations of independent and of autocorrelated runs (up to 0.5), at least 92% of the
    intervals contain the median, also if runs are repeated until the interval is short.

    Source: Conover, "Practical nonparametric statistics", 1999, section 3.2.

    Args:
        values: durations in the order of the runs, at least one.

    Example:
        >>> median_of_runs([2.0, 2.3, 2.1, 2.2, 2.0, 2.4, 2.1, 2.2, 2.3, 2.1])
        Estimate(value=2.1500000000000004, low=2.0, high=2.4, n=10)
    """
    times = np.asarray(values, float)
    n, middle = len(times), float(np.median(times))
    if n < FEWEST_RUNS:
        return Estimate(middle, -math.inf, math.inf, n)
    signs = np.where(times > middle, 1.0, -1.0)
    # An estimate from few values is too small, and those that are so end the repetition.
    correlation = min(max(float(signs[1:] @ signs[:-1]) / (n - 1) + 6 / n, 0.0), 0.95)
    half = _NORMAL / 2 * math.sqrt(n * (1 + correlation) / (1 - correlation))
    first = max(math.floor(n / 2 - half) - 1, 0)
    ordered = np.sort(times)
    found = Estimate(middle, float(ordered[first]), float(ordered[n - 1 - first]), n)
    return found if n < FEWEST_STEPS else found.extended_to(median_of_steps(times))


def ratio_of_walls(
    numerators: ArrayLike, denominators: ArrayLike, *, unseen: tuple[float, float] = (0.0, 0.0)
) -> Estimate:
    """Return the ratio of two wall times that were measured in turns, in blocks or in launches.

    The value is the ratio of the sums, so it is that of the wall times. Block i of the numerator
    belongs to block i of the denominator, so that what disturbs the machine for longer than a block
    disturbs both. The jackknife over the blocks estimates the standard error of the logarithm, and
    Student's t with n − 1 degrees of freedom determines the interval. With fewer than `FEWEST`
    blocks the interval is 0 to infinity.

    Source: Efron and Tibshirani, "An introduction to the bootstrap", 1993, chapter 11.

    Args:
        numerators, denominators: wall time / steps of each block, at least one; positive.
        unseen: shares by which the two may be too small, see `unseen_share`.

    Example:
        >>> found = ratio_of_walls([2.0, 4.0, 6.0], [4.0, 8.0, 12.0])
        >>> found.value, round(found.low, 9), round(found.high, 9)
        (0.5, 0.5, 0.5)
    """
    top, bottom = np.asarray(numerators, float), np.asarray(denominators, float)
    n, value = len(top), float(top.sum() / bottom.sum())
    if n < FEWEST:
        return Estimate(value, 0.0, math.inf, n)
    without = np.log((top.sum() - top) / (bottom.sum() - bottom))
    half = student(n - 1) * math.sqrt((n - 1) * float(without.var()))
    low, high = value * math.exp(-half), value * math.exp(half)
    return Estimate(value, low / (1 + unseen[1]), high * (1 + unseen[0]), n)


def share(value: float, n: int) -> Estimate:
    """Return a share of n independent samples with Wilson's 95% interval.

    Source: Wilson, "Probable inference, the law of succession, and statistical inference", 1927.

    Args:
        value: the share, 0 to 1.
        n: number of samples, at least 1.
    """
    centre = (value + _NORMAL**2 / (2 * n)) / (1 + _NORMAL**2 / n)
    half = _NORMAL * math.sqrt(value * (1 - value) / n + _NORMAL**2 / (4 * n**2))
    half /= 1 + _NORMAL**2 / n
    return Estimate(
        value, max(min(centre - half, value), 0.0), min(max(centre + half, value), 1.0), n
    )


def median_of_launches(values: ArrayLike) -> Estimate:
    """Return the median m of a few positive numbers, one per launch, with exp(ln m ± t · s).

    s is the bootstrap's standard error of ln m, and t the quantile 0.975 of Student's distribution
    with n − 1 degrees of freedom. Logarithms are used because times vary by factors; the interval
    of a ratio then follows. With fewer than `FEWEST` launches the interval is 0 to infinity.

    Sources: Efron and Tibshirani, "An introduction to the bootstrap", 1993, chapters 6 and 12;
    Hesterberg, The American Statistician 69 (2015), on percentile intervals of small samples.
    """
    times = np.asarray(values, float)
    return _interval(float(np.median(times)), [_standard_error(times)], [len(times)])


def ratio_of_launches(
    numerator: ArrayLike, denominator: ArrayLike, *, unseen: tuple[float, float] = (0.0, 0.0)
) -> Estimate:
    """Return the ratio of the means of two independent groups of launches.

    The interval is that of the logarithm, with √(s₁² + s₂²) for the relative standard errors s of
    the means and Welch's degrees of freedom.

    Source: Welch, "The generalization of Student's problem when several different population
    variances are involved", Biometrika 34 (1947).

    Args:
        numerator, denominator: positive numbers, one per launch.
        unseen: shares by which the two may be too small, see `unseen_share`.
    """
    groups = [np.asarray(group, float) for group in (numerator, denominator)]
    value = float(groups[0].mean() / groups[1].mean())
    sizes = [len(group) for group in groups]
    if min(sizes) < FEWEST:
        return Estimate(value, 0.0, math.inf, min(sizes))
    errors = [float(g.std(ddof=1) / g.mean()) / math.sqrt(len(g)) for g in groups]
    found = _interval(value, errors, sizes)
    return Estimate(value, found.low / (1 + unseen[1]), found.high * (1 + unseen[0]), found.n)


def _standard_error(values: np.ndarray) -> float:
    """Return the standard error of the logarithm of the median."""
    logs = np.log(values / np.median(values))
    return float(np.std(_medians(logs, np.random.Generator(np.random.Philox(0)))))


def _interval(value: float, errors: list[float], sizes: list[int]) -> Estimate:
    n = min(sizes)
    if n < FEWEST:
        return Estimate(value, 0.0, math.inf, n)
    variance = sum(error**2 for error in errors)
    if not variance:
        return Estimate(value, value, value, n)
    degrees = variance**2 / sum(e**4 / (m - 1) for e, m in zip(errors, sizes, strict=True))
    half = student(degrees) * math.sqrt(variance)
    return Estimate(value, value * math.exp(-half), value * math.exp(half), n)


@lru_cache
def student_quantile(degrees: float, probability: float) -> float:
    """Return a quantile of Student's distribution, to four digits below 1 − 10⁻⁵.

    With t = √n tan θ, the density of θ is proportional to cos θ to the power n − 1.

    Args:
        degrees: of freedom, at least 1.
        probability: of a smaller value.
    """
    angles = np.linspace(-math.pi / 2, math.pi / 2, 20_001)
    density = np.abs(np.cos(angles)) ** (degrees - 1)
    below = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    angle = np.interp(probability, below / below[-1], angles)
    return math.sqrt(degrees) * math.tan(angle)


def student(degrees: float) -> float:
    """Return the quantile 0.975 of Student's distribution.

    The table is interpolated linearly in 1 / degrees, in which the quantile is convex, so the
    result is never too small.
    """
    known = [0.0, *(1 / n for n in range(len(STUDENT), 0, -1))]
    return float(np.interp(1 / degrees, known, [_NORMAL, *reversed(STUDENT)]))
