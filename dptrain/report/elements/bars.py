"""Horizontal bars with intervals: efficiencies of the POP hierarchy, and parts of a step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dptrain.measure.profile.profile import Parts
from dptrain.measure.statistics import Estimate
from dptrain.numbers import decimals_for, fixed, percent, short
from dptrain.report.elements.canvas import (
    BOTTOM,
    PARTS,
    SMALL_PT,
    TOP,
    Plot,
    colour,
    plot,
    set_bars_axis,
)
from dptrain.vocabulary import label_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from dptrain.measure.profile.pop import Pop
    from dptrain.scaling.study import Efficiencies

ROW_PT, HEAD_PT = 24.0, 16.0
"""Height of a bar with its text line, and of the name of a group, in points."""
MOST_PERCENT = 200.0
"""Largest end of the axis of efficiencies; an arrow marks an interval that ends beyond it."""


@dataclass(frozen=True)
class Bar:
    """A bar: its label, its value with an interval, and the role of its colour."""

    label: str
    value: Estimate
    role: str = "blue"


def efficiency_bars(
    name: str, title: str, groups: Mapping[str, Sequence[Bar]], *, caption: str, alt: str
) -> Plot:
    """Draw efficiencies in per cent with their 95% intervals.

    Args:
        name: name of the files.
        title: title of the plot.
        groups: bars by the heading of their group; a heading may be empty.
        caption, alt: as in `Plot`; `alt` is followed by the values.
    """
    limits = [bar.value.high for bars in groups.values() for bar in bars]
    known = [100 * high for high in limits if math.isfinite(high)]
    end = min(max([100.0, *known]), MOST_PERCENT)
    height = sum(HEAD_PT * bool(head) + ROW_PT * len(bars) for head, bars in groups.items())

    def draw(axes: Axes) -> None:
        axes.set_ylim(height, 0)
        axes.set_xlim(0, end * 1.02)
        axes.axvline(100, color=colour("faint"), linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
        y = 0.0
        for head, bars in groups.items():
            if head:
                axes.text(0, y + 0.5 * HEAD_PT, head, fontsize=SMALL_PT, weight="bold", va="center")
                y += HEAD_PT
            for bar in bars:
                text_line(axes, y + 7, bar.label, percent_interval(bar.value))
                axes.barh(y + 16.5, 100 * bar.value.value, 7, color=colour(bar.role), zorder=2)
                whisker(axes, y + 16.5, bar.value.times(100), 0.0, end, "orange")
                y += ROW_PT
        set_bars_axis(axes, "efficiency, %")

    values = "; ".join(
        (f"{head}: " if head else "")
        + ", ".join(f"{bar.label} {percent_interval(bar.value)}" for bar in bars)
        for head, bars in groups.items()
    )
    return plot(
        name,
        title,
        "bars, and 95% intervals as lines",
        draw,
        height=TOP + BOTTOM + height,
        left=6.0,
        caption=caption,
        alt=f"{alt} {values}.",
    )


def pop_bars(pop: Pop | Efficiencies, role: str = "blue") -> list[Bar]:
    """Return the parallel efficiency and its factors.

    Args:
        pop: the efficiencies.
        role: role of the colour of the factors.
    """
    return [
        Bar("parallel efficiency", pop.parallel, "ink"),
        Bar("= load balance", pop.load_balance, role),
        Bar("× serialisation", pop.serialisation, role),
        Bar("× transfer", pop.transfer, role),
    ]


def pop_plot(name: str, title: str, groups: Mapping[str, Sequence[Bar]]) -> Plot:
    """Draw `pop_bars` of profiles by heading."""
    return efficiency_bars(
        name,
        title,
        groups,
        caption="Parallel efficiency, the busy share of all steps, is the product of load balance, "
        "serialisation and transfer.",
        alt="Efficiencies:",
    )


def parts_bars(name: str, title: str, parts: Parts, *, caption: str, unit: str) -> Plot:
    """Draw the parts of a step with their shares, without those that are less than 0.05%.

    Args:
        name, title: as in `plot`.
        parts: the parts in milliseconds.
        caption: explanation below the plot.
        unit: label of the axis.
    """
    whole = parts.total or 1.0
    rows = [(n, ms) for n, ms in parts.known.items() if ms >= 5e-4 * whole]
    rows.sort(key=lambda row: -row[1])
    decimals = decimals_for([value for _, value in rows], digits=3)

    def draw(axes: Axes) -> None:
        axes.set_ylim(ROW_PT * max(len(rows), 1), 0)
        axes.set_xlim(0, max([value for _, value in rows], default=1.0) * 1.02)
        for index, (part, value) in enumerate(rows):
            y = ROW_PT * index
            text = f"{fixed(value, decimals)} ms · {percent(value / whole)}"
            text_line(axes, y + 7, label_of(part), text)
            axes.barh(y + 16.5, value, 7, color=colour(PARTS[part]), zorder=2)
        set_bars_axis(axes, unit)

    values = ", ".join(f"{label_of(n)} {percent(value / whole)}" for n, value in rows)
    return plot(
        name,
        title,
        f"parts of {short(whole)} ms",
        draw,
        height=TOP + BOTTOM + ROW_PT * max(len(rows), 1),
        left=6.0,
        caption=caption,
        alt=f"Parts of a step of {short(whole)} ms: {values}.",
    )


def percent_interval(value: Estimate) -> str:
    """Return ``91.4% (82.0–99.7)``, or only the value if there is no interval."""
    text = percent(value.value)
    if not math.isfinite(value.high):
        return text
    return f"{text} ({fixed(100 * value.low, 1)}–{fixed(100 * value.high, 1)})"


def text_line(axes: Axes, y: float, left: str, right: str, *, x: float = 0.0) -> None:
    """Write a label at `x`, the left end of the axes, and a value at the right end."""
    ground = {"facecolor": colour("paper"), "edgecolor": "none", "pad": 0.4}
    axes.text(x, y, left, fontsize=SMALL_PT, va="center", zorder=5, bbox=ground)
    axes.annotate(
        right,
        (1, y),
        xycoords=("axes fraction", "data"),
        fontsize=SMALL_PT,
        ha="right",
        va="center",
        zorder=5,
        bbox=ground,
    )


def whisker(axes: Axes, y: float, value: Estimate, low: float, high: float, role: str) -> None:
    """Draw an interval as a line with ends; arrows mark ends beyond the axis `low` to `high`."""
    if not math.isfinite(value.high):
        return
    ends = min(max(value.low, low), high), max(min(value.high, high), low)
    axes.plot(ends, [y, y], color=colour(role), linewidth=1.3, zorder=4)
    marks = "<" if value.low < low else "|", ">" if value.high > high else "|"
    for x, marker in zip(ends, marks, strict=True):
        axes.plot([x], [y], marker=marker, markersize=5, color=colour(role), zorder=4)
