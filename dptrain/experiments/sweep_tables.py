"""The table and the plot of a sweep."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dptrain.measure.statistics import Estimate
from dptrain.numbers import decimals_for
from dptrain.tables import Records, Table, texts
from dptrain.vocabulary import find_term

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from dptrain.experiments.sweep import PointResult

SWEEP = "sweep"
"""Name of the files, without suffix."""


def sweep_table(results: Sequence[PointResult]) -> Table:
    """Return the points in order, with score, time and memory; the best scores are marked."""
    records, best = Records.of(results), best_points(results)
    axes = list(results[0].point)
    scored = next((r.scored for r in results if r.scored), "score")
    scores = [None if r.score is None else limited(r.score, r.scored) for r in results]
    unit = "%" if scored.endswith("accuracy") else ""
    scale = 100 if unit else 1
    decimals = decimals_for([scale * score.value for score in scores if score])
    points = Records(scores, records.at)
    score = points.estimates("", scored, unit, decimals=decimals, centre="score")
    columns = [
        *(records.texts(f"point.{name}", name.replace("_", " ")) for name in axes),
        replace(score, term=find_term("sweep.score"), name="score"),
        texts("", ["best" if result in best else "" for result in results]),
        records.counts("runs"),
        *([records.counts("failed")] if any(records.found("failed")) else []),
        replace(records.values("step_ms"), term=find_term("sweep.step_ms")),
        records.values("training_s"),
        records.values("memory_bytes", unit="MB"),
    ]
    note = (
        "Means over seeds, with 95% intervals by Student's distribution from 3 seeds on; steps are "
        "medians. Points whose intervals overlap with the best one may be as good. Training: steps "
        "× median step."
    )
    return Table(
        "Points of the sweep", tuple(columns), note, "points", f"{SWEEP}.csv", keys=len(axes)
    )


def best_points(results: Sequence[PointResult]) -> list[PointResult]:
    """Return the points that share the highest mean accuracy or the lowest mean loss."""
    scored = [(r.score.value, r) for r in results if r.score is not None]
    if not scored:
        return []
    choose = max if scored[0][1].scored.endswith("accuracy") else min
    best = choose(value for value, _ in scored)
    return [result for value, result in scored if value == best]


def plot_sweep(results: Sequence[PointResult], folder: Path) -> list[Path]:
    """Plot the score against the first axis, with a line for each combination of the others.

    Values that are numbers have a position by their size, others by their order.

    Returns:
        The files that were written; none if fewer than two points have a score.
    """
    from dptrain.experiments.plots import figure

    found = [result for result in results if result.score is not None]
    if len(found) < 2:
        return []
    axis, *others = list(found[0].point)
    written: list[Path] = []
    name = axis.replace("_", " ")
    title = f"{found[0].scored}: means over seeds with 95% intervals"
    with figure(folder / "sweep", written, x=name, y=found[0].scored, title=title) as axes:
        draw_sweep(axes, found)
        if others:
            axes.legend(fontsize=8)
    return written


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
    from dptrain.experiments.plots import COLOURS, MARKERS, plain_label

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
            label=plain_label(label),
        )
    if found[0].scored.endswith("accuracy"):
        axes.yaxis.set_major_formatter("{x:.1%}")
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
    from dptrain.experiments.plots import plain_label

    if _is_logarithmic(places):
        axes.set_xscale("log")
    axes.set_xticks(list(places.values()), list(map(plain_label, places)))
    axes.minorticks_off()
