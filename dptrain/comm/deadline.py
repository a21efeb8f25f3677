"""Deadlines for waits on other ranks."""

from __future__ import annotations

import time

MAX_TIMEOUT_S = 1e9
"""A longer timeout is shortened to this one: clocks of libraries overflow."""

_MAX_GAP_S = 0.25


class RankTimeoutError(TimeoutError):
    """A wait for other ranks took too long.

    Attributes:
        rank: the rank that the message is about: a stopped one, else the one that waited.
        is_cause: True if that rank is the cause, not a rank that waited.
    """

    __module__ = "dptrain"

    def __init__(self, message: str, rank: int, *, is_cause: bool = False) -> None:
        super().__init__(message)
        self.rank, self.is_cause = rank, is_cause


class Deadline:
    """Counts the time of a wait, without time in which this process was stopped.

    A scheduler that suspends a job stops all its ranks, for hours perhaps. A process cannot see
    that it was stopped; it sees that a loop that takes milliseconds took longer. Such a gap counts
    as 0.25 s at most.

    Example:
        >>> deadline = Deadline(300.0)
        >>> deadline.has_passed()
        False
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.waited_s = 0.0
        self._last = time.monotonic()

    def has_passed(self) -> bool:
        """Return True if the wait is longer than allowed; to be called in short intervals."""
        now = time.monotonic()
        self.waited_s += min(now - self._last, _MAX_GAP_S)
        self._last = now
        return self.waited_s > self.seconds
