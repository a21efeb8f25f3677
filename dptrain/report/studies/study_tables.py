"""Tables of a study: points, parts, losses, fits, forecasts, launches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from dptrain.measure.profile.known import TOLERANCE
from dptrain.measure.profile.known_tables import VERDICTS
from dptrain.measure.profile.profile import Parts
from dptrain.measure.statistics import Estimate
from dptrain.report.elements.canvas import part_name
from dptrain.report.elements.numbers import decimals_for, percent
from dptrain.report.elements.tables import Column, Records, Table, texts
from dptrain.scaling.files import STUDY
from dptrain.scaling.study import STRONG, UNITY, WEAK, Launch, Point, Study, losses_withheld

FILE = STUDY
PARTS = tuple(field.name for field in fields(Parts))
"""Names of the parts of a step."""


def points_table(study: Study, scaling: str) -> Table:
    """Return the step times, speed-ups and efficiencies of one kind of scaling."""
    points = _of(study, scaling)
    columns = [
        *_who(study, points),
        points.counts("batch", "batch_size", "samples"),
        points.estimates("step", "ms", "step_ms"),
        points.estimates("throughput", "samples/s", "samples_per_s"),
        points.estimates("speed-up", "", "speed_up", decimals=2, shown=_of_others),
        points.estimates("efficiency", "%", "efficiency", shown=_of_others),
    ]
    if any(p.possible < 1 for p in study.points):
        columns.append(points.values("core limit", "% efficiency", "possible", decimals=0))
    if scaling == STRONG:
        columns.append(points.estimates("serial fraction", "", "karp_flatt", decimals=3))
    if any(points.found("joules_per_sample")):
        columns.append(points.estimates("energy", "J/sample", "joules_per_sample"))
    columns.append(points.counts("launches", "step_ms.n"))
    note = "Intervals are over launches." + (
        " The range of the launches stands in place of an interval if they fall into two groups."
        if any(p.two_groups or p.efficiency_has_range for p in points.items)
        else ""
    )
    title = f"{scaling.capitalize()} scaling"
    return Table(f"points-{scaling}", title, FILE, tuple(columns), note)


def _of_others(estimate: Estimate) -> Estimate | None:
    """Return None for the base point, whose ratio to itself is no measurement."""
    return None if estimate == UNITY else estimate


def parts_table(study: Study, scaling: str) -> Table:
    """Return the parts of a step at each point."""
    points = _of(study, scaling)
    columns = (*_who(study, points), *points.times(_parts("parts", points.items)))
    title = f"{scaling.capitalize()} scaling: parts of a step"
    return Table(f"parts-{scaling}", title, FILE, columns, "The parts sum to the step.")


def known_losses_table(study: Study, scaling: str) -> Table | None:
    """Return what the launches recovered of known losses; None if none was injected."""
    found = [
        (point, at, index, recovery)
        for at, point in enumerate(study.points)
        if point.scaling == scaling
        for index, recovery in enumerate(point.recoveries)
    ]
    if not found:
        return None
    paths = [f"points.{at}.recoveries.{index}" for _, at, index, _ in found]
    records = Records([recovery for *_, recovery in found], paths)
    columns = (
        texts("ranks", [str(point.ranks) for point, *_ in found]),
        texts("known loss", [recovery.name for *_, recovery in found]),
        records.values("injected", "ms", "injected_ms"),
        records.estimates("recovered", "ms", "recovered_ms"),
        texts("verdict", [VERDICTS[recovery.is_recovered] for *_, recovery in found]),
        texts("reason", [recovery.reason for *_, recovery in found], kind="prose"),
    )
    title = f"{scaling.capitalize()} scaling: known losses that were injected"
    note = (
        "A loss is recovered if the interval (jointly 95%) contains the injected one or misses it "
        f"by at most {TOLERANCE:.0%}, and is at most ± a third of it wide."
    )
    return Table(f"known-{scaling}", title, FILE, columns, note)


def loss_table(study: Study, scaling: str) -> Table | None:
    """Return the time beyond an ideal step by part, and the causes of the loss of compute.

    None if a known loss was not recovered.
    """
    points = _of(study, scaling)
    if losses_withheld(points.items):
        return None
    causes = {
        "shared cores": "shared_ms",
        "contention": "contention_ms",
        "smaller batch": "small_batch_ms",
    }
    has_intervals = any(point.loss_intervals for point in points.items)
    losses = _parts("loss_intervals" if has_intervals else "loss", points.items)
    decimals = decimals_for([ms for point in points.items for ms in point.loss.known.values()])
    columns = (
        *_who(study, points),
        *(
            points.estimates(head, "ms", path, decimals=decimals)
            if has_intervals
            else points.values(head, "ms", path, decimals=decimals)
            for head, path in losses.items()
        ),
        *points.times(causes),
    )
    title = f"{scaling.capitalize()} scaling: time beyond an ideal step"
    note = (
        "The last three sum to the loss of computation. Negative: faster than ideal. Intervals are "
        "over launches; the base has no losses."
    )
    return Table(f"loss-{scaling}", title, FILE, columns, note)


def pop_table(study: Study, scaling: str) -> Table | None:
    """Return the efficiencies of the POP hierarchy; None if all points have one rank."""
    points = _with(_of(study, scaling), "pop")
    if not points.items:
        return None
    heads = {
        "parallel efficiency": "parallel",
        "load balance": "load_balance",
        "serialisation": "serialisation",
        "transfer": "transfer",
        "computation scaling": "computation_scaling",
    }
    optional = {"instructions per cycle": "instructions_per_cycle", "GHz": "ghz"}
    columns = (
        *_who(study, points),
        *(points.estimates(head, "%", f"pop.{name}") for head, name in heads.items()),
        *(
            points.estimates(head, "", f"pop.{name}", decimals=2)
            for head, name in optional.items()
            if any(points.found(f"pop.{name}"))
        ),
    )
    note = (
        "Parallel efficiency is the product of load balance, serialisation and transfer. The "
        "efficiency of a point is about parallel efficiency × computation scaling."
    )
    title = f"{scaling.capitalize()} scaling: POP efficiencies"
    return Table(f"pop-{scaling}", title, FILE, columns, note)


def accuracy_table(study: Study) -> Table | None:
    """Return the time to accuracy of weak scaling; None if no accuracy was requested."""
    points = _with(_of(study, WEAK), "time_to_accuracy")
    if not points.items:
        return None
    times = Records(points.found("time_to_accuracy"), points.sources("time_to_accuracy"))
    columns = (
        *_who(study, points),
        times.estimates("time", "s", "time_s"),
        times.estimates("speed-up", "", "speed_up", decimals=2, shown=_of_others),
        times.estimates("epochs", "", "epochs"),
        times.estimates("samples", "", "samples", decimals=0),
        times.counts("reached it", "reached", "launches"),
        times.counts("trained", "trainings", "launches"),
    )
    title = f"Time to {percent(times.items[0].accuracy)} validation accuracy"
    note = "Time of the steps, without start-up, evaluations and checkpoints."
    return Table("time-to-accuracy", title, FILE, columns, note)


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
    shares = [points.values("", "%", "2"), *(intervals.values("", "%", end) for end in "01")]
    cells = tuple(
        (*value, " (", *low, "–", *high, ", wide)" if study.forecasts[i].wide[k] else ")")
        for (i, k), value, low, high in zip(
            found, *(column.cells for column in shares), strict=True
        )
    )
    columns = [
        forecasts.texts("scaling", "scaling"),
        points.counts("ranks", "0", is_key=True),
        points.values("step", "ms", "1"),
        Column("efficiency", "% (95% interval)", cells, is_estimate=True),
        texts("assumes that", [study.forecasts[i].assumed[k] for i, k in found], kind="prose"),
    ]
    if len({f.threads for f in forecasts.items}) > 1:
        columns.insert(1, forecasts.texts("threads", "threads"))
    return Table("forecast", "Forecast", FILE, tuple(columns), "Predictions, not measurements.")


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
    times = {"step": "step_ms"}
    if all(launch.median_step_ms is not None for launch in launches):
        times["median step"] = "median_step_ms"
    columns = [
        records.counts("order", "order", is_key=True),
        texts("point", names),
        texts("started (UTC)", [launch.started[:19].replace("T", " ") for launch in launches]),
        *records.times({**times, **_parts("parts", launches)}),
    ]
    if any(outlier):
        columns.append(texts("", outlier))
    return Table("launches", "Launches", FILE, tuple(columns), "In the order of their start.")


def _of(study: Study, scaling: str) -> Records:
    """Return the points of one kind of scaling."""
    found = [(p, f"points.{i}") for i, p in enumerate(study.points) if p.scaling == scaling]
    found.sort(key=lambda pair: (pair[0].threads, pair[0].ranks))
    return Records([point for point, _ in found], [at for _, at in found])


def _with(points: Records, name: str) -> Records:
    """Return the points that have an attribute that may be None."""
    pairs = zip(points.items, points.at, strict=True)
    found = [(point, at) for point, at in pairs if getattr(point, name) is not None]
    return Records([point for point, _ in found], [at for _, at in found])


def _who(study: Study, points: Records) -> list[Column]:
    """Return the columns that identify a point: ranks, and threads and nodes if they vary."""
    varied = [n for n in ("threads", "nodes") if any(getattr(p, n) > 1 for p in study.points)]
    return [points.counts(name, name, is_key=True) for name in ("ranks", *varied)]


def _parts(attribute: str, records: Sequence[Point | Launch]) -> dict[str, str]:
    """Return the attribute of each part by heading, without parts that no record contains."""
    found = [part for part in PARTS if any(record.parts.known.get(part) for record in records)]
    return {part_name(part): f"{attribute}.{part}" for part in found}
