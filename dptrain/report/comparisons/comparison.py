"""A comparison of training runs, profiles or studies: quantities, differences, settings.

Every result is compared with the first one. The record is written to ``comparison.json``, so that
each number of the page has a source.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dptrain.errors import UserError
from dptrain.measure.profile.profile import Profile
from dptrain.measure.statistics import Estimate
from dptrain.numbers import value_text
from dptrain.records import Form, StoredRecord
from dptrain.report.differences import difference, ratio
from dptrain.report.profiles.profile_page import MeasuredProfile
from dptrain.report.runs.run_record import TrainingRun
from dptrain.report.studies.study_plots import point_name
from dptrain.scaling.pairing import difference as difference_of_launches
from dptrain.scaling.study import STRONG, UNITY, WEAK, Point, Study

FILE = "comparison.json"
POINTS, PERCENT = "percentage points", "%"

Result = TrainingRun | MeasuredProfile | Study


@dataclass(frozen=True)
class Quantity:
    """A quantity of all results.

    Attributes:
        name: name with the point of a study, such as ``weak scaling, 2 ranks: efficiency``.
        unit: unit of the values.
        values: one estimate for each result, whose interval may be infinite; None if a result does
            not have the quantity.
        changes: difference to the first result; None for the first one, and if a value is missing.
        change_unit: `POINTS` for differences, `PERCENT` for relative changes.
    """

    name: str
    unit: str
    values: tuple[Estimate | None, ...]
    changes: tuple[Estimate | None, ...]
    change_unit: str


@dataclass(frozen=True)
class Comparison(StoredRecord):
    """A comparison.

    Attributes:
        noun: what is compared, in the plural.
        names: short names of the results.
        folders: their folders.
        quantities: the quantities, the most important first.
        settings: settings that differ: values by name, one for each result.
        notes: restrictions of the validity.
    """

    FORM = Form(
        noun="comparison",
        otherwise="expected a file of `dptrain report A B`",
        anew="compare again",
    )

    noun: str
    names: tuple[str, ...]
    folders: tuple[str, ...]
    quantities: tuple[Quantity, ...]
    settings: dict[str, tuple[str, ...]]
    notes: tuple[str, ...]


def short_names(folders: Sequence[Path]) -> tuple[str, ...]:
    """Return the shortest ends of the paths that differ from each other."""
    parts = [folder.resolve().parts for folder in folders]
    depth = 1
    while depth < max(map(len, parts)):
        names = ["/".join(part[-depth:]) for part in parts]
        if len(set(names)) == len(names):
            return tuple(names)
        depth += 1
    return tuple(str(folder) for folder in folders)


def compare_runs(runs: Sequence[TrainingRun]) -> Comparison:
    """Return the comparison of training runs.

    Raises:
        UserError: some have a test accuracy and others do not.
    """
    if len({run.accuracy is None for run in runs}) > 1:
        odd = next(run for run in runs if run.accuracy is None)
        raise UserError(
            f"{odd.folder} has no test accuracy, unlike other runs; compare either runs that "
            "classify and were evaluated, or runs of regressions"
        )
    is_same_data = all(_has_same_data(run, runs[0]) for run in runs[1:])
    quantities = []
    if runs[0].accuracy is not None:
        quantities.append(
            _difference(
                "test accuracy",
                PERCENT,
                [run.accuracy for run in runs],
                scale=100,
                known=is_same_data,
            )
        )
    losses = [_exact(run.summary["test_loss"]) for run in runs]
    if any(losses):
        quantities.append(_relative("test loss", "", losses, known=is_same_data))
    steps = [run.step for run in runs]
    batches = [float(run.summary["batch_size"]) for run in runs]
    quantities += _times(steps, batches)
    rates = [_exact(run.summary["samples_per_s"]) for run in runs]
    quantities.append(_relative("throughput with evaluations", "samples/s", rates))
    notes = ["Intervals of times describe single launches; dptrain scale compares launches."]
    if runs[0].accuracy is not None:
        notes.insert(
            0,
            "Each accuracy is that of one run. Its interval describes the choice of "
            "the test samples, not the seed.",
        )
    if not is_same_data:
        notes.insert(
            0,
            "The runs have different data, so the differences of accuracy and loss are not stated.",
        )
    for run, name in zip(runs, short_names([run.folder for run in runs]), strict=True):
        if run.spans.is_resumed:
            times = f"; its times are those of {run.timed_steps}" if run.timed_steps else ""
            notes.insert(0, f"{name} was resumed {run.spans.resumes(run.selected_step)}{times}.")
    settings = _differing([_settings_of(run) for run in runs])
    return _comparison("training runs", [run.folder for run in runs], quantities, settings, notes)


def _settings_of(run: TrainingRun) -> dict[str, Any]:
    """Return the settings and the machine that made the kept parameters of a run."""
    machine = {**_machine(run.environment), "threads": run.summary["threads"]}
    if not run.spans.items:
        return {**run.job, **machine}
    texts = {name: run.setting(name) for name in run.job}
    found = {"host": "host", "cpu": "cpu", "dptrain": "version"}
    of_spans = {
        name: run.setting(key)
        for name, key in found.items()
        if any(span.value(key) is not None for span in run.spans.items)
    }
    return {**machine, **texts, **of_spans}


def _has_same_data(one: TrainingRun, two: TrainingRun) -> bool:
    """Return True if two runs have the same data, as far as their files show it.

    The digest of the content also depends on the preprocessing, which networks determine.
    """
    data, other = one.specification["data"], two.specification["data"]
    names = ["kind", "shape", "dtype", "train_samples", "test_samples"]
    if data.get("preprocessing") == other.get("preprocessing"):
        names.append("content")
    return all(data.get(name) == other.get(name) for name in names)


def compare_profiles(folders: Sequence[Path], profiles: Sequence[Profile]) -> Comparison:
    """Return the comparison of profiles.

    Raises:
        UserError: some profiles are of training and others of inference.
    """
    tasks = [str(profile.job.get("task", "training")) for profile in profiles]
    if len(set(tasks)) > 1:
        other = next(i for i, task in enumerate(tasks) if task != tasks[0])
        raise UserError(
            f"{folders[0]} is a profile of {tasks[0]} and {folders[other]} one of {tasks[other]}; "
            "compare profiles of the same task"
        )
    steps = [profile.step_ms.estimate for profile in profiles]
    quantities = _times(
        steps,
        [float(profile.job["batch_size"]) for profile in profiles],
        name="forward pass" if tasks[0] == "inference" else "step",
    )
    pops = [profile.pop for profile in profiles]
    if any(pop is not None for pop in pops):
        for label, field in (
            ("parallel efficiency", "parallel"),
            ("load balance", "load_balance"),
            ("serialisation", "serialisation"),
            ("transfer", "transfer"),
        ):
            found = [None if pop is None else getattr(pop, field) for pop in pops]
            quantities.append(_difference(label, PERCENT, found, scale=100))
    notes = [
        "Each profile is one launch; intervals do not contain the differences between "
        "launches, which dptrain scale measures."
    ]
    settings = _differing(
        [{**profile.job, **_machine(profile.environment)} for profile in profiles]
    )
    return _comparison("profiles", folders, quantities, settings, notes)


def common_points(studies: Sequence[Study]) -> list[list[Point]]:
    """Return the points that all studies have, each as a list with one point of every study."""
    names = [{point.name: point for point in study.points} for study in studies]
    return [
        [points[name] for points in names]
        for name in names[0]
        if all(name in points for points in names)
    ]


def compare_studies(folders: Sequence[Path], studies: Sequence[Study]) -> Comparison:
    """Return the comparison of studies at their common points.

    Raises:
        UserError: there is no common point.
    """
    common = common_points(studies)
    if not common:
        raise UserError(
            f"the studies in {', '.join(map(str, folders))} have no point in common; compare "
            "studies with common numbers of ranks and threads"
        )
    quantities = []
    for points in sorted(common, key=_largest_first):
        point = points[0]
        where = f"{point.scaling} scaling, {point_name(point)}"
        if not all(p.efficiency == UNITY for p in points):
            found = [p.efficiency for p in points]
            quantities.append(
                _difference(
                    f"{where}: efficiency",
                    PERCENT,
                    found,
                    scale=100,
                    subtract=_launch_difference,
                )
            )
    done = set()
    for points in common:
        point = points[0]
        key = (point.batch_size, point.ranks, point.threads)
        if key in done:
            continue  # The base belongs to weak and to strong scaling.
        done.add(key)
        quantities.append(
            _relative(
                f"{point.scaling} scaling, {point_name(point)}: step",
                "ms",
                [p.step_ms for p in points],
                known=len({p.batch_size for p in points}) == 1,
            )
        )
    notes = [
        note
        for name, study in zip(short_names(folders), studies, strict=True)
        for note in _loads(name, study)
    ]
    settings = _differing(
        [
            {**study.job, **_machine(study.environment), "base ranks": study.base_ranks}
            for study in studies
        ]
    )
    return _comparison("scaling studies", folders, quantities, settings, notes)


def _largest_first(points: Sequence[Point]) -> tuple[int, int, int]:
    return -points[0].total_threads, (WEAK, STRONG).index(points[0].scaling), -points[0].ranks


def _launch_difference(one: Estimate, base: Estimate) -> Estimate:
    return difference_of_launches(base, one)


def _loads(name: str, study: Study) -> list[str]:
    return [f"{name}: {note}" for note in study.notes if note.startswith("other programs")]


def _times(
    steps: Sequence[Estimate | None], batches: Sequence[float], name: str = "step"
) -> list[Quantity]:
    """Return the median step if all minibatches are equal, else the throughput of it."""
    name = f"median {name}"
    if len(set(batches)) == 1:
        return [_relative(name, "ms", steps)]
    rates = [
        None if step is None else step.below(1e3 * batch)
        for step, batch in zip(steps, batches, strict=True)
    ]
    return [_relative(f"throughput of a {name}", "samples/s", rates)]


def _difference(
    name: str,
    unit: str,
    found: Sequence[Estimate | None],
    *,
    scale: float,
    known: bool = True,
    subtract: Callable[[Estimate, Estimate], Estimate] = difference,
) -> Quantity:
    changes = _changes(found, subtract) if known else (None,) * len(found)
    return Quantity(
        name,
        unit,
        tuple(e and e.times(scale) for e in found),
        tuple(e and e.times(scale) for e in changes),
        POINTS,
    )


def _relative(
    name: str, unit: str, found: Sequence[Estimate | None], *, known: bool = True
) -> Quantity:
    """Return a positive quantity with relative changes in per cent."""

    def change(one: Estimate, base: Estimate) -> Estimate:
        factor = ratio(one, base)
        low, high = (100 * (end - 1) for end in (factor.low, factor.high))
        return Estimate(100 * (factor.value - 1), low, high, factor.n)

    changes = _changes(found, change) if known else (None,) * len(found)
    return Quantity(name, unit, tuple(found), changes, PERCENT)


def _changes(
    found: Sequence[Estimate | None], change: Callable[[Estimate, Estimate], Estimate]
) -> tuple[Estimate | None, ...]:
    base = found[0]
    others = [None if one is None or base is None else change(one, base) for one in found[1:]]
    # The interval of a relative change from 0 to infinity says nothing.
    bounded = [
        replace(e, low=-math.inf, high=math.inf) if e and not math.isfinite(e.high) else e
        for e in others
    ]
    return (None, *bounded)


def _exact(value: float | None) -> Estimate | None:
    """Return a value without an interval; None if it is missing or no positive number."""
    if value is None or not math.isfinite(value) or value <= 0:
        return None
    return Estimate(float(value), -math.inf, math.inf, 1)


def _machine(environment: Mapping[str, Any]) -> dict[str, Any]:
    versions = environment.get("versions") or {}
    return {
        "host": environment.get("host", ""),
        "cpu": environment.get("cpu", ""),
        "dptrain": versions.get("dptrain", ""),
    }


def _differing(jobs: Sequence[Mapping[str, Any]]) -> dict[str, tuple[str, ...]]:
    """Return the settings whose values are not equal in all jobs."""
    names = dict.fromkeys(name for job in jobs for name in job)
    found = {name: tuple(value_text(job.get(name, "–")) for job in jobs) for name in names}
    return {name: values for name, values in found.items() if len(set(values)) > 1}


def _comparison(
    noun: str,
    folders: Sequence[Path],
    quantities: Sequence[Quantity],
    settings: dict[str, tuple[str, ...]],
    notes: Sequence[str],
) -> Comparison:
    return Comparison(
        noun,
        short_names(folders),
        tuple(map(str, folders)),
        tuple(quantities),
        settings,
        tuple(notes),
    )
