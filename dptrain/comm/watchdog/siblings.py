"""Processes that the launcher has started on this node, of ranks that are not known otherwise.

A rank is known to the watchdog when it has registered. If the process of another rank ends before,
the launcher may end the ranks that have registered, of which none is the cause, or leave them
waiting for the start of MPI. `watch.py` imports this file without the rest of the package.
"""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Collection, Mapping
from pathlib import Path

RANK_NAMES = (
    "PMI_RANK",
    "OMPI_COMM_WORLD_RANK",
    "PMIX_RANK",
    "MV2_COMM_WORLD_RANK",
    "SLURM_PROCID",
    "PALS_RANKID",
)
"""Environment variables that hold the rank; the same as in `launcher`, in the same order."""

_LOCAL_SIZES = ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE")
"""Environment variables that hold the number of ranks of this node."""


class Siblings:
    """The processes of ranks that have not registered, until MPI has started.

    Args:
        launcher: the process that started them; None if it is not known.
        ended: the descriptors of processes are added to this epoll; one is ready when its process
            has ended, so that the order of ends is known.
        size: number of ranks of the job.
        environ: the environment variables of a rank.
    """

    def __init__(
        self, launcher: int | None, ended: select.epoll, size: int, environ: Mapping[str, str]
    ) -> None:
        self._launcher = launcher if hasattr(os, "pidfd_open") else None
        self._ended = ended
        self._by_file: dict[int, tuple[int, int]] = {}
        self._pids: set[int] = set()
        self._absent = set[int]()
        if self._launcher is not None and any(
            environ.get(name) == str(size) for name in _LOCAL_SIZES
        ):
            self._absent = set(range(size))
        self.refresh()

    @property
    def running(self) -> dict[int, int]:
        """The process of each rank that runs and has not registered."""
        return dict(sorted(self._by_file.values()))

    @property
    def absent(self) -> list[int]:
        """Ranks of which no process was ever seen; only if all ranks are on this node."""
        return sorted(self._absent)

    def refresh(self) -> None:
        """Find processes that the launcher has started meanwhile."""
        for pid in children(self._launcher):
            rank = None if pid in self._pids else rank_of(pid)
            if rank is None:
                continue
            self._pids.add(pid)
            with contextlib.suppress(OSError):  # It has just ended, so its rank remains absent.
                file = os.pidfd_open(pid)
                self._absent.discard(rank)
                self._by_file[file] = rank, pid
                self._ended.register(file, select.EPOLLIN)

    def forget(self, rank: int) -> None:
        """Forget a rank that has registered."""
        self._absent.discard(rank)
        for file in [file for file, known in self._by_file.items() if known[0] == rank]:
            self.remove(file)

    def remove(self, file: int) -> tuple[int, int] | None:
        """Close the descriptor of a process; return its rank and number, None if it is unknown."""
        found = self._by_file.pop(file, None)
        if found is not None:
            self._ended.unregister(file)
            os.close(file)
        return found

    def close(self) -> None:
        """Forget all ranks, because MPI has started."""
        self._launcher = None
        self._absent.clear()
        for file in list(self._by_file):
            self.remove(file)


def children(pid: int | None) -> list[int]:
    """Return the child processes of a process; [] if there is none, or the kernel lists none."""
    if pid is None:
        return []
    try:
        return [int(n) for n in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def rank_of(pid: int, ignored: Collection[str] = ()) -> int | None:
    """Return the rank in the environment of a process; None if there is none.

    Args:
        pid: the process.
        ignored: names of variables that do not count.
    """
    try:
        lines = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    values = dict(line.decode(errors="replace").partition("=")[::2] for line in lines)
    found = (values[name] for name in RANK_NAMES if name in values and name not in ignored)
    rank = next(found, "")
    return int(rank) if rank.isdecimal() else None
