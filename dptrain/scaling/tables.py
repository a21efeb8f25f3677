"""Efficiencies and studies as people read them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from dptrain.measure.statistics import FEWEST, Estimate
from dptrain.measure.tables import fitted_table, plain_table
from dptrain.scaling.points import PARTS
from dptrain.scaling.study import STRONG, WEAK, Fit, Forecast, Point, Study

if TYPE_CHECKING:
    from rich.table import Table

WIDE = 112
"""Columns of a terminal from which on the tables show all they have."""
SHORT = ("compute", "data", "transfer", "imbal.", "other")
"""`PARTS` on a narrow one."""


def study_report(study: Study, width: int) -> list[str | Table]:
    """Everything that is printed of a study, in order: the answer first, then what it rests on.

    Args:
        study: what was measured.
        width: columns of the terminal.
    """
    wide = width >= WIDE
    found: list[str | Table] = [_heading(study), "", *study.answer, ""]
    for scaling in (WEAK, STRONG):
        points = [point for point in study.points if point.scaling == scaling]
        if points:
            found += [_points_table(scaling, points, wide), _loss_table(scaling, points, wide)]
    if study.fits:
        found.append(_fits_table(study.fits))
    found += [_forecast_table(f) for f in study.forecasts if f.points]
    for forecast in study.forecasts:
        if forecast.points:
            found.append(f"{series_name(forecast)}, the forecast assumes: "
                         f"{'; '.join(forecast.assumptions)}.")  # fmt: skip
    return [*found, *(f"note: {note}" for note in study.notes)]


def _heading(study: Study) -> str:
    job, environment = study.job, study.environment
    shared = {launch.folder for point in study.points for launch in point.launches}
    words = [str(job[key]) for key in ("network", "backend", "precision", "strategy") if key in job]
    where = f"{environment['cpu']}, " if "cpu" in environment else ""
    launches, points = _count(len(shared), "launch", "es"), _count(len(study.points), "point", "s")
    return f"{', '.join(words)} on {where}{launches} of {points}"


def _count(number: int, noun: str, ending: str) -> str:
    return f"{number} {noun}{ending * (number != 1)}"


def series_name(of: Fit | Forecast) -> str:
    """``weak scaling``; with more than one thread, how many."""
    return f"{of.scaling} scaling" + (f", {of.threads} threads" if of.threads > 1 else "")


def _points_table(scaling: str, points: Sequence[Point], wide: bool) -> Table:
    """A row a point; narrow terminals do without what follows from the rest."""
    serial = any(point.karp_flatt is not None for point in points)
    shares = any(point.possible < 1 for point in points)
    columns = {
        "ranks": _places(points),
        "batch": [f"{point.batch_size:,}" for point in points],
        "step ms": [_interval(point.step_ms, _number) for point in points],
        "samples/s": [_number(point.samples_per_s.value) for point in points],
        "speed-up": [_interval(p.speed_up, _number) for p in points] if wide else [],
        "efficiency": [_interval(point.efficiency, _share) for point in points],
        "possible": [f"{point.possible:.0%}" for point in points] if shares else [],
        "serial": [_fraction(p.karp_flatt, wide) for p in points] if serial else [],
        "n": [str(len(point.launches)) for point in points],
    }
    kept = {name: cells for name, cells in columns.items() if cells}
    keeps = "a worker keeps its samples" if scaling == WEAK else "the minibatch stays"
    rows = list(zip(*kept.values(), strict=True))
    title = f"{scaling.capitalize()} scaling: {keeps}; median (95%)"
    table = fitted_table(title, list(kept), rows, text=())
    if serial:
        table.caption = "serial: fraction of the work, determined from the speed-up (Karp–Flatt)"
        table.caption_justify = "left"
    return table


def _places(points: Sequence[Point]) -> list[str]:
    """``4``, or ``4x2`` where threads matter."""
    threads = any(point.threads > 1 for point in points)
    return [f"{point.ranks}x{point.threads}" if threads else str(point.ranks) for point in points]


def _loss_table(scaling: str, points: Sequence[Point], wide: bool) -> Table:
    """What is added to the ideal step to make the measured one."""
    columns = ["ranks", "ideal", *(PARTS if wide else SHORT), "= step"]
    rows = []
    for place, point in zip(_places(points), points, strict=True):
        lost = [_lost(getattr(point.loss, name)) for name in PARTS]
        rows.append([place, f"{point.ideal.total:.3f}", *lost, f"{point.step_ms.value:.3f}"])
        if wide:
            rows[-1] += [_lost(point.shared_ms), _lost(point.contention_ms),
                         _lost(point.small_batch_ms)]  # fmt: skip
    title = f"{scaling.capitalize()} scaling: where the loss goes, ms of a step"
    heads = [column.replace("_", " ") for column in columns]
    if wide:
        heads += ["| shared", "contention", "small batch"]
    table = fitted_table(title, heads, rows, text=())
    if wide:
        table.caption = "behind |: what compute's loss follows from, where that can be told"
        table.caption_justify = "left"
    return table


def _lost(value: float | None) -> str:
    # Adding 0.0 makes a zero of a negative one.
    return "" if value is None else f"{round(value, 3) + 0.0:+.3f}"


def _fits_table(fits: Sequence[Fit]) -> Table:
    rows = [
        [
            series_name(fit), fit.model,
            ", ".join(f"{name} {_number(value)}" for name, value in fit.parameters.items()),
            "" if fit.hindcast_error is None else f"{fit.hindcast_error:.1%}",
        ]
        for fit in fits
    ]  # fmt: skip
    table = plain_table("Models; the error at the largest point, which they had not seen")
    table.padding = (0, 1, 0, 0)
    for name in ("scaling", "model", "parameters", "error"):
        table.add_column(name, overflow="fold", justify="right" if name == "error" else "left",
                         no_wrap=name != "parameters")  # fmt: skip
    for row in rows:
        table.add_row(*row)
    return table


def _forecast_table(forecast: Forecast) -> Table:
    """Step and efficiency by the best model, and efficiencies by the others."""
    others = [name for name in forecast.efficiencies if name != forecast.model]
    rows = [
        [f"{ranks:,}", _number(step_ms), f"{efficiency:.1%}",
         *(f"{forecast.efficiencies[name][place]:.1%}" for name in others)]
        for place, (ranks, step_ms, efficiency) in enumerate(forecast.points)
    ]  # fmt: skip
    columns = ["ranks", "step ms", f"efficiency, {forecast.model}", *others]
    return fitted_table(f"Forecast of {series_name(forecast)}", columns, rows, text=())


def _interval(value: Estimate, text: Callable[[float], str]) -> str:
    if value.n < FEWEST or value.low == value.high:
        return text(value.value)
    return f"{text(value.value)} ({text(value.low)}–{text(value.high)})"


def _fraction(value: Estimate | None, wide: bool) -> str:
    def text(number: float) -> str:
        return f"{number:.2f}"

    return "" if value is None else _interval(value, text) if wide else text(value.value)


def _share(value: float) -> str:
    return f"{value:.0%}"


def _number(value: float) -> str:
    """Three or four digits."""
    if value == 0 or not math.isfinite(value):
        return str(value)
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}" if abs(value) >= 100 else f"{value:.3g}"
