"""Repeated timing of a function until its median is certain, within a time limit."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dptrain.measure.profile.analysis import spread
from dptrain.measure.profile.profile import Spread
from dptrain.measure.statistics import median_of_runs

MAX_MADS = 3.0
"""A value further from the median than this many median absolute deviations is an outlier."""
NORMAL = 1.4826
"""Ratio of standard deviation and median absolute deviation of a normal distribution."""
WARM_UP = 5
"""Number of runs before timing starts. The first runs touch memory, and on a GPU two alternating
programs each run once before they are captured as CUDA graphs."""
MIN_RUNS, MAX_RUNS = 5, 20000
"""Least and largest number of timed runs; there are fewer only if the time limit is exceeded."""
TARGET_UNCERTAINTY = 0.005
"""Timing ends early if the relative uncertainty of the median is at most this."""


@dataclass(frozen=True)
class Timing:
    """Times of repeated runs.

    Attributes:
        time_ms: distribution over all timed runs, outliers included.
        outliers: number of runs further than `MAX_MADS` deviations from the median.
        warm_up: number of runs before the timed ones.
        first_ms: time of the first run.
    """

    time_ms: Spread
    outliers: int
    warm_up: int
    first_ms: float


def find_outliers(values: ArrayLike) -> NDArray[np.bool_]:
    """Return True for values further than `MAX_MADS` scaled deviations from the median.

    The deviation is at least a thousandth of the median, because of the resolution of the clock.

    Source: Leys et al., "Detecting outliers: do not use standard deviation around the mean, use
    absolute deviation around the median", J. Experimental Social Psychology 49, 2013.
    """
    array = np.asarray(values, float)
    middle = np.median(array)
    distance = np.abs(array - middle)
    deviation = max(NORMAL * float(np.median(distance)), 1e-3 * abs(float(middle)))
    return np.asarray(distance > MAX_MADS * deviation)


def time_runs(
    run: Callable[[], float],
    budget_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> Timing:
    """Call `run` until its median is certain or the time limit is reached.

    Args:
        run: runs once and returns its time in milliseconds.
        budget_s: time limit in seconds. A run that takes longer is timed once, after one warm-up.
        clock: clock for the time limit.
    """
    start = clock()
    first = run()
    warm_up = 1
    while warm_up < WARM_UP and clock() - start < budget_s / WARM_UP:
        run()
        warm_up += 1
    values: list[float] = []
    look = 20
    while len(values) < MAX_RUNS:
        values.append(run())
        spent = clock() - start
        if spent >= 2 * budget_s or (len(values) >= MIN_RUNS and spent >= budget_s):
            break
        if len(values) >= look:
            look = len(values) * 5 // 4
            if spent >= budget_s / 5 and uncertainty(values) <= TARGET_UNCERTAINTY:
                break
    return Timing(spread(np.array(values)), int(find_outliers(values).sum()), warm_up, first)


def uncertainty(values: Sequence[float]) -> float:
    """Return the larger half of the 95% interval of the median, relative to it.

    It is infinite for few runs, see `dptrain.measure.statistics.median_of_runs`.
    """
    found = median_of_runs(values)
    return max(found.high - found.value, found.value - found.low) / found.value
