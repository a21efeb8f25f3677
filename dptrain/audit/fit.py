"""The noise of a study, fitted to the steps of its launches."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from dptrain.audit.noise import BURST_SPREAD, Noise, Times
from dptrain.measure.series import FEWEST_FOR_CORRELATION, correlation
from dptrain.measure.tail_index import HEAVY, tail_index

SLOW_DEVIATIONS, SLOW_SHARE = 4.0, 0.2
"""A step is slow if it is longer than the median by this many standard deviations of the others,
and by this share of the median."""
FAST = 1.5
"""Steps up to this many times the 10th percentile determine what is fast."""
SLOW_LAUNCH = 1.15
"""A launch is slow if its mean step is this many times the median of the launches."""
LEAST_TAIL = 1.1
"""Least tail index; the mean of a distribution with an index of 1 is infinite."""
GAP = 2
"""Largest number of fast steps within a burst."""
NORMAL = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""


def fit_noise(launches: Sequence[Times], ranks: int) -> Noise:
    """Return noise with which jobs of `ranks` ranks have steps like these.

    Slow steps are bursts; of each rank, they are so frequent that one of all ranks is in a burst as
    often as the job is. If a few slow steps determine the mean instead, they are lateness with a
    Pareto distribution. The spread and its correlation are those of the other steps. The
    spread of launches is that of their fast steps.

    Args:
        launches: steps of each launch in ms, in the order of time; at least one launch with two
            steps or more.
        ranks: number of ranks of the job.

    Example:
        >>> steps = [np.random.default_rng(k).normal(10, 0.5, 1000) for k in range(5)]
        >>> round(fit_noise(steps, 1).spread, 2)
        0.05
    """
    levels = np.array([_level(np.asarray(steps, float)) for steps in launches])
    relative = [np.asarray(steps) / level for steps, level in zip(launches, levels, strict=True)]
    slow = [_in_bursts(steps) for steps in relative]
    calm = [np.log(steps[~mask]) for steps, mask in zip(relative, slow, strict=True)]
    noise = Noise(
        spread=float(np.sqrt(np.mean([values.var() for values in calm]))),
        correlation=float(np.mean([correlation(values) for values in calm])),
        **_launches(levels),
    )
    steps, in_bursts = np.concatenate(relative), np.concatenate(slow)
    if not in_bursts.any():
        return noise
    index = tail_index(steps)
    if index < HEAVY:
        tail = max(index, LEAST_TAIL)
        late = float((steps[steps > 1] - 1).mean()) / ranks ** (1 / tail)
        return replace(noise, late=late, tail=tail)
    lengths = np.concatenate([_lengths(mask) for mask in slow])
    share = min(float(in_bursts.mean()), 0.9)
    return replace(
        noise,
        burst_share=1 - (1 - share) ** (1 / ranks),
        burst_steps=max(float(lengths.mean()), 1.0),
        burst_factor=float(steps[in_bursts].mean()) / math.exp(BURST_SPREAD**2 / 2),
    )


def _level(steps: Times) -> float:
    """Return the median of the steps that are not slow."""
    return float(np.median(_fast(steps)))


def _fast(steps: Times) -> Times:
    return np.asarray(steps[steps <= FAST * np.percentile(steps, 10)])


def _in_bursts(steps: Times) -> NDArray[np.bool_]:
    """Return True for slow steps, and for the few fast ones between them."""
    deviation = NORMAL * float(np.median(np.abs(_fast(steps) - 1)))
    slow = steps > 1 + max(SLOW_DEVIATIONS * deviation, SLOW_SHARE)
    positions = np.flatnonzero(slow)
    for first, last in itertools.pairwise(positions):
        if last - first <= GAP + 1 and last - first > 1:
            slow[first:last] = True
    return np.asarray(slow)


def _lengths(mask: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return the lengths of the bursts."""
    edges = np.diff(np.concatenate([[0], mask.astype(np.int64), [0]]))
    return np.asarray(np.flatnonzero(edges < 0) - np.flatnonzero(edges > 0))


def _launches(levels: Times) -> dict[str, float]:
    """Return the fields of `Noise` that describe launches."""
    factors = levels / np.median(levels)
    slow = factors > SLOW_LAUNCH
    logs = np.log(factors[~slow])
    found = {
        "launch_spread": float(logs.std(ddof=1)) if len(logs) > 1 else 0.0,
        "slow_share": float(slow.mean()),
        "launch_correlation": correlation(logs) if len(logs) >= FEWEST_FOR_CORRELATION else 0.0,
    }
    return found | ({"slow_factor": float(factors[slow].mean())} if slow.any() else {})
