"""Starting ranks: which launcher, which command, and that nothing of it survives us."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

from dptrain.errors import UserError
from dptrain.training.settings import OTHER_VARIABLES, PREFIX

OPEN_MPI = "Open MPI"
_GRACE_S = 5.0
_WORD = "here"


@dataclass(frozen=True)
class Launcher:
    """What starts ranks.

    Attributes:
        words: program and arguments, ``("/usr/bin/srun", "--mpi=pmi2")``.
        is_open_mpi: whether it is Open MPI's, which needs to be asked for more ranks than cores.
        binds: whether a rank of one thread may be bound to one core, as Open MPI does. One that
            leaves computing to a GPU reads data ahead meanwhile.
    """

    words: tuple[str, ...]
    is_open_mpi: bool
    binds: bool = True

    @property
    def is_srun(self) -> bool:
        """Whether it is Slurm's."""
        return Path(self.words[0]).name == "srun"

    @property
    def says_where(self) -> bool:
        """Whether its arguments bind ranks already: Open MPI refuses to be told twice."""
        return any("bind-to" in word or "PE=" in word.upper() for word in self.words[1:])

    @property
    def starts_here(self) -> bool:
        """Whether ranks come from this process, so that their time can be told from others'.

        Those of Slurm come from its daemons, where mpirun was asked for them, too.
        """
        return not self.is_srun and "SLURM_JOB_ID" not in os.environ

    def command(self, ranks: int, threads: int, program: Sequence[str]) -> list[str]:
        """The whole command, as an argument list."""
        extra: list[str] = []
        if self.is_srun:
            extra = ["--ntasks", str(ranks), "--cpus-per-task", str(threads)]
        elif self.is_open_mpi:
            # It binds a rank to one core, where the rank's threads would all have to run.
            extra = ["-n", str(ranks), "--oversubscribe"]
            one_core = self.binds and threads == 1
            extra += [] if one_core or self.says_where else ["--bind-to", "none"]
        else:
            extra = ["-n", str(ranks)]
        return [*self.words, *extra, *program]

    def try_out(self) -> None:
        """Let it start one rank, which says a word: arguments may be mistyped, too.

        Raises:
            UserError: no such word came.
        """
        speaker = [sys.executable, "-I", "-S", "-c", f"print('{_WORD}')"]
        try:
            done = subprocess.run(
                self.command(1, 1, speaker), capture_output=True, text=True, check=False,
                stdin=subprocess.DEVNULL, env=child_environment(),
            )  # fmt: skip
        except OSError as error:
            raise UserError(f"cannot run {self.words[0]}: {error}") from None
        if _WORD not in done.stdout.split():
            lines = (done.stderr + done.stdout).splitlines()
            said = [line.strip() for line in lines if any(map(str.isalpha, line))]
            raise UserError(
                f"--launcher {shlex.join(self.words)} starts no rank: "
                f"{(said or ['it printed nothing'])[0]}; "
                "expected auto, mpirun or srun, with arguments if need be"
            )


def find_launcher(words: Sequence[str] = ()) -> Launcher:
    """The launcher that the user names, or else the one that belongs to this environment.

    That is the `mpirun` beside the interpreter, because it came with the MPI that mpi4py loads;
    else `srun` inside a job of Slurm; else the first `mpirun` or `srun` on PATH.

    Raises:
        UserError: there is none.
    """
    beside = str(Path(sys.executable).parent)
    if words:
        found = shutil.which(words[0]) or shutil.which(words[0], path=beside)
        if found is None:
            raise UserError(
                f"--launcher {shlex.join(words)}: no such program; "
                "expected auto, mpirun or srun, with arguments if need be"
            )
        return _launcher((found, *words[1:]))
    in_slurm = shutil.which("srun") if "SLURM_JOB_ID" in os.environ else None
    choices = (
        shutil.which("mpirun", path=beside), in_slurm, shutil.which("mpirun"), shutil.which("srun"),
    )  # fmt: skip
    chosen = next(filter(None, choices), None)
    if chosen is None:
        raise UserError(
            "found neither mpirun nor srun; pip install 'dptrain[mpi]' brings mpirun, "
            "or name one with --launcher"
        )
    return _launcher((chosen,))


def _launcher(words: tuple[str, ...]) -> Launcher:
    if Path(words[0]).name == "srun":
        return Launcher(words, False)
    try:
        answer = subprocess.run(
            [words[0], "--version"], capture_output=True, text=True, check=False, timeout=30,
            stdin=subprocess.DEVNULL,
        ).stdout  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"cannot run {words[0]}: {error}") from None
    return Launcher(words, OPEN_MPI in answer)


def child_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """This process's, without settings of a job: the command says them."""
    return {
        name: value
        for name, value in environ.items()
        if not name.startswith(PREFIX) or name in OTHER_VARIABLES
    }


class Child:
    """A launch under way, in a session of its own; leaving the block ends it, whatever happened.

    Only we hear Ctrl-C then, and if we are killed, so is the launcher, which takes its ranks along.
    """

    def __init__(self, command: Sequence[str], log: IO[bytes]) -> None:
        self._process = subprocess.Popen(
            [*_tether(), *command], stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            env=child_environment(), start_new_session=True,
        )  # fmt: skip

    def wait(self, seconds: float) -> int | None:
        """The exit code; None if it still runs after so long."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            self.wait(_GRACE_S)
        # The launcher has gone, or does not listen; what is left of its session goes too. Open
        # MPI's ranks are in process groups of their own, so the group is not enough.
        for member in {self._process.pid, *session_members(self._process.pid)}:
            if member != self._process.pid or self._process.poll() is None:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(member, signal.SIGKILL)
        self._process.wait()


def session_members(session: int) -> list[int]:
    """Processes of a session, by the process that began it; none where the system does not say."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):
            # The name stands in parentheses and may itself hold any character.
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session:
                found.append(int(stat.parent.name))
    return found


def _tether() -> list[str]:
    """Words before a command that end it when we are gone. Linux alone can."""
    if not sys.platform.startswith("linux"):
        return []
    script = Path(__file__).with_name("tether.py")
    return [sys.executable, "-I", "-S", str(script), str(os.getpid())]


def cause(log: Path) -> str:
    """Why a launch failed: the line that `dptrain` ended with, or else the last of the log."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    said = [line.removeprefix("dptrain: ") for line in lines if line.startswith("dptrain: ")]
    last = [line.strip() for line in lines if line.strip()][-1:]
    return (said[:1] or last or ["it printed nothing"])[0]
