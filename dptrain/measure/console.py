"""Whether a person is watching, and how wide the window is.

Under `mpirun` a rank's output is a pipe even when it ends on a terminal, or a terminal of no width
even when it ends in a file: the launcher copies the bytes. So where this process has no terminal of
its own, the launcher above it is asked.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, ProgressColumn
    from rich.table import Table

LAUNCHERS = ("mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prterun", "srun")
PLAIN_WIDTH = 100
NARROWEST = 60
"""Columns of the narrowest terminal that is written for."""

V = TypeVar("V", bound="Voice")


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


class Voice:
    """What a person sees while something takes long: lines, and on a terminal a bar below them.

    Use it as a context manager; subclasses say what the bar shows. It is drawn only when it is told
    to: a thread that draws would take a core from what is timed.

    Args:
        console: None: nothing is said.
    """

    def __init__(self, console: Console | None) -> None:
        self._console = console
        self._bar: Progress | None = None
        self._task: Any = None

    def __enter__(self: V) -> V:
        if self._console is not None and self._console.is_terminal:
            from rich.progress import Progress

            self._bar = Progress(
                *self._columns(), console=self._console, transient=True, auto_refresh=False
            )
            self._bar.start()
            self._task = self._begin(self._bar)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def say(self, what: str | Table) -> None:
        """Print a line, which is never cut, or a table, above the bar."""
        if self._console is not None:
            self._console.print(what, soft_wrap=isinstance(what, str))

    def _columns(self) -> list[ProgressColumn]:
        """Of the bar."""
        raise NotImplementedError

    def _begin(self, bar: Progress) -> Any:
        """The bar's task."""
        raise NotImplementedError
