"""Ratios of launches that are paired by round, and groups of launches that fall apart.

A round launches every point once, so whatever changes slowly (temperature, clock rate, other users)
changes both launches of a pair, and their ratio loses it. With a round effect of 10% and five
rounds, paired intervals are a fifth as wide as those of independent groups (simulated).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dptrain.measure.statistics import (
    FEWEST,
    Estimate,
    ratio_of_launches,
    ratio_of_walls,
    unseen_launches,
    unseen_share,
)
from dptrain.measure.student import student

FEWEST_TO_SPLIT = 5
"""Smallest number of launches that are tested for two groups."""
GAP, LEAST_GAP = 3.0, 0.02
"""Two groups differ by this multiple of the larger group's range, and by this share of the value.
Of five normal launches 3% look like two groups, of eight 0.1%."""


def common_rounds(one: Sequence[str], two: Sequence[str]) -> list[str]:
    """Return the rounds that two points have in common, in the order of the first.

    There are none if fewer than `FEWEST` rounds, or fewer than half, are common although at least
    one point has launches in each.

    Args:
        one, two: rounds of the launches of each point.
    """
    common = [name for name in one if name in two]
    return common if len(common) >= max(FEWEST, min(len(one), len(two)) / 2) else []


def mean_ratio(ratios: ArrayLike) -> Estimate:
    """Return the geometric mean of ratios with its 95% t interval, exp(mean ± t s / √n).

    Source: Student, "The probable error of a mean", Biometrika 6 (1908). Of two points with the
    same distribution, log ratios are symmetric, also if launches are not.

    Args:
        ratios: positive, shape (n,); with n < `FEWEST` the interval is 0 to infinity.
    """
    logs = np.log(np.asarray(ratios, float))
    n, mean = len(logs), float(np.mean(logs))
    if n < FEWEST:
        return Estimate(math.exp(mean), 0.0, math.inf, n)
    half = student(n - 1) * float(np.std(logs, ddof=1)) / math.sqrt(n)
    return Estimate(math.exp(mean), math.exp(mean - half), math.exp(mean + half), n)


def split(values: ArrayLike) -> float | None:
    """Return the value between two groups of launches; None if the launches form one group.

    Each group has two launches or more; a single launch that differs is an outlier. No interval of
    the median is meaningful if it lies between the groups, so reports show the range instead.

    Args:
        values: positive numbers, one per launch, shape (n,).
    """
    logs = np.sort(np.log(np.asarray(values, float)))
    if len(logs) < FEWEST_TO_SPLIT:
        return None
    gaps = np.diff(logs)[1:-1]
    below = int(np.argmax(gaps)) + 1
    gap, widest = gaps[below - 1], max(logs[below] - logs[0], logs[-1] - logs[below + 1])
    if gap < max(GAP * widest, LEAST_GAP):
        return None
    return float(np.exp((logs[below] + logs[below + 1]) / 2))


def with_range(value: float, values: ArrayLike) -> Estimate:
    """Return a mean over launches with the range of the launches in place of an interval."""
    found = np.asarray(values, float)
    return Estimate(value, float(np.min(found)), float(np.max(found)), len(found))


@dataclass(frozen=True)
class Walls:
    """Wall times of the launches of a point.

    Attributes:
        steps_ms: wall time / steps of each launch in ms, in the order of the rounds.
        num_steps: steps of all launches together.
    """

    steps_ms: NDArray[np.float64]
    num_steps: int

    @property
    def unseen(self) -> float:
        """Share by which the mean may be too small.

        It is the larger of `dptrain.measure.statistics.unseen_share` and `unseen_launches`.
        """
        steps = unseen_share(float(self.steps_ms.mean()), self.num_steps)
        return max(steps, unseen_launches(len(self.steps_ms)))


def mean_wall(walls: Walls) -> tuple[Estimate, bool]:
    """Return the mean step in ms, and whether its interval is the range because of two groups."""
    times = walls.steps_ms
    if split(times) is not None:
        return with_range(float(times.mean()), times), True
    return ratio_of_walls(times, np.ones(len(times)), unseen=(walls.unseen,) * 2), False


def compare_walls(base: Walls, point: Walls, *, paired: bool) -> tuple[Estimate, bool]:
    """Return T(base) / T(point), and whether its interval is the range because of two groups.

    More launches do not reduce a range.

    Args:
        base, point: their launches.
        paired: True if launch i of both belongs to one round.
    """
    unseen, one, two = (base.unseen, point.unseen), base.steps_ms, point.steps_ms
    if paired:
        found, ratios = ratio_of_walls(one, two, unseen=unseen), one / two
        return (found, False) if split(ratios) is None else (with_range(found.value, ratios), True)
    found = ratio_of_launches(one, two, unseen=unseen)
    if split(one) is None and split(two) is None:
        return found, False
    limits = float(one.min() / two.max()), float(one.max() / two.min())
    return Estimate(found.value, *limits, found.n), True


def difference(one: Estimate, two: Estimate) -> Estimate:
    """Return two − one with a 95% interval, for two independent studies of the same point.

    The standard errors follow from the t intervals, and Welch's degrees of freedom from their
    sizes. Source: Welch, Biometrika 34 (1947).
    """
    n = min(one.n, two.n)
    value = two.value - one.value
    if n < FEWEST or math.isinf(one.high) or math.isinf(two.high):
        return Estimate(value, -math.inf, math.inf, n)
    errors = [(e.high - e.low) / (2 * student(e.n - 1)) for e in (one, two)]
    variance = sum(error**2 for error in errors)
    if not variance:
        return Estimate(value, value, value, n)
    degrees = variance**2 / sum(
        error**4 / (e.n - 1) for error, e in zip(errors, (one, two), strict=True)
    )
    half = student(degrees) * math.sqrt(variance)
    return Estimate(value, value - half, value + half, n)
