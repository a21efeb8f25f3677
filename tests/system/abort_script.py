"""A small command under `guard`, run by test_abort: joins, works in step with others, and fails."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

from dptrain.comm.abort import guard
from dptrain.comm.job import start_job
from dptrain.comm.launcher import find_launch
from dptrain.comm.world import World
from dptrain.errors import UserError


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
    world = World.connect(timeout=4.0 if how == "SIGSTOP" else 300.0)
    world.barrier()
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
