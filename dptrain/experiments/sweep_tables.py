"""The tables and the plots of a sweep."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dptrain.experiments.measuring import size_text
from dptrain.experiments.network_changes import AXES
from dptrain.measure.statistics import Estimate
from dptrain.numbers import decimals_for
from dptrain.tables import Column, Records, Table, texts
from dptrain.vocabulary import find_term

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from dptrain.experiments.sweep_results import PointResult

SWEEP = "sweep"
"""Name of the files, without suffix."""
BY_TIME = "accuracy-by-time"
"""Name of the plot of scores against step times."""
MAX_BY_TIME = 28
"""Largest number of points in it, which its colours and markers distinguish."""


def sweep_report(results: Sequence[PointResult]) -> Iterator[Table | str]:
    """Yield the table of points, the reasons of those without a run, and times by operation."""
    yield sweep_table(results)
    reasons = [f"{result.name}: {result.why}" for result in results if result.why]
    if reasons:
        yield "\n".join(["Not possible or failed:", *reasons, ""])
    if changes_networks(results) and any(result.kinds for result in results):
        yield kinds_table(results)


def has_all_axes(results: Sequence[PointResult]) -> bool:
    """Return True if each point has a value of each axis, False if some axes are unchanged."""
    return all(list(result.point) == list(results[-1].point) for result in results)


def changes_networks(results: Sequence[PointResult]) -> bool:
    """Return True if an axis is a change of the network."""
    return any(name in AXES for result in results for name in result.point)


def is_of_variants(results: Sequence[PointResult]) -> bool:
    """Return True if all axes are changes of the network."""
    return changes_networks(results) and all(name in AXES for r in results for name in r.point)


def sweep_table(results: Sequence[PointResult]) -> Table:
    """Return the points in order, with score, time and memory; the best scores are marked."""
    records, best = Records.of(results), best_points(results)
    axes = list(results[0].point) if has_all_axes(results) else []
    scored = next((r.scored for r in results if r.scored), "score")
    scores = [None if r.score is None else limited(r.score, r.scored) for r in results]
    unit = "%" if scored.endswith("accuracy") else ""
    scale = 100 if unit else 1
    decimals = decimals_for([scale * score.value for score in scores if score])
    points = Records(scores, records.at)
    score = points.estimates("", scored, unit, decimals=decimals, centre="score")
    columns = [
        *(records.texts(f"point.{name}", name.replace("_", " ")) for name in axes),
        *([] if axes else [records.texts("name", "point")]),
        replace(score, term=find_term("sweep.score"), name="score"),
        texts("", ["best" if result in best else "" for result in results]),
        records.counts("runs"),
        *([records.counts("failed")] if any(records.found("failed")) else []),
        replace(records.values("step_ms"), term=find_term("sweep.step_ms")),
        *(_convolution_columns(records) if changes_networks(results) else []),
        records.values("training_s"),
        records.values("memory_bytes", unit="MB"),
    ]
    note = (
        "Means over seeds, with 95% intervals by Student's distribution from 3 seeds on; steps are "
        "medians. Points whose intervals overlap with the best one may be as good. Training: steps "
        "× median step."
    )
    return Table(
        "Variants of the network" if is_of_variants(results) else "Points of the sweep",
        tuple(columns),
        note,
        "points",
        f"{SWEEP}.csv",
        keys=max(len(axes), 1),
    )


def kinds_table(results: Sequence[PointResult]) -> Table:
    """Return the times of a forward pass, a row for each point and kind of operation."""
    columns = ("point", "kind", "time ms", "share", "cumulative", "read + written")
    rows: list[tuple[str, ...]] = []
    for result in results:
        rows += [()] if rows and result.kinds else []
        for kind in result.kinds:
            rows.append((
                result.name,
                kind.kind,
                f"{kind.forward_ms:.3f}",
                f"{kind.share:.1%}",
                f"{kind.cumulative_share:.1%}",
                size_text(kind.forward_bytes),
            ))  # fmt: skip
    title = "A forward pass by kind of operation"
    return Table.of_rows(title, columns, rows, text=columns[:2], keys=2)


def best_points(results: Sequence[PointResult]) -> list[PointResult]:
    """Return the points that share the highest mean accuracy or the lowest mean loss."""
    scored = [(r.score.value, r) for r in results if r.score is not None]
    if not scored:
        return []
    choose = max if scored[0][1].scored.endswith("accuracy") else min
    best = choose(value for value, _ in scored)
    return [result for value, result in scored if value == best]


def _convolution_columns(records: Records) -> list[Column]:
    """Return the columns of the stages with a convolution in a forward pass."""
    return [
        records.values("conv_forward_ms"),
        records.values("conv_forward_share", decimals=0),
    ]


def plot_sweep(results: Sequence[PointResult], folder: Path) -> list[Path]:
    """Plot the score against the first axis, and for changes of a network against the step time.

    Returns:
        The files that were written; none if fewer than two points have a score.
    """
    from dptrain.experiments.plots import figure, legend_outside

    found = [result for result in results if result.score is not None]
    if len(found) < 2:
        return []
    written: list[Path] = []
    title = f"{found[0].scored}: means over seeds with 95% intervals"
    if has_all_axes(found):
        axis, *others = list(found[0].point)
        name = axis.replace("_", " ")
        with figure(folder / "sweep", written, x=name, y=found[0].scored, title=title) as axes:
            draw_sweep(axes, found)
            if others:
                axes.legend(fontsize=8)
    if timed := points_by_time(found):
        with figure(
            folder / BY_TIME, written, x="time per step, ms", y=found[0].scored, title=title
        ) as axes:
            draw_by_time(axes, timed)
            legend_outside(axes)
    return written


def points_by_time(results: Sequence[PointResult]) -> list[PointResult]:
    """Return the points of a plot of scores against step times; none if there is no such plot.

    It is for changes of a network, and has a legend for a few of them.
    """
    timed = [r for r in results if r.score is not None and r.step_ms is not None]
    return timed if changes_networks(timed) and 1 < len(timed) <= MAX_BY_TIME else []


def draw_by_time(axes: Axes, results: Sequence[PointResult]) -> None:
    """Draw the score against the time per step with its quartiles."""
    from dptrain.experiments.plots import COLOURS, MARKERS, label_decades

    for i, result in enumerate(results):
        assert result.score is not None
        assert result.step_ms is not None
        q1, q3 = result.step_q1_ms or result.step_ms, result.step_q3_ms or result.step_ms
        axes.errorbar(
            result.step_ms,
            result.score.value,
            xerr=[[max(result.step_ms - q1, 0.0)], [max(q3 - result.step_ms, 0.0)]],
            yerr=_bars([result]),
            color=COLOURS[i % len(COLOURS)],
            marker=MARKERS[i // len(COLOURS)],
            markersize=6,
            linestyle="none",
            capsize=2,
            label=result.name,
        )
    _format_scores(axes, results)
    axes.set_xscale("log")
    label_decades(axes.xaxis)


def _format_scores(axes: Axes, results: Sequence[PointResult]) -> None:
    if results[0].scored.endswith("accuracy"):
        axes.yaxis.set_major_formatter("{x:.1%}")


def sweep_lines(results: Sequence[PointResult]) -> dict[str, list[PointResult]]:
    """Return the points that have a score by the values of all axes but the first one."""
    lines: dict[str, list[PointResult]] = {}
    for result in results:
        if result.score is not None:
            others = list(result.point.items())[1:]
            label = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in others)
            lines.setdefault(label, []).append(result)
    return lines


def draw_sweep(axes: Axes, results: Sequence[PointResult]) -> None:
    """Draw the score against the first axis; the values of the others are the labels of lines."""
    from dptrain.experiments.plots import COLOURS, MARKERS

    lines = sweep_lines(results)
    found = [result for line in lines.values() for result in line]
    axis = next(iter(found[0].point))
    places = _places([result.point[axis] for result in results if result.score is not None])
    for number, (label, line) in enumerate(lines.items()):
        ordered = sorted(line, key=lambda result: places[result.point[axis]])
        axes.errorbar(
            [_aside(places, r.point[axis], number - (len(lines) - 1) / 2) for r in ordered],
            [r.score.value for r in ordered if r.score is not None],
            yerr=_bars(ordered),
            marker=MARKERS[number % len(MARKERS)],
            color=COLOURS[number % len(COLOURS)],
            capsize=3,
            label=label,
        )
    _format_scores(axes, found)
    _ticks(axes, places)


def _is_logarithmic(places: Mapping[str, float]) -> bool:
    """Return True for numbers that span a factor of 8 or more."""
    numbers = list(places.values())
    return 0 < 8 * min(numbers) <= max(numbers)


def _aside(places: Mapping[str, float], value: str, number: float) -> float:
    """Return the position of a value on a line, a little aside, so that intervals are visible."""
    if _is_logarithmic(places):
        return places[value] * math.pow(1.03, number)
    return places[value] + 0.01 * number * (max(places.values()) - min(places.values()))


def _bars(line: Sequence[PointResult]) -> list[list[float]]:
    """Return the lengths of the lower and upper bars; none for a few seeds."""
    pairs = [(r.score, limited(r.score, r.scored)) for r in line if r.score is not None]
    lower = [score.value - bar.low if math.isfinite(bar.low) else 0.0 for score, bar in pairs]
    upper = [bar.high - score.value if math.isfinite(bar.high) else 0.0 for score, bar in pairs]
    return [lower, upper]


def limited(score: Estimate, scored: str) -> Estimate:
    """Return the score with an interval that contains no accuracy below 0 or above 1."""
    if not (scored.endswith("accuracy") and math.isfinite(score.low)):
        return score
    return Estimate(score.value, max(score.low, 0.0), min(score.high, 1.0), score.n)


def _places(values: Sequence[str]) -> dict[str, float]:
    """Return the position of each value: the number itself, or its index."""
    try:
        return {value: float(value) for value in values}
    except ValueError:
        return {value: float(i) for i, value in enumerate(dict.fromkeys(values))}


def _ticks(axes: Any, places: Mapping[str, float]) -> None:
    if _is_logarithmic(places):
        axes.set_xscale("log")
    axes.set_xticks(list(places.values()), list(places))
    axes.minorticks_off()
