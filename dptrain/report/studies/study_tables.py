"""Tables of a study: points, parts, losses, fits, forecasts, launches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from dptrain.measure.profile.profile import Parts
from dptrain.measure.statistics import Estimate
from dptrain.report.elements.canvas import part_name
from dptrain.report.elements.numbers import percent, short
from dptrain.report.elements.tables import Column, Table, counts, estimates, texts, times, values
from dptrain.scaling.files import STUDY
from dptrain.scaling.study import STRONG, WEAK, Launch, Point, Study

FILE = STUDY
PARTS = tuple(field.name for field in fields(Parts))
"""Names of the parts of a step."""


def points_table(study: Study, scaling: str) -> Table:
    """Return the step times, speed-ups and efficiencies of one kind of scaling."""
    points, at = _of(study, scaling)
    columns = [
        *_who(study, points, at),
        counts("batch", [p.batch_size for p in points], [f"{a}.batch_size" for a in at],
               "samples"),
        estimates("step", "ms", [p.step_ms for p in points], [f"{a}.step_ms" for a in at]),
        estimates("throughput", "samples/s", [p.samples_per_s for p in points],
                  [f"{a}.samples_per_s" for a in at]),
        estimates("speed-up", "", [_of_others(p.speed_up) for p in points],
                  [f"{a}.speed_up" for a in at], decimals=2),
        estimates("efficiency", "%", [_of_others(p.efficiency) for p in points],
                  [f"{a}.efficiency" for a in at], decimals=1, scale=100),
    ]  # fmt: skip
    if any(p.possible < 1 for p in study.points):
        columns.append(
            values(
                "core limit",
                "% efficiency",
                [p.possible for p in points],
                [f"{a}.possible" for a in at],
                decimals=0,
                scale=100,
            )
        )
    if scaling == STRONG:
        columns.append(
            estimates(
                "serial fraction",
                "",
                [p.karp_flatt for p in points],
                [f"{a}.karp_flatt" for a in at],
                decimals=3,
            )
        )
    if any(p.joules_per_sample is not None for p in points):
        columns.append(
            estimates(
                "energy",
                "J/sample",
                [p.joules_per_sample for p in points],
                [f"{a}.joules_per_sample" for a in at],
            )
        )
    columns.append(
        counts("launches", [p.step_ms.n for p in points], [f"{a}.step_ms.n" for a in at])
    )
    note = "Intervals are over launches." + (
        " The range of the launches stands in place of an interval if they fall into two groups."
        if any(p.two_groups or p.efficiency_has_range for p in points)
        else ""
    )
    title = f"{scaling.capitalize()} scaling"
    return Table(f"points-{scaling}", title, FILE, tuple(columns), note)


def _of_others(estimate: Estimate) -> Estimate | None:
    """Return None for the base point, whose ratio to itself is no measurement."""
    return None if estimate.low == estimate.high == 1 else estimate


def parts_table(study: Study, scaling: str) -> Table:
    """Return the parts of a step at each point."""
    points, at = _of(study, scaling)
    columns = [*_who(study, points, at), *times(_parts("parts", points), points, at)]
    title = f"{scaling.capitalize()} scaling: parts of a step"
    note = "The parts sum to the step."
    return Table(f"parts-{scaling}", title, FILE, tuple(columns), note)


def loss_table(study: Study, scaling: str) -> Table:
    """Return the time beyond an ideal step by part, and the causes of the loss of compute."""
    points, at = _of(study, scaling)
    causes = {
        "shared cores": "shared_ms",
        "contention": "contention_ms",
        "smaller batch": "small_batch_ms",
    }
    columns = [*_who(study, points, at), *times({**_parts("loss", points), **causes}, points, at)]
    title = f"{scaling.capitalize()} scaling: time beyond an ideal step"
    note = "The last three sum to the loss of computation. Negative: faster than ideal."
    return Table(f"loss-{scaling}", title, FILE, tuple(columns), note)


def pop_table(study: Study, scaling: str) -> Table | None:
    """Return the efficiencies of the POP hierarchy; None if all points have one rank."""
    points, at = _of(study, scaling)
    known = [(p, a, p.pop) for p, a in zip(points, at, strict=True) if p.pop is not None]
    if not known:
        return None
    heads = {
        "parallel efficiency": "parallel",
        "load balance": "load_balance",
        "serialisation": "serialisation",
        "transfer": "transfer",
        "computation scaling": "computation_scaling",
    }
    columns = [
        *_who(study, [point for point, _, _ in known], [a for _, a, _ in known]),
        *(
            estimates(
                head,
                "%",
                [getattr(pop, name) for _, _, pop in known],
                [f"{a}.pop.{name}" for _, a, _ in known],
                decimals=1,
                scale=100,
            )
            for head, name in heads.items()
        ),
    ]
    optional = {"instructions per cycle": "instructions_per_cycle", "GHz": "ghz"}
    columns += [
        estimates(
            head,
            "",
            [getattr(pop, name) for _, _, pop in known],
            [f"{a}.pop.{name}" for _, a, _ in known],
            decimals=2,
        )
        for head, name in optional.items()
        if any(getattr(pop, name) is not None for _, _, pop in known)
    ]
    note = (
        "Parallel efficiency is the product of load balance, serialisation and transfer. The "
        "efficiency of a point is about parallel efficiency × computation scaling."
    )
    title = f"{scaling.capitalize()} scaling: POP efficiencies"
    return Table(f"pop-{scaling}", title, FILE, tuple(columns), note)


def accuracy_table(study: Study) -> Table | None:
    """Return the time to accuracy of weak scaling; None if no accuracy was requested."""
    points, at = _of(study, WEAK)
    known = [
        (p, a, p.time_to_accuracy)
        for p, a in zip(points, at, strict=True)
        if p.time_to_accuracy is not None
    ]
    if not known:
        return None
    found = [time for _, _, time in known]
    paths = [f"{a}.time_to_accuracy" for _, a, _ in known]

    def column(head: str, unit: str, name: str, decimals: int | None = None) -> Column:
        return estimates(
            head,
            unit,
            [getattr(time, name) for time in found],
            [f"{a}.{name}" for a in paths],
            decimals=decimals,
        )

    columns = (
        *_who(study, [point for point, _, _ in known], [a for _, a, _ in known]),
        column("time", "s", "time_s"),
        column("speed-up", "", "speed_up", 2),
        column("epochs", "", "epochs"),
        column("samples", "", "samples", 0),
        counts(
            "reached it",
            [time.reached for time in found],
            [f"{a}.reached" for a in paths],
            "launches",
        ),
        counts(
            "trained",
            [time.trainings for time in found],
            [f"{a}.trainings" for a in paths],
            "launches",
        ),
    )
    title = f"Time to {percent(found[0].accuracy)} validation accuracy"
    note = "Time of the steps, without start-up, evaluations and checkpoints."
    return Table("time-to-accuracy", title, FILE, columns, note)


def fits_table(study: Study) -> Table | None:
    """Return the models with their parameters and hindcast errors; None if there are none."""
    if not study.fits:
        return None
    fits = study.fits
    parameters = [
        ", ".join(f"{name} = {short(value)}" for name, value in fit.parameters.items())
        for fit in fits
    ]
    columns = [
        texts("scaling", [fit.scaling for fit in fits]),
        texts("model", [fit.model for fit in fits]),
        texts("equation", [fit.equation for fit in fits], kind="prose"),
        texts("parameters", parameters, kind="prose"),
        values(
            "hindcast error",
            "%",
            [fit.hindcast_error for fit in fits],
            [f"fits.{i}.hindcast_error" for i in range(len(fits))],
            decimals=1,
            scale=100,
        ),
    ]
    if len({fit.threads for fit in fits}) > 1:
        columns.insert(1, texts("threads", [fit.threads for fit in fits]))
    return Table("fits", "Models fitted to the step times", FILE, tuple(columns))


def forecast_table(study: Study) -> Table | None:
    """Return the forecasts at more ranks; None if all are withheld."""
    found = [(i, k) for i, f in enumerate(study.forecasts) for k in range(len(f.points))]
    if not found:
        return None
    forecasts = [study.forecasts[i] for i, _ in found]
    points = [study.forecasts[i].points[k] for i, k in found]
    at = [f"forecasts.{i}.points.{k}" for i, k in found]
    intervals = [study.forecasts[i].intervals[k] for i, k in found]
    limits = [f"forecasts.{i}.intervals.{k}" for i, k in found]
    columns = [
        texts("scaling", [f.scaling for f in forecasts]),
        counts("ranks", [p[0] for p in points], [f"{a}.0" for a in at]),
        values("step", "ms", [p[1] for p in points], [f"{a}.1" for a in at]),
        values("efficiency", "%", [p[2] for p in points], [f"{a}.2" for a in at], decimals=1,
               scale=100),
        values("lower limit", "% (95% interval)", [i[0] for i in intervals],
               [f"{a}.0" for a in limits], decimals=1, scale=100),
        values("upper limit", "% (95% interval)", [i[1] for i in intervals],
               [f"{a}.1" for a in limits], decimals=1, scale=100),
    ]  # fmt: skip
    if len({f.threads for f in forecasts}) > 1:
        columns.insert(1, texts("threads", [f.threads for f in forecasts]))
    return Table("forecast", "Forecast", FILE, tuple(columns), "Predictions, not measurements.")


def launches_table(study: Study) -> Table:
    """Return every launch once, in time; launches of the base belong to two points."""
    indices: dict[str, list[tuple[int, int]]] = {}
    for i, point in enumerate(study.points):
        for k, launch in enumerate(point.launches):
            indices.setdefault(launch.folder, []).append((i, k))
    found = sorted((study.points[i].launches[k].order, i, k) for (i, k), *_ in indices.values())
    launches = [study.points[i].launches[k] for _, i, k in found]
    at = [f"points.{i}.launches.{k}" for _, i, k in found]
    names = [
        ", ".join(study.points[i].name for i, _ in indices[launch.folder]) for launch in launches
    ]
    outlier = [
        "outlier" if launch.order in study.points[i].outliers else ""
        for launch, (_, i, _) in zip(launches, found, strict=True)
    ]
    columns = [
        counts("order", [launch.order for launch in launches], [f"{a}.order" for a in at]),
        texts("point", names),
        texts("started (UTC)", [launch.started[:19].replace("T", " ") for launch in launches]),
        *times({"step": "step_ms", **_parts("parts", launches)}, launches, at),
    ]
    if any(outlier):
        columns.append(texts("", outlier))
    return Table("launches", "Launches", FILE, tuple(columns), "In the order of their start.")


def _of(study: Study, scaling: str) -> tuple[list[Point], list[str]]:
    """Return the points of one kind of scaling, and the path of each in the file."""
    found = [(p, f"points.{i}") for i, p in enumerate(study.points) if p.scaling == scaling]
    found.sort(key=lambda pair: (pair[0].threads, pair[0].ranks))
    return [point for point, _ in found], [at for _, at in found]


def _who(study: Study, points: Sequence[Point], at: Sequence[str]) -> list[Column]:
    """Return the columns that identify a point: ranks, and threads and nodes if they vary."""
    columns = [counts("ranks", [p.ranks for p in points], [f"{a}.ranks" for a in at])]
    for head in ("threads", "nodes"):
        if any(getattr(p, head) > 1 for p in study.points):
            found = [getattr(p, head) for p in points]
            columns.append(counts(head, found, [f"{a}.{head}" for a in at]))
    return columns


def _parts(attribute: str, records: Sequence[Point | Launch]) -> dict[str, str]:
    """Return the attribute of each part by heading, without parts that no record contains."""
    found = [part for part in PARTS if any(getattr(record.parts, part) for record in records)]
    return {part_name(part): f"{attribute}.{part}" for part in found}
