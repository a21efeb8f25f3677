"""Medians with intervals, by bootstrap."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

RESAMPLES = 2000


@dataclass(frozen=True)
class Estimate:
    """A value with the interval that holds it with 95% confidence, and the sample size."""

    value: float
    low: float
    high: float
    n: int


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
