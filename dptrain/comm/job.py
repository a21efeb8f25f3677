"""The folder that the ranks of a node share without MPI, so that a failure is reported once.

The folder is in the temporary directory; its name follows from the launcher's process. The first
rank that arrives starts the watchdog (`dptrain.comm.watchdog.watch`). The process that creates the
file ``failed`` in the folder prints the cause. Files are used because MPI calls of a rank that
fails can hang.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import os
import re
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from dptrain.comm.node.activity import Activity
from dptrain.comm.signals import SIGNALS
from dptrain.comm.watchdog import mpi_files, watch

if TYPE_CHECKING:
    from mpi4py import MPI

_BEGIN_S = 10.0
"""Time limit for the watchdog to start and to reply, on a busy machine."""

_CONNECT_S = 3.0
"""Time in which a rank waits for the watchdog to connect to that of another node."""

_CLEANUP_S = 10.0
"""Time limit for the watchdog to remove its folder after the last rank has left."""

_LEAVE_NAP_S = 0.05
"""Longest time between two polls of a rank that waits for others to leave."""

_HIGH_FILE = 500


@dataclass
class Job:
    """The job of this process, and its connection to the watchdog.

    Attributes:
        rank, size: of COMM_WORLD.
        folder: the folder that the ranks of this node share.
        node: index of this rank's node; 0 until MPI has started.
        pipe: file descriptor of the named pipe that the watchdog reads; None without watchdog.
        registration: that of the pipe ``register``; the watchdog runs while it is open.
        signals: that of the file in which signals are recorded; None if they are not.
        activity: what the ranks of this node do at present.
        has_printed: True if this rank has printed why the job ends.
    """

    rank: int
    size: int
    folder: Path
    node: int = 0
    pipe: int | None = None
    registration: int | None = None
    signals: int | None = None
    activity: Activity = field(init=False)
    has_printed: bool = False

    def __post_init__(self) -> None:
        self.activity = Activity(self.rank, self.size)

    def claim(self) -> bool:
        """Return True if no process of this node has claimed to print a cause before."""
        return watch.claim(str(self.folder))

    def register(self) -> None:
        """Report this process to the watchdog of this node, and start the watchdog if needed.

        Raises:
            OSError: the temporary directory or the watchdog cannot be used.
        """
        end = time.monotonic() + _BEGIN_S
        while not self._register(end):
            if (self.folder / "failed").exists():  # Perhaps it has not been a watchdog's folder.
                raise FileExistsError(f"a rank has failed before rank {self.rank} registered")
        self.activity = Activity(self.rank, self.size, self.folder)
        atexit.register(self.leave)

    def _register(self, end: float) -> bool:
        """Register once; return False if the watchdog has ended before it watched this rank."""
        name = f"{self.rank}-{os.getpid()}"
        alive, watched = self.folder / f"alive-{name}", self.folder / f"watched-{name}"
        try:
            self.registration = _open_register(self.folder, self.size)
            with contextlib.suppress(FileExistsError):
                os.mkfifo(alive)
            # For reading and writing, since opening for writing alone needs a reader.
            self.pipe = _raise_number(os.open(alive, os.O_RDWR | os.O_NONBLOCK))
            self._record_signals(self.folder / f"signals-{name}")
            os.write(self.registration, f"{name}\n".encode())
        except (FileNotFoundError, BrokenPipeError):
            self._close_pipes()
            return False
        # Wait for the watchdog. It cannot determine which rank ended first if both ended before it
        # opened their pipes.
        closed = select.poll()
        closed.register(self.registration, 0)  # POLLERR needs no mask.
        while not watched.exists() and time.monotonic() < end:
            if closed.poll(2):
                self._close_pipes()
                return False
        return True

    def _record_signals(self, path: Path) -> None:
        """Let the C function that receives signals for Python write their numbers to a file.

        So the watchdog knows of a signal for whose handler Python had no time: the launcher may
        kill this process while it imports modules or starts MPI. The file remains open until the
        process ends. Nothing is recorded outside of the main thread, or if the program uses this
        facility of Python itself.
        """
        with contextlib.suppress(OSError, ValueError):
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK
            previous = signal.set_wakeup_fd(-1)
            if previous not in (-1, self.signals):
                signal.set_wakeup_fd(previous)
                return
            self.signals = os.open(path, flags, 0o600)
            signal.set_wakeup_fd(self.signals, warn_on_full_buffer=False)

    def meet(self, folder: str) -> None:
        """Use the folder of the first rank of this node, after MPI has started."""
        if folder != str(self.folder):
            self._close_pipes()
            self.folder = Path(folder)
            with contextlib.suppress(OSError):
                self.register()
        self.report("started")

    def listen(self) -> tuple[int, str] | None:
        """Let this node's watchdog accept those of other nodes.

        Returns:
            The TCP port and the token that the others need; None without watchdog.
        """
        port, _, token = self._request("listen", _BEGIN_S).partition(" ")
        return (int(port), token) if token else None

    def connect(self, port: int, token: str, addresses: Sequence[str]) -> None:
        """Let this node's watchdog connect to the one that listens."""
        self._request(f"connect {port} {token} {','.join(addresses)}", _CONNECT_S)

    def _request(self, line: str, limit_s: float) -> str:
        """Send a line to the watchdog and return its reply; "" if there is none in `limit_s`."""
        self.report(line)
        reply = self.folder / "links"
        end = time.monotonic() + limit_s
        while self.pipe is not None and time.monotonic() < end:
            with contextlib.suppress(FileNotFoundError):
                return reply.read_text()
            time.sleep(0.002)
        return ""

    def report(self, line: str) -> None:
        """Send a line to the watchdog."""
        if self.pipe is not None:
            with contextlib.suppress(OSError):  # The watchdog was killed.
                os.write(self.pipe, f"{line}\n".encode())

    def leave(self) -> None:
        """Shut MPI down, and report to the watchdog that this process ends regularly.

        Stop signals are ignored from now on, since nothing is left to stop.
        """
        with contextlib.suppress(ValueError):  # Not the main thread.
            for number in SIGNALS:
                signal.signal(number, signal.SIG_IGN)
        module = sys.modules.get("mpi4py.MPI")
        if module is not None and module.Is_initialized() and not module.Is_finalized():
            self.activity.leave()
            self._wait_for_others(module.COMM_WORLD)
            module.Finalize()
        self._close_pipes()

    def _wait_for_others(self, comm: MPI.Comm) -> None:
        """Let MPI progress until the other ranks of this node leave too.

        The end of MPI waits for them without showing whether this rank runs; see `activity.stuck`.
        """
        nap_s = 0.0005
        while not self.activity.all_have_left():
            comm.Iprobe()
            self.activity.poll()
            time.sleep(nap_s)
            nap_s = min(2 * nap_s, _LEAVE_NAP_S)

    def _close_pipes(self) -> None:
        """Report a regular end, and close the pipes, for which the watchdog waits."""
        self.report("bye")
        self.forget_pipes()

    def forget_pipes(self) -> None:
        """Close the pipes without a report."""
        for file in (self.registration, self.pipe):
            if file is not None:
                os.close(file)
        self.registration = self.pipe = None

    @contextlib.contextmanager
    def limit_call(self, purpose: str, timeout: float) -> Iterator[None]:
        """Let the watchdog end this process if the block takes longer than `timeout` seconds.

        Some calls wait for all ranks without limit and hold the interpreter's lock, so that no
        Python code of this process can run meanwhile: starting MPI, connecting NCCL. The watchdog
        names the rank that does not arrive. It sends SIGHUP, which the C function ``_exit``
        handles here: its argument is the number of the signal, so the exit code is 1. The library
        must be loaded before, because some libraries install handlers of their own.

        Args:
            purpose: what the call waits for, such as "MPI to start".
            timeout: time limit in seconds. Time in which this process is stopped does not count.
        """
        import ctypes

        library = ctypes.CDLL(None)
        library.signal.argtypes, library.signal.restype = [ctypes.c_int, ctypes.c_void_p], None
        previous = signal.getsignal(signal.SIGHUP)
        library.signal(signal.SIGHUP, ctypes.cast(library._exit, ctypes.c_void_p))
        if reads_program():
            self.report("stdin")
        self.report(f"wait {timeout} {purpose}")
        self.activity.begin_wait()
        try:
            yield
        finally:
            self.activity.end_wait()
            self.report("arrived")
            # No handler of Python's, or not the main thread.
            with contextlib.suppress(ValueError, TypeError):
                signal.signal(signal.SIGHUP, previous)


