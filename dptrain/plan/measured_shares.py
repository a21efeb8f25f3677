"""Shares that follow the speeds of the ranks, but change only on evidence.

Times of a machine that other programs use, too, vary by factors. A window therefore consists of
several blocks of steps. In each block the ranks are compared with each other, and a rank is slower
than others only if it was in nearly all blocks of a window. Speeds are compared at equal shares: a
step has a part whose time does not depend on the number of samples, so a rank with few samples
would seem slow because it has few.

A rank that is much slower than the others may cost more than it contributes: the gradient sum, and
the part of its steps that does not depend on the number of samples. It then has no samples
(`Exclusion`), if steps are faster without it. From time to time it has some samples for a few
blocks, which show whether it has become faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dptrain.plan.shares import Counts, alone, better_counts, equal_counts, proportional_counts

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
MUCH_SLOWER = 8.0
"""Factor of the times above which ranks can be excluded, at the lower end of its interval. Without
exclusion, such ranks contribute at most 1/8 of what the others compute."""
PROBE_BLOCKS = 5
"""Blocks in which an excluded rank has some parts again."""
PROBE_SHARE = 4
"""Parts of an excluded rank in these blocks, relative to those that fit its speed. If it is still
as slow, it takes at least twice as long as the others; otherwise less time, for its fewer parts."""
RECOVERED = 1.6
"""Largest time of an excluded rank in such blocks, relative to the others, for which all ranks are
compared at equal shares. That comparison is expensive if the rank is still slow."""


def intervals(times: NDArray[np.float64]) -> tuple[NDArray[np.float64], ...]:
    """Return intervals of the times of ranks, relative to the median of all ranks in each block.

    Args:
        times: (blocks, ranks), above 0.

    Returns:
        Lower ends, medians and upper ends, each of shape (ranks,).
    """
    ordered = np.sort(times / np.median(times, axis=1, keepdims=True), axis=0)
    return ordered[OUTLIERS], np.median(ordered, axis=0), ordered[-1 - OUTLIERS]


def much_slower(times: NDArray[np.float64]) -> tuple[int, ...]:
    """Return the ranks that take at least `MUCH_SLOWER` times as long as the others.

    Args:
        times: (blocks, ranks) at equal shares, above 0.

    Returns:
        As many of the slowest ranks as possible whose rates are at most 1 / `MUCH_SLOWER` of those
        of the others together. Usually none.
    """
    order = np.argsort(-np.median(times, axis=0), kind="stable")
    rates = 1 / np.median(times, axis=0)
    for count in range(len(order) - 1, 0, -1):
        slow, others = order[:count], order[count:]
        factors = times[:, slow].min(axis=1) / np.median(times[:, others], axis=1)
        is_evident = np.sort(factors)[OUTLIERS] >= MUCH_SLOWER
        if is_evident and rates[slow].sum() * MUCH_SLOWER <= rates[others].sum():
            return tuple(sorted(slow.tolist()))
    return ()


@dataclass(frozen=True)
class Window:
    """Several blocks with the same shares.

    Attributes:
        times: (blocks, ranks) of computation in a step.
        step_s: median duration of a step.
        duration_s: of all blocks.
    """

    times: NDArray[np.float64]
    step_s: float
    duration_s: float


@dataclass
class Exclusion:
    """Ranks without samples, and how steps were while they had some.

    Attributes:
        slow: the ranks.
        shares: parts of all ranks before.
        step_s: duration of a step with these parts.
        window_s: duration of the window in which it was measured.
        hold: time until the next probe, in such windows; 0 before the first one.
    """

    slow: tuple[int, ...]
    shares: Counts
    step_s: float
    window_s: float
    hold: int = 0

    @property
    def counts(self) -> Counts:
        """Parts of all ranks while the slow ones have none."""
        return self._with_parts([0] * len(self.slow))

    @property
    def probe(self) -> Counts:
        """Parts of all ranks while the slow ones are probed."""
        most = min(equal_counts(sum(self.shares), len(self.shares)))
        return self._with_parts([min(PROBE_SHARE * self.shares[r] + 1, most) for r in self.slow])

    def _with_parts(self, parts: Sequence[int]) -> Counts:
        """Return counts with these parts of the slow ranks; the others are divided as before."""
        rates = [0.0 if rank in self.slow else float(n) for rank, n in enumerate(self.shares)]
        counts = list(proportional_counts(rates, sum(self.shares) - sum(parts)))
        for rank, count in zip(self.slow, parts, strict=True):
            counts[rank] = count
        return tuple(counts)

    def has_recovered(self, times: NDArray[np.float64]) -> bool:
        """Return whether the slow ranks are no longer slow.

        Args:
            times: (blocks, ranks) of computation in a step with the parts of `probe`.
        """
        others = np.median(np.delete(times, self.slow, axis=1), axis=1)
        return float(np.median(times[:, self.slow].min(axis=1) / others)) < RECOVERED


class MeasuredShares:
    """Computes shares from the times of blocks of steps.

    Args:
        counts: parts of each rank at the start; at least as many parts as ranks.
        can_exclude: ranks may have no parts; otherwise each has at least one.

    Attributes:
        counts: present parts of each rank.

    Example:
        A rank takes twice as long as another one for a part:

        >>> shares = MeasuredShares((6, 6))
        >>> [shares.add_block([6.0, 12.0], duration_s=0.2) for _ in range(12)][-2:]
        [(6, 6), (8, 4)]
    """

    def __init__(self, counts: Counts, *, can_exclude: bool = False) -> None:
        self.counts = counts
        self._can_exclude = can_exclude
        self._equal = equal_counts(sum(counts), len(counts))
        self._times: list[Sequence[float]] = []
        self._durations: list[tuple[float, float]] = []
        self._hold_s = 0.0
        self._hold = FIRST_HOLD
        self._much_slower: tuple[int, ...] = ()
        self._exclusion: Exclusion | None = None

    @property
    def num_blocks(self) -> int:
        """Blocks of the present window."""
        exclusion = self._exclusion
        if exclusion is not None and self.counts == exclusion.probe:
            return PROBE_BLOCKS
        if alone(self.counts) is None:
            return BLOCKS
        # Nothing is compared but the duration of steps, in the first window.
        return 1 if exclusion is None or exclusion.hold else PROBE_BLOCKS

    def add_block(self, times: Sequence[float], duration_s: float, steps: float = 1) -> Counts:
        """Return the counts for the next block.

        Args:
            times: of computation in a step, of each rank, without waiting for other ranks; any
                number for ranks without parts.
            duration_s: of the block in seconds.
            steps: of the block.
        """
        self._times.append(times)
        self._durations.append((duration_s, steps))
        if len(self._times) >= self.num_blocks:
            self.counts = self._next(self._take_window())
        return self.counts

    def _take_window(self) -> Window:
        seconds, steps = np.array(self._durations).T
        window = Window(
            np.array(self._times), float(np.median(seconds / steps)), float(seconds.sum())
        )
        self._times, self._durations = [], []
        return window

    def _next(self, window: Window) -> Counts:
        """Return the counts after a window."""
        self._hold_s -= window.duration_s
        exclusion = self._exclusion
        if exclusion is not None:
            is_probe = self.counts == exclusion.probe
            return (self._end_probe if is_probe else self._end_excluded)(exclusion, window)
        if self.counts == self._equal:
            return self._compare(window)
        if self._hold_s <= 0 or self._delays_others(window.times):
            return self._equal
        return self._exclude(window) if self._much_slower else self.counts

    def _compare(self, window: Window) -> Counts:
        """Return counts for the times of all ranks at equal shares."""
        counts = self._by_speed(window.times)
        is_slower = counts != self._equal
        self._much_slower = much_slower(window.times) if self._can_exclude else ()
        self._hold_s = self._hold * window.duration_s
        self._hold = min(2 * self._hold, MAX_HOLD) if is_slower else FIRST_HOLD
        # With few parts, the shares of ranks with one part each cannot follow their speeds.
        return counts if is_slower or not self._much_slower else self._exclude(window)

    def _exclude(self, window: Window) -> Counts:
        slow, self._much_slower = self._much_slower, ()
        self._exclusion = Exclusion(slow, self.counts, window.step_s, window.duration_s)
        return self._exclusion.counts

    def _end_excluded(self, exclusion: Exclusion, window: Window) -> Counts:
        """Return the counts after a window in which ranks had no parts."""
        if self._delays_others(window.times):
            return self._end_exclusion(self._equal)
        if not exclusion.hold:
            if window.step_s >= exclusion.step_s:
                return self._end_exclusion(exclusion.shares)
            self._hold_exclusion(exclusion)
        return exclusion.probe if self._hold_s <= 0 else self.counts

    def _end_probe(self, exclusion: Exclusion, window: Window) -> Counts:
        """Return the counts after excluded ranks had some parts for some blocks."""
        if exclusion.has_recovered(window.times):
            return self._end_exclusion(self._equal)
        self._hold_exclusion(exclusion)
        return exclusion.counts

    def _hold_exclusion(self, exclusion: Exclusion) -> None:
        exclusion.hold = min(2 * exclusion.hold, MAX_HOLD) or FIRST_HOLD
        self._hold_s = exclusion.hold * exclusion.window_s

    def _end_exclusion(self, counts: Counts) -> Counts:
        self._exclusion = None
        return counts

    def _by_speed(self, window: NDArray[np.float64]) -> Counts:
        """Return counts for the speeds at equal shares; each rank has at least one part.

        A rank whose interval contains the speed of the others is taken to be as fast.
        """
        low, median, high = intervals(window / np.array(self._equal))
        times = np.where((low <= 1) & (high >= 1), 1.0, median)
        return better_counts(self._equal, (1 / times).tolist(), least=1, margin=MARGIN)

    def _delays_others(self, window: NDArray[np.float64]) -> bool:
        """Return whether a rank with at least an equal share is now slower than the others."""
        counts, equal = np.array(self.counts), np.array(self._equal)
        active = counts > 0
        if active.sum() < 2:
            return False
        low, _, _ = intervals(window[:, active])
        return bool((low > 1 + MARGIN)[counts[active] >= equal[active]].any())
