"""Requests to stop from the keyboard or a batch system. Training reads them between steps."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from dptrain.comm.watchdog.watch import open_stderr
from dptrain.errors import UserError

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""Ctrl-C; a batch system's end or `kill`; Slurm's warning (``#SBATCH --signal=USR1@120``); the end
of a terminal."""

EARLY_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""Signals that may come before training begins; training then stops after its first step. Ctrl-C
ends the start-up at once, because nothing is lost yet."""

_SAME_PRESS_S = 1.0

_early: signal.Signals | None = None


def remember_early_signals() -> None:
    """Keep `EARLY_SIGNALS` for the next `StopRequest`, instead of ending the process."""
    for number in EARLY_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP.
            signal.signal(number, _remember)


def _remember(number: int, frame: FrameType | None) -> None:
    global _early
    _early = _early or signal.Signals(number)


def receive_early_signals() -> None:
    """Let Python end the process on `EARLY_SIGNALS`, as they end one that does not handle them.

    So the watchdog knows of the signal, and does not take this for a rank that was killed.
    """
    for number in EARLY_SIGNALS:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _end)


def _end(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)


class StoppedError(UserError):
    """A signal ended a run before its first step; the same command starts it again."""

    __module__ = "dptrain"

    exit_code = 75


@contextlib.contextmanager
def end_on(
    number: signal.Signals, when: str, report: Callable[[StoppedError], None]
) -> Iterator[None]:
    """Let a signal end the block at once, instead of being kept for the training loop.

    Programs that do not handle the signal are ended by it as before.

    Args:
        number: the signal.
        when: the end of the message, such as "while kernels were compiled".
        report: receives the error before it is raised.

    Raises:
        StoppedError: the signal was received.
    """

    def end(received: int, frame: FrameType | None) -> None:
        error = StoppedError(f"{signal.Signals(received).name} {when}")
        report(error)
        raise error

    previous = signal.getsignal(number)
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or previous in (signal.SIG_DFL, signal.SIG_IGN, None):
        yield
        return
    signal.signal(number, end)
    try:
        yield
    finally:
        signal.signal(number, previous)


class StopRequest:
    """Within the block, signals set a flag instead of ending the process.

    The training loop reads `requested` once a step and adds it to the sums over the ranks, so that
    all ranks stop after the same step, whichever of them received the signal.

    MPICH's mpirun passes the first Ctrl-C, SIGTERM and SIGUSR1 on to all ranks and
    waits without limit; a second Ctrl-C makes it kill them. Open MPI's mpirun passes SIGUSR1 on,
    but kills the ranks after the others (`stop_advice`). In a terminal, a rank may receive the
    same Ctrl-C twice, from the keyboard and from mpirun: signals within 1 s count as one. Without
    mpirun, a later second Ctrl-C raises `KeyboardInterrupt`. Slurm's `scancel` sends SIGTERM, and
    SIGKILL after KillWait (30 s by default). Under ``nohup`` SIGHUP stays ignored.

    Python allows signal handlers only in the main thread; in another thread the block changes
    nothing.

    Args:
        signals: those that set the flag from the beginning. [default: all of `SIGNALS`]

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
        """True if a signal was received."""
        return self._signal is not None

    @property
    def signal_name(self) -> str:
        """Name of the first signal, such as ``SIGTERM``; "" before one was received."""
        return "" if self._signal is None else self._signal.name

    def listen(self, *signals: signal.Signals) -> None:
        """Let these signals set the flag too, until the block ends."""
        global _early
        if _early in signals and self._signal is None:
            self._signal, self._since, _early = _early, time.monotonic(), None
        if threading.current_thread() is threading.main_thread():
            for number in signals:
                if number is signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                    continue
                previous = signal.signal(number, self._receive)
                self._previous.setdefault(number, previous)

    def finish(self) -> None:
        """Ignore the signals until the process ends, because nothing is left to stop."""
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                signal.signal(number, signal.SIG_IGN)
            self._previous = {}

    def __enter__(self) -> StopRequest:
        self.listen(*self._first)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def _receive(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._signal is None:
            self._signal, self._since = signal.Signals(number), now
        elif number == signal.SIGINT and now - self._since > _SAME_PRESS_S:
            raise KeyboardInterrupt


_OPEN_MPI_LAUNCHER = re.compile(r"mpirun|mpiexec|prterun|orterun")


def stop_advice(
    environ: Mapping[str, str] = os.environ, proc: Path = Path("/proc"), pid: int | None = None
) -> str:
    """Return one line that names the signal to stop with, if the launcher kills ranks after others.

    After SIGINT, SIGTERM or SIGHUP, the mpirun of Open MPI sends SIGTERM to the ranks, and SIGKILL
    after 0.25 s (version 5) or after the parameter ``odls_base_sigkill_timeout`` (version 4, 1 s by
    default); its exit code is 1. It passes SIGUSR1 on and waits. ``launch/mpirun.sh`` blocks the
    other signals of mpirun, and sends SIGUSR1 in their place.

    Args:
        environ: the environment variables; Open MPI's mpirun sets ``OMPI_COMM_WORLD_SIZE``.
        proc: the folder that describes processes; tests pass another folder.
        pid: this process [default: that of the system].

    Returns:
        The line; "" with another launcher, or if mpirun does not receive the other signals.
    """
    if "OMPI_COMM_WORLD_SIZE" not in environ:
        return ""
    mpirun = _find_open_mpi(os.getpid() if pid is None else pid, proc)
    if mpirun is not None and signal.SIGTERM in _blocked(mpirun, proc):
        return ""
    target = "the process of mpirun" if mpirun is None else str(mpirun)
    return (
        f"to stop with a checkpoint: kill -USR1 {target}; after Ctrl-C, SIGTERM or SIGHUP, Open "
        "MPI's mpirun kills the ranks before one is complete"
    )


def open_launcher_output(
    environ: Mapping[str, str] = os.environ, proc: Path = Path("/proc"), pid: int | None = None
) -> int | None:
    """Open a file for a last line under Open MPI's mpirun; return None if this is not possible.

    After a signal, mpirun of version 5 no longer forwards what ranks write to their standard error,
    so the line goes to that of mpirun. Version 4 forwards it until it kills the ranks.

    Args:
        environ, proc, pid: as for `stop_advice`.
    """
    if "OMPI_COMM_WORLD_SIZE" not in environ:
        return None
    mpirun = _find_open_mpi(os.getpid() if pid is None else pid, proc)
    if mpirun is None:
        return None
    with contextlib.suppress(OSError):
        if "prte" not in (proc / f"{mpirun}/stat").read_text():
            return os.dup(2)
    return open_stderr(mpirun, proc)


def _find_open_mpi(pid: int, proc: Path) -> int | None:
    """Return the process of mpirun among the parents of a process; None on another node."""
    while pid > 1:
        try:
            name, _, rest = (proc / f"{pid}/stat").read_text().partition("(")[2].rpartition(")")
            pid, child = int(rest.split()[1]), pid
        except (OSError, ValueError, IndexError):
            return None
        if _OPEN_MPI_LAUNCHER.match(name):
            return child
    return None


def _blocked(pid: int, proc: Path) -> set[signal.Signals]:
    """Return the signals that a process blocks."""
    try:
        found = re.search(r"^SigBlk:\s*([0-9a-f]+)", (proc / f"{pid}/status").read_text(), re.M)
    except OSError:
        return set()
    mask = int(found[1], 16) if found else 0
    return {number for number in signal.Signals if mask >> (number - 1) & 1}
