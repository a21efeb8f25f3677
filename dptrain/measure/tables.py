"""Tables for terminals, and the table at the end of training."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from dptrain.measure.console import MIN_WIDTH
from dptrain.measure.profile import Parts, StageProfile
from dptrain.plan.lowering import Phase

if TYPE_CHECKING:
    from rich.table import Table


def plain_table(title: str) -> Table:
    """Return an empty table in the style of all reports."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    line = Text(title, style="bold")
    if len(title) <= MIN_WIDTH:  # The title may be wider than the columns.
        line.no_wrap, line.overflow = True, "ignore"
    return Table(title=line, title_justify="left", box=box.SIMPLE_HEAD)


def fitted_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, text: Sequence[str]
) -> Table:
    """Return a table that shortens texts but never numbers if the terminal is too small.

    Args:
        title: title above the table.
        columns: headings.
        rows: cells; an empty row draws a line.
        text: headings of the columns that contain text.
    """
    table, cells = plain_table(title), list(rows)
    table.padding = (0, 1, 0, 0)
    for index, column in enumerate(columns):
        if column in text:
            table.add_column(column, overflow="ellipsis")
        else:
            width = max([len(column), *(len(row[index]) for row in cells if row)])
            table.add_column(column, justify="right", no_wrap=True, min_width=width)
    for row in cells:
        if row:
            table.add_row(*row)
        else:
            table.add_section()
    return table


def closing_table(
    parts: Parts, stages: Sequence[StageProfile], hidden_ms: float, *, ranks: int, steps: str
) -> Table:
    """Return the table at the end of training: a row for each group, then the parts of the step.

    Args:
        parts: parts of the mean step.
        stages: stages in the order of the plan.
        hidden_ms: communication that overlapped with compute.
        ranks: number of ranks.
        steps: description of the steps in the mean.
    """
    total = parts.total
    groups: dict[str, list[StageProfile]] = {}
    for stage in stages:
        groups.setdefault(stage.group, []).append(stage)
    columns = ["stage", "forward ms", "backward ms", "slowest rank ms", "share", "GFLOP/s", "MB"]
    if ranks == 1:
        columns.remove("slowest rank ms")
    rows: list[Sequence[str]] = []
    for name, found in groups.items():
        forward, backward = direction_cells(found)
        cells = {
            "stage": name,
            "forward ms": forward,
            "backward ms": backward,
            "slowest rank ms": slowest_cell(found),
            "share": f"{sum(stage.share for stage in found):.1%}",
            "GFLOP/s": rate_cell(sum(stage.flops for stage in found), mean_ms(found)),
            "MB": f"{sum(stage.bytes_moved for stage in found) / 1e6:.2f}",
        }
        rows.append([cells[column] for column in columns])

    def add(name: str, value: float, share: str) -> None:
        cells = {"stage": name, "forward ms": ms_cell(value), "share": share}
        rows.append([cells.get(column, "") for column in columns])

    rows.append([])
    for name, value in PART_NAMES.items():
        if name != "compute":
            part = getattr(parts, name)
            add(value, part, f"{part / total:.1%}" if total else "")
    rows.append([])
    add("step", total, "100.0%")
    if hidden_ms:
        add("communication, overlapped", hidden_ms, "")
    title = f"Where a step goes (mean over {steps} and ranks)"
    return fitted_table(title, columns, rows, text=("stage",))


PART_NAMES = {
    "compute": "compute",
    "data_wait": "data wait",
    "transfer": "communication, transfer",
    "imbalance": "communication, imbalance",
    "other": "other",
}
"""Names of the fields of `Parts` in tables."""


def notes_table(stages: Sequence[StageProfile]) -> Table | None:
    """Return the algorithm of every stage for which the backend states one, or None."""
    noted = [stage for stage in stages if stage.note]
    if not noted:
        return None
    table = plain_table("Algorithms of the stages")
    for column in ("stage", "algorithm", "ms"):
        table.add_column(column, justify="right" if column == "ms" else "left")
    for stage in noted:
        table.add_row(stage.name, stage.note, ms_cell(stage.time_ms.mean))
    return table


def ms_cell(value: float) -> str:
    """Return milliseconds without the unit."""
    return f"{value:.3f}"


def mean_ms(stages: Sequence[StageProfile]) -> float:
    """Return the sum of the mean times of stages in ms."""
    return sum(stage.time_ms.mean for stage in stages)


def direction_cells(stages: Sequence[StageProfile]) -> tuple[str, str]:
    """Return the times in ms of the stages that are not backward, and of those that are."""
    backward = [stage for stage in stages if stage.phase.startswith(Phase.BACKWARD.value)]
    forward = [stage for stage in stages if stage not in backward]
    return (
        ms_cell(mean_ms(forward)) if forward else "",
        ms_cell(mean_ms(backward)) if backward else "",
    )


def slowest_cell(stages: Sequence[StageProfile]) -> str:
    """Return the time in ms of the slowest rank of each stage, and these ranks."""
    ranks = sorted({stage.slowest_rank for stage in stages})
    return f"{ms_cell(sum(s.slowest_ms for s in stages))} (rank {','.join(map(str, ranks[:3]))})"


def rate_cell(work: float, ms: float) -> str:
    """Return a rate in 10⁹ per second."""
    return f"{work / ms / 1e6:,.1f}" if work and ms else ""
