"""A helper process that can still speak when a rank no longer can. Run by path, not imported.

``watch.py ranks FOLDER HOST SIZE RANK…`` reads a named pipe ``alive-RANK`` in FOLDER for each rank
of one node and writes to stdout when it has begun. A rank holds its pipe open and writes to it
when it ends regularly. A pipe that closes without a word tells of a rank that was killed, ran out
of memory or called ``os._exit``: it is named on stderr, unless some rank has named a cause already
(``failed`` in FOLDER). The launcher then ends the other ranks; those of this node that it has left
alone, as MPICH's does now and then with ranks beside one that left with 0, are killed. FOLDER is
removed at the end.

``watch.py deadline SECONDS PID MESSAGE`` prints MESSAGE and kills PID unless killed before.

It holds nothing of the rank's but stderr: an inherited launcher's socket would hide the rank's end.
What asks ranks to stop is not for the helper, but Slurm sends it to every process of a step.
"""

import contextlib
import os
import select
import signal
import sys
import time
from pathlib import Path

_LAUNCHER_S = 3.0
"""What the launcher gets for ending the other ranks."""


def _speak(folder: Path, message: str) -> None:
    try:
        (folder / "failed").touch(exist_ok=False)
    except FileExistsError:
        return
    except OSError:
        pass  # Saying it twice is better than not saying it.
    os.write(2, message.encode())


def ranks(folder: Path, host: str, size: str, watched: list[str]) -> None:
    """Wait until every pipe is closed, name the first that closed in silence."""
    # An epoll hands out what is ready in the order in which it became so; poll does not.
    poll = select.epoll()
    pipes = {}
    for rank in watched:
        pipe = os.open(folder / f"alive-{rank}", os.O_RDONLY | os.O_NONBLOCK)
        pipes[pipe] = rank
        poll.register(pipe, select.EPOLLIN)
    os.write(1, b"begun")
    end = None
    while pipes:
        ready = poll.poll(None if end is None else max(end - time.monotonic(), 0.0))
        if not ready:
            _kill(pipes)
            end = None
        for pipe, _ in ready:
            if not os.read(pipe, 1):
                end = end or time.monotonic() + _LAUNCHER_S
                _speak(
                    folder,
                    f"dptrain: rank {pipes[pipe]} of {size}: its process on {host} was killed or "
                    "left in the middle of the run (out of memory? kill? os._exit?)\n",
                )
            poll.unregister(pipe)
            del pipes[pipe]
    try:
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()
    except OSError:
        pass  # Somebody else tidied up.


def _kill(pipes: dict[int, str]) -> None:
    """Kill whoever still holds a pipe: found by that, for numbers of processes are used again."""
    held = [os.fstat(pipe) for pipe in pipes]
    for process in Path("/proc").iterdir():
        is_other = process.name.isdecimal() and process.name != str(os.getpid())
        if is_other and _holds(process, held):
            with contextlib.suppress(OSError):  # It has just ended.
                os.kill(int(process.name), signal.SIGKILL)


def _holds(process: Path, files: list[os.stat_result]) -> bool:
    """Whether a process has one of these files open; not if it has ended or is another user's."""
    with contextlib.suppress(OSError):
        for link in list((process / "fd").iterdir()):
            with contextlib.suppress(OSError):  # It has just closed it.
                if any(os.path.samestat(link.stat(), file) for file in files):
                    return True
    return False


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
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    if sys.argv[1] == "ranks":
        ranks(Path(sys.argv[2]), sys.argv[3], sys.argv[4], sys.argv[5:])
    else:
        deadline(float(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
