"""What a person sees while an experiment runs: a line a case, and how much is left."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dptrain.experiments.tables import duration
from dptrain.measure.console import Voice, make_console

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.progress import Progress, ProgressColumn


class CaseDisplay(Voice):
    """Rank 0's voice, or nobody's.

    Args:
        verbose: whether progress is printed.
        costs_s: estimates of all cases that are left, in order.
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
        """A case begins.

        Args:
            what: case.
            left_s: seconds until all are done, about.
        """
        if self._bar is not None:
            left = f"{duration(max(left_s, 1))} left"
            self._bar.update(self._task, description=what, left=left, refresh=True)

    def end(self, what: str, left_s: float) -> None:
        """A case is done; `what` was found."""
        self._done += 1
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, refresh=True)
        left = f"  ({duration(left_s)} left)" if self._bar is None and left_s >= 1 else ""
        self.say(f"{self._done}/{self._total}  {what}{left}")
