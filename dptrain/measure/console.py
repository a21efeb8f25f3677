"""Detects whether output goes to a terminal, and its width.

Under `mpirun` the output of a rank is a pipe even if it ends on a terminal, because the launcher
copies it. If this process has no terminal, the output of its launcher is inspected.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from dptrain.texts import with_escapes

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, ProgressColumn
    from rich.text import Text

    from dptrain.tables import Table

LAUNCHERS = ("mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prterun", "srun")
PLAIN_WIDTH = 100_000
"""Width of output that goes to no terminal: no line is wrapped or cut."""
CLEAR = "\x1b[K"
"""Clears a line of a terminal from the cursor on."""
MIN_WIDTH = 20
"""Least width of a terminal, in characters, for which output is formatted."""

V = TypeVar("V", bound="ProgressPrinter")


def _launcher() -> int | None:
    """Return the process id of the launcher on this node that started this process, or None."""
    pid = os.getpid()
    for _ in range(8):
        try:
            # The name of the command is in parentheses and can contain any character.
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            pid = int(fields[1])
            name = Path(f"/proc/{pid}/comm").read_text().strip()
        except (OSError, ValueError, IndexError):
            return None
        if name in LAUNCHERS:
            return pid
    return None


def terminal_width(descriptor: int = 1) -> int | None:
    """Return the width of the terminal of `descriptor` (1 output, 2 errors), or None."""
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
    """Return a console: with colours on a terminal, plain text otherwise.

    Lines are printed as they are, without markup or names of emoji; control characters are escaped.

    Args:
        errors: True for standard error instead of standard output.
    """
    from rich.console import Console

    class LiteralConsole(Console):
        def render_str(self, text: str, **options: Any) -> Text:
            return super().render_str(with_escapes(text), **options)

    width = terminal_width(2 if errors else 1)
    return LiteralConsole(
        width=PLAIN_WIDTH if width is None else max(width, MIN_WIDTH),
        force_terminal=width is not None,
        highlight=False,
        markup=False,
        emoji=False,
        stderr=errors,
    )


class ReplacedLine:
    """A line that replaces itself on a terminal; elsewhere each is a new one on standard error.

    On a terminal it is written to standard output, as what follows it is: a launcher may exchange
    the order of the two. If only standard error is a terminal, it is written there.
    """

    def __init__(self) -> None:
        output = terminal_width(1)
        self._width = terminal_width(2) if output is None else output
        self._stream = sys.stderr if output is None else sys.stdout
        self._is_shown = False

    @property
    def is_replaced(self) -> bool:
        """True on a terminal."""
        return self._width is not None

    def show(self, text: str) -> None:
        """Show a text, on a terminal cut to one line."""
        if self._width is None:
            print(text, file=self._stream, flush=True)
            return
        # A line as wide as the terminal would make some of them begin another one.
        print(f"\r{text[: self._width - 1]}{CLEAR}", end="", file=self._stream, flush=True)
        self._is_shown = True

    def end(self) -> None:
        """Remove the line from a terminal."""
        if self._is_shown:
            print(f"\r{CLEAR}", end="", file=self._stream, flush=True)
            self._is_shown = False


class ProgressPrinter:
    """Prints lines, with a progress bar below them on a terminal.

    It is a context manager; subclasses define the bar. The bar is drawn only on request, because a
    drawing thread would take time from what is measured.

    Args:
        console: the console; None prints nothing.
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

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def print(self, what: str | Table) -> None:
        """Print a table, or a line of any length, above the bar."""
        if self._console is not None:
            self._console.print(what, soft_wrap=isinstance(what, str))

    def _columns(self) -> list[ProgressColumn]:
        """Return the columns of the bar."""
        raise NotImplementedError

    def _begin(self, bar: Progress) -> Any:
        """Add the task of the bar and return it."""
        raise NotImplementedError
