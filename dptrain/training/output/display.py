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
"""Least number of seconds between two lines within an epoch if there is no terminal."""
LINE_SHARE = 0.1
"""Least time between two such lines as a share of the time so far, so that logs stay short."""
MOST_EPOCHS = 10
"""Largest number of epochs that have a line each."""
REFRESH_EVERY_S = 0.1


class Display(ProgressPrinter):
    """Shows the progress on rank 0; on other ranks every call does nothing.

    Args:
        verbose: True if this rank prints.
        first_step, last_step: steps of this run, counted from 0.
        task: the name of the bar.
        epoch_steps: steps of an epoch, for the bar and for the choice of the epochs that have a
            line; None shows no epochs.
        brief: show only the progress; `print` does nothing.
    """

    def __init__(
        self,
        verbose: bool,
        first_step: int,
        last_step: int,
        task: str = "training",
        *,
        epoch_steps: int | None = None,
        brief: bool = False,
    ) -> None:
        super().__init__(make_console() if verbose else None)
        self._first, self._last = first_step, last_step
        self._start = self._printed_at = self._drawn = monotonic()
        self._name, self._brief, self._epoch_steps = task, brief, epoch_steps

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

    def epoch(self, number: int, line: str, *, always: bool) -> None:
        """Print the line of an epoch; of many, the first and every n-th, or if one is due.

        Args:
            number: of the epoch, from 1.
            line: its results.
            always: print it in any case.
        """
        steps = self._epoch_steps or 1
        first, last = self._first // steps + 1, -(-self._last // steps)
        is_chosen = number == first or number % epoch_stride(last - first + 1) == 0
        if always or is_chosen or self._is_line_due():
            self._printed_at = monotonic()
            self.print(line)

    def _is_line_due(self) -> bool:
        """Return True if the last line in a file or pipe was printed long ago."""
        now = monotonic()
        return self._bar is None and now - self._printed_at >= max(
            LINE_EVERY_S, LINE_SHARE * (now - self._start)
        )

    def step(self, progress: Progress) -> None:
        """Show that a step is complete; draws at most ten times per second."""
        if self._console is None:
            return
        now, step = monotonic(), progress.step
        if self._bar is not None:
            if now - self._drawn < REFRESH_EVERY_S and step < self._last:
                return
            self._drawn = now
            name = self._name
            if self._epoch_steps is not None:
                name = f"epoch {-(-step // self._epoch_steps)}"
            self._bar.update(
                self._task, description=name, completed=step - self._first, facts=_facts(progress)
            )
            self._bar.refresh()
        elif self._is_line_due():
            self._printed_at = now
            left = (now - self._start) / (step - self._first) * (self._last - step)
            super().print(f"step {step}/{self._last}  {_facts(progress)}  {left:.0f} s left")


def epoch_stride(count: int) -> int:
    """Return n so that the first, every n-th and the last of some epochs are at most ten.

    Example:
        >>> [epoch_stride(count) for count in (4, 10, 12, 50, 100, 1000)]
        [1, 1, 2, 10, 20, 200]
    """
    if count <= MOST_EPOCHS:
        return 1
    round_numbers = (digit * int(10**power) for power in range(20) for digit in (1, 2, 5))
    return next(n for n in round_numbers if count // n + 2 <= MOST_EPOCHS)


def _facts(progress: Progress) -> str:
    score = "" if progress.score is None else f"validation {progress.score}  "
    return f"loss {progress.loss:.4f}  {score}{progress.samples_per_s:,.0f} samples/s"
