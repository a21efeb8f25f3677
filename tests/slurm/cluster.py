"""A Slurm cluster of three nodes on this machine, in a temporary folder, gone when it is left.

Each node is a slurmd of its own with its own port, which is all that the rest of Slurm sees of a
node. They share the machine's cores, whatever number of them they claim to have.
"""

from __future__ import annotations

import os
import pwd
import random
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from tests.system.launch import ROOT, SCRIPTS, environment

NODES = ("n1", "n2", "n3")
GPUS = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random")
"""Slurm hands out the names of devices, whatever they are."""
PROGRAMS = (
    "munged",
    "slurmctld",
    "slurmd",
    "sbatch",
    "srun",
    "scontrol",
    "sinfo",
    "squeue",
    "setpriv",
)
WITH_US = ("setpriv", "--pdeathsig", "TERM")
"""What a daemon is started by, so that it ends with this process, even if that is killed."""
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY"}
_PATIENCE_S = 480.0

CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# A job that goes back into the queue waits until its old credential is void.
AuthInfo=socket={folder}/munge/socket,cred_expire=5
# MPICH calls memory by the job's number, and a killed rank leaves some behind.
FirstJobId={first}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldDebug=info
SlurmdDebug=info
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0
SlurmdParameters=config_overrides
MpiDefault=none
KillWait=30
GresTypes=gpu
{nodes}
PartitionName=main Nodes=ALL Default=YES State=UP
"""


def missing() -> str:
    """Why there can be no cluster here, and what to do; "" if there can be one."""
    path = _search_path()
    absent = [program for program in PROGRAMS if shutil.which(program, path=path) is None]
    if absent:
        return f"no {absent[0]}: apt-get install slurm-wlm munge, or what your system calls them"
    if os.geteuid() != 0:
        return "Slurm's daemons run as root: run this suite as root, in a container for example"
    return ""


def _search_path() -> str:
    return os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


def until(true: Callable[[], bool], what: str, *, every_s: float = 0.2) -> None:
    """Wait for something to become true; asking Slurm too often takes time from its jobs."""
    deadline = time.monotonic() + _PATIENCE_S
    while not true():
        assert time.monotonic() < deadline, f"waited {_PATIENCE_S:.0f} s in vain for {what}"
        time.sleep(every_s)


@dataclass(frozen=True)
class Job:
    """A job that was submitted, and the folder it was submitted from."""

    cluster: Cluster
    number: int
    folder: Path

    def facts(self) -> dict[str, str]:
        """What ``scontrol show job`` says: ``JobState``, ``Restarts``, ``ExitCode``, …"""
        text = self.cluster.run("scontrol", "--oneliner", "show", "job", str(self.number))
        return dict(word.split("=", 1) for word in text.split() if "=" in word)

    @property
    def state(self) -> str:
        """``RUNNING``, ``COMPLETED`` and so on."""
        return self.facts()["JobState"]

    @property
    def output(self) -> str:
        """What it has printed."""
        return "".join(path.read_text() for path in self.folder.glob(f"*-{self.number}.out"))

    def wait(self) -> str:
        """Wait until it has ended; its last state."""
        until(lambda: self.state in ENDED, f"the end of job {self.number}")
        return self.state

    def pids(self) -> list[int]:
        """Processes that train."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # It has just ended.
                mine = f"SLURM_JOB_ID={self.number}".encode() in _words(process / "environ")
                if mine and _trains(_words(process / "cmdline")):
                    found.append(int(process.name))
        return found


def _words(file: Path) -> list[bytes]:
    return file.read_bytes().split(b"\0")


def _trains(words: list[bytes]) -> bool:
    return b"python" in words[0] and b"train" in words[1:] and words[1].endswith(b"dptrain")


