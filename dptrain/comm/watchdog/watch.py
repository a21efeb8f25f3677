"""The watchdog process of a node: it reports failures that a rank cannot report itself.

This file is run by its path.

``watch.py ranks FOLDER HOST SIZE`` watches the ranks of one node. Its stdin is the named pipe
``register`` in FOLDER, to which a rank writes the line ``RANK-PID``. The rank keeps this pipe and
the named pipe ``alive-RANK-PID`` open, and writes these lines to the latter:

- ``wait SECONDS PURPOSE`` before a call that waits for all ranks, and ``arrived`` afterwards;
- ``stdin`` before them if it reads its program from standard input;
- ``started`` when MPI has started, so that all ranks have registered;
- ``file PATH`` for a file in /dev/shm that its MPI library has made (in a container, the watchdog
  cannot know whether other processes use a file);
- ``bye`` when it ends regularly;
- ``late`` when it has waited too long, and every rank of its node waits: other nodes then look for
  the rank that is late;
- ``listen``, ``connect PORT TOKEN ADDRESSES`` and ``named``, for jobs on several nodes
  (`node_links`). The watchdog replies to the first two with the file ``links``, which contains the
  port and the token after ``listen``.

The watchdog creates the file ``watched-RANK-PID`` when it has opened the pipe of a rank. The file
``signals-RANK-PID`` has a byte for each signal that the rank has received: its number.

The process that creates the file ``failed`` in FOLDER names the cause on stderr. The watchdog also
creates this file if it learns of a failure on another node.

- A pipe that closes without ``bye`` belongs to a rank that was killed, crashed or called
  ``os._exit``. The launcher then ends the other ranks. Ranks of this node that still run 3 s later
  are killed, and so are those of other nodes.
- If a rank of the node has received a signal that requests a stop up to `AFTER_SIGNAL_S` before, no
  rank is named: launchers kill ranks that have not stopped in time (Open MPI's mpirun after 0.25 s
  or 1 s, Slurm after 30 s). One line names the signal.
- The process of a rank that ends before it registers, while others wait for the start of MPI, is
  known from the launcher's child processes (`siblings`). The waiting ranks are ended. So they are
  if their program came from standard input, for which the process of another rank waits: MPICH's
  mpirun passes it to rank 0 only.
- If such a call takes longer than SECONDS, a rank is stopped or hangs. The waiting ranks are ended.
- If the launcher's process ends before the ranks, the ranks get SIGTERM and, 10 s later, SIGKILL.

Time in which a rank was stopped (SIGSTOP) does not count.

The watchdog ends when no process has ``register`` or the pipe of a rank open. If a rank fails
before MPI has started, the watchdog also waits for the end of the launcher, because a rank that
starts later and is killed must find the file ``failed``. At its end, it removes the files that MPI
libraries leave in /dev/shm if their ranks are killed, and FOLDER. If it is killed before, the next
job of the user does so (`dptrain.comm.job.remove_left_folders`).

``watch.py deadline SECONDS PID FOLDER MESSAGE`` kills the process PID after SECONDS, and prints
MESSAGE before unless the file ``failed`` in FOLDER exists.

The watchdog keeps no file of the rank open except stderr: an inherited socket of the launcher would
hide the end of the rank from the launcher. It ignores the signals that request ranks to stop,
because Slurm sends them to every process of a step.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import select
import signal
import struct
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dptrain.comm.watchdog.idle_nodes import IdleNodes
    from dptrain.comm.watchdog.node_links import NodeLinks
    from dptrain.comm.watchdog.siblings import Siblings

LAUNCHER_S = 3.0
"""Time for the launcher to end the other ranks after one has failed."""

CHECKPOINT_S = 10.0
"""Time for ranks to write a checkpoint after their launcher has gone."""

AFTER_SIGNAL_S = 45.0
"""Time after a signal in which the end of a rank is attributed to it."""

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""Signals that request ranks to stop."""

