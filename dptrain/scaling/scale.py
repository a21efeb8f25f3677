"""A scaling study: run the missing launches, collect the profiles, analyse, write the files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dptrain.backends import load_backend
from dptrain.errors import UserError, suggest
from dptrain.files import writing
from dptrain.machine import has_smaller_mask
from dptrain.measure.statistics import FEWEST, FEWEST_TO_SEE, RARE
from dptrain.scaling.analysis import analyse
from dptrain.scaling.collecting import collect
from dptrain.scaling.design import Design, Task, unfinished
from dptrain.scaling.display import StudyDisplay
from dptrain.scaling.files import refuse_foreign, write_study
from dptrain.scaling.launching import find_launcher
from dptrain.scaling.points import Group, base_of, has_range, make_groups, make_points
from dptrain.scaling.registered import find_registered, scored
from dptrain.scaling.running import run_tasks
from dptrain.scaling.study import UNITY, Study

FEWEST_FOR_RANGE = 8
"""Smallest number of launches whose two groups are hardly ever chance: in 0.1% of cases."""


@dataclass(frozen=True)
class Selection:
    """A part of the launches of a study, for job arrays.

    Attributes:
        points: names of points; all if it is empty.
        part, parts: number of the part, from 1, and number of parts.
    """

    points: tuple[str, ...] = ()
    part: int = 1
    parts: int = 1

    @property
    def is_all(self) -> bool:
        """True if all launches are selected."""
        return not self.points and self.parts == 1

    def of(self, design: Design) -> list[Task]:
        """Return the selected launches in the order of the study.

        Parts are contiguous. If there are as many parts as rounds, each part is one round, so that
        each job of an array measures every point on its own nodes.

        Raises:
            UserError: there is no such point.
        """
        names = [point.name for point in design.points()]
        for name in self.points:
            if name not in names:
                raise UserError(
                    f"--only {name}: no such point; the points are {', '.join(names)}"
                    f"{suggest(name, names)}"
                )
        tasks = [t for t in design.tasks() if not self.points or t.point.name in self.points]
        begin, end = (len(tasks) * share // self.parts for share in (self.part - 1, self.part))
        return tasks[begin:end]


def launch_study(
    folder: Path, design: Design, chosen: Selection, display: StudyDisplay
) -> tuple[bool, Design]:
    """Run the selected launches that are not complete, and with `Design.until` more rounds.

    Returns:
        False if a signal requested a stop before all were complete; and the design, with the
        number of rounds that were made.

    Raises:
        UserError: no launcher starts ranks, or the folder cannot be written.
        LaunchError: a launch failed.
    """
    if design.until and not chosen.is_all:
        raise UserError("--until decides after each round, so it excludes --only and --part")
    tasks = chosen.of(design)
    refuse_foreign(folder)
    computes_itself = load_backend(str(design.settings["backend"])).threaded
    # Open MPI binds to cores of the whole machine.
    binds = computes_itself and not has_smaller_mask()
    launcher = replace(find_launcher(design.launcher), binds=binds)
    # The design is stored only if its launcher works, because a study keeps its launcher.
    launcher.try_out()
    design.write(folder)
    display.print(f"study: {folder}")
    done = run_tasks(folder, design, tasks, launcher, display)
    while done and design.until and design.launches < design.most_launches:
        wide = _widest(folder, design)
        if not wide:
            break
        display.print(f"round {design.launches + 1}, because {wide}")
        design = replace(design, launches=design.launches + 1)
        design.write(folder)
        done = run_tasks(folder, design, design.tasks(), launcher, display, prepared=True)
    return done, design


def _widest(folder: Path, design: Design) -> str:
    """Return which efficiency is not known well enough; "" if all are.

    All must be, also without the last round. Otherwise studies would stop at intervals that are
    small by chance. A study does not stop before it can have seen a slow launch, which takes
    `FEWEST_TO_SEE` launches. Points in two groups do not count.
    """
    launches = collect([folder], folder).launches
    last = {task.folder for task in design.tasks() if task.round == design.launches}
    earlier = [launch for launch in launches if launch.folder not in last]
    ranges, few = _keys_of_ranges(make_groups(launches)), ""
    for considered in (launches, earlier):
        for point in make_points(make_groups(considered)):
            key, known = (point.threads, point.ranks, point.batch_size), point.efficiency
            if known == UNITY or key in ranges:
                continue
            if known is None:
                return (
                    f"the interval of the efficiency of {point.name} needs {FEWEST} launches, also "
                    "without the last round"
                )
            half = (known.high - known.low) / 2
            if half > design.until:
                return f"the efficiency of {point.name} is known to ±{half:.3f}"
            if considered is launches and known.n < FEWEST_TO_SEE:
                few = few or (
                    f"fewer than {FEWEST_TO_SEE} launches may contain no slow one even if "
                    f"{RARE:.0%} of all launches are slow; --most-launches limits the rounds"
                )
    return few


def _keys_of_ranges(groups: Sequence[Group]) -> set[tuple[int, int, int]]:
    """Return threads, ranks and minibatch size of points whose ranges more rounds do not reduce.

    Their efficiency has the range of the launches in place of an interval. Of a few launches, two
    groups may be chance, which more launches show.
    """
    base = base_of(groups)
    return {
        group.launches[0].key
        for group in groups
        if len(group.launches) >= FEWEST_FOR_RANGE and has_range(group, base)
    }


def missing(folder: Path, design: Design) -> int:
    """Return the number of launches of the whole study that are not complete."""
    return len(unfinished(folder, design.tasks()))


def conclude_study(folders: Sequence[Path], output: Path) -> Study:
    """Collect launches, analyse them, score registered forecasts, and write the study.

    Args:
        folders: folders of launches.
        output: folder of the study.

    Raises:
        UserError: there are no launches, they do not belong together, a registered forecast was
            changed, or `output` cannot be written.
    """
    found = collect(folders, output)
    records = find_registered(folders)
    study = analyse(found.launches, commands=found.commands, notes=found.notes)
    jobs = {launch.folder: launch.profile.job for launch in found.launches}
    study = scored(study, records.values(), jobs)
    with writing(output, "--output"):
        output.mkdir(parents=True, exist_ok=True)
    write_study(study, output)
    return study
