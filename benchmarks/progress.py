"""Show progress, and print tables at the end."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from dptrain.measure.console import make_console

if TYPE_CHECKING:
    from dptrain.tables import Table


class Progress:
    """A status line on a terminal; otherwise one line per measurement."""

    def __init__(self) -> None:
        self._console = make_console()
        self._start = time.perf_counter()
        self._status = self._console.status("") if self._console.is_terminal else None
        if self._status is not None:
            self._status.start()

    def step(self, what: str) -> None:
        """Show what is measured next."""
        line = f"{time.perf_counter() - self._start:4.0f} s  {what}"
        if self._status is None:
            print(line, flush=True)
        else:
            self._status.update(line)

    def close(self) -> None:
        """Restore the terminal."""
        if self._status is not None:
            self._status.stop()

    def print(self, text: str) -> None:
        """Print lines without formatting."""
        print(text, flush=True)

    def show(self, tables: Iterable[Table]) -> None:
        """Print tables."""
        for table in tables:
            self._console.print(table)
