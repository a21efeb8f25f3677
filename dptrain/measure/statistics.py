"""Means, medians and ratios with 95% confidence intervals.

Steps of one launch depend on their neighbours, see `dptrain.measure.series`. For medians of
launches the bootstrap estimates the standard error, and Student's t distribution determines the
interval: those of the percentile bootstrap are too small for a few launches. With five launches
they contain the median in 93% of cases, with three in 75%.

`dptrain.audit` simulates how often the intervals contain the truth.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dptrain.measure.series import correlation_time, half_width_of_mean
from dptrain.measure.student import NORMAL, student

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
RARE, SLOWER, FEWEST_TO_SEE = 0.1, 1.5, 29
"""Slow launches by which intervals are wider because a few launches do not show them: their share,
how many times as long they take, and the number of launches of which 95% contain one."""


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
        high = math.inf if self.low <= 0 else numerator / self.low
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


def unseen_launches(launches: int) -> float:
    """Return by which share the mean of some launches may be too small.

    Fewer than `FEWEST_TO_SEE` launches probably contain none that is slow if a share `RARE` of all
    launches is; it is assumed to take `SLOWER` times as long.

    Example:
        >>> round(unseen_launches(5), 9), unseen_launches(29)
        (0.05, 0.0)
    """
    return RARE * (SLOWER - 1) if launches < FEWEST_TO_SEE else 0.0


def unseen_at_most(launches: int) -> float:
    """Return the largest share of slow launches of which none may be among some launches.

    It is the exact upper limit of a binomial share at a level of 95%, 1 − 0.05^(1 / n). Source:
    Clopper and Pearson, "The use of confidence or fiducial limits illustrated in the case of the
    binomial", Biometrika 26 (1934).

    Example:
        >>> round(unseen_at_most(5), 2)
        0.45
    """
    return float(1 - 0.05 ** (1 / launches))


def resolution(values: NDArray[np.float64]) -> float:
    """Return the resolution of the clock that measured some durations; 0 if it is fine.

    Durations by a coarse clock are multiples of its resolution, so that many are equal.
    """
    largest = float(np.abs(values).max()) or 1.0
    distinct = largest * np.unique(
        np.round(values / largest, 9)
    )  # Differences have rounding errors.
    return float(np.diff(distinct).min()) if 1 < len(distinct) <= len(values) / 2 else 0.0


def median_of_steps(values: ArrayLike) -> Estimate:
    """Return `median_of_runs` of the steps of one launch.

    With fewer than `FEWEST_STEPS` steps the interval is minus to plus infinity.

    Args:
        values: durations in the order of the steps, at least one.
    """
    found = median_of_runs(values)
    return found if found.n >= FEWEST_STEPS else replace(found, low=-math.inf, high=math.inf)


def median_of_runs(values: ArrayLike) -> Estimate:
    """Return the median of steps or of repeated runs, with its 95% interval.

    The number of n independent values below the median has a standard deviation of √n / 2. Values
    depend on their neighbours, so it is multiplied by the root of the correlation time of the
    series that counts values as above or below the median; the interval lies between two order
    statistics. It is wider on both sides by the `resolution` of the clock. From `FEWEST_STEPS`
    values on, it contains that of batches of consecutive values, too. With fewer than `FEWEST_RUNS`
    values it is minus to plus infinity.

    It holds for independent and for autocorrelated values, and for bursts of slow values if there
    are enough of them; docs/explanation/intervals.md states how often.

    Source: Conover, "Practical nonparametric statistics", 1999, section 3.2.

    Args:
        values: durations in the order of the measurement, at least one.

    Example:
        >>> median_of_runs([2.0, 2.3, 2.1, 2.2, 2.05, 2.4, 2.15, 2.25, 2.35, 2.12])
        Estimate(value=2.175, low=2.0, high=2.4, n=10)
    """
    times = np.asarray(values, float)
    n, middle = len(times), float(np.median(times))
    if n < FEWEST_RUNS:
        return Estimate(middle, -math.inf, math.inf, n)
    signs = np.where(times > middle, 1.0, -1.0)
    # An estimate from few values is too small, and those that are so end the repetition.
    correlation = min(max(float(signs[1:] @ signs[:-1]) / (n - 1) + 6 / n, 0.0), 0.95)
    counts_as_one = max((1 + correlation) / (1 - correlation), correlation_time(signs))
    half = NORMAL / 2 * math.sqrt(n * counts_as_one)
    first = max(math.floor(n / 2 - half) - 1, 0)
    ordered, error = np.sort(times), resolution(times)
    limits = float(ordered[first]) - error, float(ordered[n - 1 - first]) + error
    found = Estimate(middle, *limits, n)
    return found if n < FEWEST_STEPS else found.extended_to(_median_of_batches(times))


def _median_of_batches(times: NDArray[np.float64]) -> Estimate:
    """Return the median with the t interval of the medians of four batches of consecutive values.

    Four batches are long. The interval is wider by √((1 + r) / (1 − r)) for the correlation r of
    neighbouring batches. Source: Law and Kelton, "Simulation modeling and analysis", 2000, section
    9.5.3 (batch means).
    """
    n, middle, batches = len(times), float(np.median(times)), 4
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


def ratio_of_walls(
    numerators: ArrayLike, denominators: ArrayLike, *, unseen: tuple[float, float] = (0.0, 0.0)
) -> Estimate:
    """Return the ratio of two wall times that were measured in turns, in blocks or in launches.

    The value is the ratio of the sums, so it is that of the wall times. Block i of the numerator
    belongs to block i of the denominator, so that what disturbs the machine for longer than a block
    disturbs both. The pseudo-values of the jackknife over the blocks, of the logarithm, are a
    series with the interval of `dptrain.measure.series`. With fewer than `FEWEST` blocks the
    interval is 0 to infinity.

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
    half = half_width_of_mean(n * math.log(value) - (n - 1) * without)
    low, high = value * math.exp(-half), value * math.exp(half)
    return Estimate(value, low / (1 + unseen[1]), high * (1 + unseen[0]), n)


def share(value: float, n: int) -> Estimate:
    """Return a share of n independent samples with Wilson's 95% interval.

    Source: Wilson, "Probable inference, the law of succession, and statistical inference", 1927.

    Args:
        value: the share, 0 to 1.
        n: number of samples, at least 1.
    """
    centre = (value + NORMAL**2 / (2 * n)) / (1 + NORMAL**2 / n)
    half = NORMAL * math.sqrt(value * (1 - value) / n + NORMAL**2 / (4 * n**2))
    half /= 1 + NORMAL**2 / n
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
