"""``python end_with_parent.py PARENT PROGRAM …`` runs PROGRAM until the process PARENT ends.

It is a separate program, because Python code between fork and exec is unsafe if the parent has
threads.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG, prctl(2): the signal that a process receives when its parent has ended."""


def main(parent: int, command: list[str]) -> None:
    """Request SIGTERM at the end of the parent, unless it has ended already, and run `command`."""
    ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
