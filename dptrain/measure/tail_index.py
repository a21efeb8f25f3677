"""Whether a few slow steps determine the mean step: the index of the tail of a distribution."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

TAIL = 0.05
"""Share of the steps that are the tail."""
FEWEST_FOR_TAIL = 250
"""Smallest number of steps whose tail is judged."""
HEAVY = 1.75
"""A tail with a smaller index is marked. Of 250 steps whose lateness has a Pareto distribution with
the index 1.5, at least 80% are marked, of 1,000 steps 95%; with the index 3, 25% and 10%; with
exponential lateness, none."""


def tail_index(values: ArrayLike) -> float:
    """Return Hill's estimate of the tail index of durations.

    The mean of a distribution whose index is below 2 converges slowly, because its variance is
    infinite, and one below 1 has no mean. Durations count from their median on, because a step has
    a part that does not vary. The index is infinite for too few durations, or if all are equal.

    Source: Hill, "A simple general approach to inference about the tail of a distribution", Annals
    of Statistics 3 (1975).

    Args:
        values: durations, shape (n,).

    Example:
        >>> steps = 10 + (np.arange(1, 1001) / 1001) ** (-1 / 1.5)
        >>> 1.2 < tail_index(steps) < 1.7
        True
    """
    times = np.asarray(values, float)
    if len(times) < FEWEST_FOR_TAIL:
        return math.inf
    number = int(TAIL * len(times))
    largest = np.sort(times - np.median(times))[-number - 1 :]
    if largest[0] <= 0:
        return math.inf
    mean = float(np.log(largest[1:] / largest[0]).mean())
    return 1 / mean if mean else math.inf


def tail_note(values: ArrayLike, what: str) -> str:
    """Return a remark if the tail is heavy, else "".

    Args:
        values: durations of steps.
        what: whose steps they are, such as ``weak-r4-t1``.
    """
    index = tail_index(values)
    if index >= HEAVY:
        return ""
    return (
        f"a few slow steps determine the mean step of {what} (tail index {index:.1f}, below 2): it "
        "converges slowly, and more steps may change it by more than its interval states; make ten "
        "times as many steps"
    )