def reads_program() -> bool:
    """Return True if Python reads this program from standard input: ``python - < script.py``."""
    return sys.argv[:1] in ([""], ["-"])


_current: Job | None = None
_is_forked = False
_interrupt_handler: Callable[[int, FrameType | None], None] | None = None


def start_job(rank: int, size: int) -> Job:
    """Register this process as a rank of its job, once; if that fails, print a warning.

    Args:
        rank, size: as the launcher or MPI assigned them.
    """
    global _current
    if _current is not None and (_current.rank, _current.size) == (rank, size):
        return _current
    _current = Job(rank, size, meeting_folder())
    if hasattr(select, "epoll"):
        try:
            _current.register()
        except OSError as error:
            if not (_current.folder / "failed").exists():
                sys.stderr.write(
                    f"dptrain: warning: rank {rank} runs without watchdog ({error}); if a rank is "
                    "killed, no message names it\n"
                )
    if _current.pipe is None:
        atexit.register(_current.leave)
    os.register_at_fork(after_in_child=_forget)
    return _current


def _forget() -> None:
    """Forget the job in a child that was forked: it is not a rank, and must not speak for one."""
    global _current, _is_forked
    _is_forked = True
    if _current is not None:
        _current.forget_pipes()
        if _current.signals is not None:
            signal.set_wakeup_fd(-1)
        _current.activity.detach()
        atexit.unregister(_current.leave)
        _current = None


