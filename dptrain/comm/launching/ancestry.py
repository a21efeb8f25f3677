"""What the operating system knows about the start of this process: ancestors and connections.

Launchers describe a job in environment variables, which every program that a rank starts inherits.
The facts of this module distinguish a rank from such a program.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

from dptrain.comm.watchdog import watch
from dptrain.comm.watchdog.mpi_files import mapped_files, sees_all_processes

_MPI_LIBRARY = re.compile(r"libmpi(ch)?\.so")
_LISTENING = "0A"
"""TCP_LISTEN in /proc/net/tcp."""


def is_open_socket(descriptor: int) -> bool:
    """Return whether a file descriptor of this process is a socket whose other end is open."""
    try:
        copy = socket.socket(fileno=os.dup(descriptor))
    except (OSError, OverflowError):
        return False
    with copy:
        try:
            return copy.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False


def is_listening(port: int) -> bool | None:
    """Return whether a process of this machine accepts TCP connections; None if unknown."""
    known = None
    for name in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/net/{name}").read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        known = False
        for line in lines:
            _, local, _, state, *_ = line.split()
            if state == _LISTENING and int(local.rpartition(":")[2], 16) == port:
                return True
    return known


@dataclass(frozen=True)
class Facts:
    """How this process was started.

    Attributes:
        launchers: names of each ancestor that is a launcher, the nearest first.
        mpi_parent: the process between the launcher and this one that runs MPI; "" if there is
            none.
        sees_all: True if all ancestors are known, so that one that is absent does not exist.
        has_socket: see `is_open_socket`.
        has_listener: see `is_listening`.
    """

    launchers: tuple[frozenset[str], ...] = ()
    mpi_parent: str = ""
    sees_all: bool = False
    has_socket: Callable[[int], bool] = field(default=is_open_socket)
    has_listener: Callable[[int], bool | None] = field(default=is_listening)


def observe(programs: Collection[str]) -> Facts:
    """Return the facts about this process.

    Args:
        programs: names of launchers' programs.
    """
    launchers: list[frozenset[str]] = []
    mpi_parent, first, pid = "", os.getpid(), watch.parent(os.getpid())
    while pid is not None:
        first, names = pid, watch.program_names(pid)
        if names & set(programs):
            launchers.append(names)
        elif not launchers and not mpi_parent and _runs_mpi(pid):
            mpi_parent = f"process {pid} ({min(names, default='unknown')})"
        pid = watch.parent(pid)
    return Facts(tuple(launchers), mpi_parent, first == 1 and sees_all_processes())


def _runs_mpi(pid: int) -> bool:
    """Return whether a process has loaded an MPI library itself; profilers preload one."""
    if not any(_MPI_LIBRARY.match(Path(path).name) for path in mapped_files("/libmpi", pid)):
        return False
    try:
        return b"LD_PRELOAD=" not in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
