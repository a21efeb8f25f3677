"""The closing table: an `Attribution` as people read it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from dptrain.measure.attribution import Attribution, Span, StageTime
from dptrain.plan.lowering import Phase

if TYPE_CHECKING:
    from rich.table import Table


def plain_table(title: str) -> Table:
    """An empty table in the style of all reports."""
    from rich import box
    from rich.table import Table

    return Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)


def fitted_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, text: Sequence[str]
) -> Table:
    """A table whose numbers are never cut: where room is short, its texts are.

    Args:
        title: above it.
        columns: headings.
        rows: cells; an empty row draws a line.
        text: headings of the columns of texts.
    """
    table, cells = plain_table(title), list(rows)
    table.padding = (0, 1, 0, 0)
    for place, column in enumerate(columns):
        if column in text:
            table.add_column(column, overflow="ellipsis")
        else:
            width = max([len(column), *(len(row[place]) for row in cells if row)])
            table.add_column(column, justify="right", no_wrap=True, min_width=width)
    for row in cells:
        if row:
            table.add_row(*row)
        else:
            table.add_section()
    return table


def stage_table(attribution: Attribution, *, ranks: int, timed: int | None = None) -> Table:
    """One row a group of layers; forward and backward; the rest of the step below.

    Args:
        attribution: of a mean step.
        ranks: of the job.
        timed: number of steps that were timed stage by stage; None if all were.
    """
    steps = "steps" if timed is None else f"{timed} steps that were timed in order"
    table = plain_table(f"Where a step goes (mean over {steps} and ranks)")
    table.add_column("stage", no_wrap=True, overflow="ellipsis")
    for column in ("forward ms", "backward ms", "slowest rank ms", "share", "GFLOP/s", "MB"):
        table.add_column(column, justify="right")
    groups: dict[str, list[StageTime]] = {}
    for stage in attribution.stages:
        groups.setdefault(stage.group, []).append(stage)
    for group, stages in groups.items():
        table.add_row(*_group_row(group, stages))
    table.add_section()
    rows = {
        "communication, exposed": attribution.exposed,
        "data wait": attribution.data_wait,
        "other": attribution.other,
    }
    for name, span in rows.items():
        table.add_row(name, *_span_cells(span, ranks))
    table.add_section()
    table.add_row("step", *_span_cells(attribution.step, ranks))
    hidden = attribution.hidden
    if hidden.mean_ms:
        table.add_row("communication, hidden", _ms(hidden.mean_ms), "", _slowest(hidden, ranks))
    return table


def notes_table(attribution: Attribution) -> Table | None:
    """A row a stage of which the backend has something to say; None where it has not of any.

    Beside the numbers it would take more room than a terminal has.
    """
    noted = [stage for stage in attribution.stages if stage.note]
    if not noted:
        return None
    table = plain_table("How stages are computed")
    for column in ("stage", "by", "ms"):
        table.add_column(column, justify="right" if column == "ms" else "left")
    for stage in noted:
        table.add_row(stage.name, stage.note, _ms(stage.mean_ms))
    return table


def _ms(value: float) -> str:
    return f"{value:.3f}"


def _slowest(span: Span, ranks: int) -> str:
    return f"{_ms(span.slowest_ms)} (r{span.slowest_rank})" if ranks > 1 else _ms(span.slowest_ms)


def _span_cells(span: Span, ranks: int) -> tuple[str, ...]:
    return _ms(span.mean_ms), "", _slowest(span, ranks), f"{span.share:.1%}"


def _group_row(group: str, stages: list[StageTime]) -> tuple[str, ...]:
    backward = [stage for stage in stages if stage.phase.startswith(Phase.BACKWARD.value)]
    forward = [stage for stage in stages if stage not in backward]
    total = sum(stage.mean_ms for stage in stages)
    flops = sum(stage.flops for stage in stages)
    return (
        group,
        _ms(sum(stage.mean_ms for stage in forward)),
        _ms(sum(stage.mean_ms for stage in backward)) if backward else "",
        _ms(sum(stage.slowest_ms for stage in stages)),
        f"{sum(stage.share for stage in stages):.1%}",
        f"{flops / total / 1e6:.1f}" if flops and total else "",
        f"{sum(stage.bytes_moved for stage in stages) / 1e6:.2f}",
    )