class Cluster:
    """The daemons, from entering the block to leaving it."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self.folder = Path()
        self._environment: dict[str, str] = {}

    def __enter__(self) -> Cluster:
        with ExitStack() as stack:
            # munged runs as another user, and its socket needs a short name.
            name = stack.enter_context(tempfile.TemporaryDirectory(prefix="dptrain-slurm-"))
            self.folder = Path(name)
            self.folder.chmod(0o755)
            configuration = self._configure()
            self._environment = {"SLURM_CONF": str(configuration), "PATH": _search_path()}
            self._start(stack)
            stack.callback(self._cancel_all)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()

    def _configure(self) -> Path:
        ports = free_ports(1 + len(NODES))
        host = socket.gethostname().partition(".")[0]
        nodes = [
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=64 "
            f"Gres=gpu:{len(GPUS)}"
            for name, port in zip(NODES, ports[1:], strict=True)
        ]
        (self.folder / "state").mkdir()
        (self.folder / "gres.conf").write_text("".join(f"Name=gpu File={gpu}\n" for gpu in GPUS))
        configuration = self.folder / "slurm.conf"
        configuration.write_text(
            CONFIGURATION.format(
                folder=self.folder,
                host=host,
                ports=ports,
                nodes="\n".join(nodes),
                first=random.randrange(1, 1 << 25),
            )
        )
        return configuration

    def _start(self, stack: ExitStack) -> None:
        munge = pwd.getpwnam("munge")
        own = self.folder / "munge"
        own.mkdir(mode=0o755)
        key = own / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        for path in (own, key):
            os.chown(path, munge.pw_uid, munge.pw_gid)
        words = [f"--{word}-file={own / word}" for word in ("key", "log", "pid", "seed")]
        words += ["--foreground", f"--socket={own / 'socket'}"]
        stack.enter_context(self._daemon("munged", *words, user="munge"))
        until((own / "socket").exists, "munged's socket")
        stack.enter_context(self._daemon("slurmctld", "-D"))
        for name in NODES:
            (self.folder / name).mkdir()
            stack.enter_context(self._daemon("slurmd", "-D", "-N", name, log=name))
        until(self._is_idle, "idle nodes")

    def _is_idle(self) -> bool:
        """Whether the controller answers, and all nodes are idle."""
        with suppress(AssertionError):
            return self.run("sinfo", "-hNo", "%T").split() == ["idle"] * len(NODES)
        return False

    @contextmanager
    def _daemon(
        self, *command: str, log: str = "", user: str | None = None
    ) -> Iterator[subprocess.Popen[bytes]]:
        program = shutil.which(command[0], path=_search_path())
        assert program is not None
        with (self.folder / f"{log or command[0]}.log").open("w") as file:
            process = subprocess.Popen(
                [*WITH_US, program, *command[1:]], env=self.environment(), stdin=subprocess.DEVNULL,
                stdout=file, stderr=file, user=user, group=user,
            )  # fmt: skip
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _cancel_all(self) -> None:
        self.run("scancel", "--user=root")
        with suppress(AssertionError):  # What does not want to end is killed with its node.
            until(lambda: not self.run("squeue", "--noheader"), "an empty queue")

    def environment(self, **variables: str) -> dict[str, str]:
        """This process's, with the cluster's in front; also for the jobs, which inherit it."""
        path = os.pathsep.join([str(SCRIPTS), self._environment["PATH"]])
        return environment(**{**self._environment, "PATH": path, **variables})

    def run(self, *command: str, folder: Path = ROOT, **variables: str) -> str:
        """What one of Slurm's programs prints, called from `folder`."""
        done = subprocess.run(
            command, cwd=folder, env=self.environment(**variables), capture_output=True, text=True,
            timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}\n{self.logs()}"
        return done.stdout.strip()

    def submit(self, *command: object, folder: Path, **variables: str) -> Job:
        """``sbatch``: options, then a script and its arguments."""
        number = self.run("sbatch", "--parsable", *map(str, command), folder=folder, **variables)
        return Job(self, int(number), folder)

    def logs(self) -> str:
        """The last lines of what the daemons have to say."""
        tails = []
        for path in sorted(self.folder.glob("*.log")):
            lines = path.read_text(errors="replace").splitlines()[-25:]
            tails.append("\n".join([f"--- {path.name}", *lines]))
        return "\n".join(tails)


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens to."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
