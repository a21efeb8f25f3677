"""Shares that follow the speeds of the ranks, but change only on evidence.

Times of a machine that other programs use, too, vary by factors. A window therefore consists of
several blocks of steps. In each block the ranks are compared with each other, and a rank is slower
than others only if it was in nearly all blocks of a window. Speeds are compared at equal shares: a
step has a part whose time does not depend on the number of samples, so a rank with few samples
would seem slow because it has few.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dptrain.plan.shares import Counts, better_counts, equal_counts

BLOCKS = 12
"""Blocks of a window."""
OUTLIERS = 1
"""Blocks at each end of the order that an interval omits, because another program may have
disturbed a rank. The interval still contains the median with a probability of 99.4%: it does not if
11 of 12 blocks are on one side."""
MARGIN = 0.04
"""Smallest reduction of the time of the slowest rank for which shares change."""
FIRST_HOLD, MAX_HOLD = 4, 32
"""Time for which unequal shares remain before speeds are compared again, in durations of the window
that led to them. It doubles each time that a rank is slower again. At equal shares a step can take
many times as long, so comparisons take at most 1/32 of the time in the end."""


def intervals(times: NDArray[np.float64]) -> tuple[NDArray[np.float64], ...]:
    """Return intervals of the times of ranks, relative to the median of all ranks in each block.

    Args:
        times: (blocks, ranks), above 0.

    Returns:
        Lower ends, medians and upper ends, each of shape (ranks,).
    """
    ordered = np.sort(times / np.median(times, axis=1, keepdims=True), axis=0)
    return ordered[OUTLIERS], np.median(ordered, axis=0), ordered[-1 - OUTLIERS]


class MeasuredShares:
    """Computes shares from the times of blocks of steps. Each rank has at least one part.

    Args:
        counts: parts of each rank at the start; at least as many parts as ranks.

    Attributes:
        counts: present parts of each rank.

    Example:
        A rank takes twice as long as another one for a part:

        >>> shares = MeasuredShares((6, 6))
        >>> [shares.add_block([6.0, 12.0], duration_s=0.2) for _ in range(12)][-2:]
        [(6, 6), (8, 4)]
    """

    def __init__(self, counts: Counts) -> None:
        self.counts = counts
        self._equal = equal_counts(sum(counts), len(counts))
        self._times: list[Sequence[float]] = []
        self._window_s = self._hold_s = 0.0
        self._hold = FIRST_HOLD

    def add_block(self, times: Sequence[float], duration_s: float) -> Counts:
        """Return the counts for the next block.

        Args:
            times: of computation in a step, of each rank, without waiting for other ranks.
            duration_s: of the block in seconds.
        """
        self._times.append(times)
        self._window_s += duration_s
        if len(self._times) < BLOCKS:
            return self.counts
        window, window_s = np.array(self._times), self._window_s
        self._times, self._window_s = [], 0.0
        if self.counts != self._equal:
            self._hold_s -= window_s
            if self._hold_s <= 0 or self._delays_others(window):
                self.counts = self._equal
            return self.counts
        self.counts = self._by_speed(window)
        is_slower = self.counts != self._equal
        self._hold_s = self._hold * window_s
        self._hold = min(2 * self._hold, MAX_HOLD) if is_slower else FIRST_HOLD
        return self.counts

    def _by_speed(self, window: NDArray[np.float64]) -> Counts:
        """Return counts for the speeds at equal shares.

        A rank whose interval contains the speed of the others is taken to be as fast.
        """
        low, median, high = intervals(window / np.array(self._equal))
        times = np.where((low <= 1) & (high >= 1), 1.0, median)
        return better_counts(self._equal, (1 / times).tolist(), least=1, margin=MARGIN)

    def _delays_others(self, window: NDArray[np.float64]) -> bool:
        """Return whether a rank with at least an equal share is now slower than the others."""
        low, _, _ = intervals(window)
        return bool((low > 1 + MARGIN)[np.array(self.counts) >= self._equal].any())
