"""The parts of a gradient sum, from the times at which its ranks reach them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

PARTS = ("arrive", "work", "release", "mean work")


def parts_of_sum(stamps: Sequence[ArrayLike]) -> dict[str, float]:
    """Divide the time of a sum with update.

    The first three parts follow each other and add up to the time: until the last rank has arrived,
    until the last rank has summed and updated its slice, and until the last rank knows that. *Mean
    work* is the mean over the ranks of what the second part takes each of them. If the work of the
    slowest rank takes much longer, the rank was interrupted or has a slower core.

    Args:
        stamps: (steps, 4) for each rank: when it started, had arrived, had updated its slice and
            ended, in ns of a clock that all ranks share.

    Returns:
        Medians over the steps by part, in µs.

    Example:
        >>> parts_of_sum([[[0, 1000, 5000, 9000]], [[0, 2000, 8000, 9000]]])
        {'arrive': 2.0, 'work': 6.0, 'release': 1.0, 'mean work': 4.5}
    """
    starts, arrivals, updates, ends = np.moveaxis(np.array(stamps, np.int64), 2, 0)
    last_arrival, last_update = arrivals.max(axis=0), updates.max(axis=0)
    spans = (
        last_arrival - starts.max(axis=0),
        last_update - last_arrival,
        ends.max(axis=0) - last_update,
        (updates - last_arrival).mean(axis=0),
    )
    return {part: float(np.median(span)) / 1e3 for part, span in zip(PARTS, spans, strict=True)}
