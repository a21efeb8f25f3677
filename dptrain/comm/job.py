"""What the processes of one job share besides MPI, so that they can fail with one voice.

A folder for each node, in its temporary directory, named by a token that rank 0 draws: whoever
creates the file ``failed`` in it first may name the cause. Files cannot hang, MPI calls of a
failing rank can.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import select
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpi4py import MPI

_TIDY_S = 2.0
VARIABLE = "DPTRAIN_JOB"
"""Environment variable in which a rank leaves token and node for itself."""


@dataclass(frozen=True)
class Job:
    """One rank's place in the job.

    Attributes:
        rank, size: of COMM_WORLD.
        node: index of this rank's node.
        token: common to all ranks, different in every job.
    """

    rank: int
    size: int
    node: int
    token: str

    @property
    def folder(self) -> Path:
        """Meeting place of the ranks of this node; nodes may share the place it lies in."""
        return Path(tempfile.gettempdir()) / f"dptrain-{self.token}-{self.node}"

    def remember(self) -> None:
        """Leave node and token where `current_job` finds them.

        The name of COMM_WORLD would be a better place, but Open MPI 5.0 spoils its heap there.
        """
        os.environ[VARIABLE] = f"{self.token} {self.node}"

    def claim(self) -> bool:
        """Whether this rank is the first on its node to name a cause."""
        try:
            self.folder.mkdir(mode=0o700, exist_ok=True)
            (self.folder / "failed").touch(exist_ok=False)
        except FileExistsError:
            return False
        except OSError:
            return True  # Nowhere to write: saying it twice is better than not saying it.
        return True

    def watch(self, ranks: Iterable[int], host: str) -> None:
        """Start the helper that names a rank of this node that ends in silence, where it can be."""
        if not hasattr(select, "epoll"):
            return
        self.folder.mkdir(mode=0o700)
        for rank in ranks:
            os.mkfifo(self._pipe(rank))
        begun, stdout = os.pipe()
        words = str(self.folder), host, str(self.size), *map(str, ranks)
        atexit.register(_see_off, _spawn("ranks", *words, stdout=stdout))
        os.close(stdout)
        os.read(begun, 16)
        os.close(begun)

    def report_to_watcher(self) -> None:
        """Be alive in the helper's eyes from now until the interpreter exits."""
        with contextlib.suppress(OSError):  # No helper, no report.
            pipe = os.open(self._pipe(self.rank), os.O_WRONLY | os.O_NONBLOCK)
            atexit.register(_report, pipe)

    def _pipe(self, rank: int) -> Path:
        return self.folder / f"alive-{rank}"


def _report(pipe: int) -> None:
    with contextlib.suppress(OSError):  # The helper was killed.
        os.write(pipe, b"!")


def _see_off(helper: int) -> None:
    """Let the helper tidy up: when its ranks have ended, Slurm kills what is left of a step."""
    end = time.monotonic() + _TIDY_S
    with contextlib.suppress(ChildProcessError):
        while not os.waitpid(helper, os.WNOHANG)[0] and time.monotonic() < end:
            time.sleep(0.005)


def new_token() -> str:
    """A word that no other job has."""
    return secrets.token_hex(8)


def current_job() -> Job | None:
    """The job that this process is a rank of; None before MPI is up, after, and for one rank."""
    module = sys.modules.get("mpi4py.MPI")
    if module is None or not module.Is_initialized() or module.Is_finalized():
        return None
    comm: MPI.Comm = module.COMM_WORLD
    if comm.Get_size() == 1:
        return None
    # Not joined by `World`, a rank has nobody to share a token with.
    token, node = os.environ.get(VARIABLE, f"{new_token()} 0").split()
    return Job(comm.Get_rank(), comm.Get_size(), int(node), token)


@contextlib.contextmanager
def last_words(seconds: float, message: str) -> Iterator[None]:
    """Print `message` and kill this process if the block takes longer than `seconds`.

    For calls that hold the interpreter's lock, such as MPI's initialisation.
    """
    helper = _spawn("deadline", str(seconds), str(os.getpid()), message)
    try:
        yield
    finally:
        os.kill(helper, 9)
        os.waitpid(helper, 0)


def _spawn(*arguments: str, stdout: int = 2) -> int:
    """Start ``watch.py``; a session of its own, so that Ctrl-C and the launcher do not reach it."""
    script = Path(__file__).with_name("watch.py")
    argv = [sys.executable, "-I", "-S", str(script), *arguments]
    files: list[tuple[int, int, str, int, int] | tuple[int, int, int]] = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_DUP2, stdout, 1),
    ]
    return os.posix_spawn(sys.executable, argv, os.environ, file_actions=files, setsid=True)
