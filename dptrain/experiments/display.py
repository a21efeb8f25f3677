"""Progress of an experiment: one line for each case, and the estimated time left."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dptrain.experiments.tables import duration
from dptrain.measure.console import ProgressPrinter, make_console

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.progress import Progress, ProgressColumn


class CaseDisplay(ProgressPrinter):
    """Prints progress.

    Args:
        verbose: False prints nothing.
        costs_s: estimated seconds of the cases that are left, in order.
    """

    def __init__(self, verbose: bool, costs_s: Sequence[float]) -> None:
        super().__init__(make_console() if verbose else None)
        self._total = len(costs_s)
        self._done = 0

    def _columns(self) -> list[ProgressColumn]:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn

        return [
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[left]}"),
            TextColumn("{task.description}"),
        ]

    def _begin(self, bar: Progress) -> Any:
        return bar.add_task("", total=self._total, left="")

    def begin(self, what: str, left_s: float) -> None:
        """Show that a case begins.

        Args:
            what: description of the case.
            left_s: estimated seconds until all cases are done.
        """
        if self._bar is not None:
            left = f"{duration(max(left_s, 1))} left"
            self._bar.update(self._task, description=what, left=left, refresh=True)

    def end(self, what: str, left_s: float) -> None:
        """Print the result `what` of a case, and the estimated time left."""
        self._done += 1
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, refresh=True)
        left = f"  ({duration(left_s)} left)" if self._bar is None and left_s >= 1 else ""
        self.print(f"{self._done}/{self._total}  {what}{left}")
