"""The ranks of a launch that run on this node."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

from dptrain.comm.watchdog.siblings import RANK_NAMES
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
        self._started: dict[int, str] = {}

    def refresh(self) -> None:
        """Find ranks that were started meanwhile."""
        self._find(self._launcher)

    def _find(self, parent: int) -> None:
        for child in _children(parent):
            if child in self._started:
                continue
            # The processes below a rank are its own: the watchdog must outlive it.
            if child != parent and _is_rank(child):
                self._started[child] = start_time(child)
            else:
                self._find(child)

    def running(self) -> list[int]:
        """Return the processes that have not ended."""
        return [
            pid
            for pid, started in self._started.items()
            if start_time(pid) == started and process_state(pid) != "Z"
        ]

    def any_stopped(self) -> bool:
        """Return True if a signal such as SIGSTOP has stopped one."""
        return any(map(is_stopped, self.running()))

    def processor_s(self) -> float:
        """Return the processor time of those that run, in seconds."""
        ticks = 0
        for pid in self.running():
            with suppress(OSError, ValueError, IndexError):
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def __enter__(self) -> LocalRanks:
        return self

    def __exit__(self, *error: object) -> None:
        for pid in self.running():
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)


def _children(pid: int) -> list[int]:
    with suppress(OSError):
        return [int(n) for n in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def _is_rank(pid: int) -> bool:
    """Return True if the environment of a process names its rank, and that of this one does not.

    A batch script of Slurm has such a variable.
    """
    names = tuple(f"{name}=".encode() for name in RANK_NAMES if name not in os.environ)
    with suppress(OSError):
        return any(
            word.startswith(names)
            for word in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        )
    return False
