"""Progress of a study: the present launch, the completed ones, the remaining time."""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING, Any

from dptrain.measure.console import ProgressPrinter, make_console
from dptrain.scaling.design import Task

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn

LINE_EVERY_S = 10.0
"""Seconds between two lines if there is no terminal."""


def time_text(seconds: float) -> str:
    """Return ``45 s``, ``3 min 20 s`` or ``2 h 5 min``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min"


class StudyDisplay(ProgressPrinter):
    """Show a bar on a terminal, and a line from time to time elsewhere.

    Args:
        errors: write to standard error, because a program reads standard output.
    """

    def __init__(self, *, errors: bool = False) -> None:
        super().__init__(make_console(errors=errors))
        self._printed_at = 0.0
        self._left_s, self._left_at = 0.0, monotonic()
        self._what, self._done, self._total = "", 0, 0

    def _columns(self) -> list[ProgressColumn]:
        from rich.progress import BarColumn, SpinnerColumn, TextColumn

        return [
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[facts]}"),
        ]

    def _begin(self, bar: Progress) -> Any:
        return bar.add_task("", total=None, facts="")

    def print_now(self, text: str) -> None:
        """Show the present activity, before the first launch."""
        self._what = text
        if self._bar is None:
            self.print(text)
        self.tick()

    def begin(self, *, done: int, total: int, left_s: float) -> None:
        """Show how many launches remain and how long they will take."""
        self._done, self._total = done, total
        already = f" ({done} of {total} are complete)" if done else ""
        count = total - done
        self.print(f"{count} launch{'es' * (count != 1)}{already}, about {time_text(left_s)}")
        if self._bar is not None:
            self._bar.update(self._task, total=total, completed=done)

    def now(self, task: Task, left_s: float) -> None:
        """Show that a launch starts."""
        point = task.point
        threads = f" × {point.threads} threads" if point.threads > 1 else ""
        ranks = f"{point.ranks} rank{'s' * (point.ranks > 1)}{threads}"
        self._what = f"{point.scaling}, {ranks}, round {task.round}"
        self._expect(left_s)
        self.tick()

    def advance(self, left_s: float) -> None:
        """Show that a launch is complete."""
        self._done += 1
        self._expect(left_s)
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done)
        elif monotonic() - self._printed_at >= LINE_EVERY_S or self._done == self._total:
            self._printed_at = monotonic()
            self.print(f"{self._done}/{self._total}  {self._what}  {time_text(left_s)} left")

    def tick(self) -> None:
        """Redraw the bar, if there is one."""
        if self._bar is None:
            return
        left = max(self._left_s - (monotonic() - self._left_at), 0.0)
        facts = f"{self._done}/{self._total}  {time_text(left)} left" if self._total else ""
        self._bar.update(self._task, description=self._what, facts=facts)
        self._bar.refresh()

    def _expect(self, left_s: float) -> None:
        self._left_s, self._left_at = left_s, monotonic()
