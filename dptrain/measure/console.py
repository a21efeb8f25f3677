"""Whether a person is watching, and how wide the window is.

Under `mpirun` a rank's output is a pipe even when it ends on a terminal, or a terminal of no width
even when it ends in a file: the launcher copies the bytes. So where this process has no terminal of
its own, the launcher above it is asked.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

LAUNCHERS = ("mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prterun", "srun")
PLAIN_WIDTH = 100
NARROWEST = 60
"""Columns of the narrowest terminal that is written for."""


def _launcher() -> int | None:
    """Process number of the launcher on this node that started this process."""
    pid = os.getpid()
    for _ in range(8):
        try:
            # The name stands in parentheses and may itself hold any character.
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            pid = int(fields[1])
            name = Path(f"/proc/{pid}/comm").read_text().strip()
        except (OSError, ValueError, IndexError):
            return None
        if name in LAUNCHERS:
            return pid
    return None


def terminal_width(descriptor: int = 1) -> int | None:
    """Columns of the terminal that `descriptor` (1 output, 2 errors) ends on, or None."""
    stream = sys.stdout if descriptor == 1 else sys.stderr
    try:
        own = os.get_terminal_size(stream.fileno()).columns if stream.isatty() else 0
        if own:
            return own
        pid = _launcher()
        if pid is None:
            return None
        target = Path(f"/proc/{pid}/fd/{descriptor}")
        if not str(target.readlink()).startswith(("/dev/pts/", "/dev/tty")):
            return None
        with target.open("rb") as terminal:
            return os.get_terminal_size(terminal.fileno()).columns
    except (OSError, ValueError):
        return None


def make_console(*, errors: bool = False) -> Console:
    """A console on standard output: colours where somebody watches, plain text elsewhere.

    Args:
        errors: on standard error instead.
    """
    from rich.console import Console

    width = terminal_width(2 if errors else 1)
    if width is None:
        return Console(
            width=PLAIN_WIDTH, force_terminal=False, highlight=False, markup=False, stderr=errors
        )
    return Console(
        width=max(width, NARROWEST),
        force_terminal=True,
        highlight=False,
        markup=False,
        stderr=errors,
    )
