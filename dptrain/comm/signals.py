"""A wish to stop, from the keyboard or a batch system, that training can grant between steps."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Ctrl-C; a batch system's or `kill`'s end; Slurm's warning (``#SBATCH --signal=USR1@120``)."""

_SAME_PRESS_S = 1.0


class StopRequest:
    """Within the block, `signals` set a flag instead of ending the process.

    The training loop reads `requested` once a step and adds it to the sums that ranks share, so
    that all ranks stop after the same step, whichever of them were told.

    What a user sees: MPICH's mpirun passes the first Ctrl-C, SIGTERM and SIGUSR1 on to all ranks
    and waits without limit; a second Ctrl-C makes it kill them. On a terminal a rank may get
    the same Ctrl-C twice, from the keyboard and from mpirun: signals within 1 s count as one.
    Without mpirun, a later second Ctrl-C raises `KeyboardInterrupt`. Slurm's `scancel` sends
    SIGTERM, and SIGKILL after KillWait (30 s unless configured).

    Outside the main thread, where Python allows no handlers, the block changes nothing.

    Args:
        signals: to begin with; all of `SIGNALS` where left out.

    Example:
        >>> with StopRequest() as stop:
        ...     print(stop.requested)
        False
    """

    def __init__(self, *signals: signal.Signals) -> None:
        self._first = signals or SIGNALS
        self._signal: signal.Signals | None = None
        self._since = 0.0
        self._previous: dict[signal.Signals, Any] = {}

    @property
    def requested(self) -> bool:
        """Whether a signal has come."""
        return self._signal is not None

    @property
    def signal_name(self) -> str:
        """``SIGTERM`` and so on; "" while none has come."""
        return "" if self._signal is None else self._signal.name

    def listen(self, *signals: signal.Signals) -> None:
        """Let these signals set the flag too, until the block ends."""
        if threading.current_thread() is threading.main_thread():
            for number in signals:
                previous = signal.signal(number, self._receive)
                self._previous.setdefault(number, previous)

    def __enter__(self) -> StopRequest:
        self.listen(*self._first)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def _receive(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._signal is None:
            self._signal, self._since = signal.Signals(number), now
        elif number == signal.SIGINT and now - self._since > _SAME_PRESS_S:
            raise KeyboardInterrupt
