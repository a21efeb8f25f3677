"""What a person sees while training runs: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Any

from dptrain.measure.console import make_console

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.table import Table

    from dptrain.training.progress import Progress

LINE_EVERY_S = 10.0
"""Where there is no terminal, seconds between lines inside a long epoch."""
REFRESH_EVERY_S = 0.1


class Display:
    """Rank 0's voice; on other ranks every call does nothing.

    Args:
        speaks: whether this rank is the one that does.
        first_step, last_step: of this run.
        task: what is done, in a word.
        brief: show how far it is, and leave out all that `say` would tell.
    """

    def __init__(
        self,
        speaks: bool,
        first_step: int,
        last_step: int,
        task: str = "training",
        *,
        brief: bool = False,
    ) -> None:
        self._console = make_console() if speaks else None
        self._first, self._last = first_step, last_step
        self._bar: Bar | None = None
        self._start = self._said = self._drawn = monotonic()
        self._name, self._brief = task, brief
        self._task: Any = None

    def __enter__(self) -> Display:
        self._start = self._said = monotonic()
        if self._console is not None and self._console.is_terminal:
            self._bar = self._make_bar()
            self._bar.start()
            total = self._last - self._first
            self._task = self._bar.add_task(self._name, total=total, facts="")
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

    def _make_bar(self) -> Bar:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        return Bar(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[facts]}"),
            TextColumn("left"),
            TimeRemainingColumn(compact=True),
            console=self._console,
            transient=True,
            auto_refresh=False,
        )

    def say(self, what: str | Table) -> None:
        """Print a line, which is never cut, or a table, above the bar."""
        if not self._brief:
            self._print(what)

    def _print(self, what: str | Table) -> None:
        if self._console is not None:
            self._console.print(what, soft_wrap=isinstance(what, str))

    def step(self, progress: Progress) -> None:
        """A step is done. Cheap: it draws at most ten times a second."""
        if self._console is None:
            return
        now, step, rate = monotonic(), progress.step, progress.images_per_s
        if self._bar is not None:
            if now - self._drawn < REFRESH_EVERY_S and step < self._last:
                return
            self._drawn = now
            facts = f"loss {progress.loss:.4f}  {rate:,.0f} images/s"
            self._bar.update(self._task, completed=step - self._first, facts=facts)
            self._bar.refresh()
        elif now - self._said >= LINE_EVERY_S:
            self._said = now
            left = (now - self._start) / (step - self._first) * (self._last - step)
            self._print(
                f"step {step}/{self._last}  loss {progress.loss:.4f}  {rate:,.0f} images/s  "
                f"{left:.0f} s left"
            )
