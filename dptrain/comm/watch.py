"""A helper process that can still speak when a rank no longer can. Run by path, not imported.

``watch.py ranks FOLDER HOST SIZE RANK:PID…`` waits for the processes of one node. If one of them
ends without having left ``ended-RANK`` in FOLDER (killed, out of memory, ``os._exit``), it is named
on stderr, unless some rank has named a cause already (``failed`` in FOLDER). The launcher then ends
the other ranks. FOLDER is removed when all have ended.

``watch.py deadline SECONDS PID MESSAGE`` prints MESSAGE and kills PID unless killed before.

It holds nothing of the rank's but stderr: an inherited launcher's socket would hide the rank's end.
"""

import os
import select
import shutil
import signal
import sys
import time
from pathlib import Path


def _speak(folder: Path, message: str) -> None:
    try:
        (folder / "failed").touch(exist_ok=False)
    except FileExistsError:
        return
    except OSError:
        pass  # Saying it twice is better than not saying it.
    os.write(2, message.encode())


def ranks(folder: Path, host: str, size: str, watched: list[str]) -> None:
    """Wait for the processes, name the first that ended in silence."""
    poll = select.poll()
    waiting: dict[int, tuple[str, str]] = {}
    gone: list[tuple[str, str]] = []
    for entry in watched:
        rank, pid = entry.split(":")
        try:
            descriptor = os.pidfd_open(int(pid))
        except ProcessLookupError:
            gone.append((rank, pid))
        else:
            poll.register(descriptor, select.POLLIN)
            waiting[descriptor] = rank, pid
    while gone or waiting:
        for rank, pid in gone:
            if not (folder / f"ended-{rank}").exists():
                _speak(
                    folder,
                    f"dptrain: rank {rank} of {size}: process {pid} on {host} was killed or left "
                    "in the middle of the run (out of memory? kill? os._exit?)\n",
                )
        gone = []
        for descriptor, _ in poll.poll() if waiting else ():
            poll.unregister(descriptor)
            gone.append(waiting.pop(descriptor))
    shutil.rmtree(folder, ignore_errors=True)


def deadline(seconds: float, pid: int, message: str) -> None:
    """Speak for a process that is stuck, and end it."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if os.getppid() != pid:
            return
        time.sleep(0.05)
    os.write(2, message.encode())
    os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    os.closerange(3, 1024)
    if sys.argv[1] == "ranks":
        ranks(Path(sys.argv[2]), sys.argv[3], sys.argv[4], sys.argv[5:])
    else:
        deadline(float(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
