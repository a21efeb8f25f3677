"""The tables of a scaling study, which the terminal, the report and papers show."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from dptrain.measure.profile.known import TOLERANCE
from dptrain.measure.profile.known_tables import NOT_VERIFIED, VERDICTS, known_lines
from dptrain.measure.profile.profile import Parts
from dptrain.measure.statistics import Estimate, share
from dptrain.numbers import decimals_for, fixed, percent, short
from dptrain.scaling.conclusion import withheld_sentence
from dptrain.scaling.files import STUDY
from dptrain.scaling.points import PARTS
from dptrain.scaling.registered import Entry
from dptrain.scaling.study import (
    STRONG,
    UNITY,
    WEAK,
    WIDE,
    Forecast,
    Point,
    Study,
    losses_withheld,
    series_name,
)
from dptrain.tables import (
    UNKNOWN,
    Cell,
    Column,
    Number,
    Records,
    Table,
    bounds,
    computed,
    texts,
)
from dptrain.vocabulary import find_term, label_of

BASE = "base"
"""Cell of the base in columns that compare points with it."""
NOT_REACHED = "not reached"
"""Cell of a time to accuracy if a launch did not reach the accuracy."""
STEP_PARTS = tuple(field.name for field in fields(Parts))
"""Names of the parts of a step."""
LOSS_DECIMALS = 3
"""Largest number of decimals of losses in milliseconds."""
CAUSES = ("shared_ms", "contention_ms", "small_batch_ms")
"""Causes of the loss of computation."""


def study_report(study: Study) -> list[str | Table]:
    """Return the printed form of a study: the conclusion, then the tables and the notes."""
    found: list[str | Table] = [_heading(study), "", *study.conclusion, ""]
    for scaling in (WEAK, STRONG):
        points = [point for point in study.points if point.scaling == scaling]
        if points:
            found.append(points_table(study, scaling))
            found += _losses_of(study, scaling, points)
            found += filter(None, [pop_table(study, scaling)])
            found += filter(None, [accuracy_table(study) if scaling == WEAK else None])
    found += filter(None, [forecast_table(study)])
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


def _losses_of(study: Study, scaling: str, points: Sequence[Point]) -> Iterator[str | Table]:
    """Yield the table of losses, or why it is withheld, and the verdicts on known losses."""
    table = loss_table(study, scaling)
    yield table or (
        f"{scaling.capitalize()} scaling: the table of losses is withheld, because "
        f"{losses_withheld(points)}"
    )
    known = [
        line
        for point in points
        if point.recoveries
        for line in known_lines(point.recoveries, f" at {point.name}")
    ]
    yield from (*(known or [NOT_VERIFIED]), "")


def points_table(study: Study, scaling: str) -> Table:
    """Return the step times, speed-ups and efficiencies of one kind of scaling."""
    points = _of(study, scaling)
    columns = [
        *_who(study, points),
        points.counts("batch_size"),
        points.estimates("step_ms"),
        points.estimates("speed_up", decimals=2, shown=_of_others),
        points.estimates("efficiency", shown=_of_others),
        points.estimates("samples_per_s"),
    ]
    if any(p.possible < 1 for p in study.points):
        columns.append(points.values("possible", decimals=0))
    if scaling == STRONG:
        columns.append(points.estimates("karp_flatt", decimals=3))
    if any(points.found("joules_per_sample")):
        columns.append(points.estimates("joules_per_sample"))
    columns.append(points.counts("step_ms.n"))
    work = "constant batch per rank" if scaling == WEAK else "constant global batch"
    note = f"{work.capitalize()}; means over launches with 95% intervals."
    if any(p.two_groups or p.efficiency_has_range for p in points.items):
        note += (
            " The range of the launches stands in place of an interval if they fall into two "
            "groups."
        )
    return _table(f"points-{scaling}", f"{scaling.capitalize()} scaling", columns, note)


def _of_others(estimate: Estimate) -> Estimate | str:
    """Return a text for the base point, whose ratio to itself is no measurement."""
    return BASE if estimate == UNITY else estimate


def parts_table(study: Study, scaling: str) -> Table:
    """Return the parts of a step at each point."""
    points = _of(study, scaling)
    columns = [*_who(study, points), *points.times(_parts("parts", points.items))]
    title = f"{scaling.capitalize()} scaling: parts of a step"
    return _table(f"parts-{scaling}", title, columns, "The parts sum to the step.")


def known_losses_table(study: Study, scaling: str) -> Table | None:
    """Return what the launches recovered of known losses; None if none was injected."""
    found = [
        (point, f"points.{at}.recoveries.{index}", recovery)
        for at, point in enumerate(study.points)
        if point.scaling == scaling
        for index, recovery in enumerate(point.recoveries)
    ]
    if not found:
        return None
    records = Records([recovery for *_, recovery in found], [at for _, at, _ in found])
    columns = (
        texts("ranks", [str(point.ranks) for point, *_ in found]),
        records.texts("name", "known loss"),
        records.values("injected_ms"),
        records.estimates("recovered_ms"),
        texts("verdict", [VERDICTS[recovery.is_recovered] for *_, recovery in found]),
        records.texts("reason", "reason", kind="prose"),
    )
    title = f"{scaling.capitalize()} scaling: known losses that were injected"
    note = (
        "A loss is recovered if the interval (jointly 95%) contains the injected one or misses it "
        f"by at most {TOLERANCE:.0%}, and is at most ± a third of it wide."
    )
    return _table(f"known-{scaling}", title, columns, note)


@dataclass(frozen=True)
class _Row:
    """A row of the table of losses: a point, what is lost, and how much of its step."""

    point: Point
    at: str
    name: str
    ms: float | None
    source: str = ""
    interval: Estimate | None = None

    def cell(self, decimals: int) -> Cell:
        if self.ms is None:
            return (UNKNOWN,)
        number = Number(fixed(self.ms, decimals), self.ms, self.source, "value")
        if self.interval is None or not self.interval.low > float("-inf"):
            return (number,)
        source = self.source.removesuffix(".value")
        ends = bounds(self.interval.low, self.interval.high, decimals, source, ("low", "high"))
        return (number, *ends)


def loss_table(study: Study, scaling: str) -> Table | None:
    """Return the time beyond an ideal step by part, and the causes of the loss of compute.

    None if a known loss was not recovered.
    """
    points = _of(study, scaling)
    if losses_withheld(points.items):
        return None
    pairs = list(zip(points.items, points.at, strict=True))
    compared = pairs[len(pairs) > 1 :]
    each = [list(_loss_rows(point, at)) for point, at in compared]
    rows = [row for of_point in each for row in of_point]
    known = [row.ms for row in rows if row.ms is not None and row.name in map(label_of, PARTS)]
    decimals = min(decimals_for(known), LOSS_DECIMALS)
    unit = "ms (95% interval)" if any(row.interval for row in rows) else "ms"
    shares = [
        None if row.ms is None or not row.source else row.ms / row.point.step_ms.value
        for row in rows
    ]
    columns = [
        *_who(study, Records([row.point for row in rows], [row.at for row in rows])),
        replace(texts("loss", [row.name for row in rows]), is_key=True),
        Column(
            "time",
            unit,
            tuple(row.cell(decimals) for row in rows),
            is_estimate=True,
            term=find_term("points", "loss"),
            name="loss_ms",
        ),
        computed("of the step", "%", shares, term=find_term("share"), missing=""),
    ]
    title = f"{scaling.capitalize()} scaling: ideal step + loss by part = step"
    note = (
        "After |: causes of the loss of computation: shared cores, contention for memory and "
        "caches, smaller batch per rank. Negative: faster than ideal. Intervals are over launches."
    )
    table = _table(f"loss-{scaling}", title, columns, note)
    starts = [sum(map(len, each[:i])) for i in range(1, len(each))]
    return replace(table, rules=frozenset(starts))


def _loss_rows(point: Point, at: str) -> Iterator[_Row]:
    """Yield the ideal step, the loss of each part, the step, and the causes of the first loss."""
    yield _Row(point, at, "ideal step", point.ideal.total)
    for name in PARTS:
        ms, found = getattr(point.loss, name), point.loss_intervals.get(name)
        source = f"{at}.loss_intervals.{name}.value" if found else f"{at}.loss.{name}"
        yield _Row(point, at, label_of(name), ms, source, found)
    yield _Row(point, at, "= step", point.step_ms.value, f"{at}.step_ms.value")
    for name in CAUSES:
        if ms := getattr(point, name):
            yield _Row(point, at, f"| {label_of(name)}", ms, f"{at}.{name}")


def pop_table(study: Study, scaling: str) -> Table | None:
    """Return the efficiencies of the POP hierarchy; None if all points have one rank."""
    points = _of(study, scaling).having("pop")
    if not points.items:
        return None
    names = ("parallel", "load_balance", "serialisation", "transfer", "computation_scaling")
    columns = [*_who(study, points), *(points.estimates(f"pop.{name}") for name in names)]
    for name in ("instructions_per_cycle", "ghz"):
        if any(points.found(f"pop.{name}")):
            column = points.estimates(f"pop.{name}", unit="", decimals=2)
            columns.append(replace(column, is_detail=True))
    note = (
        "Parallel efficiency is the product of load balance, serialisation and transfer. The "
        "efficiency of a point is about parallel efficiency × computation scaling."
    )
    title = f"{scaling.capitalize()} scaling: POP efficiencies"
    return _table(f"pop-{scaling}", title, columns, note)


def accuracy_table(study: Study) -> Table | None:
    """Return the time to accuracy of weak scaling; None if no accuracy was requested."""
    points = _of(study, WEAK).having("time_to_accuracy")
    if not points.items:
        return None
    times = Records(points.found("time_to_accuracy"), points.sources("time_to_accuracy"))
    columns = (
        *_who(study, points),
        points.counts("batch_size"),
        times.estimates("time_s", missing=NOT_REACHED),
        times.estimates("speed_up", decimals=2, shown=_of_others),
        times.estimates("epochs", missing=NOT_REACHED),
        times.estimates("samples", decimals=0, missing=NOT_REACHED),
        times.counts("reached", "reached it", "launches"),
        times.counts("trainings", "trained", "launches"),
    )
    title = f"Time to {percent(times.items[0].accuracy)} validation accuracy"
    note = (
        "Geometric means of the launches. Time of the steps, without start-up, evaluations and "
        "checkpoints."
    )
    return _table("time-to-accuracy", title, columns, note)


def forecast_table(study: Study) -> Table | None:
    """Return the forecasts at more ranks; None if all are withheld."""
    found = [(i, k) for i, f in enumerate(study.forecasts) for k in range(len(f.points))]
    if not found:
        return None
    forecasts = Records(
        [study.forecasts[i] for i, _ in found], [f"forecasts.{i}" for i, _ in found]
    )
    points, intervals = (
        Records(
            [getattr(study.forecasts[i], name)[k] for i, k in found],
            [f"forecasts.{i}.{name}.{k}" for i, k in found],
        )
        for name in ("points", "intervals")
    )
    wide = [study.forecasts[i].wide[k] for i, k in found]
    columns = [
        forecasts.texts("scaling", "scaling"),
        *_threads(forecasts),
        replace(points.counts("0", "ranks", "", is_key=True), term=find_term("ranks")),
        replace(points.values("1", "step", "ms"), term=find_term("points", "step_ms")),
        _forecast_efficiencies(points, intervals, wide),
        texts("assumes that", [study.forecasts[i].assumed[k] for i, k in found], kind="prose"),
    ]
    bases = [f"{series_name(f)}: {_basis(f)}" for f in study.forecasts if f.points]
    note = f"Predictions, not measurements. {'. '.join(bases)}."
    return _table("forecast", "Forecast", columns, note)


def _forecast_efficiencies(points: Records, intervals: Records, wide: Sequence[bool]) -> Column:
    """Return a column of efficiencies with their intervals, which the file has apart."""
    cells: list[Cell] = []
    for point, limits, is_wide in zip(points.items, intervals.items, wide, strict=True):
        at = len(cells)
        number = Number(fixed(100 * point[2], 1), point[2], f"{points.at[at]}.2", "value")
        low, high = limits
        ends = bounds(low, high, 1, intervals.at[at], ("0", "1"), scale=100.0)
        cells.append((number, *(ends[:-1] if is_wide else ends), *([", wide)"] if is_wide else [])))
    term = find_term("efficiency")
    return Column(
        "efficiency",
        "% (95% interval)",
        tuple(cells),
        is_estimate=True,
        term=term,
        name="efficiency",
    )


def _basis(forecast: Forecast) -> str:
    """Return what the forecast is based on: the network, and how it predicted measured points."""
    rate, found = forecast.beta_gb_per_s, []
    if forecast.algorithm:
        network = f"{forecast.algorithm}, α {short(forecast.alpha_us or 0.0)} µs"
        found.append(f"all-reduce: {network}" + (f", 1/β {short(rate)} GB/s" if rate else ""))
    past = ", ".join(
        f"{ranks} ranks {predicted / measured - 1:+.1%}"
        for ranks, predicted, measured in forecast.hindcasts
    )
    if past:
        found.append(f"errors of hindcasts: {past}")
    if any(forecast.wide):
        found.append(f"wide: the upper limit is more than {WIDE} times the lower one")
    return "; ".join(found)


def launches_table(study: Study) -> Table:
    """Return every launch once, in time; launches of the base belong to two points."""
    indices: dict[str, list[tuple[int, int]]] = {}
    for i, point in enumerate(study.points):
        for k, launch in enumerate(point.launches):
            indices.setdefault(launch.folder, []).append((i, k))
    found = sorted((study.points[i].launches[k].order, i, k) for (i, k), *_ in indices.values())
    launches = [study.points[i].launches[k] for _, i, k in found]
    records = Records(launches, [f"points.{i}.launches.{k}" for _, i, k in found])
    names = [
        ", ".join(study.points[i].name for i, _ in indices[launch.folder]) for launch in launches
    ]
    outlier = [
        "outlier" if launch.order in study.points[i].outliers else ""
        for launch, (_, i, _) in zip(launches, found, strict=True)
    ]
    has_medians = all(launch.median_step_ms is not None for launch in launches)
    times = ("step_ms", "median_step_ms") if has_medians else ("step_ms",)
    columns = [
        records.counts("order", is_key=True),
        texts("point", names),
        texts("started (UTC)", [launch.started[:19].replace("T", " ") for launch in launches]),
        *records.times([*times, *_parts("parts", launches)]),
        *([texts("", outlier)] if any(outlier) else []),
    ]
    return _table("launches", "Launches", columns, "In the order of their start.")


def calibration_table(entries: Sequence[Entry]) -> Table:
    """Return the table of registered forecasts, with the share that was right below it."""
    heads = ("file", "scaling", "ranks", "forecast", "measured", "verdict")
    rows = []
    for facts in (entry.facts() for entry in entries):
        measured = facts["measured"]
        rows.append((
            os.path.relpath(facts["file"]),
            facts["scaling"],
            f"{facts['ranks']:,}",
            f"{facts['efficiency']:.0%} ({facts['low']:.0%} – {facts['high']:.0%})",
            "" if measured is None else f"{measured:.0%}",
            facts["verdict"] or "not measured",
        ))  # fmt: skip
    scores = [entry.score for entry in entries if entry.score is not None]
    note = f"{len(scores)} of {len(entries)} registered efficiencies were measured later"
    if scores:
        inside = sum(score.is_inside for score in scores)
        limits = share(inside / len(scores), len(scores))
        note += (
            f"; {inside} of {len(scores)} are inside the 95% interval of the forecast: "
            f"{inside / len(scores):.0%} (95% interval {limits.low:.0%} to {limits.high:.0%}; "
            "forecasts of one study are not independent)"
        )
    text = ("file", "scaling", "verdict")
    return Table.of_rows("Registered forecasts", heads, rows, text=text, note=note)


def _table(name: str, title: str, columns: Sequence[Column], note: str) -> Table:
    keys = max((i + 1 for i, column in enumerate(columns) if column.is_key), default=1)
    return Table(title, tuple(columns), note, name, STUDY, keys=keys)


def _of(study: Study, scaling: str) -> Records:
    """Return the points of one kind of scaling."""
    found = [(p, f"points.{i}") for i, p in enumerate(study.points) if p.scaling == scaling]
    found.sort(key=lambda pair: (pair[0].threads, pair[0].ranks))
    return Records([point for point, _ in found], [at for _, at in found])


def _who(study: Study, points: Records) -> list[Column]:
    """Return the columns that identify a point: ranks, and threads and nodes if they vary."""
    varied = [n for n in ("threads", "nodes") if any(getattr(p, n) > 1 for p in study.points)]
    return [
        replace(points.counts(name, is_key=True), is_detail=name == "nodes")
        for name in ("ranks", *varied)
    ]


def _threads(records: Records) -> list[Column]:
    """Return a column of the threads per rank if they vary."""
    varied = len(set(records.found("threads"))) > 1
    return [records.texts("threads", "threads")] if varied else []


def _parts(attribute: str, records: Sequence[Any]) -> list[str]:
    """Return the path of each part, without parts that no record contains."""
    found = [part for part in STEP_PARTS if any(each.parts.known.get(part) for each in records)]
    return [f"{attribute}.{part}" for part in found]
