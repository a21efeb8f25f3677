"""The tables and the plots of a sweep."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dptrain.experiments.measuring import size_text
from dptrain.experiments.network_changes import AXES
from dptrain.experiments.tables import digits, duration
from dptrain.measure.statistics import Estimate
from dptrain.tables import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from dptrain.experiments.sweep_results import PointResult

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


def sweep_table(results: Sequence[PointResult]) -> Table:
    """Return the points in order, with score, time and memory; the best score is marked.

    Columns without a value are omitted.
    """
    scored = next((r.scored for r in results if r.scored), "score")
    axes = list(results[0].point) if has_all_axes(results) else []
    best = best_points(results)
    columns: dict[str, list[str]] = {
        **{name.replace("_", " "): [r.point[name] for r in results] for name in axes},
        **({} if axes else {"point": [r.name for r in results]}),
        scored: [_score(r, is_best=r in best) for r in results],
        "95% interval": [
            "" if r.score is None else interval_text(r.score, scored) for r in results
        ],
        "runs": [f"{r.runs}" + (f" + {r.failed} failed" if r.failed else "") for r in results],
        "time per step": list(map(_step, results)),
    }
    if changes_networks(results):
        columns |= {
            "conv forward": _texts(results, "conv_forward_ms", lambda ms: f"{digits(ms)} ms"),
            "share": _texts(results, "conv_forward_share", lambda share: f"{share:.0%}"),
        }
    columns |= {
        "training": _texts(results, "training_s", duration),
        "memory": _texts(results, "memory_bytes", size_text),
    }
    columns = {head: cells for head, cells in columns.items() if any(cells)}
    shown = ["Means over seeds."]
    if "95% interval" in columns:
        shown.append("95% interval by Student's distribution from 3 seeds on.")
    shown.append("* marks the best mean; points whose intervals overlap with it may be as good.")
    if "conv forward" in columns:
        shown.append("conv forward, share: stages with a convolution in a forward pass.")
    return Table(
        "Points of the sweep",
        list(columns),
        text=() if axes else ("point",),
        rows=list(zip(*columns.values(), strict=True)),
        keys=max(len(axes), 1),
        caption=" ".join(shown),
    )


def _texts(results: Sequence[PointResult], name: str, text: Callable[[float], str]) -> list[str]:
    found = [getattr(result, name) for result in results]
    return ["" if value is None else text(value) for value in found]


def _score(result: PointResult, *, is_best: bool) -> str:
    if result.score is None:
        return "–"
    return ("* " if is_best else "") + _text(result.score.value, result.scored)


def _step(result: PointResult) -> str:
    """Return the median step, with half the distance of its quartiles."""
    if result.step_ms is None:
        return ""
    q1, q3 = result.step_q1_ms, result.step_q3_ms
    spread = "" if q1 is None or q3 is None else f" ±{(q3 - q1) / 2 / result.step_ms:.0%}"
    return f"{digits(result.step_ms)} ms{spread}"


def kinds_table(results: Sequence[PointResult]) -> Table:
    """Return the times of a forward pass, a row for each point and kind of operation."""
    columns = ("point", "kind", "time ms", "share", "cumulative", "read + written")
    table = Table("A forward pass by kind of operation", columns, text=columns[:2], keys=2)
    for result in results:
        for i, kind in enumerate(result.kinds):
            table.add_row(
                "" if i else result.name,
                kind.kind,
                f"{kind.forward_ms:.3f}",
                f"{kind.share:.1%}",
                f"{kind.cumulative_share:.1%}",
                size_text(kind.forward_bytes),
            )
        if result.kinds:
            table.add_line()
    return table


def best_points(results: Sequence[PointResult]) -> list[PointResult]:
    """Return the points that share the highest mean accuracy or the lowest mean loss."""
    scored = [(r.score.value, r) for r in results if r.score is not None]
    if not scored:
        return []
    choose = max if scored[0][1].scored.endswith("accuracy") else min
    best = choose(value for value, _ in scored)
    return [result for value, result in scored if value == best]


def interval_text(score: Estimate, scored: str) -> str:
    """Return the interval of a score; empty for a few seeds."""
    if not math.isfinite(score.low):
        return ""
    score = limited(score, scored)
    return f"{_text(score.low, scored)} – {_text(score.high, scored)}"


def _text(value: float, scored: str) -> str:
    return f"{value:.2%}" if scored.endswith("accuracy") else f"{value:.4g}"


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
    from dptrain.experiments.plots import COLOURS, MARKERS, label_decades, plain_label

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
            label=plain_label(result.name),
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
    from dptrain.experiments.plots import plain_label

    if _is_logarithmic(places):
        axes.set_xscale("log")
    axes.set_xticks(list(places.values()), list(map(plain_label, places)))
    axes.minorticks_off()
