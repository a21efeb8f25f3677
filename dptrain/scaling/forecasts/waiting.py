"""How the time in which ranks wait for the slowest one grows with their number."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist

import numpy as np

from dptrain.scaling.forecasts.observed import Means

TOLERATED_WAITING = 0.15
"""Relative error that a distribution of lateness may have in the measured waiting times."""


def _normal(ranks: float) -> float:
    # Blom, "Statistical estimates and transformed beta-variables", 1958.
    return NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25)) if ranks > 1 else 0.0


def _exponential(ranks: float) -> float:
    return sum(1 / k for k in range(2, round(ranks) + 1))


def _pareto(ranks: float) -> float:
    if ranks <= 1:
        return 0.0
    largest = math.lgamma(ranks + 1) + math.lgamma(2 / 3) - math.lgamma(ranks + 2 / 3)
    return math.exp(largest) - 1.5


LATENESS: dict[str, Callable[[float], float]] = {
    "normal": _normal,
    "exponential": _exponential,
    "Pareto": _pareto,
}
"""Expected maximum of p variables minus their mean, up to a factor."""


class Waiting:
    """The measured waiting times with one distribution of lateness.

    Args:
        points: at least one of several ranks.
        lateness: name of the distribution, a key of `LATENESS`.
        shrinks: True if lateness is proportional to the work of a rank.
    """

    def __init__(self, points: Sequence[Means], lateness: str, *, shrinks: bool) -> None:
        self._growth = LATENESS[lateness]
        several = [at for at in points if at.point.ranks > 1]
        self._times = np.array([at.waiting / (at.busy if shrinks else 1.0) for at in several])
        self._known = np.array([self._growth(at.point.ranks) for at in several])
        self._shrinks = shrinks

    def time_ms(self, ranks: int, busy: float) -> float:
        """Return the time that a rank waits for the slowest one on average."""
        scale = float(self._known @ self._times / (self._known @ self._known))
        return scale * self._growth(ranks) * (busy if self._shrinks else 1.0)

    @property
    def error(self) -> float:
        """Error of the measured times, in units of `TOLERATED_WAITING`."""
        if not self._times.any():
            return 0.0
        ratios = self._times / self._known
        return float(np.std(ratios) / np.mean(ratios)) / TOLERATED_WAITING
