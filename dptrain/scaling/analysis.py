"""Turn complete launches into a `Study`: points, fits, forecasts, and the conclusion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dptrain.errors import UserError
from dptrain.measure.profile.rooflines import highest_roofs
from dptrain.measure.statistics import FEWEST, FEWEST_TO_SEE, RARE, SLOWER, unseen_at_most
from dptrain.measure.tail_index import tail_note
from dptrain.scaling.conclusion import conclude
from dptrain.scaling.efficiencies import missing_counters
from dptrain.scaling.forecasts.forecast import make_forecast, make_series
from dptrain.scaling.pairing import split
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
    "network",
    "data",
    "backend",
    "precision",
    "strategy",
    "optimizer",
    "parameters",
    "prefetch",
)
"""Job entries that must be equal; a difference would be mistaken for an effect of scaling."""
MACHINE = ("cpu", "cpu_configuration", "os", "python", "versions", "mpi", "host")
"""Keys of ``env.json`` that should be equal. Cores are not compared: launchers bind some jobs to
fewer cores."""


def analyse(
    launches: Sequence[Measured],
    *,
    commands: Mapping[str, str] | None = None,
    notes: Sequence[str] = (),
) -> Study:
    """Return the study of complete launches.

    Args:
        launches: one or more, in any order.
        commands: command line by the folder of the launch.
        notes: observations during the launches.

    Raises:
        UserError: the launches do not belong to one job, the data are too small, or a minibatch
            fits neither weak nor strong scaling.
    """
    _check_same_job(launches)
    _check_same_accuracy(launches)
    groups = make_groups(launches)
    base = base_of(groups)
    points = make_points(groups)
    forecasts = [make_forecast(series) for series in make_series(groups, base)]
    profiles = {
        f"{scaling}-r{group.ranks}-t{group.threads}": group.median_launch.folder
        for group in groups
        for scaling in scalings_of(group, base)
    }
    names = {point.name for point in points}
    roofs = {
        f"{scaling}-r{group.ranks}-t{group.threads}": highest_roofs(measured)
        for group in groups
        for scaling in scalings_of(group, base)
        if (measured := [m.profile.roofs for m in group.launches if m.profile.roofs is not None])
    }
    job = base.first.job
    return Study(
        job={k: v for k, v in job.items() if all(m.profile.job.get(k) == v for m in launches)},
        base_ranks=base.ranks,
        base_threads=base.threads,
        points=points,
        forecasts=tuple(forecasts),
        conclusion=conclude(points, forecasts),
        notes=(
            *notes,
            *_notes(launches, points),
            *missing_counters([launch.profile for launch in launches]),
        ),
        profiles={name: folder for name, folder in profiles.items() if name in names},
        commands={
            name: commands[folder]
            for name, folder in profiles.items()
            if name in names and commands and folder in commands
        },
        environment=launches[0].profile.environment,
        roofs={name: found for name, found in roofs.items() if name in names},
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
                    "of one job, collect different jobs separately"
                )


def _check_same_accuracy(launches: Sequence[Measured]) -> None:
    trained = [m for m in launches if m.training is not None]
    for other in trained:
        one, two = (m.training.requested for m in (trained[0], other) if m.training)
        if one != two:
            raise UserError(
                f"{other.folder} was trained to an accuracy of {two:g}, {trained[0].folder} to "
                f"{one:g}; expected one accuracy, collect the studies separately"
            )


def _notes(launches: Sequence[Measured], points: Sequence[Point]) -> list[str]:
    """Return the restrictions of the validity of the results."""
    found = []
    shared = sorted({(p.ranks, p.threads, p.possible) for p in points if p.possible < 1})
    found += [
        f"{ranks} ranks × {threads} thread{'s' * (threads > 1)} share cores: the efficiency there "
        f"is at most {possible:.0%}"
        for ranks, threads, possible in shared
    ]
    fewest = min(len(point.launches) for point in points)
    if fewest < FEWEST:
        found.append(
            f"a point has {fewest} launch{'es' * (fewest > 1)}, too few for an efficiency; "
            "measure five or more"
        )
    elif fewest < 5:
        found.append(
            f"{fewest} launches per point result in wide intervals and do not show two groups; "
            "measure five or more"
        )
    found += _about_groups(points)
    named = set()
    for point in points:
        for launch in point.launches:
            if launch.order in point.outliers and launch.folder not in named:
                named.add(launch.folder)
                deviation = launch.step_ms / point.step_ms.value - 1
                found.append(
                    f"the step time of {launch.folder} deviates by {deviation:+.1%} from the "
                    "mean of its point"
                )
    found += _about_heavy_tail(launches, points)
    if FEWEST <= fewest < FEWEST_TO_SEE:
        found.append(
            f"{fewest} launches per point may contain no slow one although up to "
            f"{unseen_at_most(fewest):.0%} of all launches are slow: intervals include "
            f"{RARE:.0%} that take {SLOWER:g} times as long; --launches {FEWEST_TO_SEE} would show "
            "one"
        )
    return found + _differences(launches)


def _about_heavy_tail(launches: Sequence[Measured], points: Sequence[Point]) -> list[str]:
    """Return remarks on each point whose mean step a few slow steps determine."""
    by_folder = {measured.folder: measured.profile for measured in launches}
    found = {}
    for point in points:
        times = [by_folder[m.folder].step_times_ms for m in point.launches]
        # Launches that differ are no tail.
        steps = np.concatenate([np.array(series) / np.median(series) for series in times])
        found[point.launches[0].folder] = tail_note(steps, point.name)
    return [note for note in found.values() if note]


def _about_groups(points: Sequence[Point]) -> list[str]:
    """Return remarks on each point whose step times or ratios fall into two groups."""
    found = {}
    for point in points:
        times = [launch.step_ms for launch in point.launches]
        between = split(times)
        if between is not None:
            fast, slow = ([t for t in times if (t > between) == later] for later in (False, True))
            found[f"{point.launches[0].folder} step"] = (
                f"the launches of {point.name} fall into two groups, {len(fast)} with "
                f"{min(fast):.3g} to {max(fast):.3g} ms and {len(slow)} with {min(slow):.3g} to "
                f"{max(slow):.3g} ms; the interval of its step time is the range of the launches, "
                "because no interval describes two groups"
            )
        if point.efficiency_has_range:
            found[f"{point.launches[0].folder} efficiency"] = (
                f"the efficiencies of {point.name} by round fall into two groups; their interval "
                "is the range of the launches"
            )
    return list(found.values())


def _differences(launches: Sequence[Measured]) -> list[str]:
    """Return the differences in machine and versions between launches."""
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
        # Launchers bind ranks to different cores, depending on the number of ranks.
        return ", ".join(f"{key} {item}" for key, item in value.items() if key != "binding")
    return str(value)


def _changed(launches: Sequence[Measured], first: str, second: str) -> tuple[str, str]:
    by_folder = {launch.folder: launch.profile.environment["versions"] for launch in launches}
    one, two = by_folder[first], by_folder[second]
    keys = [key for key in sorted({*one, *two}) if one.get(key) != two.get(key)]
    return tuple(  # type: ignore[return-value]
        ", ".join(f"{key} {side.get(key, 'absent')}" for key in keys) for side in (one, two)
    )
