"""The plots of a study: efficiency, speed-up, parts of a step, forecast."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from dptrain.measure.statistics import Estimate
from dptrain.numbers import decimals_for, fixed, percent
from dptrain.report.elements.bars import Bar, efficiency_bars, pop_bars
from dptrain.report.elements.canvas import (
    PARTS,
    SMALL_PT,
    Plot,
    colour,
    draw_launches,
    plot,
    set_ranks_axis,
)
from dptrain.scaling.points import round_of
from dptrain.scaling.study import STRONG, WEAK, Forecast, Point, Study
from dptrain.vocabulary import label_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SERIES = (("blue", "o"), ("green", "s"), ("purple", "^"), ("orange", "D"), ("ink", "v"))
"""Role of the colour, and marker, of each number of threads."""
MOST_POP = 5
"""Largest number of points in the plot of POP efficiencies."""


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
        if any(point.pop is not None for point in points):
            plots.append(_pop(scaling, points))
    plots += [_forecast(study, f) for f in study.forecasts if f.points]
    plots.append(_launches(study))
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

    known = [
        e if math.isfinite(e.high) else Estimate(e.value, e.value, e.value, e.n) for e in estimates
    ]
    return [[length(e.value - e.low) for e in known], [length(e.high - e.value) for e in known]]


def draw_estimates(
    axes: Axes,
    xs: Sequence[float],
    estimates: Sequence[Estimate],
    style: str,
    role: str,
    label: str,
) -> None:
    """Draw estimates with their intervals.

    Args:
        axes, xs, estimates: where, and what.
        style: marker and line, as matplotlib names them.
        role: role of the colour.
        label: entry of the legend; ``_`` for none.
    """
    axes.errorbar(
        xs,
        [e.value for e in estimates],
        yerr=_errors(estimates),
        fmt=style,
        color=colour(role),
        capsize=2.5,
        capthick=1.0,
        elinewidth=1.0,
        zorder=4,
        label=label,
    )


def _measured(axes: Axes, points: Sequence[Point], quantity: str, *, scale: float = 1.0) -> None:
    """Draw points with intervals; each number of threads has a marker and a legend entry.

    Single launches are drawn to the left of their point.
    """
    groups = _by_threads(points)
    base = base_point(points)
    for index, (threads, group) in enumerate(groups):
        known = [point for point in group if getattr(point, quantity) is not None]
        estimates = [getattr(point, quantity).times(scale) for point in known]
        role, marker = SERIES[index % len(SERIES)]
        label = "measured" if len(groups) == 1 else _threads(threads)
        xs = [point.total_threads for point in known]
        draw_estimates(axes, xs, estimates, f"{marker}-", role, label)
        for point in group:
            found = [scale * value for value in launch_values(point, base, quantity)]
            draw_launches(axes, [point.total_threads] * len(found), found, role)


def base_point(points: Sequence[Point]) -> Point:
    """Return the base point of one kind of scaling."""
    return min(points, key=lambda point: (point.total_threads, point.ranks))


def launch_values(point: Point, base: Point, quantity: str) -> list[float]:
    """Return the speed-up or the efficiency of each launch of a point, relative to its round.

    Launches without a partner in their round, and those of a single round, are compared with the
    mean of the base. The base itself has no values: they would all be 1.

    Args:
        point: the point.
        base: the base point of the same kind of scaling.
        quantity: ``speed_up`` or ``efficiency``.
    """
    if point is base:
        return []
    rounds = {round_of(launch.folder): launch.step_ms for launch in base.launches}
    by_round = {name: step_ms for name, step_ms in rounds.items() if name}
    factor = point.batch_size / base.batch_size
    if quantity == "efficiency":
        factor *= base.total_threads / point.total_threads
    return [
        factor * by_round.get(round_of(launch.folder), base.step_ms.value) / launch.step_ms
        for launch in point.launches
    ]


def _threads(count: int) -> str:
    return f"{count} thread{'s' * (count > 1)} per rank"


def _value_label(axes: Axes, point: Point, text: str, value: float) -> None:
    axes.annotate(
        text,
        (point.total_threads, value),
        xytext=(6, 0),
        textcoords="offset points",
        ha="left",
        va="center",
        weight="bold",
        fontsize=SMALL_PT,
        zorder=5,
    )


def _listed(points: Sequence[Point], quantity: str, decimals: int) -> str:
    """Return the values as text, for screen readers."""
    known = ((point_name(point), getattr(point, quantity)) for point in points)
    return "; ".join(f"{name} {fixed(found.value, decimals)}" for name, found in known if found)


def point_name(point: Point) -> str:
    """Return ``8 ranks``; with more than one thread per rank, their number, too."""
    ranks = f"{point.ranks} rank{'s' * (point.ranks > 1)}"
    return ranks if point.threads == 1 else f"{ranks} × {point.threads} threads"


def _efficiency(study: Study, scaling: str, points: Sequence[Point]) -> Plot:
    limited = any(point.possible < 0.995 for point in points)

    def draw(axes: Axes) -> None:
        set_ranks_axis(axes, [point.total_threads for point in points], _axis_label(points))
        axes.axhline(100, color=colour("faint"), linewidth=0.8, linestyle=(0, (4, 3)))
        if limited:
            limits = sorted({(point.total_threads, 100 * point.possible) for point in points})
            axes.plot(
                *zip(*limits, strict=True),
                color=colour("orange"),
                linewidth=1.3,
                linestyle=(0, (1.2, 1.2)),
                label="core limit",
                zorder=3,
            )
        _measured(axes, points, "efficiency", scale=100)
        largest = max(points, key=lambda point: (point.total_threads, point.ranks))
        if largest.efficiency is not None:
            value = largest.efficiency.value
            _value_label(axes, largest, percent(value, decimals=0), 100 * value)
        base = base_point(points)
        single = [value for p in points for value in launch_values(p, base, "efficiency")]
        high = [estimate.high for estimate in _with_intervals(points, "efficiency")]
        axes.set_ylim(0, 108 * max([1.0, *high, *single]))
        if limited or len(_by_threads(points)) > 1:
            axes.legend(loc="lower left", bbox_to_anchor=(0.01, 0.02))

    formula = "E = T(1) / T(p)" if scaling == WEAK else "E = T(1) / (p T(p))"
    work = "Constant batch per rank" if scaling == WEAK else "Constant global batch"
    limit = " Dotted: upper bound because ranks share cores." if limited else ""
    return plot(
        f"efficiency-{scaling}",
        f"{scaling.capitalize()} scaling: efficiency",
        f"parallel efficiency {formula}, %",
        draw,
        caption=f"{work}; 100% is ideal. {_marks(points, 'efficiency')}{limit}",
        alt=f"Efficiency of {scaling} scaling: {_listed(points, 'efficiency', 3)}.",
    )


def _marks(points: Sequence[Point], quantity: str) -> str:
    """Return what dots, bars and circles mean, as sentences."""
    if not _with_intervals(points, quantity):
        return "Circles are single launches; there are too few for an efficiency."
    bars = "95% intervals over launches"
    if any(point.has_range(quantity) for point in points):
        bars += ", or the range of launches that fall into two groups"
    return f"Circles are single launches, each relative to its round; bars are {bars}."


def _with_intervals(points: Sequence[Point], quantity: str) -> list[Estimate]:
    """Return the estimates of a quantity that have an interval."""
    found = [getattr(point, quantity) for point in points]
    return [estimate for estimate in found if estimate and math.isfinite(estimate.high)]


def _speed_up(study: Study, scaling: str, points: Sequence[Point]) -> Plot:
    base = study.base_ranks * study.base_threads
    largest = max(point.total_threads for point in points)

    def draw(axes: Axes) -> None:
        workers = [point.total_threads for point in points]
        set_ranks_axis(axes, workers, _axis_label(points))
        ends = (base, largest)
        axes.plot(
            ends,
            [end / base for end in ends],
            color=colour("faint"),
            linewidth=0.9,
            linestyle=(0, (4, 3)),
            label="ideal",
            zorder=1,
        )
        _measured(axes, points, "speed_up")
        _set_speed_up_axis(axes, points, largest / base)
        axes.legend(loc="upper left", bbox_to_anchor=(0.02, 1.0))

    unit = "rank" if all(point.threads == 1 for point in points) else "compute thread"
    return plot(
        f"speed-up-{scaling}",
        f"{scaling.capitalize()} scaling: speed-up",
        f"throughput over {base} {unit}{'s' * (base > 1)} (log scale)",
        draw,
        caption=f"{_marks(points, 'speed_up')} Grey dashes are ideal.",
        alt=f"Speed-up of {scaling} scaling: {_listed(points, 'speed_up', 2)}.",
    )


def _set_speed_up_axis(axes: Axes, points: Sequence[Point], ideal: float) -> None:
    """Set a logarithmic y axis that contains all intervals and launches, and has a legend."""
    base = base_point(points)
    single = [value for point in points for value in launch_values(point, base, "speed_up")]
    known = _with_intervals(points, "speed_up")
    # An interval may extend to zero, which a logarithmic axis cannot show.
    lows = [max(estimate.low, estimate.value / 64) for estimate in known]
    highs = [estimate.high for estimate in known]
    low = min([1.0, *lows, *single]) / 1.15
    high = max([ideal, *highs, *single]) * 1.15
    high *= (high / low) ** 0.25
    exponents = range(math.ceil(math.log2(low)), math.floor(math.log2(high)) + 1)
    ticks = [2.0**exponent for exponent in exponents[:: len(exponents) // 8 + 1]]
    axes.set_yscale("log", base=2)
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_ylim(low, high)


def _parts(study: Study, scaling: str, points: Sequence[Point]) -> Plot:
    base = study.base_ranks * study.base_threads
    ordered = sorted(points, key=lambda p: p.ranks)
    factors = [1.0 if scaling == WEAK else point.total_threads / base for point in ordered]
    ideal = ordered[0].ideal.total * factors[0]
    top = max(p.parts.total * f for p, f in zip(ordered, factors, strict=True))
    threads = ordered[0].threads
    several = len({point.threads for point in study.points}) > 1
    names = [
        name
        for name in PARTS
        if any(p.parts.known.get(name, 0.0) >= 5e-4 * p.parts.total for p in ordered)
    ]
    width = min(0.24 * len(ordered), 0.72)

    def draw(axes: Axes) -> None:
        tops = [0.0] * len(ordered)
        for name in names:
            role = PARTS[name]
            heights = [
                p.parts.known.get(name, 0.0) * f for p, f in zip(ordered, factors, strict=True)
            ]
            axes.bar(
                range(len(ordered)),
                heights,
                width,
                bottom=tops,
                color=colour(role),
                edgecolor=colour("paper"),
                linewidth=0.6,
                label=label_of(name),
            )
            tops = [low + height for low, height in zip(tops, heights, strict=True)]
        axes.axhline(ideal, color=colour("ink"), linewidth=0.9, linestyle=(0, (4, 3)), zorder=5)
        decimals = decimals_for([point.parts.total for point in ordered], digits=3)
        for x, (point, end) in enumerate(zip(ordered, tops, strict=True)):
            label = fixed(point.parts.total, decimals)
            if factors[x] != 1:
                label = f"{factors[x]:.4g} × {label}"
            axes.annotate(
                label,
                (x, max(end, ideal)),
                xytext=(0, 3),
                textcoords="offset points",
                ha="center",
                fontsize=7.5,
            )
        axes.set_xticks(range(len(ordered)), [str(point.ranks) for point in ordered])
        axes.grid(visible=False, axis="x")
        each = f" (× {threads} threads)" if threads > 1 else ""
        axes.set_xlabel(f"ranks{each}", labelpad=2)
        axes.set_ylim(0, max(top, ideal) * 1.12)
        axes.set_xlim(-0.6, len(ordered) - 0.4)

    if scaling == WEAK:
        vertical, more = "step time, ms", ""
    else:
        over = "ranks" if max(p.threads for p in study.points) == 1 else "compute threads"
        vertical = (
            f"cost: step time × {over}, ms"
            if base == 1
            else (f"cost: step time × {over} / {base}, ms")
        )
        more = (
            f" Labels are {over}{'' if base == 1 else f' / {base}'} × step time; ideal strong "
            "scaling has a constant cost."
        )
    largest = ordered[-1]
    shares = ", ".join(
        f"{label_of(name)} {percent(value / largest.parts.total)}"
        for name, value in largest.parts.known.items()
        if name in names
    )
    return plot(
        f"parts-{scaling}" + (f"-t{threads}" if several else ""),
        f"{scaling.capitalize()} scaling: parts of a step"
        + (f", {threads} threads" if several else ""),
        vertical,
        draw,
        legend=3,
        left=12 + 5.5 * max(len(f"{top:.0f}"), 4),
        caption="Parts of the step, mean over ranks. The dashed line is the ideal step."
        f"{more}" + (f" With {_threads(threads)}." if several else ""),
        alt=f"Parts of a step of {scaling} scaling; at {largest.ranks} ranks: {shares}.",
    )


def _pop(scaling: str, points: Sequence[Point]) -> Plot:
    """Draw the efficiencies of the POP hierarchy of the largest points."""
    known = [(p, p.pop) for p in points if p.pop is not None]
    known.sort(key=lambda pair: (pair[0].total_threads, pair[0].ranks))
    shown = known[-MOST_POP:]
    groups = {
        point_name(point): [
            *pop_bars(pop),
            Bar("computation scaling", pop.computation_scaling, "green"),
        ]
        for point, pop in shown
    }
    title = f"{scaling.capitalize()} scaling: POP efficiencies"
    fewer = f" The plot shows the {len(shown)} largest points." if len(shown) < len(known) else ""
    return efficiency_bars(
        f"pop-{scaling}",
        title,
        groups,
        caption="Parallel efficiency is the product of load balance, serialisation and transfer. "
        f"Efficiency ≈ parallel efficiency × computation scaling.{fewer}",
        alt="Efficiencies:",
    )


def _launches(study: Study) -> Plot:
    """Draw the step of every launch in time, relative to that of its point."""
    named: dict[str, tuple[list[int], list[float]]] = {}
    seen = set()
    for point in study.points:
        for launch in point.launches:
            if launch.folder not in seen:
                seen.add(launch.folder)
                orders, ratios = named.setdefault(point.scaling, ([], []))
                orders.append(launch.order + 1)
                ratios.append(launch.step_ms / point.step_ms.value)

    def draw(axes: Axes) -> None:
        from matplotlib.ticker import MaxNLocator

        axes.axhline(1, color=colour("faint"), linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
        for (scaling, (orders, ratios)), (role, marker) in zip(named.items(), SERIES, strict=False):
            axes.plot(
                orders,
                ratios,
                linestyle="none",
                marker=marker,
                markersize=4,
                markerfacecolor="none",
                color=colour(role),
                label=scaling,
            )
        ratios = [ratio for _, found in named.values() for ratio in found]
        axes.set_ylim(min(0.9, 0.95 * min(ratios)), max(1.1, 1.05 * max(ratios)))
        axes.set_xlabel("launch, in the order of the start", labelpad=2)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))

    ratios = [ratio for _, found in named.values() for ratio in found]
    return plot(
        "launches",
        "Launches in time",
        "step / step of its point",
        draw,
        legend=2,
        caption="Each mark is a launch. A trend means that the machine changed during the study; "
        "launches of one round are compared with each other, so that it has little effect.",
        alt=f"Step times of {len(seen)} launches, {min(ratios):.2f} to {max(ratios):.2f} times the "
        "step of their point.",
    )


def _forecast(study: Study, forecast: Forecast) -> Plot:
    points = [
        p for p in study.points if p.scaling == forecast.scaling and p.threads == forecast.threads
    ]
    xs = [ranks * forecast.threads for ranks, _, _ in forecast.points]
    ys = [100 * efficiency for _, _, efficiency in forecast.points]
    by_ranks = {point.ranks: point for point in points}
    past = [(by_ranks[ranks], predicted) for ranks, predicted, _ in forecast.hindcasts]

    def draw(axes: Axes) -> None:
        set_ranks_axis(axes, [*(p.total_threads for p in points), *xs], _axis_label(points))
        axes.axhline(100, color=colour("faint"), linewidth=0.8, linestyle=(0, (4, 3)))
        lows, highs = zip(*((100 * a, 100 * b) for a, b in forecast.intervals), strict=True)
        axes.fill_between(xs, lows, highs, color=colour("mint"), linewidth=0, label="95% interval")
        axes.vlines(xs, lows, highs, color=colour("mint"), linewidth=4)  # One point has no band.
        axes.plot(
            xs,
            ys,
            "D--",
            color=colour("green"),
            markerfacecolor=colour("paper"),
            linewidth=1.2,
            label="forecast",
            zorder=3,
        )
        _measured(axes, points, "efficiency", scale=100)
        if past:
            predicted = [
                100 * p.efficiency.value * p.step_ms.value / ms for p, ms in past if p.efficiency
            ]
            axes.plot(
                [p.total_threads for p, _ in past],
                predicted,
                "s",
                color=colour("orange"),
                markersize=7,
                markerfacecolor="none",
                label="hindcast",
                zorder=6,
            )
        axes.annotate(
            f"{ys[-1]:.0f}%",
            (xs[-1], highs[-1]),
            xytext=(0, 3),
            ha="center",
            va="bottom",
            textcoords="offset points",
            weight="bold",
            fontsize=SMALL_PT,
        )
        finite = [estimate.high for estimate in _with_intervals(points, "efficiency")]
        axes.set_ylim(0, 108 * max(1.0, *finite, *(high / 100 for high in highs)))

    values = "; ".join(
        f"{ranks} ranks {e:.2f} ({low:.2f} to {high:.2f})"
        for (ranks, _, e), (low, high) in zip(forecast.points, forecast.intervals, strict=True)
    )
    suffix = "" if len({f.threads for f in study.forecasts}) == 1 else f"-t{forecast.threads}"
    return plot(
        f"forecast-{forecast.scaling}{suffix}",
        f"{forecast.scaling.capitalize()} scaling: forecast",
        "parallel efficiency, %",
        draw,
        legend=2,
        lines=True,
        caption="Hollow diamonds are predictions by an ensemble of models. Squares are hindcasts: "
        f"measured points as predicted from the smaller ones. The forecast ends: "
        f"{forecast.unknown}.",
        alt=f"Forecast of the efficiency of {forecast.scaling} scaling: {values}.",
    )
