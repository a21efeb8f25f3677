"""The audit of a study: how often its intervals contain the truth for the noise of that study."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from dptrain.audit.coverage import ENOUGH, Coverage, count, in_parts
from dptrain.audit.fit import fit_noise
from dptrain.audit.kinds import (
    POP,
    Size,
    draw_efficiencies,
    draw_pop_of_studies,
    draw_steps,
    efficiency_truth,
    pop_truth,
    step_truth,
)
from dptrain.audit.noise import Noise, Random, Times
from dptrain.errors import UserError
from dptrain.measure.profile.profile import Profile
from dptrain.records import Form, StoredRecord
from dptrain.scaling.design import PROFILE
from dptrain.scaling.files import STUDY
from dptrain.scaling.study import UNITY, Point, Study

T = TypeVar("T")

AUDIT = "audit.json"
LARGEST = 64
"""Largest number of ranks that are simulated one by one; larger jobs have the noise of these."""


@dataclass(frozen=True)
class Interval:
    """The coverage of an interval of a study.

    Attributes:
        point: name of the point, such as ``weak-r4-t1``.
        name: the estimate in `dptrain.scaling.study.Point`, such as ``efficiency`` or
            ``pop.transfer``.
        coverage: of simulated studies with the noise of this one.
    """

    point: str
    name: str
    coverage: Coverage

    @property
    def label(self) -> str:
        """The estimate in words, such as ``load balance``."""
        return self.name.removeprefix("pop.").removesuffix("_ms").replace("_", " ")


@dataclass(frozen=True)
class Audit(StoredRecord):
    """How often the intervals of a study contain the truth for the noise of that study.

    Attributes:
        launches: step of each launch in ms, by the name of the point.
        noises: noise of each point, by its name.
        intervals: those of the study that are given.
    """

    FORM = Form(
        noun="audit",
        otherwise="expected a file of `dptrain audit`",
        anew="run `dptrain audit` again",
        version=2,
    )

    launches: dict[str, tuple[float, ...]]
    noises: dict[str, Noise]
    intervals: tuple[Interval, ...]

    @property
    def weak(self) -> tuple[Interval, ...]:
        """Intervals that contain the truth less often than `ENOUGH`."""
        return tuple(interval for interval in self.intervals if interval.coverage.is_weak)

    def describes(self, study: Study) -> bool:
        """Return True if the study has the launches that were audited."""
        return self.launches == _launches_of(study)

    def sentence(self) -> str:
        """Return the result in a sentence."""
        number, weak = len(self.intervals), self.weak
        if not number:
            return "The study has no intervals, because no point has three launches."
        if not weak:
            return (
                f"For the noise of this study, each of {number} intervals contains the truth in "
                f"{ENOUGH:.0%} of simulated studies or more."
            )
        names = ", ".join(f"{i.label} of {i.point} ({i.coverage.share:.1%})" for i in weak)
        return (
            f"For the noise of this study, {len(weak)} of {number} intervals "
            f"contain{'s' * (len(weak) == 1)} the truth in less than {ENOUGH:.0%} of simulated "
            f"studies: {names}. Make more launches or steps."
        )


def read_study(folder: Path) -> Study:
    """Return the study in a folder.

    Raises:
        UserError: there is none, or it cannot be read.
    """
    if not (folder / STUDY).is_file():
        raise UserError(
            f"{folder} contains no {STUDY}; expected a folder in which `dptrain scale` wrote a "
            "study"
        )
    return Study.read(folder / STUDY)


def audit_study(folder: Path, *, replications: int, seed: int = 0) -> Audit:
    """Return the audit of the study in a folder, from its launches alone.

    Args:
        folder: of ``study.json`` and of the profiles of its launches.
        replications: number of simulated studies.
        seed: of the random numbers.

    Raises:
        UserError: a file is missing, or has another format.
    """
    study = read_study(folder)
    by_launch: dict[str, Point] = {}
    for point in study.points:  # The base belongs to both kinds of scaling.
        by_launch.setdefault(point.launches[0].folder, point)
    points = list(by_launch.values())
    steps = {point.name: _steps_of(folder, point) for point in points}
    noises = {
        point.name: fit_noise(steps[point.name], min(point.ranks, LARGEST)) for point in points
    }
    base = next((noises[point.name] for point in points if point.efficiency == UNITY), None)
    found: list[Interval] = []
    for point in points:
        num_steps = round(float(np.mean([len(times) for times in steps[point.name]])))
        size = Size(min(point.ranks, LARGEST), num_steps, len(point.launches), base)
        random = np.random.default_rng(seed)
        found += _audit_point(point, noises[point.name], size, random, replications)
    return Audit(
        _launches_of(study),
        noises,
        tuple(found),
    )


def _launches_of(study: Study) -> dict[str, tuple[float, ...]]:
    return {point.name: tuple(m.step_ms for m in point.launches) for point in study.points}


def _steps_of(folder: Path, point: Point) -> list[Times]:
    """Return the steps of each launch of a point in ms.

    Raises:
        UserError: a profile cannot be read, or has fewer than two steps.
    """
    found = []
    for launch in point.launches:
        path = folder / launch.folder / PROFILE
        try:
            steps = np.array(Profile.read(path).step_times_ms, float)
        except UserError as error:
            raise UserError(
                f"{error}; the audit needs every launch of the study, so restore it, or collect "
                "the study again"
            ) from None
        if len(steps) < 2:
            raise UserError(
                f"{path} has {len(steps)} step, but noise needs two steps or more; make the study "
                "with more --steps"
            )
        found.append(steps)
    return found


def _audit_point(
    point: Point, noise: Noise, size: Size, random: Random, replications: int
) -> list[Interval]:
    """Return the coverage of the intervals that a point has."""
    found: list[Interval] = []

    def add(name: str, coverage: Coverage) -> None:
        found.append(Interval(point.name, name, coverage))

    def simulate(draw: Callable[[Noise, Size, Random, int], Iterable[T]]) -> Iterator[T]:
        return in_parts(partial(draw, noise, size, random), replications)

    if math.isfinite(point.step_ms.high):
        add("step_ms", count(simulate(draw_steps), step_truth(noise, size), replications))
    if point.efficiency is not None and math.isfinite(point.efficiency.high):
        truth = efficiency_truth(noise, size)
        add("efficiency", count(simulate(draw_efficiencies), truth, replications))
    if point.pop is not None and math.isfinite(point.pop.parallel.high):
        pops = list(simulate(draw_pop_of_studies))
        for name in POP:
            truth = pop_truth(name, noise, size)
            add(f"pop.{name}", count((pop[name] for pop in pops), truth, replications))
    return found