ABSENT_S = 5.0
"""Time for a launcher to start all ranks after the first one has registered."""

IDLE_S = 5.0
"""Time without processor time after which a process that has not registered waits for its standard
input, if that is where another rank has read the program."""

ONE_READER = (
    "mpirun passes standard input to rank 0 only, which read its program from there; write the "
    "program to a file: mpirun -n {size} python script.py"
)

LATE_S = 30.0
"""Time in which a rank may start after all others have ended because of a failure."""

HYDRA = ("hydra_pmi_proxy", "pmi_proxy", "hydra_bstrap_proxy")
"""Names of the program that starts ranks for MPICH's mpirun on each node."""

LAUNCHERS = (
    *HYDRA, "mpirun", "mpiexec", "mpiexec.hydra",
    "mpiexec.gforker", "prterun", "prted", "orterun", "orted", "mpispawn", "mpirun_rsh",
    "slurmstepd",
)  # fmt: skip
"""Names of programs that start ranks. Distributions and wrappers start them by other names."""

OPEN_MPI = ("mpirun", "mpiexec", "orterun", "prterun")
"""Names of Open MPI's launcher on the node where it was started."""

MAX_NAMED = 8
"""Ranks that one message lists."""

HOLD_S = 1.0
"""Longest time in which a node of several waits for the others before it prints a cause: a launcher
or MPI ends ranks of other nodes within milliseconds, perhaps before the first death is known."""

_REGISTER = 0
"""File descriptor of the pipe ``register``."""

_CLOCK_S = 1.0
"""By how much the time of a file may precede the clock."""

ACTIVITY = struct.Struct("8q")
"""A record of `dptrain.comm.node.activity`: process, state, phase, step, number of waits and polls.
After those of the ranks there is one of the job; its state is 1 + the rank that has left, while all
nodes wait for it."""

WORKING, WAITING, LEFT = range(3)
"""States of a rank: it works, waits for other ranks, or its program has ended."""

MIN_POLLS = 3
"""Polls of a rank in the time after which its wait counts as endless. A rank that did not run for a
while may have missed the end of its wait."""

_POLL_S = 0.1
_LAUNCHER_POLL_S = 0.5
_USED, _STARTED = slice(11, 13), 19
"""Indices of the processor times and of the start time among the fields of /proc/PID/stat that
follow the name."""


def process_state(pid: int) -> str:
    """Return the state of a process, ``T`` if it is stopped; "" if there is none."""
    return (_stat(pid) or ("", [""]))[1][0]


def is_stopped(pid: int) -> bool:
    """Return True if a signal such as SIGSTOP has stopped a process."""
    return process_state(pid) in ("T", "t")


def start_time(pid: int) -> str:
    """Return when a process was started, in ticks since the machine was; "" if there is none."""
    found = _stat(pid)
    return "" if found is None else found[1][_STARTED]


def _sleep_state(pid: int) -> tuple[str, ...]:
    """Return the processor times of a process that sleeps; () if it runs or has ended."""
    found = _stat(pid)
    return tuple(found[1][_USED]) if found is not None and found[1][0] == "S" else ()


def _is_running(pid: int, started: str) -> bool:
    """Return whether a process runs; mpirun of MPICH 4.0 does not wait for a proxy that ended."""
    return start_time(pid) == started and process_state(pid) != "Z"


def find_launcher(pid: int) -> int | None:
    """Return the nearest ancestor of a process that starts ranks; None if there is none."""
    above = parent(pid)
    while above is not None and not program_names(above) & set(LAUNCHERS):
        above = parent(above)
    return above


def parent(pid: int) -> int | None:
    """Return the parent of a process; None if it has none, or is unknown."""
    found = _stat(pid)
    return (int(found[1][1]) or None) if found else None


def program_names(pid: int) -> frozenset[str]:
    """Return the name by which a process was started, and that of its executable file.

    They differ if a link starts the program: Debian's ``mpirun.openmpi`` is ``orterun``.
    """
    found = _stat(pid)
    names = set() if found is None else {found[0]}
    with contextlib.suppress(OSError):  # Another user's process.
        names.add(Path(f"/proc/{pid}/exe").readlink().name)
    return frozenset(names)


