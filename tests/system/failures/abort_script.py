"""A small command under `guard`, run by test_abort: joins, works in step with others, and fails."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, NoReturn

from dptrain.comm.abort import guard
from dptrain.comm.job import start_job
from dptrain.comm.launching.launcher import find_launch
from dptrain.comm.world import World
from dptrain.errors import UserError

if TYPE_CHECKING:
    from mpi4py import MPI


def _stuck_communicator() -> MPI.Intracomm:
    """Return COMM_WORLD with an `Abort` that does not return and holds the interpreter's lock."""
    from mpi4py import MPI

    class StuckCommunicator(MPI.Intracomm):
        def Abort(self, errorcode: int = 0) -> NoReturn:
            while True:
                ctypes.PyDLL(None).pause()

    return StuckCommunicator(MPI.COMM_WORLD)


def _fail(how: str) -> None:
    if how == "bug":
        raise ZeroDivisionError("seven by nothing")
    if how == "user":
        raise UserError("the data is missing")
    if how == "exit":
        sys.exit(0)
    if how == "os_exit":
        os._exit(0)
    if how in ("SIGKILL", "SIGSTOP"):
        os.kill(os.getpid(), getattr(signal, how))
    if how == "hang":
        time.sleep(600)
    if how == "stuck":
        sys.modules["mpi4py.MPI"].COMM_WORLD = _stuck_communicator()
        raise ZeroDivisionError("seven by nothing")
    if how == "thread":
        thread = threading.Thread(target=_fail, args=("bug",))
        thread.start()
        thread.join()


def _main(how: str, ranks: str) -> int:
    when, _, how = how.rpartition(".")
    chosen = str(find_launch().rank) in ranks.split(",")
    launch = find_launch()
    start_job(launch.rank, launch.size)  # As the command line does before it imports MPI.
    if when == "before" and chosen:
        _fail(how)
    world = World.connect()
    world.barrier()
    if how in ("SIGSTOP", "hang"):
        world.timeout = 4.0  # From here on: ranks may start at different times.
    if how == "agree":
        world.agree(UserError("the data is missing") if chosen else None)
    if chosen:
        _fail(how)
    for _ in range(2):
        world.barrier()
    time.sleep(0.05)
    world.barrier()
    # In one write: unbuffered, the parts of a line of several ranks would mix.
    sys.stdout.write(f"done {world.rank}\n")
    return 0


if __name__ == "__main__":
    sys.exit(guard(lambda: _main(sys.argv[1], sys.argv[2])))
