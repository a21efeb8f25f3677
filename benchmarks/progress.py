"""Show progress, and print tables at the end."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from dptrain.measure.console import make_console

if TYPE_CHECKING:
    from benchmarks.tables import Table

WIDTH = 170
"""Columns of the widest table."""


class Progress:
    """A status line on a terminal; otherwise one line per measurement."""

    def __init__(self) -> None:
        self._console = make_console()
        # Tables wider than the window are wrapped, not cropped.
        self._console.width = max(self._console.width, WIDTH)
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
        """Print tables: with frames and colours on a terminal, otherwise plain."""
        from rich import box
        from rich.table import Table as Frame

        terminal = self._console.is_terminal
        for table in tables:
            frame = Frame(
                title=table.title, title_justify="left", box=box.SIMPLE if terminal else None
            )
            for i, column in enumerate(table.columns):
                frame.add_column(column, justify="left" if i == 0 else "right", no_wrap=True)
            for row in table.rows:
                style = "yellow" if row[-1].endswith("target") else None
                frame.add_row(*row, style=style)
            self._console.print(frame, crop=False)
            self._console.print()