def _stat(pid: int) -> tuple[str, list[str]] | None:
    """The name of a process and the other fields of its /proc/PID/stat."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    name, _, fields = text.partition("(")[2].rpartition(")")
    return name, fields.split()


class Rank:
    """The state of a rank.

    Attributes:
        number: the rank, as text.
        pid: its process.
        pipe: file descriptor of its pipe.
        has_ended: True if it reported a regular end.
        reads_program: True if its program came from standard input.
        was_dead: True if its process had ended before the watchdog knew it.
        limit_s: time limit of the call in which it waits for all ranks; None outside such calls.
        purpose: what that call waits for.
        waited_s: time since the call began.
        num_arrived: number of such calls that have returned.
        requests: lines that are not about the rank itself.
    """

    def __init__(self, number: str, pid: int, pipe: int) -> None:
        self.number, self.pid, self.pipe = number, pid, pipe
        self.has_ended = self.reads_program = False
        self.was_dead = process_state(pid) in ("", "Z")
        self.limit_s: float | None = None
        self.purpose = ""
        self.waited_s = 0.0
        self.num_arrived = 0
        self.requests: list[str] = []
        self._unread = b""

    def read(self) -> None:
        """Read what the rank wrote."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self.pipe, 4096):
                *lines, self._unread = (self._unread + data).split(b"\n")
                for line in lines:
                    self._parse(line.decode())

    def _parse(self, line: str) -> None:
        command, _, arguments = line.partition(" ")
        if command == "wait":
            seconds, _, self.purpose = arguments.partition(" ")
            self.limit_s, self.waited_s = float(seconds), 0.0
        elif command == "arrived":
            self.limit_s = None
            self.num_arrived += 1
        elif command == "bye":
            self.has_ended = True
        elif command == "stdin":
            self.reads_program = True
        else:
            self.requests.append(line)


