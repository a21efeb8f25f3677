"""The mean of a series whose values depend on their neighbours, with its 95% interval.

Two properties reduce how much a series shows: neighbours that resemble each other, and a few values
that determine the mean. The first reduces the number of independent values, the second the degrees
of freedom of Student's distribution.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from dptrain.measure.student import student

Values = NDArray[np.float64]

FEWEST_FOR_CORRELATION = 8
"""Smallest number of values whose correlation is estimated."""
BLOCKS = 4
"""Number of blocks of a series; with four, their means are hardly correlated."""
_ROUNDING = 1e-12


def half_width_of_mean(values: Values, least_rho: float = 0.0) -> float:
    """Return half the 95% interval of the mean of a series whose neighbours are correlated.

    The variance s² of n values with the correlation time τ results in the standard error
    s / √(n / τ − 1), and `degrees_of_freedom` those of Student's t. The half width is at least that
    of the means of `BLOCKS` blocks.

    Source: Law and Kelton, "Simulation modeling and analysis", 2000, section 9.5.3 (batch means).

    Args:
        values: in the order of the measurement, shape (n,), n ≥ 2.
        least_rho: the correlation of neighbours counts as at least this.

    Example:
        >>> half_width_of_mean(np.array([2.0, 4.0, 2.0, 4.0, 2.0, 4.0])) > 1.0
        True
    """
    n = len(values)
    if _are_equal(values):
        return 0.0
    independent = num_independent(values, least_rho)
    error = math.sqrt(float(values.var()) / (independent - 1))
    half = student(degrees_of_freedom(values, independent)) * error
    if n < BLOCKS * FEWEST_FOR_CORRELATION:
        return half
    means = np.array([block.mean() for block in np.array_split(values, BLOCKS)])
    return max(half, student(BLOCKS - 1) * float(means.std(ddof=1)) / math.sqrt(BLOCKS))


def num_independent(values: Values, least_rho: float = 0.0) -> float:
    """Return as how many independent values a series counts, at least 2."""
    return max(len(values) / correlation_time(values, least_rho), 2.0)


def degrees_of_freedom(values: Values, independent: float) -> float:
    """Return Satterthwaite's degrees of freedom of the variance of a series, at least 1.

    They are 2 m / (κ − 1) for m independent values with the kurtosis κ, but below m: about m for
    a normal distribution, and about k if k values determine the variance.

    Source: Satterthwaite, "An approximate distribution of estimates of variance components",
    Biometrics Bulletin 2 (1946).

    Args:
        values: shape (n,).
        independent: m, of `num_independent`.
    """
    if _are_equal(values):
        return max(independent - 1, 1.0)
    deviations = values - values.mean()
    kurtosis = float((deviations**4).mean()) / float((deviations**2).mean()) ** 2
    return max(min(independent - 1, 2 * independent / max(kurtosis - 1, _ROUNDING)), 1.0)


def _are_equal(values: Values) -> bool:
    return float(np.ptp(values)) <= _ROUNDING * float(np.abs(values).max())


def correlation_time(values: Values, least_rho: float = 0.0) -> float:
    """Return the number of neighbouring values that count as one independent value, at least 1.

    It is the larger of two: (1 + ρ) / (1 − ρ) for the correlation ρ of neighbours, and the sum of
    all correlations up to the first pair of distances whose sum is negative (initial positive
    sequence). An estimate from few values is too small, so it is multiplied by 1 + √(τ / n).

    Sources: Zwiers and von Storch, Journal of Climate 8 (1995); Geyer, "Practical Markov chain
    Monte Carlo", Statistical Science 7 (1992).

    Args:
        values: shape (n,); for n < `FEWEST_FOR_CORRELATION` the result is 1.
        least_rho: ρ counts as at least this.
    """
    n = len(values)
    if n < FEWEST_FOR_CORRELATION or _are_equal(values):
        return 1.0
    rho = max(correlation(values), least_rho)
    size = 1 << (2 * n - 1).bit_length()
    power = np.abs(np.fft.rfft(values - values.mean(), size)) ** 2
    covariances = np.fft.irfft(power, size)
    sums = covariances[: n // 4 * 2].reshape(-1, 2).sum(axis=1) / covariances[0]
    kept = np.cumprod(sums > 0)
    found = max((1 + rho) / (1 - rho), 2 * float(sums @ kept) - 1)
    return found * (1 + math.sqrt(found / n))


def correlation(values: Values) -> float:
    """Return the correlation of neighbours in one or more series along the last axis.

    The bias of the estimate, −(1 + 3 ρ) / n, is corrected; negative values count as 0.
    Source: Kendall, "Note on bias in the estimation of autocorrelation", Biometrika 41, 1954.
    """
    n = values.shape[-1]
    centred = values - values.mean(axis=-1, keepdims=True)
    squares = float((centred**2).sum())
    if n < 4 or squares <= 0:
        return 0.0
    found = float((centred[..., 1:] * centred[..., :-1]).sum()) / squares
    return float(min(max((n * found + 1) / (n - 3), 0.0), 0.98))
