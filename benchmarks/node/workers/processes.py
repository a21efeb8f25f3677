"""Worker processes, bound to cores: starting them, and requesting measurements from them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from benchmarks.node.mpi import Mpi
from benchmarks.node.workers.running import MissingError, Results, Timed

ROOT = Path(__file__).resolve().parents[3]
CONNECT_S, REPLY_S, STOP_S = 90.0, 300.0, 10.0
"""Limits for the start of processes, for a reply, and for their end."""
START_NS = 15_000_000
"""From a request to the common start of the processes: sending it takes less."""
HUGE_PAGES = {"THP_MEM_ALLOC_ENABLE": "1"}
"""Makes PyTorch allocate huge pages, as NumPy does for dptrain's arena."""
SINGLE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class WorkerError(Exception):
    """A worker process failed."""


class Worker:
    """A connection to one worker process."""

    def __init__(self, connection: socket.socket, log: Path) -> None:
        self._connection, self._log = connection, log
        self._connection.settimeout(REPLY_S)
        self._lines = connection.makefile("r", encoding="utf-8")
        self.hello: dict[str, Any] = self.reply()

    def send(self, request: Mapping[str, Any]) -> None:
        """Send a request."""
        try:
            self._connection.sendall(json.dumps(request).encode() + b"\n")
        except OSError as error:
            raise WorkerError(f"a worker process has ended: {error}\n{self._tail()}") from None

    def reply(self) -> dict[str, Any]:
        """Return the reply to the last request.

        Raises:
            MissingError: the worker lacks what the program needs.
            WorkerError: it failed.
        """
        try:
            line = self._lines.readline()
        except OSError:
            line = ""
        if not line:
            raise WorkerError(f"a worker process has ended or hangs\n{self._tail()}")
        reply: dict[str, Any] = json.loads(line)
        if "missing" in reply:
            raise MissingError(reply["missing"])
        if "error" in reply:
            raise WorkerError(reply["error"])
        return reply

    def stop(self) -> None:
        """Request the end of the process, unless it has ended, and close the connection."""
        with suppress(WorkerError):
            self.send({"do": "stop"})
        self._lines.close()
        self._connection.close()

    def _tail(self) -> str:
        return self._log.read_text(errors="replace")[-2000:]


class Team:
    """Worker processes that run a program together: one process, copies, or the ranks of a job."""

    def __init__(self, workers: Sequence[Worker], *, shares_steps: bool = False) -> None:
        self.workers = tuple(workers)
        self.shares_steps = shares_steps
        """True for ranks, which make each step together; copies work independently."""

    def __len__(self) -> int:
        return len(self.workers)

    def build(
        self, key: str, program: str, spec: Mapping[str, Any], results: Path | None = None
    ) -> dict[str, Any]:
        """Build a program in every process and return the facts of the first."""
        self.begin_build(key, program, spec, results)
        return self.end_build()

    def begin_build(
        self, key: str, program: str, spec: Mapping[str, Any], results: Path | None = None
    ) -> None:
        """Request that every process builds a program; `end_build` must follow.

        Args:
            key: names the program in later requests.
            program: one of `benchmarks.node.workers.programs.PROGRAMS`.
            spec: its specification; every process also receives its number as ``rank``.
            results: file for the results of the first process's check; None makes no check.
        """
        for rank, worker in enumerate(self.workers):
            path = str(results) if results is not None else None
            if path is not None and rank and not self.shares_steps:
                path = None
            elif path is not None and rank:
                path = f"{path}.rank{rank}.npz"
            worker.send({"do": "build", "key": key, "program": program,
                         "spec": {**spec, "rank": rank}, "results": path})  # fmt: skip

    def end_build(self) -> dict[str, Any]:
        """Wait until the program is built and return the facts of the first process.

        Raises:
            MissingError: a library or a setting is missing.
            WorkerError: a process failed.
        """
        facts: dict[str, Any] = self._replies()[0]["facts"]
        return facts

    def run(self, key: str, steps: int, warm_up: int = 1, period_ns: int = 0) -> list[Timed]:
        """Run steps in every process, from a common start."""
        request = {
            "do": "run", "key": key, "steps": steps, "warm_up": warm_up, "period_ns": period_ns,
            "at": time.monotonic_ns() + START_NS,
        }  # fmt: skip
        for worker in self.workers:
            worker.send(request)
        return [Timed(r["begins"], r["ends"], r["cpus"]) for r in self._replies()]

    def details(self, key: str) -> list[dict[str, Any]]:
        """Return the further measurements of the program in each process."""
        for worker in self.workers:
            worker.send({"do": "details", "key": key})
        return [reply["details"] for reply in self._replies()]

    def drop(self, key: str) -> None:
        """Release a program."""
        for worker in self.workers:
            worker.send({"do": "drop", "key": key})
        self._replies()

    def _replies(self) -> list[dict[str, Any]]:
        """Return all replies; raise the first error after all have arrived."""
        replies, errors = [], []
        for worker in self.workers:
            try:
                replies.append(worker.reply())
            except (MissingError, WorkerError) as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return replies


