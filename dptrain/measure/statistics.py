"""Medians with intervals, by bootstrap.

Two kinds of samples, two intervals. Many steps of one launch: the percentile bootstrap. A handful
of launches: that one is too narrow then (of five it holds the median in 93% of cases, of three in
75%), so the bootstrap supplies the standard error, and Student's t the rest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

RESAMPLES = 2000
FEWEST = 3
"""Launches that an interval takes. That of two would be honest, and span powers of ten."""
STUDENT = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
)  # fmt: skip
"""Quantile 0.975 of Student's distribution for 1, 2, … degrees of freedom."""
_NORMAL = 1.960


@dataclass(frozen=True)
class Estimate:
    """A value with the interval that holds it with 95% confidence, and the sample size."""

    value: float
    low: float
    high: float
    n: int

    def times(self, factor: float) -> Estimate:
        """Of a quantity `factor` > 0 times as large."""
        return Estimate(factor * self.value, factor * self.low, factor * self.high, self.n)

    def below(self, numerator: float) -> Estimate:
        """Of `numerator` > 0 divided by the quantity, which is positive."""
        low = 0.0 if math.isinf(self.high) else numerator / self.high
        high = math.inf if self.low == 0 else numerator / self.low
        return Estimate(numerator / self.value, low, high, self.n)

    def meets(self, other: Estimate) -> bool:
        """Whether the two intervals have a number in common."""
        return self.low <= other.high and other.low <= self.high


def _medians(values: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    chosen = generator.integers(0, len(values), (RESAMPLES, len(values)))
    return np.asarray(np.median(values[chosen], axis=1))


def ratio_of_medians(
    numerator: ArrayLike, denominator: ArrayLike, *, factor: float = 1.0, seed: int = 0
) -> Estimate:
    """Ratio factor · median(numerator) / median(denominator), both resampled independently.

    Percentile bootstrap. Source: Efron and Tibshirani, "An introduction to the bootstrap", 1993,
    chapter 13.

    Args:
        numerator, denominator: at least one number each.
        factor: multiplies value and interval.
        seed: of the resampling; the same numbers give the same interval.
    """
    top, bottom = np.asarray(numerator, float), np.asarray(denominator, float)
    generator = np.random.Generator(np.random.Philox(seed))
    ratios = factor * _medians(top, generator) / _medians(bottom, generator)
    low, high = np.percentile(ratios, [2.5, 97.5])
    value = factor * float(np.median(top) / np.median(bottom))
    return Estimate(value, float(low), float(high), min(len(top), len(bottom)))


def median_of_launches(values: ArrayLike) -> Estimate:
    """Median m of a few positive numbers, one a launch: exp(ln m ± t · s).

    s is the bootstrap's standard error of ln m, t the quantile 0.975 of Student's distribution
    with n − 1 degrees of freedom. Sources: Efron and Tibshirani, "An introduction to the
    bootstrap", 1993, chapters 6 and 12; Hesterberg, "What teachers should know about the
    bootstrap", The American Statistician 69 (2015), on how narrow percentile intervals of small
    samples are. Logarithms, because times scatter by factors, and the interval of a ratio
    follows. Fewer than `FEWEST` launches have no interval: it goes from 0 to infinity.
    """
    times = np.asarray(values, float)
    return _interval(float(np.median(times)), [_standard_error(times)], [len(times)])


def ratio_of_launches(numerator: ArrayLike, denominator: ArrayLike) -> Estimate:
    """Ratio of the medians of two independent groups of launches.

    As `median_of_launches`, with √(s₁² + s₂²) and Welch's degrees of freedom. Source: Welch, "The
    generalization of Student's problem when several different population variances are involved",
    Biometrika 34 (1947).
    """
    top, bottom = np.asarray(numerator, float), np.asarray(denominator, float)
    errors = [_standard_error(top), _standard_error(bottom)]
    return _interval(float(np.median(top) / np.median(bottom)), errors, [len(top), len(bottom)])


def _standard_error(values: np.ndarray) -> float:
    """Of the logarithm of the median."""
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


def student(degrees: float) -> float:
    """Quantile 0.975 of Student's distribution; between whole degrees of freedom never too small.

    Linear in 1 / degrees between the numbers of the table, along which the quantile is convex.
    """
    known = [0.0, *(1 / n for n in range(len(STUDENT), 0, -1))]
    return float(np.interp(1 / degrees, known, [_NORMAL, *reversed(STUDENT)]))
