"""Progress of training: a bar on a terminal, a line every few seconds in a file or pipe."""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING, Any

from dptrain.measure.console import ProgressPrinter, make_console

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import ProgressColumn

    from dptrain.tables import Table
    from dptrain.training.output.progress import Progress

LINE_EVERY_S = 10.0
"""Seconds between two lines within an epoch if there is no terminal."""
REFRESH_EVERY_S = 0.1


class Display(ProgressPrinter):
    """Shows the progress on rank 0; on other ranks every call does nothing.

    Args:
        verbose: True if this rank prints.
        first_step, last_step: steps of this run, counted from 0.
        task: the name of the bar.
        brief: show only the progress; `print` does nothing.
    """

    def __init__(
        self,
        verbose: bool,
        first_step: int,
        last_step: int,
        task: str = "training",
        *,
        brief: bool = False,
    ) -> None:
        super().__init__(make_console() if verbose else None)
        self._first, self._last = first_step, last_step
        self._start = self._printed_at = self._drawn = monotonic()
        self._name, self._brief = task, brief

    def __enter__(self) -> Display:
        self._start = self._printed_at = monotonic()
        return super().__enter__()

    def _columns(self) -> list[ProgressColumn]:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

        return [
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[facts]}"),
            TextColumn("left"),
            TimeRemainingColumn(compact=True),
        ]

    def _begin(self, bar: Bar) -> Any:
        return bar.add_task(self._name, total=self._last - self._first, facts="")

    def print(self, what: str | Table) -> None:
        """Print a table, or a line of any length, above the bar; nothing if `brief`."""
        if not self._brief:
            super().print(what)

    def step(self, progress: Progress) -> None:
        """Show that a step is complete; draws at most ten times per second."""
        if self._console is None:
            return
        now, step = monotonic(), progress.step
        if self._bar is not None:
            if now - self._drawn < REFRESH_EVERY_S and step < self._last:
                return
            self._drawn = now
            self._bar.update(self._task, completed=step - self._first, facts=_facts(progress))
            self._bar.refresh()
        elif now - self._printed_at >= LINE_EVERY_S:
            self._printed_at = now
            left = (now - self._start) / (step - self._first) * (self._last - step)
            super().print(f"step {step}/{self._last}  {_facts(progress)}  {left:.0f} s left")


def _facts(progress: Progress) -> str:
    return f"loss {progress.loss:.4f}  {progress.samples_per_s:,.0f} samples/s"
