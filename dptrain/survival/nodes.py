"""The nodes of a job that can still start ranks: those of a Slurm allocation, or named hosts."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from dptrain.bounds import Limits, parse_number
from dptrain.errors import UserError, shown
from dptrain.scaling.launching import Launcher

_DOWN = re.compile(r"(down|fail|unk|no_respond).*|.*\*", re.IGNORECASE)
"""States of `sinfo` in which a node starts no ranks; ``*`` marks one that does not respond."""

_QUERY_S = 30.0
_PROBE_S = 20.0
"""Time in which a host has to start a program, after which it counts as lost."""


@dataclass(frozen=True)
class Host:
    """A host that `mpirun` reaches.

    Attributes:
        name: its name or address.
        slots: ranks that it may start.
    """

    name: str
    slots: int

    def __str__(self) -> str:
        return f"{self.name}:{self.slots}"


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Return the hosts of a text such as ``a:2,b:2``.

    Raises:
        UserError: the text is not of this form.

    Example:
        >>> [str(host) for host in parse_hosts("a:2,b")]
        ['a:2', 'b:1']
    """
    hosts = []
    for part in text.split(",") if text else ():
        name, _, slots = part.strip().partition(":")
        number = parse_number(slots or "1", int, Limits(at_least=1))
        if not name or number is None:
            raise UserError(f"--hosts is '{shown(text)}'; expected NAME:RANKS,…, such as a:2,b:2")
        hosts.append(Host(name, int(number)))
    return tuple(hosts)


def on_hosts(launcher: Launcher, hosts: Sequence[Host]) -> Launcher:
    """Return an `mpirun` that starts ranks on some hosts; as it is without any."""
    if not hosts:
        return launcher
    flag = "--host" if launcher.is_open_mpi else "-hosts"
    return replace(launcher, arguments=(*launcher.arguments, flag, ",".join(map(str, hosts))))


def reachable(launcher: Launcher, hosts: Sequence[Host]) -> tuple[Host, ...]:
    """Return the hosts on which a launcher can start a program."""

    def starts(host: Host) -> bool:
        try:
            on_hosts(launcher, [host]).try_out(_PROBE_S)
        except UserError:
            return False
        return True

    with ThreadPoolExecutor(max(len(hosts), 1)) as pool:
        found = list(pool.map(starts, hosts))
    return tuple(host for host, is_reached in zip(hosts, found, strict=True) if is_reached)


def usable(
    launcher: Launcher,
    ranks: int,
    hosts: Sequence[Host] = (),
    environ: Mapping[str, str] = os.environ,
) -> tuple[Launcher, int]:
    """Return the launcher for the nodes that are left, and the number of ranks that fit there.

    Args:
        launcher: of the job, without hosts.
        ranks: number of ranks of the job.
        hosts: of the job; without any, those of a Slurm allocation count.
        environ: the environment variables.
    """
    if not hosts:
        return within_allocation(launcher, ranks, environ)
    left = reachable(launcher, hosts)
    return on_hosts(launcher, left or hosts), min(ranks, sum(host.slots for host in left or hosts))


def within_allocation(
    launcher: Launcher, ranks: int, environ: Mapping[str, str] = os.environ
) -> tuple[Launcher, int]:
    """Return the same for the nodes of a Slurm allocation.

    Without Slurm, or if Slurm does not reply, both are unchanged.

    Args:
        launcher: of the job.
        ranks: number of ranks of the job.
        environ: the environment variables of the batch script.
    """
    job = environ.get("SLURM_JOB_ID")
    if job is None or not launcher.is_srun:
        return launcher, ranks
    names = _query("squeue", "--noheader", "--job", job, "--format=%N").strip()
    states = _query("sinfo", "--noheader", "--Node", "--nodes", names, "--format=%N %t")
    found = dict(line.split() for line in states.splitlines() if len(line.split()) == 2)
    up = sorted(node for node, state in found.items() if not _DOWN.fullmatch(state))
    if not up or len(up) == len(found) == slurm_number(environ, "SLURM_JOB_NUM_NODES"):
        return launcher, ranks
    tasks = slurm_number(environ, "SLURM_NTASKS_PER_NODE")
    tasks = tasks or -(-ranks // max(slurm_number(environ, "SLURM_JOB_NUM_NODES"), 1))
    ranks = min(ranks, tasks * len(up))
    nodes = min(len(up), -(-ranks // tasks))
    options = (f"--nodelist={','.join(up[:nodes])}", f"--nodes={nodes}")
    return replace(launcher, arguments=(*launcher.arguments, *options)), ranks


def slurm_number(environ: Mapping[str, str], name: str) -> int:
    """Return the number in a variable of Slurm; 0 if it has none.

    Example:
        >>> slurm_number({"SLURM_NTASKS": "8"}, "SLURM_NTASKS")
        8
    """
    return int(parse_number(environ.get(name, ""), int, Limits(at_least=1)) or 0)


def _query(*command: str) -> str:
    """Return what a command of Slurm prints; "" if it fails."""
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_QUERY_S,
            stdin=subprocess.DEVNULL,
        ).stdout  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return ""
