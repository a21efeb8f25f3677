"""Plots of series: step times, and learning curves of one or several runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dptrain.numbers import short
from dptrain.report.elements.canvas import (
    SMALL_PT,
    Plot,
    colour,
    plot,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDE_RANGE = 5.0
"""Ratio of the largest to the smallest value from which an axis is logarithmic."""
MARKED = 40
"""Largest number of values of a curve with markers."""


@dataclass(frozen=True)
class Curve:
    """A curve of a plot.

    Attributes:
        label: entry of the legend.
        xs, ys: the values.
        role: role of the colour.
        dashes: pattern of the line: "" for a solid line, "-" for dashes, "." for points only.
    """

    label: str
    xs: Sequence[float]
    ys: Sequence[float]
    role: str
    dashes: str = ""


def curves_plot(
    name: str,
    title: str,
    vertical: str,
    curves: Sequence[Curve],
    *,
    x: str,
    caption: str,
    alt: str,
    log: bool | None = None,
    top: float | None = None,
    bottom: float | None = None,
    columns: int = 2,
) -> Plot:
    """Draw curves over a common axis.

    Args:
        name, title, vertical: as in `plot`.
        curves: the curves; those without values are left out.
        x: label of the x axis.
        caption, alt: as in `Plot`.
        log: whether the y axis is logarithmic [default: if the values span a wide range].
        top: the y axis ends there, such as 100 for per cent [default: above the values].
        bottom: the y axis begins there [default: below the values].
        columns: columns of the legend.
    """
    drawn = [curve for curve in curves if len(curve.ys)]
    values = [float(y) for curve in drawn for y in curve.ys]
    low, high = min(values, default=0.0), max(values, default=1.0)
    is_log = low > 0 and high / low > WIDE_RANGE if log is None else log and low > 0

    def draw(axes: Axes) -> None:
        for curve in drawn:
            _draw_curve(axes, curve)
        axes.set_xlabel(x, labelpad=2)
        axes.grid(visible=False, axis="x")
        _set_x_axis(axes, [float(v) for curve in drawn for v in curve.xs])
        if is_log:
            _set_log_axis(axes, low, high)
        else:
            margin = 0.06 * ((high - low) or abs(high) or 1.0)
            end = high + margin if top is None else top + 0.02 * (top - low + margin)
            begin = max(low - margin, 0.0) if low >= 0 else low - margin
            axes.set_ylim(begin if bottom is None else bottom, end)
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")

    return plot(
        name,
        title,
        vertical + (" (log scale)" if is_log else ""),
        draw,
        caption=caption,
        alt=alt,
        left=36.0,
        legend=columns if len(drawn) > 1 else 0,
        lines=True,
    )


def _draw_curve(axes: Axes, curve: Curve) -> None:
    if curve.dashes == ".":
        axes.plot(
            curve.xs,
            curve.ys,
            linestyle="none",
            marker="o",
            markersize=2.4,
            color=colour(curve.role),
            markeredgewidth=0,
            label=curve.label,
            zorder=2,
        )
        return
    style = (0, (3.5, 1.6)) if curve.dashes else "-"
    marker = ("s" if curve.dashes else "o") if len(curve.xs) <= MARKED else ""
    # Large empty squares show the dots of another curve below them.
    size, face = (5.6, "none") if curve.dashes else (3.2, colour(curve.role))
    axes.plot(
        curve.xs,
        curve.ys,
        linestyle=style,
        marker=marker,
        markersize=size,
        markerfacecolor=face,
        color=colour(curve.role),
        label=curve.label,
        zorder=3,
    )


def _set_x_axis(axes: Axes, xs: Sequence[float]) -> None:
    """Start the axis at 0 and end it at the last value."""
    from matplotlib.ticker import MaxNLocator

    end = max(xs, default=1.0)
    axes.set_xlim(-0.02 * end, 1.03 * end)
    whole = all(float(value).is_integer() for value in xs)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=whole, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.6g}".replace(",", "\u202f"))


def _set_log_axis(axes: Axes, low: float, high: float) -> None:
    """Label a logarithmic y axis with plain numbers, at least two of them."""
    from matplotlib.ticker import NullFormatter

    axes.set_yscale("log")
    low, high = low / 1.12, high * 1.12
    ticks: list[float] = []
    for factors in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 8)):
        ticks = [f * 10.0**k for k in range(-9, 10) for f in factors if low <= f * 10.0**k <= high]
        if len(ticks) >= 3:
            break
    axes.set_ylim(low, high)
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.yaxis.set_minor_formatter(NullFormatter())


def steps_plot(
    name: str,
    title: str,
    steps: Sequence[float],
    times_ms: Sequence[float],
    *,
    median: float,
    interval: tuple[float, float] | None,
    caption: str,
) -> Plot:
    """Draw the duration of steps as points, with their median and its interval.

    Args:
        name, title: as in `plot`.
        steps: numbers of the steps.
        times_ms: their durations.
        median: median of all steps.
        interval: its 95% interval; None if there is none.
        caption: explanation below the plot.
    """
    low, high = min(times_ms), max(times_ms)
    is_log = low > 0 and high / low > WIDE_RANGE

    def draw(axes: Axes) -> None:
        if interval is not None:
            axes.axhspan(*interval, color=colour("sky"), linewidth=0, zorder=1)
        axes.axhline(median, color=colour("blue"), linewidth=1.1, zorder=2)
        axes.plot(
            steps,
            times_ms,
            linestyle="none",
            marker="o",
            markersize=2.2,
            color=colour("ink"),
            markeredgewidth=0,
            zorder=3,
        )
        axes.set_xlabel("step", labelpad=2)
        axes.grid(visible=False, axis="x")
        _set_x_axis(axes, steps)
        if is_log:
            _set_log_axis(axes, low, high)
        else:
            axes.set_ylim(0, high * 1.06)
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.annotate(
            f"{short(median)} ms",
            (1, median),
            xycoords=("axes fraction", "data"),
            xytext=(-2, 3),
            textcoords="offset points",
            ha="right",
            va="bottom",
            fontsize=SMALL_PT,
            weight="bold",
            zorder=5,
            bbox={"facecolor": colour("paper"), "edgecolor": "none", "pad": 0.6},
        )

    return plot(
        name,
        title,
        "step time, ms" + (" (log scale)" if is_log else ""),
        draw,
        caption=caption,
        left=36.0,
        alt=f"Duration of {len(times_ms)} steps: {short(low)} to {short(high)} ms, "
        f"median {short(median)} ms.",
    )
