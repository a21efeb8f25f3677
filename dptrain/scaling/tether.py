"""``python tether.py PARENT PROGRAM …`` becomes PROGRAM, which ends when the process PARENT does.

A program of its own, because what a child does between fork and exec must not be Python where its
parent has threads.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG, prctl(2): the signal that a process gets when its parent is gone."""


def main(parent: int, command: list[str]) -> None:
    """Ask for SIGTERM at the parent's end, unless that has come already, and become `command`."""
    ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
