"""Timing one thing as often as it takes to know it, within a budget."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dptrain.measure.analysis import spread
from dptrain.measure.profile import Spread

MOST_MADS = 3.0
"""Distance from the median, in median absolute deviations, beyond which a value is an outlier."""
NORMAL = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""
WARM_UP = 5
"""Runs before the clock counts: the first ones touch memory, and on a GPU two programs take turns,
each of which is run as it is once and then captured."""
FEWEST, MOST = 5, 20000
"""Timed runs: fewer only of what takes longer than the budget."""
CERTAIN = 0.005
"""Where the median is known to this part of itself, timing ends before the budget does."""


@dataclass(frozen=True)
class Timing:
    """Times of one thing.

    Attributes:
        time_ms: over all timed runs, outliers included.
        outliers: how many of them lie more than `MOST_MADS` deviations from the median.
        warm_up: runs before them.
        first_ms: of the very first run.
    """

    time_ms: Spread
    outliers: int
    warm_up: int
    first_ms: float


def find_outliers(values: ArrayLike) -> NDArray[np.bool_]:
    """Which values lie further than `MOST_MADS` scaled deviations from the median.

    A deviation below a thousandth of the median counts as that much: a clock ticks.

    Source: Leys et al., "Detecting outliers: do not use standard deviation around the mean, use
    absolute deviation around the median", J. Experimental Social Psychology 49, 2013.
    """
    array = np.asarray(values, float)
    middle = np.median(array)
    distance = np.abs(array - middle)
    deviation = max(NORMAL * float(np.median(distance)), 1e-3 * abs(float(middle)))
    return np.asarray(distance > MOST_MADS * deviation)


def time_runs(
    run: Callable[[], float],
    budget_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> Timing:
    """Call `run` until its median is known, or the budget is spent.

    Args:
        run: does the work and gives its milliseconds.
        budget_s: for all of it. What takes longer than that is timed once, behind one warm-up.
        clock: for the budget.
    """
    start = clock()
    first = run()
    warm_up = 1
    while warm_up < WARM_UP and clock() - start < budget_s / WARM_UP:
        run()
        warm_up += 1
    values: list[float] = []
    look = 20
    while len(values) < MOST:
        values.append(run())
        spent = clock() - start
        if spent >= 2 * budget_s or (len(values) >= FEWEST and spent >= budget_s):
            break
        if len(values) >= look:
            look = len(values) * 5 // 4
            if spent >= budget_s / 5 and uncertainty(values) <= CERTAIN:
                break
    return Timing(spread(np.array(values)), int(find_outliers(values).sum()), warm_up, first)


def uncertainty(values: Sequence[float]) -> float:
    """Half width of the median's 95% interval, as a part of the median: 1.57 IQR / √n.

    Source: McGill, Tukey and Larsen, "Variations of box plots", American Statistician 32, 1978.
    """
    low, middle, high = np.percentile(values, [25, 50, 75])
    return float(1.57 * (high - low) / len(values) ** 0.5 / middle)