class Watchdog:
    """The state of ``watch.py ranks``."""

    def __init__(self, folder: str, host: str, size: str) -> None:
        self.folder, self.host, self.size = folder, host, size
        self.ranks: dict[int, Rank] = {}
        self.can_register = True
        self.has_mpi_started = self.has_lost_launcher = False
        self.poll = select.epoll()
        # Level-triggered, it would report without end that no process has the pipe open.
        self.poll.register(_REGISTER, select.EPOLLIN | select.EPOLLET)
        # An epoll returns files in the order in which they became ready; poll does not. This one
        # is for closed pipes alone, since a pipe with unread lines is ready before it closes.
        self.closed = select.epoll()
        launcher = find_launcher(os.getpid())
        self.launcher = None if launcher is None else (launcher, start_time(launcher))
        self.output = launcher_output(launcher)
        self.kill_at: float | None = None
        self.links: NodeLinks | None = None
        self.idle_nodes: IdleNodes | None = None
        self.files: set[str] = set()
        self.siblings = self._find_siblings(launcher)
        self.missing: tuple[int, int] | None = None
        self.absent_s = 0.0
        self.idle: dict[int, tuple[tuple[str, ...], float]] = {}
        self.num_ranks = 0
        self.held: tuple[list[int], str, float] | None = None
        self.rivals: set[int] = set()
        self.num_agreed = 0
        self.began = time.time()

    def _find_siblings(self, launcher: int | None) -> Siblings:
        found = _import_neighbour("siblings").Siblings
        siblings: Siblings = found(launcher, self.closed, int(self.size), os.environ)
        return siblings

    def run(self) -> None:
        """Watch until every rank has ended."""
        last = last_rank = time.monotonic()
        while self.ranks or self.can_register or self.held or self._must_remain(last - last_rank):
            if not (self.ranks or self.can_register or self.held):
                release_output({1, 2, self.output})
            ready = [file for file, _ in self.poll.poll(self._patience())]
            if _REGISTER in ready:
                self._add_ranks()
            from_nodes = [file for file in ready if file != _REGISTER and file not in self.ranks]
            for file in ready:
                if file in self.ranks:
                    self._read(self.ranks[file])
            for file, _ in self.closed.poll(0):
                if file in self.ranks:
                    self._read(self.ranks[file])
                    self._remove(self.ranks[file])
                else:
                    self.missing = self.missing or self.siblings.remove(file)
            # After the pipes: a rank may have died before the one that another node reports.
            for file in from_nodes:
                if self.links is not None:
                    self.links.handle(file)
            now = time.monotonic()
            self._check_siblings(now - last)
            self._check_calls(min(now - last, 2 * _POLL_S))
            self._check_launcher()
            self._check_idle_nodes()
            self._check_held(now)
            if self.ranks:
                last_rank = now
                if self.kill_at is not None and now >= self.kill_at:
                    kill_holders(list(self.ranks))
            last = now
        self._remove_files_of_mpi()
        self._remove_folder()

    def _remove_files_of_mpi(self) -> None:
        """Remove what MPI left in /dev/shm, also the files of ranks that did not report them."""
        for path in self.files:
            Path(path).unlink(missing_ok=True)
        _import_neighbour("mpi_files").remove_unused(self.began - _CLOCK_S)

    def _must_remain(self, idle_s: float) -> bool:
        """Return True if a rank may still start that must find the file ``failed``."""
        if self.has_mpi_started or not Path(f"{self.folder}/failed").exists():
            return False
        return idle_s < LATE_S and not self.has_lost_launcher

    def _patience(self) -> float:
        waits = self.held or any(rank.limit_s is not None for rank in self.ranks.values())
        return _POLL_S if waits else _LAUNCHER_POLL_S

    def _add_ranks(self) -> None:
        """Watch the ranks that have registered."""
        self.can_register, lines = True, b""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(_REGISTER, 4096):
                lines += data
            self.can_register = False  # No process has the pipe open.
        for name in lines.decode().split():
            number, _, pid = name.partition("-")
            path = f"{self.folder}/alive-{name}"
            pipe = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            self.ranks[pipe] = Rank(number, int(pid), pipe)
            self.num_ranks += 1
            self.siblings.forget(int(number))
            self.poll.register(pipe, select.EPOLLIN)
            self.closed.register(pipe, 0)  # EPOLLHUP needs no mask.
            # epoll reports only pipes that were open for writing after they were opened here. The
            # rank may have ended before.
            os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
            with contextlib.suppress(OSError):
                Path(f"{self.folder}/watched-{name}").touch()

    def _read(self, rank: Rank) -> None:
        rank.read()
        while rank.requests:
            command, *words = rank.requests.pop(0).split()
            if command == "started":
                self.has_mpi_started = True
                self.siblings.close()
                self.missing = None
            elif command in ("named", "late") and self.links is not None:
                self.links.send(command)
            elif command == "file":
                self.files.update(words)
            elif command == "listen":
                token = os.urandom(16).hex()
                self._reply(f"{self._make_links(token).listen()} {token}")
            elif command == "connect":
                port, token, addresses = words
                self._make_links(token).connect(addresses.split(","), int(port))
                self._reply("")

    def _make_links(self, token: str) -> NodeLinks:
        module = _import_neighbour("node_links")
        links: NodeLinks = module.NodeLinks(self.poll, self._receive, token)
        self.links = links
        idle = _import_neighbour("idle_nodes")
        path, states = Path(f"{self.folder}/activity"), (WORKING, WAITING, LEFT)
        node = idle.IdleNode(path, ACTIVITY, states, MIN_POLLS)
        self.idle_nodes = idle.IdleNodes(node, int(self.size), links.send, self._end_waits_for)
        return links

    def _check_idle_nodes(self) -> None:
        """End the waits of the ranks of all nodes for a rank that has left."""
        if self.links is not None and self.idle_nodes is not None:
            first = self.links.is_first_node
            self.idle_nodes.check(self.links.statuses.values() if first else None)

    def _end_waits_for(self, left: int) -> None:
        """End the waits of ranks of this node, because a rank has left."""
        with contextlib.suppress(OSError), Path(f"{self.folder}/activity").open("r+b") as file:
            file.seek(int(self.size) * ACTIVITY.size)
            file.write(ACTIVITY.pack(0, 1 + left, *[0] * 6))

    def _reply(self, text: str) -> None:
        """Write the file ``links``, for which the rank that sent a request waits."""
        new = Path(f"{self.folder}/links.new")
        new.write_text(text)
        new.rename(f"{self.folder}/links")

    def _receive(self, line: str) -> None:
        """Handle a line of another node: see `node_links`."""
        if line == "late":
            return self._name_late_of_node()
        if line.startswith("left "):
            assert self.idle_nodes is not None
            return self.idle_nodes.receive(line)
        command, *numbers = line.split()
        if command == "agreed":
            if self.held is not None and self.held[0][0] == int(numbers[1]):
                self.num_agreed += int(numbers[0])
            return None
        if command == "died":
            self.kill_at = self.kill_at or time.monotonic() + LAUNCHER_S
            self._receive_death(*map(int, numbers))
        else:
            self.held = None  # The cause has been printed.
        with contextlib.suppress(OSError):
            Path(f"{self.folder}/failed").touch()
        return None

    def _receive_death(self, num_ranks: int, *numbers: int) -> None:
        """Agree with a node about its ranks that died, unless some of this node did so before."""
        if self.held is not None:
            self.num_agreed += num_ranks
            self.rivals.update(numbers)
        elif self.links is not None:
            self.links.send(f"agreed {self.num_ranks} {numbers[0]}")

    def _name_late_of_node(self) -> None:
        """Name a rank of this node, if there is one, for which those of another waited too long.

        The ranks that waited end the job.
        """
        try:
            records = ACTIVITY.iter_unpack(Path(f"{self.folder}/activity").read_bytes())
        except OSError:
            return
        known = [(rank, pid, state) for rank, (pid, state, *_) in enumerate(records) if pid]
        late = [(rank, pid, "is stopped (SIGSTOP?)") for rank, pid, _ in known if is_stopped(pid)]
        late += [(rank, pid, "has not arrived") for rank, pid, state in known if state == WORKING]
        late += [
            (rank, pid, "has ended its program") for rank, pid, state in known if state == LEFT
        ]
        for rank, pid, what in late[:1]:
            self._report(
                str(rank),
                f"its process {pid} on {self.host} {what}; ranks of another node waited for it",
            )
            if self.links is not None:
                self.links.send("named")

    def _remove(self, rank: Rank) -> None:
        self.poll.unregister(rank.pipe)
        self.closed.unregister(rank.pipe)
        os.close(rank.pipe)
        del self.ranks[rank.pipe]
        if not rank.has_ended:
            self.kill_at = self.kill_at or time.monotonic() + LAUNCHER_S
            if self._report_signal():
                return
            dead = [each for each in (rank, *self.ranks.values()) if each.was_dead]
            are_known = self.launcher is not None or len(self.ranks) + 1 == int(self.size)
            is_first = are_known and len(dead) + len(self.siblings.absent) == 1
            if dead and not is_first:
                self._name_unknown(dead)
            self._name_missing()
            rank = dead[0] if dead else rank
            self._name(
                rank.number,
                f"its process {rank.pid} on {self.host} was killed or exited in the middle of the "
                "run (out of memory, kill -9, a crash or os._exit)",
            )

    def _name_unknown(self, dead: list[Rank]) -> None:
        """Print which ranks ended before this process knew them: which was the first is unknown.

        If the launcher has ended too, ranks that never registered are not known either.
        """
        numbers = sorted({*(int(rank.number) for rank in dead), *self.siblings.absent})
        self._hold(numbers, self._unknown(numbers, f"on {self.host} during the start"))

    def _unknown(self, numbers: list[int], where: str) -> str:
        """Return the message about ranks of which it is unknown whose end was the cause."""
        names = ", ".join(map(str, numbers[:MAX_NAMED])) + ", …" * (len(numbers) > MAX_NAMED)
        return (
            f"dptrain: rank{'s' * (len(numbers) > 1)} {names} of {self.size} ended {where} (out of "
            "memory, kill -9, a crash or os._exit), perhaps because another rank did; see the "
            "launcher's messages\n"
        )

    def _name_missing(self) -> bool:
        """Name a rank that ended before it registered; return False if there is none.

        The launcher may end the other ranks then, and they are not the cause.
        """
        absent = self.siblings.absent
        if (absent or self.missing is not None) and self._report_signal():
            return True
        cause = f"; {ONE_READER.format(size=self.size)}" if self._reads_program() else ""
        if self.missing is not None:
            rank, pid = self.missing
            self._name(
                str(rank),
                f"its process {pid} on {self.host} ended before it started MPI"
                + (cause or " (it was killed, or its program ended)"),
            )
        elif absent:
            self._name(
                str(absent[0]),
                f"it ended before it started MPI, or was not started on {self.host}"
                + (cause or "; see the launcher's messages"),
            )
        return bool(absent) or self.missing is not None

    def _report_signal(self) -> bool:
        """Report that ranks ended after a signal; return False if they have received none."""
        now, found = time.time(), list[tuple[float, int]]()
        for file in Path(self.folder).glob("signals-*"):
            with contextlib.suppress(OSError, IndexError):
                found.append((now - file.stat().st_mtime, file.read_bytes()[-1]))
        found = [each for each in found if each[0] < AFTER_SIGNAL_S and each[1] in STOP_SIGNALS]
        if not found:
            return False
        if claim(self.folder):
            elapsed_s, number = max(found)
            if self.links is not None:
                self.links.send("named")
            text = (
                f"dptrain: {signal.Signals(number).name} ended the job: ranks on {self.host} were "
                f"killed {max(elapsed_s, 0.0):.1f} s after it, in the middle of the run\n"
            )
            write(text, self.output)
        return True

    def _check_siblings(self, elapsed_s: float) -> None:
        """End the start of MPI if the process of a rank has ended."""
        self.siblings.refresh()
        self.absent_s = self.absent_s + min(elapsed_s, 2 * _POLL_S) if self.siblings.absent else 0.0
        is_missing = self.missing is not None or self.absent_s > ABSENT_S
        if self.ranks and is_missing and self._name_missing():
            self._end_waiting()
        elif self._reads_program():
            self._check_readers(elapsed_s)

    def _reads_program(self) -> bool:
        return any(rank.reads_program for rank in self.ranks.values())

    def _check_readers(self, elapsed_s: float) -> None:
        """End the start of MPI if a rank waits for a program that rank 0 has read."""
        before, self.idle = self.idle, {}
        for rank, pid in self.siblings.running.items():
            state = _sleep_state(pid)
            known, idle_s = before.get(pid, ((), 0.0))
            idle_s = idle_s + min(elapsed_s, 2 * _POLL_S) if state and state == known else 0.0
            self.idle[pid] = state, idle_s
            if idle_s > IDLE_S:
                cause = f"waits for its standard input; {ONE_READER.format(size=self.size)}"
                self._name(str(rank), f"its process {pid} on {self.host} {cause}")
                return self._end_waiting()
        return None

    def _end_waiting(self) -> None:
        """End the ranks that wait in a call for all ranks, and soon all others."""
        self.siblings.close()
        self.missing = None
        for rank in self.ranks.values():
            if rank.limit_s is not None:
                self._end_call(rank)
        self.kill_at = self.kill_at or time.monotonic() + LAUNCHER_S

    def _end_call(self, rank: Rank) -> None:
        rank.limit_s = None
        with contextlib.suppress(OSError):
            os.kill(rank.pid, signal.SIGHUP)  # `Job.limit_call` exits with code 1.

    def _check_calls(self, elapsed_s: float) -> None:
        """End ranks that wait too long for all ranks, and name the rank that does not arrive."""
        for rank in list(self.ranks.values()):
            if rank.limit_s is None:
                continue
            if not is_stopped(rank.pid):
                rank.waited_s += elapsed_s
            if rank.waited_s < rank.limit_s:
                continue
            self._name_late(rank)
            self._end_call(rank)
            self.kill_at = self.kill_at or time.monotonic() + LAUNCHER_S

    def _name_late(self, waiting: Rank) -> None:
        waited = f"waited {waiting.waited_s:.0f} s for {waiting.purpose}"
        by_rank = f"rank {waiting.number} {waited}"
        others = [rank for rank in self.ranks.values() if rank is not waiting]
        starting = [(str(rank), pid) for rank, pid in self.siblings.running.items()]
        for number, pid in [*((rank.number, rank.pid) for rank in others), *starting]:
            if is_stopped(pid):
                return self._name(
                    number, f"its process {pid} on {self.host} is stopped (SIGSTOP?); {by_rank}"
                )
        late = [
            (rank.number, rank.pid)
            for rank in others
            if rank.limit_s is None and rank.num_arrived <= waiting.num_arrived
        ]
        for number, pid in [*late, *starting]:
            return self._name(
                number, f"its process {pid} on {self.host} has not arrived; {by_rank}"
            )
        known = {rank.number for rank in self.ranks.values()}
        absent = [number for number in map(str, range(int(self.size))) if number not in known]
        elsewhere = ""
        if absent:
            names = ", ".join(absent[:MAX_NAMED]) + ", …" * (len(absent) > MAX_NAMED)
            elsewhere = f"; no process of rank {names} runs on {self.host}"
        reason = "a rank hangs, is stopped or was not started"
        if waiting.reads_program:
            reason = ONE_READER.format(size=self.size)
        return self._name(waiting.number, f"{waited}{elsewhere}; {reason}")

    def _check_launcher(self) -> None:
        """End the ranks if the launcher's process has ended."""
        if self.launcher is None or _is_running(*self.launcher):
            return
        self.launcher, self.has_lost_launcher = None, True
        if not self.ranks:
            return
        print_once(
            self.folder,
            f"dptrain: the launcher's process on {self.host} has ended; its ranks end too\n",
        )
        for rank in self.ranks.values():
            with contextlib.suppress(OSError):
                os.kill(rank.pid, signal.SIGTERM)
        self.kill_at = time.monotonic() + CHECKPOINT_S

    def _name(self, number: str, cause: str) -> None:
        self._hold([int(number)], self._message(number, cause))

    def _hold(self, numbers: list[int], message: str) -> None:
        """Print a message about ranks that died, unless another node prints the cause."""
        if self.links is None:
            print_once(self.folder, message)
        elif claim(self.folder):
            self.links.send(f"died {self.num_ranks} {' '.join(map(str, numbers[:MAX_NAMED]))}")
            self.num_agreed = self.num_ranks
            self.held = numbers, message, time.monotonic() + HOLD_S

    def _check_held(self, now: float) -> None:
        """Print the message that was held back; one node lists the ranks if several have died.

        Which of them died first is unknown, because each node noticed its own rank first.
        """
        if self.held is None or (now < self.held[2] and self.num_agreed < int(self.size)):
            return
        (numbers, message, _), self.held = self.held, None
        if not self.rivals:
            write(message)
        elif min(numbers) < min(self.rivals):
            write(
                self._unknown(sorted({*numbers, *self.rivals}), "at the same time on several nodes")
            )

    def _report(self, number: str, cause: str) -> None:
        print_once(self.folder, self._message(number, cause))

    def _message(self, number: str, cause: str) -> str:
        return f"dptrain: rank {number} of {self.size}: {cause}\n"

    def _remove_folder(self) -> None:
        """Remove the folder; a rank that registers meanwhile finds it renamed and starts again."""
        with contextlib.suppress(OSError):
            folder = Path(self.folder)
            # The rank that started this process may have been killed before it made the folder.
            if not os.path.samestat(os.fstat(_REGISTER), (folder / "register").stat()):
                return
            folder = folder.rename(f"{folder}~{os.getpid()}")
            for file in folder.iterdir():
                file.unlink()
            folder.rmdir()


