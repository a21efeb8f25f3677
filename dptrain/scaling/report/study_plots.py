"""The plots of a study: efficiency, speed-up, parts of a step, forecast."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING

from dptrain.measure.statistics import Estimate
from dptrain.scaling.report.canvas import (
    BOTTOM,
    HEIGHT,
    PARTS,
    SMALL_PT,
    Plot,
    colour,
    legend_below,
    legend_height,
    part_name,
    plot,
    set_ranks_axis,
)
from dptrain.scaling.report.numbers import decimals_for, fixed, percent
from dptrain.scaling.study import STRONG, WEAK, Fit, Forecast, Point, Study

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FITS = {
    "amdahl": ("orange", (0, (5, 1.5))),
    "gustafson": ("orange", (0, (5, 1.5))),
    "usl": ("purple", (0, (1.2, 1.2))),
    "alpha-beta": ("green", (0, (5, 1.5, 1.2, 1.5))),
}
"""Role of the colour, and dashes, of each model."""
SERIES = (("blue", "o"), ("green", "s"), ("purple", "^"), ("orange", "D"), ("ink", "v"))
"""Role of the colour, and marker, of each number of threads."""


def study_plots(study: Study) -> list[Plot]:
    """Return all plots of a study, in the order of the page."""
    plots = []
    for scaling in (WEAK, STRONG):
        points = [point for point in study.points if point.scaling == scaling]
        if points:
            plots += [_efficiency(study, scaling, points), _speed_up(study, scaling, points)]
    for scaling in (WEAK, STRONG):
        points = [point for point in study.points if point.scaling == scaling]
        plots += [_parts(study, scaling, group) for _, group in _by_threads(points)]
    plots += [_forecast(study, f) for f in study.forecasts if f.points]
    return plots


def _by_threads(points: Sequence[Point]) -> list[tuple[int, list[Point]]]:
    ordered = sorted(points, key=lambda p: (p.threads, p.ranks))
    return [(threads, list(group)) for threads, group in groupby(ordered, lambda p: p.threads)]


def _axis_label(points: Sequence[Point]) -> str:
    return "ranks" if all(p.threads == 1 for p in points) else "compute threads, all ranks"


def _errors(estimates: Sequence[Estimate]) -> list[list[float]]:
    """Return the lengths of error bars; 0 if there is no interval."""

    def length(difference: float) -> float:
        return max(difference, 0.0) if math.isfinite(difference) else 0.0

    known = [e if math.isfinite(e.high) else Estimate(e.value, e.value, e.value, e.n)
             for e in estimates]  # fmt: skip
    return [[length(e.value - e.low) for e in known], [length(e.high - e.value) for e in known]]


def _measured(axes: Axes, points: Sequence[Point], quantity: str, *, line: bool = True) -> None:
    """Draw points with intervals; each number of threads has a marker and a legend entry."""
    groups = _by_threads(points)
    for index, (threads, group) in enumerate(groups):
        estimates = [getattr(point, quantity) for point in group]
        role, marker = SERIES[index % len(SERIES)]
        axes.errorbar(
            [point.total_threads for point in group], [e.value for e in estimates],
            yerr=_errors(estimates), fmt=marker + ("-" if line else ""), color=colour(role),
            capsize=2.5, capthick=1.0, elinewidth=1.0, zorder=4,
            label="measured" if len(groups) == 1 else _threads(threads),
        )  # fmt: skip


def _threads(count: int) -> str:
    return f"{count} thread{'s' * (count > 1)} per rank"


def _value_label(axes: Axes, point: Point, value: float) -> None:
    axes.annotate(
        f"{value:.2f}", (point.total_threads, value), xytext=(6, 0), textcoords="offset points",
        ha="left", va="center", weight="bold", fontsize=SMALL_PT, zorder=5,
    )  # fmt: skip


def _listed(points: Sequence[Point], quantity: str, decimals: int) -> str:
    """Return the values as text, for screen readers."""
    return "; ".join(
        f"{point_name(point)} {fixed(getattr(point, quantity).value, decimals)}" for point in points
    )


def point_name(point: Point) -> str:
    """Return ``8 ranks``; with more than one thread per rank, their number, too."""
    ranks = f"{point.ranks} rank{'s' * (point.ranks > 1)}"
    return ranks if point.threads == 1 else f"{ranks} × {point.threads} threads"


def _efficiency(study: Study, scaling: str, points: Sequence[Point]) -> Plot:
    limited = any(point.possible < 0.995 for point in points)

    def draw(axes: Axes) -> None:
        set_ranks_axis(
            axes, [point.total_threads for point in points], _axis_label(points), margin=1.6
        )
        axes.axhline(1, color=colour("faint"), linewidth=0.8, linestyle=(0, (4, 3)))
        if limited:
            limits = sorted({(point.total_threads, point.possible) for point in points})
            axes.plot(*zip(*limits, strict=True), color=colour("orange"), linewidth=1.3,
                      linestyle=(0, (1.2, 1.2)), label="core limit", zorder=3)  # fmt: skip
        _measured(axes, points, "efficiency")
        largest = max(points, key=lambda point: (point.total_threads, point.ranks))
        _value_label(axes, largest, largest.efficiency.value)
        highest = max(
            [1.0, *(p.efficiency.high for p in points if math.isfinite(p.efficiency.high))]
        )
        axes.set_ylim(0, 1.08 * highest)
        if limited or len(_by_threads(points)) > 1:
            axes.legend(loc="lower left", bbox_to_anchor=(0.01, 0.02))

    formula = "E = T(1) / T(p)" if scaling == WEAK else "E = T(1) / (p T(p))"
    work = "a constant batch per rank" if scaling == WEAK else "a constant global batch"
    limit = " Dotted: upper bound because ranks share cores." if limited else ""
    return plot(
        f"efficiency-{scaling}", f"{scaling.capitalize()} scaling: efficiency",
        f"parallel efficiency {formula}", draw,
        caption=f"Efficiency with {work}; 1 is ideal. Bars are 95% intervals over launches.{limit}",
        alt=f"Efficiency of {scaling} scaling: {_listed(points, 'efficiency', 3)}.",
    )  # fmt: skip


def _speed_up(study: Study, scaling: str, points: Sequence[Point]) -> Plot:
    base = study.base_ranks * study.base_threads
    largest = max(point.total_threads for point in points)

    def draw(axes: Axes) -> None:
        workers = [point.total_threads for point in points]
        set_ranks_axis(axes, workers, _axis_label(points))
        ends = (base, largest)
        axes.plot(ends, [end / base for end in ends], color=colour("faint"), linewidth=0.9,
                  linestyle=(0, (4, 3)), label="ideal", zorder=1)  # fmt: skip
        for fit, label in _shown_fits(study, scaling):
            role, dashes = FITS.get(fit.model, ("green", (0, (3, 1))))
            curve = [(x, y) for x, y in _fitted_speed_ups(study, fit, points) if x <= largest]
            axes.plot(*zip(*curve, strict=True), color=colour(role), linestyle=dashes,
                      linewidth=1.3, label=label, zorder=2)  # fmt: skip
        _measured(axes, points, "speed_up", line=False)
        axes.set_yscale("log", base=2)
        # An interval may extend to zero, which a logarithmic axis cannot show.
        low = min(1.0, *(max(p.speed_up.low, p.speed_up.value / 4) for p in points)) / 1.3
        high = largest / base * 1.5
        exponents = range(math.ceil(math.log2(low)), math.floor(math.log2(high)) + 1)
        ticks = [2.0**exponent for exponent in exponents[:: len(exponents) // 8 + 1]]
        axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.set_ylim(low, high)
        axes.legend(loc="upper left", bbox_to_anchor=(0.02, 1.0))

    fits = [fit for fit in study.fits if fit.scaling == scaling]
    fitted = " Other lines are fitted models." if fits else ""
    unit = "rank" if all(point.threads == 1 for point in points) else "compute thread"
    return plot(
        f"speed-up-{scaling}", f"{scaling.capitalize()} scaling: speed-up",
        f"throughput over {base} {unit}{'s' * (base > 1)} (log scale)", draw,
        caption=f"Speed-up with 95% intervals over launches; grey dashes are ideal.{fitted}",
        alt=f"Speed-up of {scaling} scaling: {_listed(points, 'speed_up', 2)}.",
    )  # fmt: skip


def _shown_fits(study: Study, scaling: str) -> list[tuple[Fit, str]]:
    """Return the fits to draw with their labels: all, or the best for each number of threads."""
    fits = [fit for fit in study.fits if fit.scaling == scaling]
    if len({fit.threads for fit in fits}) <= 1:
        return [(fit, fit.model) for fit in fits]
    best: dict[int, Fit] = {}
    for fit in fits:
        best.setdefault(fit.threads, fit)
    named: set[str] = set()
    shown = []
    for fit in best.values():
        shown.append((fit, "_" if fit.model in named else fit.model))
        named.add(fit.model)
    return shown


def _fitted_speed_ups(study: Study, fit: Fit, points: Sequence[Point]) -> list[tuple[float, float]]:
    """Return (compute threads, speed-up) along the curve of a fit."""
    base = study.base_ranks * study.base_threads
    alone = next(point.step_ms.value for point in points if point.total_threads == base)
    found: list[tuple[float, float]] = []
    for ranks, step_ms in fit.curve:
        workers = ranks * fit.threads
        grown = workers / base if fit.scaling == WEAK else 1.0
        found.append((workers, grown * alone / step_ms))
    return found


def _parts(study: Study, scaling: str, points: Sequence[Point]) -> Plot:
    base = study.base_ranks * study.base_threads
    ordered = sorted(points, key=lambda p: p.ranks)
    factors = [1.0 if scaling == WEAK else point.total_threads / base for point in ordered]
    ideal = ordered[0].ideal.total * factors[0]
    top = max(p.parts.total * f for p, f in zip(ordered, factors, strict=True))
    threads = ordered[0].threads
    several = len({point.threads for point in study.points}) > 1

    def draw(axes: Axes) -> None:
        tops = [0.0] * len(ordered)
        for name, role in PARTS.items():
            heights = [getattr(p.parts, name) * f for p, f in zip(ordered, factors, strict=True)]
            axes.bar(range(len(ordered)), heights, 0.72, bottom=tops, color=colour(role),
                     edgecolor=colour("paper"), linewidth=0.6, label=part_name(name))  # fmt: skip
            tops = [low + height for low, height in zip(tops, heights, strict=True)]
        axes.axhline(ideal, color=colour("ink"), linewidth=0.9, linestyle=(0, (4, 3)), zorder=5)
        decimals = decimals_for(tops, digits=3)
        for x, end in enumerate(tops):
            axes.annotate(fixed(end, decimals), (x, max(end, ideal)), xytext=(0, 3),
                          textcoords="offset points", ha="center", fontsize=SMALL_PT)  # fmt: skip
        axes.set_xticks(range(len(ordered)), [str(point.ranks) for point in ordered])
        axes.grid(visible=False, axis="x")
        each = f" (× {threads} threads)" if threads > 1 else ""
        axes.set_xlabel(f"ranks{each}", labelpad=2)
        axes.set_ylim(0, max(top, ideal) * 1.12)
        middle, half = (len(ordered) - 1) / 2, max(len(ordered), 3) / 2 + 0.1
        axes.set_xlim(middle - half, middle + half)
        legend_below(axes, 3)

    if scaling == WEAK:
        vertical, more = "step time, ms", ""
    else:
        over = "ranks" if max(p.threads for p in study.points) == 1 else "compute threads"
        vertical = f"cost: step time × {over}, ms" if base == 1 else (
            f"cost: step time × {over} / {base}, ms"
        )  # fmt: skip
        more = " Ideal strong scaling has a constant cost."
    legend = legend_height(len(PARTS), 3)
    largest = ordered[-1]
    shares = ", ".join(
        f"{part_name(name)} {percent(value / largest.parts.total)}"
        for name, value in asdict(largest.parts).items()
        if name in PARTS
    )
    return plot(
        f"parts-{scaling}" + (f"-t{threads}" if several else ""),
        f"{scaling.capitalize()} scaling: parts of a step"
        + (f", {threads} threads" if several else ""),
        vertical, draw,
        height=HEIGHT + legend, bottom=BOTTOM + legend,
        left=12 + 5.5 * max(len(f"{top:.0f}"), 4),
        caption="Parts of the median step, mean over ranks. The dashed line is the ideal step."
        f"{more}" + (f" With {_threads(threads)}." if several else ""),
        alt=f"Parts of a step of {scaling} scaling; at {largest.ranks} ranks: {shares}.",
    )  # fmt: skip


def _forecast(study: Study, forecast: Forecast) -> Plot:
    points = [p for p in study.points
              if p.scaling == forecast.scaling and p.threads == forecast.threads]  # fmt: skip
    xs = [ranks * forecast.threads for ranks, _, _ in forecast.points]
    ys = [efficiency for _, _, efficiency in forecast.points]
    by_ranks = {point.ranks: point for point in points}
    past = [(by_ranks[ranks], predicted) for ranks, predicted, _ in forecast.hindcasts]

    def draw(axes: Axes) -> None:
        set_ranks_axis(axes, [*(p.total_threads for p in points), *xs], _axis_label(points))
        axes.axhline(1, color=colour("faint"), linewidth=0.8, linestyle=(0, (4, 3)))
        lows, highs = zip(*forecast.intervals, strict=True)
        axes.fill_between(xs, lows, highs, color=colour("mint"), linewidth=0,
                          label="95% interval")  # fmt: skip
        axes.plot(xs, ys, "D--", color=colour("green"), markerfacecolor=colour("paper"),
                  linewidth=1.2, label="forecast", zorder=3)  # fmt: skip
        _measured(axes, points, "efficiency")
        if past:
            predicted = [p.efficiency.value * p.step_ms.value / ms for p, ms in past]
            axes.plot([p.total_threads for p, _ in past], predicted, "s", color=colour("orange"),
                      markersize=7, markerfacecolor="none", label="hindcast", zorder=6)  # fmt: skip
        axes.annotate(f"{ys[-1]:.2f}", (xs[-1], ys[-1]), xytext=(0, 6), ha="center", va="bottom",
                      textcoords="offset points", weight="bold", fontsize=SMALL_PT)  # fmt: skip
        axes.set_ylim(0, 1.12)
        legend_below(axes, 2, lines=True)

    legend = legend_height(4, 2)
    values = "; ".join(
        f"{ranks} ranks {e:.2f} ({low:.2f} to {high:.2f})"
        for (ranks, _, e), (low, high) in zip(forecast.points, forecast.intervals, strict=True)
    )
    suffix = "" if len({f.threads for f in study.forecasts}) == 1 else f"-t{forecast.threads}"
    return plot(
        f"forecast-{forecast.scaling}{suffix}",
        f"{forecast.scaling.capitalize()} scaling: forecast", "parallel efficiency", draw,
        height=HEIGHT + legend, bottom=BOTTOM + legend,
        caption="Hollow diamonds are predictions by an ensemble of models. Squares are hindcasts: "
        f"measured points as predicted from the smaller ones. The forecast ends: "
        f"{forecast.unknown}.",
        alt=f"Forecast of the efficiency of {forecast.scaling} scaling: {values}.",
    )  # fmt: skip
