"""A process that builds programs and runs their steps on request.

    python -m benchmarks.node.workers.worker SOCKET CORES THREADS

Requests and replies are lines of JSON. Between requests the process only waits in `recv`, so that
it takes no core from the program that is timed. Under an MPI launcher every rank is such a process.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

RANK_VARIABLES = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "SLURM_PROCID")


def launched_rank(environment: Mapping[str, str]) -> int:
    """Return the rank that the launcher states; 0 without a launcher."""
    ranks = (environment[name] for name in RANK_VARIABLES if name in environment)
    return int(next(ranks, 0))


def cores_of(rank: int, cores: Sequence[int], threads: int) -> list[int]:
    """Return the cores of a rank with `threads` threads.

    Ranks that do not fit on the cores share all of them.
    """
    own = cores[rank * threads : (rank + 1) * threads]
    return list(own) if len(own) == threads else list(cores)


class Server:
    """Serves the requests of the controlling process.

    Args:
        connection: the socket.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._lines = connection.makefile("r", encoding="utf-8")
        self._connection = connection
        self._runners: dict[str, Any] = {}
        self._session: dict[str, Any] = {}

    def serve(self) -> None:
        """Serve until the controlling process requests the end or disappears."""
        with self._connection, self._lines:
            for line in self._lines:
                request = json.loads(line)
                if request["do"] == "stop":
                    return
                self._reply(self._handle(request))

    def _handle(self, request: dict[str, Any]) -> dict[str, Any]:
        from benchmarks.node.workers.running import MissingError
        from dptrain.errors import UserError

        try:
            method = {
                "build": self._build,
                "run": self._run,
                "details": self._details,
                "drop": self._drop,
            }[request["do"]]
            return method(request)
        except (ImportError, MissingError, UserError) as error:
            return {"missing": f"{type(error).__name__}: {error}"}
        except Exception:
            return {"error": traceback.format_exc()}

    def _build(self, request: dict[str, Any]) -> dict[str, Any]:
        import numpy as np

        from benchmarks.node.workers.programs import build

        runner = build(request["program"], request["spec"], self._session)
        self._runners[request["key"]] = runner
        if request["results"] and runner.check is not None:
            arrays: dict[str, Any] = runner.check()
            np.savez(Path(request["results"]), **arrays)
        return {"facts": runner.facts}

    def _run(self, request: dict[str, Any]) -> dict[str, Any]:
        from benchmarks.node.workers.running import run_steps

        runner = self._runners[request["key"]]
        timed = run_steps(
            runner, request["steps"], request["warm_up"], request["at"], request["period_ns"]
        )
        return {"begins": timed.begins, "ends": timed.ends, "cpus": timed.cpus}

    def _details(self, request: dict[str, Any]) -> dict[str, Any]:
        details = self._runners[request["key"]].details
        return {"details": {} if details is None else details()}

    def _drop(self, request: dict[str, Any]) -> dict[str, Any]:
        runner = self._runners.pop(request["key"], None)
        if runner is not None:
            runner.close()
        return {}

    def _reply(self, reply: dict[str, Any]) -> None:
        self._connection.sendall(json.dumps(reply).encode() + b"\n")


def main() -> None:
    """Bind this process to its cores, connect, and serve."""
    path, text, threads = sys.argv[1:4]
    rank = launched_rank(os.environ)
    cores = cores_of(rank, [int(core) for core in text.split(",")], int(threads))
    if hasattr(os, "sched_setaffinity"):
        # Before any library is loaded: they count the cores when they start their threads.
        os.sched_setaffinity(0, cores)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(path)
    hello = {"rank": rank, "pid": os.getpid(), "cores": cores}
    connection.sendall(json.dumps(hello).encode() + b"\n")
    Server(connection).serve()


if __name__ == "__main__":
    main()
