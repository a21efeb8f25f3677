"""Time that the computing threads of a rank wait for a core, from the run queue of Linux.

A thread that can run but has no core is in a run queue. The kernel adds up this time, the *run
delay*, for each thread, in nanoseconds, readable without rights. A thread that sleeps, for example
until data or another rank arrives, is in no run queue.

It does not contain what a hypervisor takes from all programs of a virtual machine (the field steal
of /proc/stat), nor interrupts.

Source: Linux, Documentation/scheduler/sched-stats.rst, "/proc/<pid>/schedstat".
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

TASKS = Path("/proc/self/task")
LINE_BYTES = 128
"""Upper limit of the size of a schedstat file: three numbers of at most 20 digits."""
WORKERS_EVERY = 200
"""Workers are read if at least so many times the duration of the reading has passed."""
READ_NS = 1_000
"""Duration of the reading of one file, upper limit. Measured: 690 ns (AMD EPYC, Linux 6.18)."""


def run_delay_ns(line: bytes) -> int | None:
    """Return the run delay in a schedstat file, in nanoseconds; None if the kernel counts none.

    A kernel without these counters offers no such file, or three zeros.

    Example:
        >>> run_delay_ns(b"294503 1200 1"), run_delay_ns(b"0 0 0"), run_delay_ns(b"")
        (1200, None, None)
    """
    fields = line.split()
    return int(fields[1]) if len(fields) == 3 and int(fields[0]) > 0 else None


class RunDelays:
    """Reads the run delays of the thread that calls, and of the other compute threads.

    Lines are returned as bytes and parsed later, because a step should take as little time as
    possible.

    Args:
        workers: returns the native numbers of the other compute threads of this rank.
        tasks: folder with the files of the threads of this process.
    """

    def __init__(self, workers: Callable[[], Sequence[int]] = tuple, tasks: Path = TASKS) -> None:
        self._workers, self._tasks = workers, tasks
        self._thread = 0
        self._own: _File | None = None
        self._others: dict[int, _File] = {}
        self._read_ns = 0

    def follow_caller(self) -> None:
        """Read the thread that calls from now on; it is the one that computes."""
        thread = threading.get_ident()
        if thread != self._thread:
            self._thread, self._own = thread, _File(self._path(threading.get_native_id()))

    def read(self) -> bytes:
        """Return the line of the own thread; empty if there is none."""
        return b"" if self._own is None else self._own.read()

    def read_workers(self, now_ns: int) -> list[tuple[int, bytes]] | None:
        """Return number and line of each other compute thread; None if that would cost too much.

        What is not read is part of the next reading.

        Args:
            now_ns: the present time in nanoseconds.
        """
        numbers = self._workers()
        if not numbers or now_ns - self._read_ns < WORKERS_EVERY * READ_NS * len(numbers):
            return None
        self._read_ns = now_ns
        if self._others.keys() != set(numbers):
            self._others = {number: _File(self._path(number)) for number in numbers}
        return [(number, file.read()) for number, file in self._others.items()]

    def _path(self, thread: int) -> Path:
        return self._tasks / str(thread) / "schedstat"


class _File:
    """A small file of /proc that stays open; without it, or after the thread, it is empty."""

    def __init__(self, path: Path) -> None:
        self._descriptor = -1
        with suppress(OSError):
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            weakref.finalize(self, os.close, self._descriptor)

    def read(self) -> bytes:
        try:
            return os.pread(self._descriptor, LINE_BYTES, 0)
        except OSError:
            return b""
