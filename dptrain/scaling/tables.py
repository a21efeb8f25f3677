"""The tables of a scaling study in the terminal."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence

from dptrain.measure.profile.known_tables import NOT_VERIFIED, known_lines
from dptrain.measure.profile.tables import PART_NAMES, count_cell
from dptrain.measure.statistics import FEWEST, Estimate, share
from dptrain.scaling.conclusion import withheld_sentence
from dptrain.scaling.points import PARTS
from dptrain.scaling.registered import Entry
from dptrain.scaling.study import (
    STRONG,
    WEAK,
    WIDE,
    Forecast,
    Point,
    Study,
    losses_withheld,
    series_name,
)
from dptrain.tables import Table

BASE = "base"
"""Cell of the base in columns that compare points with it."""


def study_report(study: Study) -> list[str | Table]:
    """Return the printed form of a study: the conclusion, then the tables and the notes."""
    found: list[str | Table] = [_heading(study), "", *study.conclusion, ""]
    for scaling in (WEAK, STRONG):
        points = [point for point in study.points if point.scaling == scaling]
        if points:
            found.append(_points_table(scaling, points))
            found += _losses_of(scaling, points)
            found += _pop_tables(scaling, points)
            found += _accuracy_tables(points)
    found += [_forecast_table(f) for f in study.forecasts if f.points]
    found += [withheld_sentence(f) for f in study.forecasts if not f.points]
    for forecast in study.forecasts:
        if forecast.points:
            found.append(
                f"The forecast of {series_name(forecast)} assumes: "
                f"{'; '.join(forecast.assumptions)}."
            )
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


def _points_table(scaling: str, points: Sequence[Point]) -> Table:
    """Return a table with a row per point."""
    serial = any(point.karp_flatt is not None for point in points)
    shares = any(point.possible < 1 for point in points)
    columns = {
        "ranks": _ranks(points),
        "batch": [f"{point.batch_size:,}" for point in points],
        "step ms": [_interval(point.step_ms, _number) for point in points],
        "samples/s": [_number(point.samples_per_s.value) for point in points],
        "speed-up": _relative(points, "speed_up", _number),
        "efficiency": _relative(points, "efficiency", _share),
        "limit": [f"{point.possible:.0%}" for point in points] if shares else [],
        "serial": [_fraction(p.karp_flatt) for p in points] if serial else [],
        "J/sample": _joules(points),
        "n": [str(len(point.launches)) for point in points],
    }
    shown = {name: cells for name, cells in columns.items() if cells}
    work = "constant batch per rank" if scaling == WEAK else "constant global batch"
    rows = list(zip(*shown.values(), strict=True))
    title = f"{scaling.capitalize()} scaling: {work}; mean (95% interval)"
    table = Table(title, list(shown), rows=rows)
    captions = ["limit: efficiency that the shared cores allow"] * shares
    captions += ["serial: serial fraction (Karp–Flatt)"] * serial
    if captions:
        table.caption = "; ".join([*captions, "n: launches"])
    return table


def _relative(points: Sequence[Point], name: str, text: Callable[[float], str]) -> list[str]:
    """Return a quantity relative to the base; that of the base itself is 1 by definition."""
    found = [getattr(point, name) for point in points[1:]]
    return [BASE, *("" if value is None else _interval(value, text) for value in found)]


def _ranks(points: Sequence[Point]) -> list[str]:
    """Return ``4`` for each point, or ``4×2`` if some points have several threads per rank."""
    threads = any(point.threads > 1 for point in points)
    return [f"{point.ranks}×{point.threads}" if threads else str(point.ranks) for point in points]


def _losses_of(scaling: str, points: Sequence[Point]) -> list[str | Table]:
    """Return the table of losses, or why it is withheld, and the verdicts on known losses."""
    reason = losses_withheld(points)
    name = scaling.capitalize()
    found: list[str | Table] = [
        f"{name} scaling: the table of losses is withheld, because {reason}"
        if reason
        else _loss_table(scaling, points)
    ]
    known = [
        line
        for point in points
        if point.recoveries
        for line in known_lines(point.recoveries, f" at {point.name}")
    ]
    return [*found, *(known or [NOT_VERIFIED]), ""]


def _loss_table(scaling: str, points: Sequence[Point]) -> Table:
    """Return the table of the ideal step and the loss of each part, which sum to the step."""
    rows: list[Sequence[str]] = []
    for ranks, point in zip(_ranks(points), points, strict=True):
        if point is points[0] and len(points) > 1:
            continue
        rows += [()] if rows else []
        rows.append((ranks, "ideal step", f"{point.ideal.total:.3f}", "", ""))
        for name in PARTS:
            ms, found = getattr(point.loss, name), point.loss_intervals.get(name)
            share = "" if ms is None else f"{round(100 * ms / point.step_ms.value)}%"
            cells = (count_cell(ms, _lost), _loss_interval(found), share)
            rows.append(("", PART_NAMES[name], *cells))
        rows.append(("", "= step", f"{point.step_ms.value:.3f}", "", ""))
        causes = {
            "shared cores": point.shared_ms,
            "contention": point.contention_ms,
            "smaller batch": point.small_batch_ms,
        }
        rows += [("", f"| {name}", _lost(ms), "", "") for name, ms in causes.items() if ms]
    columns = ("ranks", "loss", "ms", "95% interval", "of the step")
    return Table(
        f"{scaling.capitalize()} scaling: ideal step + loss by part = step",
        columns,
        columns[:2],
        rows=rows,
        caption="after |: causes of the loss of computation: shared cores, contention for memory "
        "and caches, smaller batch per rank; intervals over launches",
    )


def _loss_interval(found: Estimate | None) -> str:
    """Return the interval of a loss; empty if there are too few launches."""
    if found is None or found.n < FEWEST:
        return ""
    return f"{_lost(found.low)} – {_lost(found.high)}"


def _joules(points: Sequence[Point]) -> list[str]:
    """Return the energies per sample; no cell if no point has one."""
    if all(point.joules_per_sample is None for point in points):
        return []
    return [
        "" if p.joules_per_sample is None else _interval(p.joules_per_sample, _number)
        for p in points
    ]


def _pop_tables(scaling: str, points: Sequence[Point]) -> list[Table]:
    """Return the table of the POP hierarchy; none if all points have one rank."""
    rows = []
    for ranks, point in zip(_ranks(points), points, strict=True):
        if point.pop is not None:
            pop = point.pop
            values = (pop.parallel, pop.load_balance, pop.serialisation, pop.transfer)
            rows.append(
                [ranks, *(_interval(value, _share) for value in (*values, pop.computation_scaling))]
            )
    if not rows:
        return []
    columns = ["ranks", "parallel", "= balance", "× serialisation", "× transfer", "| computation"]
    title = f"{scaling.capitalize()} scaling: POP efficiencies (95% interval)"
    table = Table(
        title,
        columns,
        rows=rows,
        caption="efficiency = parallel efficiency × computation scaling, if the base has one rank",
    )
    return [table]


def _accuracy_tables(points: Sequence[Point]) -> list[Table]:
    """Return the table of the time to accuracy; none if no accuracy was requested."""
    found = [(p, p.time_to_accuracy) for p in points if p.time_to_accuracy is not None]
    if not found:
        return []
    rows = [
        [
            ranks,
            f"{point.batch_size:,}",
            f"{to.reached} of {to.trainings}",
            *(_estimate(value) for value in (to.epochs, to.samples, to.time_s)),
            BASE if point is points[0] else _estimate(to.speed_up),
        ]
        for ranks, (point, to) in zip(_ranks([p for p, _ in found]), found, strict=True)
    ]
    columns = ["ranks", "batch", "reached", "epochs", "samples", "s", "speed-up"]
    wanted = f"{found[0][1].accuracy:.4g} validation accuracy"
    title = f"Weak scaling: time to {wanted}; mean (95% interval)"
    table = Table(
        title,
        columns,
        rows=rows,
        caption="reached: launches; speed-up: s of the base / s; geometric means",
    )
    return [table]


def _estimate(value: Estimate | None) -> str:
    return "not reached" if value is None else _interval(value, _number)


def _lost(value: float | None) -> str:
    # Adding 0.0 turns a negative zero into a positive one.
    return "" if value is None else f"{round(value, 3) + 0.0:+.3f}"


def _forecast_table(forecast: Forecast) -> Table:
    """Return the table of the forecast with its intervals."""
    rows = [
        [
            f"{ranks:,}",
            _number(step_ms),
            f"{efficiency:.0%}",
            f"{low:.0%} – {high:.0%}{', wide' * is_wide}",
            assumed,
        ]
        for (ranks, step_ms, efficiency), (low, high), is_wide, assumed in zip(
            forecast.points, forecast.intervals, forecast.wide, forecast.assumed, strict=True
        )
    ]
    columns = ["ranks", "step ms", "efficiency", "95% interval", "assumes that"]
    title = f"Forecast of {series_name(forecast)}"
    return Table(title, columns, columns[-1:], rows=rows, caption=_basis(forecast))


def calibration_table(entries: Sequence[Entry]) -> Table:
    """Return the table of registered forecasts, with the share that was right below it."""
    columns = ("file", "scaling", "ranks", "forecast", "measured", "verdict")
    table = Table("Registered forecasts", columns, ("file", "scaling", "verdict"))
    for facts in (entry.facts() for entry in entries):
        measured = facts["measured"]
        table.add_row(
            os.path.relpath(facts["file"]),
            facts["scaling"],
            f"{facts['ranks']:,}",
            f"{facts['efficiency']:.0%} ({facts['low']:.0%} – {facts['high']:.0%})",
            "" if measured is None else f"{measured:.0%}",
            facts["verdict"] or "not measured",
        )
    scores = [entry.score for entry in entries if entry.score is not None]
    table.caption = f"{len(scores)} of {len(entries)} registered efficiencies were measured later"
    if scores:
        inside = sum(score.is_inside for score in scores)
        limits = share(inside / len(scores), len(scores))
        table.caption += (
            f"; {inside} of {len(scores)} are inside the 95% interval of the forecast: "
            f"{inside / len(scores):.0%} (95% interval {limits.low:.0%} to {limits.high:.0%}; "
            "forecasts of one study are not independent)"
        )
    return table


def _basis(forecast: Forecast) -> str:
    """Return what the forecast is based on: the network, and how it predicted measured points."""
    rate, found = forecast.beta_gb_per_s, []
    if forecast.algorithm:
        network = f"{forecast.algorithm}, α {_number(forecast.alpha_us or 0.0)} µs"
        found.append(f"all-reduce: {network}" + (f", 1/β {_number(rate)} GB/s" if rate else ""))
    past = ", ".join(
        f"{ranks} ranks {predicted / measured - 1:+.1%}"
        for ranks, predicted, measured in forecast.hindcasts
    )
    if past:
        found.append(f"errors of hindcasts: {past}")
    if any(forecast.wide):
        found.append(f"wide: the upper limit is more than {WIDE} times the lower one")
    return "; ".join(found)


def _interval(value: Estimate, text: Callable[[float], str]) -> str:
    if value.n < FEWEST or value.low == value.high:
        return text(value.value)
    return f"{text(value.value)} ({text(value.low)}–{text(value.high)})"


def _fraction(value: Estimate | None) -> str:
    return "" if value is None else _interval(value, "{:.2f}".format)


def _share(value: float) -> str:
    return f"{value:.0%}"


def _number(value: float) -> str:
    """Return the number with three or four digits."""
    if value == 0 or not math.isfinite(value):
        return str(value)
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}" if abs(value) >= 100 else f"{value:.3g}"
