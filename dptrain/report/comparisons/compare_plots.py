"""The plots of a comparison: curves, parts and layers of all results, and the changes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dptrain.measure.profile.pop import Pop
from dptrain.measure.profile.profile import Parts, StageProfile
from dptrain.measure.statistics import Estimate
from dptrain.numbers import decimals_for, fixed, percent, short
from dptrain.report.comparisons.comparison import POINTS, Comparison, Quantity
from dptrain.report.elements.bars import ROW_PT, pop_bars, pop_plot, text_line, whisker
from dptrain.report.elements.canvas import (
    BOTTOM,
    PARTS,
    SMALL_PT,
    TOP,
    Plot,
    colour,
    draw_end_value,
    draw_launches,
    plot,
    set_bars_axis,
    set_ranks_axis,
)
from dptrain.report.elements.curves import Curve, curves_plot
from dptrain.report.runs.run_record import TrainingRun
from dptrain.report.studies.study_plots import base_point, draw_estimates, launch_values
from dptrain.scaling.study import Point, Study
from dptrain.vocabulary import label_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROLES = ("blue", "orange", "green", "purple", "ink", "grey")
"""Roles of the colours of the results; there are at most as many results."""
MARKERS = "os^Dvp"
MOST_CHANGES = 12
"""Largest number of rows of the plot of changes."""
MOST_TIMES = 4.0
"""End of the axis of changes over the largest change; an arrow marks an interval beyond it."""
MOST_LAYERS = 14


def signed(value: float, decimals: int) -> str:
    """Return a number with its sign, and 0 without one."""
    text = fixed(value, decimals)
    return f"+{text}" if value > 0 and text.strip("0.") else text


def change_text(change: Estimate) -> str:
    """Return ``−1.4 (−3.6 to +0.7)``, or only the value if there is no interval."""
    decimals = 1 if abs(change.value) < 100 else 0
    text = signed(change.value, decimals)
    if not math.isfinite(change.high):
        return text
    return f"{text} ({signed(change.low, decimals)} to {signed(change.high, decimals)})"


def changes_plot(comparison: Comparison) -> Plot | None:
    """Return the changes to the first result with their intervals; None if no interval is known."""
    rows: list[tuple[str, Estimate, int]] = []
    for quantity in comparison.quantities:
        for i, change in enumerate(quantity.changes):
            if change is not None and math.isfinite(change.high):
                rows.append((_change_label(comparison, quantity, i), change, i))
    rows = rows[:MOST_CHANGES]
    if not rows:
        return None
    ends = max(max(abs(change.low), abs(change.high)) for _, change, _ in rows)
    reach = 1.05 * min(ends, MOST_TIMES * max(abs(change.value) for _, change, _ in rows)) or 1.0

    def draw(axes: Axes) -> None:
        from matplotlib.ticker import MaxNLocator

        axes.set_ylim(ROW_PT * len(rows), 0)
        axes.set_xlim(-reach, reach)
        axes.axvline(0, color=colour("ink"), linewidth=0.9, zorder=1)
        for index, (label, change, i) in enumerate(rows):
            y = ROW_PT * index
            text_line(axes, y + 7, label, change_text(change), x=-reach)
            whisker(axes, y + 16.5, change, -reach, reach, ROLES[i])
            axes.plot(
                [change.value],
                [y + 16.5],
                MARKERS[i],
                markersize=5,
                color=colour(ROLES[i]),
                zorder=5,
            )
        set_bars_axis(axes, f"change to {_shortened(comparison.names[0])}, %")
        # The number below a tick near an end would be cut off.
        shown = 0.9 * reach
        found = MaxNLocator(6, steps=[1, 2, 5, 10]).tick_values(-shown, shown)
        axes.set_xticks([value for value in found if abs(value) <= shown])
        axes.xaxis.set_major_formatter(lambda value, _: signed(value, 0 if reach > 4 else 1))

    listed = "; ".join(f"{label} {change_text(change)}" for label, change, _ in rows)
    return plot(
        "changes",
        "Differences",
        "with 95% intervals; the line is no difference",
        draw,
        height=TOP + BOTTOM + ROW_PT * len(rows),
        left=6.0,
        caption="Differences of shares are in percentage points (pp), those of other quantities in "
        "per cent. If an interval contains 0, the difference is not certain.",
        alt=f"Differences to {comparison.names[0]}: {listed}.",
    )


def _change_label(comparison: Comparison, quantity: Quantity, index: int) -> str:
    unit = "pp" if quantity.change_unit == POINTS else "%"
    name = quantity.name.replace(" scaling, ", " ")
    which = f"{_shortened(comparison.names[index], 10)}: " if len(comparison.names) > 2 else ""
    return f"{which}{name}, {unit}"


def _shortened(name: str, most: int = 20) -> str:
    return name if len(name) <= most else f"…{name[-most + 1 :]}"


def accuracy_plots(names: Sequence[str], runs: Sequence[TrainingRun]) -> list[Plot]:
    """Return the learning curves of all runs: accuracy and loss by epoch, and by time."""
    plots = []
    quantities = [
        ("validation_loss", "Validation loss", "loss", 1.0),
        ("train_loss", "Training loss", "loss", 1.0),
    ]
    if runs[0].accuracy is not None:
        quantities.insert(0, ("validation_accuracy", "Validation accuracy", "accuracy, %", 100.0))
    for column, title, vertical, scale in quantities:
        curves = []
        for i, run in enumerate(runs):
            xs, ys = run.column(column)
            curves.append(_curve(names[i], xs, [scale * y for y in ys], i))
        plots.append(_curves(column, f"{title} by epoch", vertical, curves, "epoch", scale))
    if all(run.seconds() is not None for run in runs):
        column, title, vertical, scale = quantities[0]
        curves = []
        for i, run in enumerate(runs):
            pairs = zip(run.seconds() or (), run.epochs, strict=True)
            known = [(s, scale * r[column]) for s, r in pairs if r[column] is not None]
            curves.append(_curve(names[i], [x for x, _ in known], [y for _, y in known], i))
        x = "training time, s"
        plots.insert(1, _curves(f"{column}-time", f"{title} by time", vertical, curves, x, scale))
    return plots


def _curve(name: str, xs: Sequence[float], ys: Sequence[float], index: int) -> Curve:
    return Curve(_shortened(name), xs, ys, ROLES[index], "-" if index % 2 else "")


def _curves(
    name: str, title: str, vertical: str, curves: Sequence[Curve], x: str, scale: float
) -> Plot:
    ends = "; ".join(f"{curve.label} {short(curve.ys[-1])}" for curve in curves if curve.ys)
    is_share = scale == 100
    return curves_plot(
        name.replace("_", "-"),
        title,
        vertical,
        curves,
        x=x,
        log=False if is_share else None,
        top=100 if is_share else None,
        columns=3 if max(len(curve.label) for curve in curves) <= 9 else 2,
        caption="Time of all steps so far with evaluations and checkpoints."
        if "time" in x
        else "One value per epoch.",
        alt=f"{title}; at the end: {ends}.",
    )


def parts_plot(
    name: str, title: str, names: Sequence[str], found: Sequence[Parts | None], caption: str
) -> Plot | None:
    """Return the parts of a step of all results as stacked bars; None if none is known."""
    rows = [(n, parts) for n, parts in zip(names, found, strict=True) if parts is not None]
    if not rows:
        return None
    longest = max(parts.total for _, parts in rows)
    shown = [n for n in PARTS if any(p.known.get(n, 0.0) >= 5e-4 * p.total for _, p in rows)]
    decimals = decimals_for([longest], digits=3)

    def draw(axes: Axes) -> None:
        for index, (label, parts) in enumerate(rows):
            y = ROW_PT * index
            text_line(axes, y + 7, _shortened(label, 26), f"{fixed(parts.total, decimals)} ms")
            start = 0.0
            for part in shown:
                value = parts.known.get(part, 0.0)
                axes.barh(
                    y + 17,
                    value,
                    9,
                    left=start,
                    color=colour(PARTS[part]),
                    edgecolor=colour("paper"),
                    linewidth=0.4,
                )
                start += value
        for part in shown:
            axes.barh(0, 0, 0, color=colour(PARTS[part]), label=label_of(part))
        axes.set_ylim(ROW_PT * len(rows) + 2, 0)
        axes.set_xlim(0, longest * 1.02)
        set_bars_axis(axes, "time of a step, ms")

    listed = "; ".join(
        f"{label}: "
        + ", ".join(
            f"{label_of(p)} {percent(parts.known.get(p, 0.0) / parts.total)}" for p in shown
        )
        for label, parts in rows
    )
    return plot(
        name,
        title,
        "parts of a step",
        draw,
        left=6.0,
        height=TOP + BOTTOM + ROW_PT * len(rows) + 2,
        legend=3,
        caption=caption,
        alt=f"Parts of a step: {listed}.",
    )


def layers_comparison(
    names: Sequence[str], stages: Sequence[Sequence[StageProfile]]
) -> Plot | None:
    """Return the time of each group of layers of all results; None if one has no stages."""
    if not all(stages):
        return None
    sums: list[dict[str, float]] = []
    for found in stages:
        groups: dict[str, float] = {}
        for stage in found:
            name = stage.group or stage.phase
            groups[name] = groups.get(name, 0.0) + stage.typical_ms
        sums.append(groups)
    order = dict.fromkeys(name for groups in sums for name in groups)
    kept = sorted(order, key=lambda n: -max(g.get(n, 0.0) for g in sums))[:MOST_LAYERS]
    shown = [name for name in order if name in kept]
    longest = max(groups.get(name, 0.0) for groups in sums for name in shown) or 1.0
    decimals = decimals_for([longest], digits=3)
    bar, head = 8.5, 15.0
    height = head + bar * len(names)

    def draw(axes: Axes) -> None:
        for index, group in enumerate(shown):
            y = height * index
            axes.text(0, y + 0.62 * head, group, fontsize=SMALL_PT, va="center")
            for i, groups in enumerate(sums):
                value = groups.get(group, 0.0)
                middle = y + head + bar * (i + 0.5)
                axes.barh(middle, value, 0.8 * bar, color=colour(ROLES[i]))
                draw_end_value(axes, value, middle, fixed(value, decimals))
        for i, name in enumerate(names):
            axes.barh(0, 0, 0, color=colour(ROLES[i]), label=_shortened(name))
        axes.set_ylim(height * len(shown) + 2, 0)
        axes.set_xlim(0, longest * 1.16)
        set_bars_axis(axes, "time per step, ms")

    fewer = f" The {len(shown)} longest groups." if len(shown) < len(order) else ""
    listed = "; ".join(
        f"{group} " + ", ".join(fixed(groups.get(group, 0.0), decimals) for groups in sums)
        for group in shown
    )
    return plot(
        "layers",
        "Layers",
        "groups of layers: forward and backward",
        draw,
        left=8.0,
        height=TOP + BOTTOM + height * len(shown) + 2,
        legend=2,
        caption=f"Time of each group of layers, mean of typical steps and ranks.{fewer}",
        alt=f"Milliseconds by layer, for {', '.join(names)}: {listed}.",
    )


def pop_comparison(names: Sequence[str], pops: Sequence[Pop | None]) -> Plot | None:
    """Return the parallel efficiencies of all profiles; None if no profile has several ranks."""
    groups = {
        name: pop_bars(pop, ROLES[i])
        for i, (name, pop) in enumerate(zip(names, pops, strict=True))
        if pop is not None
    }
    return pop_plot("pop", "Parallel efficiency", groups) if groups else None


def efficiency_plot(scaling: str, names: Sequence[str], studies: Sequence[Study]) -> Plot | None:
    """Return the efficiency of one kind of scaling of all studies; None if one has no points."""
    found = [[p for p in study.points if p.scaling == scaling] for study in studies]
    if not all(found):
        return None
    everywhere = [point for points in found for point in points]

    def draw(axes: Axes) -> None:
        several = any(point.threads > 1 for point in everywhere)
        set_ranks_axis(
            axes,
            [point.total_threads for point in everywhere],
            "compute threads, all ranks" if several else "ranks",
        )
        axes.axhline(100, color=colour("faint"), linewidth=0.8, linestyle=(0, (4, 3)))
        tops = [100.0]
        for i, points in enumerate(found):
            tops += _draw_study(axes, points, _shortened(names[i]), i)
        axes.set_ylim(0, 1.08 * max(tops))

    listed = "; ".join(
        f"{name} at {points[-1].ranks} ranks {percent(points[-1].efficiency.value)}"
        for name, points in zip(names, found, strict=True)
        if points[-1].efficiency is not None
    )
    return plot(
        f"efficiency-{scaling}",
        f"{scaling.capitalize()} scaling: efficiency",
        "parallel efficiency, %",
        draw,
        legend=2,
        lines=True,
        caption="100% is ideal. Circles are single launches, each relative to its round; bars are "
        "95% intervals over launches.",
        alt=f"Efficiency of {scaling} scaling: {listed}.",
    )


def _draw_study(axes: Axes, points: Sequence[Point], label: str, index: int) -> list[float]:
    """Draw the points of a study, shifted from those of other studies; return the largest values.

    The lines of different numbers of threads are not connected.
    """
    base, role = base_point(points), ROLES[index]
    shift = 1 + 0.035 * index
    tops = []
    for threads in sorted({point.threads for point in points}):
        group = sorted((p for p in points if p.threads == threads), key=lambda p: p.ranks)
        known = [(p.total_threads * shift, p.efficiency) for p in group if p.efficiency]
        xs, values = [x for x, _ in known], [estimate.times(100) for _, estimate in known]
        draw_estimates(axes, xs, values, f"{MARKERS[index]}-", role, label)
        label = "_"
        tops += [e.high if math.isfinite(e.high) else e.value for e in values]
        for point in group:
            single = [100 * value for value in launch_values(point, base, "efficiency")]
            tops += single
            draw_launches(axes, [point.total_threads * shift] * len(single), single, role)
    return tops