def exit_on_interrupt(rank: int, size: int) -> None:
    """Let Ctrl-C end the process at once until MPI has started.

    Python would raise `KeyboardInterrupt` while it imports modules written in C, some of which
    crash then. Another rank may wait in the start of MPI, where it cannot handle signals, so a rank
    of several replaces its program by one that starts MPI too and ends all ranks.
    """
    global _interrupt_handler

    def leave(number: int, frame: FrameType | None) -> None:
        if current_job() is not None:  # The signal came while MPI started.
            raise KeyboardInterrupt
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        job = _current or Job(rank, size, meeting_folder())
        if rank == 0 if size == 1 else job.claim():
            os.write(2, b"dptrain: interrupted\n")
        job.report("bye")
        if size > 1:
            program = "from dptrain.comm.abort import end_start; end_start(130)"
            os.execv(sys.executable, [sys.executable, "-c", program])
        os._exit(130)

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        _interrupt_handler = leave
        signal.signal(signal.SIGINT, leave)


def raise_on_interrupt() -> None:
    """Undo `exit_on_interrupt`."""
    if _interrupt_handler is not None and signal.getsignal(signal.SIGINT) is _interrupt_handler:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def current_job() -> Job | None:
    """Return the job of this process while MPI runs; None for a single rank or a forked child."""
    module = sys.modules.get("mpi4py.MPI")
    # In the middle of its import, the module is incomplete.
    if _is_forked or not hasattr(module, "COMM_WORLD"):
        return None
    assert module is not None
    if not module.Is_initialized() or module.Is_finalized():
        return None
    comm: MPI.Comm = module.COMM_WORLD
    if comm.Get_size() == 1:
        return None
    if _current is not None and _current.size == comm.Get_size():
        return _current
    return Job(comm.Get_rank(), comm.Get_size(), meeting_folder())


def meeting_folder() -> Path:
    """Return the folder that the ranks of this node share.

    Processes of one job on a node have the same launcher's process (the proxy of mpirun, the step
    daemon of Slurm) as their ancestor. Its number, start time and the user make the name unique.
    """
    launcher = watch.find_launcher(os.getpid()) or os.getppid()
    name = f"dptrain-{os.getuid()}-{launcher}-{_start_time(launcher)}-{os.uname().nodename}"
    return Path(tempfile.gettempdir()) / name


def _start_time(pid: int) -> str:
    return watch.start_time(pid) or "0"


