"""Start ranks: choose the launcher and its command, and end all of it with this process."""

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
from typing import IO

from dptrain.comm.launching.launcher import mpirun_vendor
from dptrain.errors import UserError
from dptrain.setting_groups import PREFIX
from dptrain.training.settings import OTHER_VARIABLES

OPEN_MPI = "Open MPI"
_GRACE_S = 5.0
_MARKER = "here"


@dataclass(frozen=True)
class Launcher:
    """A program that starts ranks.

    Attributes:
        arguments: program and arguments, for example ``("/usr/bin/srun", "--mpi=pmi2")``.
        is_open_mpi: True for the mpirun of Open MPI, which needs a flag for oversubscription.
        binds: True if a rank with one thread may be bound to one core, as Open MPI does. A rank
            that computes on a GPU reads data ahead on another core.
    """

    arguments: tuple[str, ...]
    is_open_mpi: bool
    binds: bool = True

    @property
    def is_srun(self) -> bool:
        """True for srun of Slurm."""
        return Path(self.arguments[0]).name == "srun"

    @property
    def sets_binding(self) -> bool:
        """True if its arguments bind ranks already: Open MPI refuses a second binding."""
        options = self.arguments[1:]
        return any("bind-to" in option or "PE=" in option.upper() for option in options)

    @property
    def starts_here(self) -> bool:
        """True if ranks are children of this process, so that their CPU time is known.

        Slurm starts ranks from its daemons, also if mpirun requests them.
        """
        return not self.is_srun and "SLURM_JOB_ID" not in os.environ

    def command(self, ranks: int, threads: int, program: Sequence[str]) -> list[str]:
        """Return the whole command as a list of arguments."""
        extra: list[str] = []
        if self.is_srun:
            extra = ["--ntasks", str(ranks), "--cpus-per-task", str(threads)]
        elif self.is_open_mpi:
            # By default, all threads of a rank would run on one core.
            extra = ["-n", str(ranks), "--oversubscribe"]
            one_core = self.binds and threads == 1
            extra += [] if one_core or self.sets_binding else ["--bind-to", "none"]
        else:
            extra = ["-n", str(ranks)]
        return [*self.arguments, *extra, *program]

    def try_out(self, timeout_s: float | None = None) -> None:
        """Start one rank that prints a marker, to find mistakes in the arguments.

        Args:
            timeout_s: time limit in seconds.

        Raises:
            UserError: the marker was not printed.
        """
        program = [sys.executable, "-I", "-S", "-c", f"print('{_MARKER}')"]
        try:
            done = subprocess.run(
                self.command(1, 1, program),
                capture_output=True,
                text=True,
                check=False,
                stdin=subprocess.DEVNULL,
                env=child_environment(),
                timeout=timeout_s,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise UserError(f"cannot run {self.arguments[0]}: {error}") from None
        if _MARKER not in done.stdout.split():
            lines = (done.stderr + done.stdout).splitlines()
            printed = [line.strip() for line in lines if any(map(str.isalpha, line))]
            raise UserError(
                f"--launcher {shlex.join(self.arguments)} starts no rank: "
                f"{(printed or ['it printed nothing'])[0]}; "
                "expected auto, mpirun or srun, with arguments if necessary"
            )


def find_launcher(arguments: Sequence[str] = ()) -> Launcher:
    """Return the launcher that the user names, or the one of this environment.

    That is the `mpirun` in the folder of the interpreter, which belongs to the MPI that mpi4py
    loads; else `srun` within a job of Slurm; else the first `mpirun` or `srun` on PATH.

    Raises:
        UserError: there is none.
    """
    scripts = str(Path(sys.executable).parent)
    if arguments:
        name = arguments[0]
        found = shutil.which(name) or shutil.which(name, path=scripts)
        if found is None:
            raise UserError(
                f"--launcher {shlex.join(arguments)}: no such program; "
                "expected auto, mpirun or srun, with arguments if necessary"
            )
        return _launcher((found, *arguments[1:]))
    in_slurm = shutil.which("srun") if "SLURM_JOB_ID" in os.environ else None
    own = shutil.which("mpirun", path=scripts)
    choices = (own, in_slurm, shutil.which("mpirun"), shutil.which("srun"))
    chosen = next(filter(None, choices), None)
    if chosen is None:
        raise UserError(
            "found neither mpirun nor srun; the extra mpi installs mpirun (pip install '.[mpi]'), "
            "and --launcher names another program"
        )
    return _launcher((chosen,))


def _launcher(arguments: tuple[str, ...]) -> Launcher:
    if Path(arguments[0]).name == "srun":
        return Launcher(arguments, False)
    try:
        version = subprocess.run(
            [arguments[0], "--version"],
            capture_output=True,
            text=True,
            check=False,
            timeout=30,
            stdin=subprocess.DEVNULL,
        ).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"cannot run {arguments[0]}: {error}") from None
    return Launcher(arguments, mpirun_vendor(version) == OPEN_MPI)


def child_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return this process's environment without settings of a job, which the command contains."""
    return {
        name: value
        for name, value in environ.items()
        if not name.startswith(PREFIX) or name in OTHER_VARIABLES
    }


class Child:
    """A running launch in a session of its own; leaving the block ends it in any case.

    Only this process receives Ctrl-C then. If this process is killed, the launcher ends too, and
    its ranks with it.

    Args:
        command: the launcher, its arguments and the program.
        output: file for standard output; None: that of this process.
        errors: file for standard error; None: `output`.
        environ: the environment variables. [default: `child_environment`]
    """

    def __init__(
        self,
        command: Sequence[str],
        output: IO[bytes] | None,
        errors: IO[bytes] | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._process = subprocess.Popen(
            [*_end_with_parent(), *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors or subprocess.STDOUT,
            env=child_environment() if environ is None else environ,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """The process of the launcher, which is also the number of its session."""
        return self._process.pid

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the launcher."""
        self._process.send_signal(number)

    def wait(self, seconds: float) -> int | None:
        """Return the exit code; None if the launch still runs after so many seconds."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *error: object) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            self.wait(_GRACE_S)
        # The launcher has ended, or ignores the signal: kill the rest of its session. The ranks of
        # Open MPI have process groups of their own, so killing the group is not enough.
        for member in {self._process.pid, *session_members(self._process.pid)}:
            if member != self._process.pid or self._process.poll() is None:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(member, signal.SIGKILL)
        self._process.wait()


def session_members(session: int) -> list[int]:
    """Return the processes of a session, which its first process identifies."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):
            # The name is in parentheses and may contain any character.
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session:
                found.append(int(stat.parent.name))
    return found


def _end_with_parent() -> list[str]:
    """Return arguments before a command that end it with this process, on Linux."""
    if not sys.platform.startswith("linux"):
        return []
    script = Path(__file__).with_name("end_with_parent.py")
    return [sys.executable, "-I", "-S", str(script), str(os.getpid())]


def cause(log: Path) -> str:
    """Return why a launch failed: the error line of `dptrain`, or the last line of the log."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    errors = [line.removeprefix("dptrain: ") for line in lines if line.startswith("dptrain: ")]
    last = [line.strip() for line in lines if line.strip()][-1:]
    return (errors[:1] or last or ["it printed nothing"])[0]
