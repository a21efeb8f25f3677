"""The plot of losses by experiment."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from dptrain.measure.profile.loss_tables import num_rows, shown_name
from dptrain.measure.profile.losses import ALONE, DURING, Losses
from dptrain.measure.statistics import Estimate
from dptrain.numbers import decimals_for, fixed
from dptrain.report.elements.bars import ROW_PT, text_line, whisker
from dptrain.report.elements.canvas import BOTTOM, TOP, Plot, colour, plot, set_bars_axis

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def losses_plot(losses: Losses) -> Plot:
    """Return the step of rank 0 alone, the losses, and the step of the job, which is their sum.

    Each loss starts where the one above ends.
    """
    rows: list[tuple[str, Estimate, float]] = [("rank 0 alone", losses.step_ms[ALONE], 0.0)]
    end = losses.step_ms[ALONE].value
    for loss in losses.losses[: num_rows(losses)]:
        rows.append((shown_name(loss), loss.time_ms, end))
        end += loss.time_ms.value
    rows.append(("job", losses.step_ms[DURING], 0.0))
    decimals = decimals_for([value.value for _, value, _ in rows], digits=3)
    ends = [start + limit for _, value, start in rows for limit in (value.low, value.high)]
    known = [value for value in ends if math.isfinite(value)] + [end]
    low, high = min(0.0, *known), max(known) * 1.02

    def draw(axes: Axes) -> None:
        axes.set_ylim(ROW_PT * len(rows), 0)
        axes.set_xlim(low, high)
        for index, (name, value, start) in enumerate(rows):
            y = ROW_PT * index
            text_line(axes, y + 7, name, _interval(value, decimals), x=low)
            role = "ink" if name == "job" else "blue" if name == "rank 0 alone" else "amber"
            axes.barh(y + 16.5, value.value, 7, left=start, color=colour(role), zorder=2)
            ends = start + value.low, start + value.high
            whisker(
                axes, y + 16.5, Estimate(start + value.value, *ends, value.n), low, high, "orange"
            )
        set_bars_axis(axes, "ms")

    values = ", ".join(f"{name} {_interval(value, decimals)}" for name, value, _ in rows)
    return plot(
        "losses",
        "Losses of a step",
        "ms, and 95% intervals as lines",
        draw,
        height=TOP + BOTTOM + ROW_PT * len(rows),
        left=6.0,
        caption="Each loss starts where the one above ends; together with the step of rank 0 alone "
        "they add up to the step of the job.",
        alt=f"Milliseconds of a step: {values}.",
    )


def _interval(value: Estimate, decimals: int) -> str:
    text = fixed(value.value, decimals)
    if not math.isfinite(value.high):
        return text
    return f"{text} ({fixed(value.low, decimals)} to {fixed(value.high, decimals)})"