def remove_left_folders() -> None:
    """Remove the folders of this user's jobs on this node of which no process is left.

    The watchdog removes its folder, unless it is killed. Slurm kills it with the ranks of a step.
    What MPI made since in /dev/shm and no process uses is removed too.
    """
    own = rf"dptrain-{os.getuid()}-(\d+)-(\d+)-{re.escape(os.uname().nodename)}(~.*)?"
    created = []
    for folder in Path(tempfile.gettempdir()).glob(f"dptrain-{os.getuid()}-*"):
        found = re.fullmatch(own, folder.name)
        if found is None or _start_time(int(found[1])) == found[2]:
            continue
        with contextlib.suppress(OSError):  # Another process removes it at the same time.
            if not any(map(_is_open, (folder / "register", *folder.glob("alive-*")))):
                created += [file.stat().st_mtime for file in (folder, *folder.iterdir())]
                shutil.rmtree(folder)
    if created:
        mpi_files.remove_unused(min(created) - 1)


def _is_open(pipe: Path) -> bool:
    """Return True if a process reads a named pipe: the watchdog or a rank."""
    try:
        os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
    except FileNotFoundError:
        return False
    except OSError as error:
        return error.errno != errno.ENXIO
    return True


def _open_register(folder: Path, size: int) -> int:
    """Open the pipe ``register`` of the folder; create folder and watchdog if there are none.

    The folder appears with its pipe and its watchdog, so that each folder has one watchdog.

    Raises:
        OSError: the temporary directory cannot be used, or the watchdog was killed.
    """
    with contextlib.suppress(FileNotFoundError):
        return os.open(folder / "register", os.O_WRONLY | os.O_NONBLOCK)
    remove_left_folders()
    new = Path(tempfile.mkdtemp(prefix=f"{folder.name}~", dir=folder.parent))
    try:
        os.mkfifo(new / "register")
        reader = os.open(new / "register", os.O_RDONLY | os.O_NONBLOCK)
        register = os.open(new / "register", os.O_WRONLY | os.O_NONBLOCK)
        helper = _spawn("ranks", str(folder), os.uname().nodename, str(size), stdin=reader)
        os.close(reader)
        try:
            new.rename(folder)
        except OSError:  # Another rank was faster.
            os.close(register)
            os.kill(helper, signal.SIGKILL)
            os.waitpid(helper, 0)
            return os.open(folder / "register", os.O_WRONLY | os.O_NONBLOCK)
    finally:
        shutil.rmtree(new, ignore_errors=True)
    atexit.register(_wait_for_watchdog, helper)
    return register


def _raise_number(file: int) -> int:
    """Move an open file to a number above those of the launcher's files.

    Linux closes the files of a process that ends in descending order. When the launcher's socket
    closes, the launcher kills the other ranks; the pipe must close before it, or the pipe of a
    killed rank may close first.
    """
    try:
        higher = fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, _HIGH_FILE)
    except OSError:
        return file  # The process may not open so many files.
    os.close(file)
    return higher


def _wait_for_watchdog(helper: int) -> None:
    """Wait until the watchdog has removed its folder: Slurm kills it when the ranks have ended."""
    end = time.monotonic() + _CLEANUP_S
    with contextlib.suppress(ChildProcessError):
        while not os.waitpid(helper, os.WNOHANG)[0] and time.monotonic() < end:
            time.sleep(0.005)


@contextlib.contextmanager
def kill_after(seconds: float, message: str) -> Iterator[None]:
    """Print `message` and kill this process if the block takes longer than `seconds`.

    For calls that hold the interpreter's lock, such as starting MPI. The message is not printed if
    another process of this node has printed a cause.
    """
    folder = str(meeting_folder() if _current is None else _current.folder)
    helper = _spawn("deadline", str(seconds), str(os.getpid()), folder, message)
    try:
        yield
    finally:
        os.kill(helper, signal.SIGKILL)
        os.waitpid(helper, 0)


def _spawn(*arguments: str, stdin: int | None = None) -> int:
    """Start ``watch.py`` in a session of its own, which Ctrl-C and the launcher do not reach."""
    argv = [sys.executable, "-I", "-S", watch.__file__, *arguments]
    files: list[tuple[int, int, str, int, int] | tuple[int, int, int]] = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)
        if stdin is None
        else (os.POSIX_SPAWN_DUP2, stdin, 0),
        (os.POSIX_SPAWN_DUP2, 2, 1),
    ]
    return os.posix_spawn(sys.executable, argv, os.environ, file_actions=files, setsid=True)