def _import_neighbour(name: str) -> Any:
    """Import a module of this folder: the package cannot be imported in isolated mode."""
    folder = str(Path(__file__).parent)
    if folder not in sys.path:
        sys.path.append(folder)  # At the end: its modules must not hide others.
    return importlib.import_module(name)


def release_output(files: Iterable[int]) -> None:
    """Redirect stdout, stderr and that of the launcher to the null device.

    Launchers, and programs that read their output, wait until no process has their pipes open.
    """
    null = os.open(os.devnull, os.O_WRONLY)
    for file in files:
        os.dup2(null, file)
    os.close(null)


def kill_holders(pipes: list[int]) -> None:
    """Kill the processes that have one of these pipes open; a number could belong to another."""
    held = [os.fstat(pipe) for pipe in pipes]
    for process in Path("/proc").iterdir():
        is_other = process.name.isdecimal() and process.name != str(os.getpid())
        if is_other and _holds(process, held):
            with contextlib.suppress(OSError):  # It has just ended.
                os.kill(int(process.name), signal.SIGKILL)


def _holds(process: Path, files: list[os.stat_result]) -> bool:
    """Return True if a process has one of these files open; False for another user's process."""
    with contextlib.suppress(OSError):
        for link in list((process / "fd").iterdir()):
            with contextlib.suppress(OSError):  # It has just closed the file.
                found = link.stat()
                if any(os.path.samestat(found, file) for file in files):
                    return True
    return False


