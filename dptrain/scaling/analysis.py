"""From finished launches to a `Study`: points, fits, forecasts, and the conclusion in sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dptrain.errors import UserError
from dptrain.measure.statistics import FEWEST
from dptrain.scaling.answer import conclude
from dptrain.scaling.forecast import as_fit, judge, make_forecast, make_series
from dptrain.scaling.points import (
    Measured,
    base_of,
    make_groups,
    make_points,
    refuse_small_data,
    scalings_of,
)
from dptrain.scaling.study import Point, Study

SAME = (
    "network", "data", "backend", "precision", "strategy", "optimizer", "parameters",
)  # fmt: skip
"""What launches of one study have in common; a difference would pass for a matter of scaling."""
MACHINE = ("cpu", "os", "python", "versions", "mpi", "host")
"""What they should have in common, by the keys of ``env.json``. Cores are not: launchers bind some
jobs to fewer."""


def analyse(
    launches: Sequence[Measured],
    *,
    commands: Mapping[str, str] | None = None,
    notes: Sequence[str] = (),
) -> Study:
    """Make a study of finished launches.

    Args:
        launches: one or more, in any order.
        commands: of each launch's folder, as it can be typed.
        notes: what was noticed while they ran.

    Raises:
        UserError: they are not launches of one job, their data was too small, or a minibatch fits
            no way of scaling.
    """
    _check_same_job(launches)
    groups = make_groups(launches)
    base = base_of(groups)
    points = make_points(groups)
    fits, forecasts, reasons = [], [], []
    for series in make_series(groups, base):
        judged, impossible = judge(series)
        fits += [as_fit(found, series) for found in judged]
        forecasts.append(make_forecast(series, judged))
        reasons += impossible
    profiles = {
        f"{scaling}-r{group.ranks}-t{group.threads}": group.median_launch.folder
        for group in groups
        for scaling in scalings_of(group, base)
    }
    names = {point.name for point in points}
    job = base.first.job
    return Study(
        job={k: v for k, v in job.items() if all(m.profile.job.get(k) == v for m in launches)},
        base_ranks=base.ranks,
        base_threads=base.threads,
        points=points,
        fits=tuple(fits),
        forecasts=tuple(forecasts),
        answer=conclude(points, forecasts),
        notes=(*notes, *_notes(launches, points), *reasons),
        profiles={name: folder for name, folder in profiles.items() if name in names},
        commands={
            name: commands[folder]
            for name, folder in profiles.items()
            if name in names and commands and folder in commands
        },
        environment=launches[0].profile.environment,
    )


def _check_same_job(launches: Sequence[Measured]) -> None:
    first = launches[0]
    for other in launches:
        refuse_small_data(other.folder, other.profile)
        for key in SAME:
            one, two = first.profile.job.get(key), other.profile.job.get(key)
            if one != two:
                raise UserError(
                    f"{other.folder} has {key} {two}, {first.folder} has {one}; expected launches "
                    "of one job, so collect them apart"
                )


def _notes(launches: Sequence[Measured], points: Sequence[Point]) -> list[str]:
    """What to know before believing the figures."""
    found = []
    shared = sorted({(p.ranks, p.threads, p.possible) for p in points if p.possible < 1})
    found += [
        f"{ranks} ranks x {threads} thread{'s' * (threads > 1)} share cores: at most "
        f"{possible:.0%} efficiency is possible there"
        for ranks, threads, possible in shared
    ]
    few = min(len(point.launches) for point in points)
    if few < FEWEST:
        found.append(
            f"a point has {few} launch{'es' * (few > 1)}, too few for an interval; "
            "measure five or more"
        )
    elif few < 5:
        found.append(f"{few} launches a point make wide intervals; measure five or more")
    named = set()
    for point in points:
        for launch in point.launches:
            if launch.order in point.outliers and launch.folder not in named:
                named.add(launch.folder)
                away = launch.step_ms / point.step_ms.value - 1
                found.append(f"{launch.folder} is {away:+.0%} off the median of its point")
    return found + _differences(launches)


def _differences(launches: Sequence[Measured]) -> list[str]:
    """Machines and versions that differ between launches."""
    found = []
    for key in MACHINE:
        seen: dict[str, str] = {}
        for launch in launches:
            value = launch.profile.environment.get(key)
            seen.setdefault(_brief(value), launch.folder)
        if len(seen) > 1:
            (one, first), (two, second) = list(seen.items())[:2]
            what = "hosts differ" if key == "host" else f"launches differ in {key}"
            if key == "versions":
                one, two = _changed(launches, first, second)
            found.append(f"{what}: {one} in {first}, {two} in {second}")
    return found


def _brief(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    return str(value)


def _changed(launches: Sequence[Measured], first: str, second: str) -> tuple[str, str]:
    by_folder = {launch.folder: launch.profile.environment["versions"] for launch in launches}
    one, two = by_folder[first], by_folder[second]
    keys = [key for key in sorted({*one, *two}) if one.get(key) != two.get(key)]
    return tuple(  # type: ignore[return-value]
        ", ".join(f"{key} {side.get(key, 'absent')}" for key in keys) for side in (one, two)
    )