class Processes:
    """All worker processes of a section; use it in ``with``, which ends them.

    Args:
        cores: numbers of the cores that may be used.
    """

    def __init__(self, cores: Sequence[int]) -> None:
        self.cores = tuple(cores)
        self._temporary = tempfile.TemporaryDirectory()
        self.folder = Path(self._temporary.name)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(str(self.folder / "s"))
        self._socket.listen(256)
        self._children: list[subprocess.Popen[bytes]] = []
        self._workers: list[Worker] = []
        self._number = 0

    def single(self, threads: int, *, first: int = 0) -> Team:
        """Start a process with `threads` cores, the first of them number `first`."""
        cores = self.cores[first : first + threads] or self.cores
        return Team(self._start([], 1, cores, threads, {}))

    def copies(self, count: int) -> Team:
        """Start `count` processes with one core each."""
        firsts = (number % len(self.cores) for number in range(count))
        return Team([self.single(1, first=first).workers[0] for first in firsts])

    def ranks(self, mpi: Mpi, count: int, threads: int = 1) -> Team:
        """Start the ranks of an MPI job, each with its own cores if there are enough."""
        command = mpi.command(count)
        started = self._start(command, count, self.cores, threads, mpi.environment)
        return Team(sorted(started, key=lambda w: int(w.hello["rank"])), shares_steps=True)

    def temporary_file(self, suffix: str = "") -> Path:
        """Return an unused path in the temporary folder."""
        self._number += 1
        return self.folder / f"{self._number}{suffix}"

    def stop(self, team: Team) -> None:
        """End the processes of a team."""
        for worker in team.workers:
            self._workers.remove(worker)
            worker.stop()

    def _start(
        self,
        launcher: Sequence[str],
        count: int,
        cores: Sequence[int],
        threads: int,
        variables: Mapping[str, str],
    ) -> list[Worker]:
        log = self.temporary_file(".log")
        command = [
            *launcher, sys.executable, "-m", "benchmarks.node.workers.worker",
            str(self.folder / "s"), ",".join(map(str, cores)), str(threads),
        ]  # fmt: skip
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environment = {
            **HUGE_PAGES,
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONPATH": path,
            **dict.fromkeys(SINGLE_THREAD, str(threads)),
            **variables,
        }
        with log.open("wb") as output:
            child = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=output,
                stderr=output,
            )  # fmt: skip
        self._children.append(child)
        workers = [self._accept(child, log) for _ in range(count)]
        self._workers += workers
        return workers

    def _accept(self, child: subprocess.Popen[bytes], log: Path) -> Worker:
        limit = time.monotonic() + CONNECT_S
        self._socket.settimeout(0.5)
        while True:
            try:
                connection, _ = self._socket.accept()
                return Worker(connection, log)
            except TimeoutError:
                if child.poll() is not None or time.monotonic() > limit:
                    tail = log.read_text(errors="replace")[-2000:]
                    raise WorkerError(f"worker processes did not start\n{tail}") from None

    def __enter__(self) -> Processes:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for worker in self._workers:
            worker.stop()
        limit = time.monotonic() + STOP_S
        for child in self._children:
            try:
                child.wait(max(limit - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                child.terminate()
                try:
                    child.wait(STOP_S)
                except subprocess.TimeoutExpired:
                    child.kill()
        self._socket.close()
        self._temporary.cleanup()


def load_results(path: Path) -> Results:
    """Read the results of a check."""
    with np.load(path) as file:
        return {name: file[name] for name in file.files}