def claim(folder: str) -> bool:
    """Return True if no process of this node has claimed to print a cause before."""
    try:
        Path(folder).mkdir(mode=0o700, exist_ok=True)
        Path(f"{folder}/failed").touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:
        return True  # It is better to print the cause twice than not at all.
    return True


def print_once(folder: str, message: str) -> None:
    """Print a cause unless a process of this node has printed one."""
    if claim(folder):
        write(message)


def write(message: str, output: int = 2) -> None:
    """Print a message on stderr or another file, if it can be reached."""
    with contextlib.suppress(OSError):
        os.write(output, message.encode())


def launcher_output(launcher: int | None) -> int:
    """Return a file descriptor for lines after a signal.

    Open MPI's launcher then no longer forwards what this process prints, and it ends at once after
    the ranks. So its own standard error is opened before, if it runs on this node.
    """
    if launcher is None or "OMPI_COMM_WORLD_SIZE" not in os.environ:
        return 2
    found = open_stderr(launcher) if program_names(launcher) & set(OPEN_MPI) else None
    return 2 if found is None else found


def open_stderr(pid: int, proc: Path = Path("/proc")) -> int | None:
    """Open the standard error of another process; None for a socket or another user's process."""
    try:
        flags = os.O_WRONLY | os.O_APPEND | os.O_NOCTTY | os.O_NONBLOCK
        return os.open(proc / f"{pid}/fd/2", flags)
    except OSError:
        return None


def deadline(seconds: float, pid: int, folder: str, message: str) -> None:
    """Print a message for a process that waits in MPI, and kill it."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if os.getppid() != pid:
            return
        time.sleep(0.05)
    if message:
        print_once(folder, message)
    os.kill(pid, signal.SIGKILL)


def main() -> None:
    """Run the mode that the command line names."""
    os.closerange(3, 1024)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    if sys.argv[1] == "ranks":
        Watchdog(*sys.argv[2:5]).run()
    else:
        deadline(float(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:6])


if __name__ == "__main__":
    main()
