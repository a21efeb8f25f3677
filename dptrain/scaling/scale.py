"""A scaling study from its settings to its files: launch what is missing, collect, analyse."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dptrain.backends import load_backend
from dptrain.errors import UserError, suggest
from dptrain.files import writing
from dptrain.scaling.analysis import analyse
from dptrain.scaling.collecting import collect
from dptrain.scaling.design import Design, Task, unfinished
from dptrain.scaling.display import StudyDisplay
from dptrain.scaling.files import refuse_foreign, write_study
from dptrain.scaling.launching import find_launcher
from dptrain.scaling.report.files import write_report
from dptrain.scaling.running import run_tasks
from dptrain.scaling.study import Study


@dataclass(frozen=True)
class Selection:
    """Part of a study's launches, for job arrays.

    Attributes:
        points: names of points; all where empty.
        part, parts: which of how many shares, counted from 1.
    """

    points: tuple[str, ...] = ()
    part: int = 1
    parts: int = 1

    @property
    def is_all(self) -> bool:
        """Whether nothing is left out."""
        return not self.points and self.parts == 1

    def of(self, design: Design) -> list[Task]:
        """The launches that are chosen, in the study's order.

        Parts are runs of it: as many as there are rounds are rounds, so that each job of an array
        meets every point, whatever its nodes are like.

        Raises:
            UserError: there is no such point.
        """
        names = [point.name for point in design.points()]
        for name in self.points:
            if name not in names:
                raise UserError(
                    f"--only {name}: no such point{suggest(name, names)}; there are "
                    f"{', '.join(names)}"
                )
        tasks = [t for t in design.tasks() if not self.points or t.point.name in self.points]
        begin, end = (len(tasks) * share // self.parts for share in (self.part - 1, self.part))
        return tasks[begin:end]


def launch_study(folder: Path, design: Design, chosen: Selection, display: StudyDisplay) -> bool:
    """Make the chosen launches that are not there yet.

    Returns:
        False if a signal asked for an end before all were made.

    Raises:
        UserError: no launcher that starts ranks, or the folder cannot be written.
        LaunchError: a launch failed.
    """
    tasks = chosen.of(design)
    refuse_foreign(folder)
    computes_itself = load_backend(str(design.settings["backend"])).threaded
    launcher = replace(find_launcher(design.launcher), binds=computes_itself)
    # What is kept has started ranks: the study could not go on with another launcher.
    launcher.try_out()
    design.keep(folder)
    display.say(f"study: {folder}")
    return run_tasks(folder, design, tasks, launcher, display)


def missing(folder: Path, design: Design) -> int:
    """Launches of the whole study that are still to be made."""
    return len(unfinished(folder, design.tasks()))


def conclude_study(folders: Sequence[Path], output: Path) -> Study:
    """Collect launches from `folders`, analyse them, write the study and its report to `output`.

    Raises:
        UserError: there are none, they do not belong together, or `output` cannot be written.
    """
    found = collect(folders, output)
    study = analyse(found.launches, commands=found.commands, notes=found.notes)
    with writing(output, "--output"):
        output.mkdir(parents=True, exist_ok=True)
    write_study(study, output)
    write_report(output)
    return study
