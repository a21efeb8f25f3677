"""The ranks of a launch that run on this node."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress

from dptrain.comm.watchdog.siblings import children, rank_of
from dptrain.comm.watchdog.watch import is_stopped, process_state, start_time


class LocalRanks:
    """The processes of the ranks below a launcher; leaving the block kills those that are left.

    A launcher may start ranks in sessions of their own (MPICH), and they outlive it if it is
    killed. So their processes are remembered while it runs. Slurm starts ranks from its daemons,
    and ends them itself.

    Args:
        launcher: its process.
    """

    def __init__(self, launcher: int) -> None:
        self._launcher = launcher
        self._started: dict[int, tuple[int, str]] = {}  # Rank and start time by process.

    def refresh(self) -> None:
        """Find ranks that were started meanwhile."""
        self._find(self._launcher)

    def _find(self, parent: int) -> None:
        for child in children(parent):
            if child in self._started:
                continue
            # The processes below a rank are its own: the watchdog must outlive it.
            # A batch script of Slurm has variables of a rank, and so has all that it starts.
            rank = rank_of(child, os.environ)
            if rank is None:
                self._find(child)
            else:
                self._started[child] = rank, start_time(child)

    def running(self) -> Iterator[int]:
        """Yield the processes that have not ended."""
        for pid, (_, started) in self._started.items():
            if start_time(pid) == started and process_state(pid) != "Z":
                yield pid

    def process_of(self, rank: int) -> int | None:
        """Return the process of a rank; None if there is none."""
        return next((pid for pid in self.running() if self._started[pid][0] == rank), None)

    def all_stopped(self) -> bool:
        """Return True if a signal such as SIGSTOP has stopped all of them."""
        running = self.running()
        first = next(running, None)
        return first is not None and is_stopped(first) and all(map(is_stopped, running))

    def __enter__(self) -> LocalRanks:
        return self

    def __exit__(self, *error: object) -> None:
        for pid in self.running():
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
