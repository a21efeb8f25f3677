"""What a person sees while an experiment runs: a line a case, and how much is left."""

from __future__ import annotations

from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Any

from dptrain.experiments.tables import duration
from dptrain.measure.console import make_console

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.progress import Progress
    from rich.table import Table


class CaseDisplay:
    """Rank 0's voice, or nobody's.

    Args:
        speaks: whether anything is said.
        costs_s: estimates of all cases that are left, in order.
    """

    def __init__(self, speaks: bool, costs_s: Sequence[float]) -> None:
        self._console = make_console() if speaks else None
        self._total = len(costs_s)
        self._done = 0
        self._start = monotonic()
        self._bar: Progress | None = None
        self._task: Any = None

    def __enter__(self) -> CaseDisplay:
        if self._console is not None and self._console.is_terminal and self._total:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

            self._bar = Progress(
                BarColumn(bar_width=20),
                MofNCompleteColumn(),
                TextColumn("{task.fields[left]}"),
                TextColumn("{task.description}"),
                console=self._console,
                transient=True,
                # A thread that draws would take a core from what is timed.
                auto_refresh=False,
            )
            self._bar.start()
            self._task = self._bar.add_task("", total=self._total, left="")
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
