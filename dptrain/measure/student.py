"""Quantiles of Student's t distribution and of the normal distribution."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

NORMAL = 1.959964
"""Quantile 0.975 of the normal distribution."""
STUDENT = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
)  # fmt: skip
"""Quantile 0.975 of Student's distribution for 1, 2, … degrees of freedom."""


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
    return float(np.interp(1 / degrees, known, [NORMAL, *reversed(STUDENT)]))
