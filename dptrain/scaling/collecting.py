"""Finished launches from folders, whoever made them."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dptrain.errors import UserError
from dptrain.measure.profile import Profile
from dptrain.scaling.design import (
    DESIGN,
    LAUNCHES,
    PREPARE,
    PROFILE,
    Design,
    launch_facts,
    unfinished,
)
from dptrain.scaling.load import is_loud
from dptrain.scaling.points import Measured


@dataclass(frozen=True)
class Collected:
    """Launches in the order of time.

    Attributes:
        commands: by the launch's folder, as it can be typed.
        notes: what was noticed while they ran.
    """

    launches: tuple[Measured, ...]
    commands: dict[str, str]
    notes: tuple[str, ...]


def collect(folders: Sequence[Path], relative_to: Path) -> Collected:
    """Read every ``profile.json`` in and below `folders`.

    Args:
        folders: of studies, of profiles, or of folders of such.
        relative_to: what the launches' folders are named from.

    Raises:
        UserError: there is none, or one cannot be read.
    """
    paths = sorted({path.resolve() for folder in folders for path in _profiles(folder)})
    if not paths:
        names = ", ".join(map(str, folders))
        raise UserError(
            f"no profile in {names}; expected what `dptrain scale` or `dptrain profile --output` "
            "leaves"
        )
    found = []
    for path in paths:
        profile, facts = Profile.read(path), launch_facts(path.parent)
        began = str(facts.get("began") or profile.environment.get("started", ""))
        found.append((began, path.parent, profile, facts))
    found.sort(key=lambda item: (item[0], str(item[1])))
    launches, commands = [], {}
    for order, (_, place, profile, facts) in enumerate(found):
        folder = os.path.relpath(place, relative_to.resolve())
        launches.append(Measured(folder, order, profile))
        words = facts.get("command") or profile.environment.get("command") or []
        commands[folder] = shlex.join(map(str, words))
    loads = [facts.get("other_cores") for *_, facts in found]
    notes = [*_about_missing(folders), *_about_load(loads)]
    return Collected(tuple(launches), commands, tuple(notes))


def _profiles(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise UserError(f"--collect {folder}: no such folder")
    inside = folder / LAUNCHES
    found = (inside if inside.is_dir() else folder).rglob(PROFILE)
    # What a study that was killed leaves of its preparation is no launch.
    return [path for path in found if not path.parents[1].name.startswith(PREPARE)]


def _about_missing(folders: Sequence[Path]) -> list[str]:
    """Launches that a study has asked for and that nobody has finished."""
    found = []
    for folder in folders:
        try:
            design = Design.read(folder) if (folder / DESIGN).exists() else None
        except UserError:  # What is finished needs no plan.
            design = None
        if design is None:
            continue
        tasks = design.tasks()
        if missing := len(unfinished(folder, tasks)):
            found.append(
                f"{missing} of {len(tasks)} launches are missing in {folder}; go on with: "
                f"dptrain scale --output {shlex.quote(str(folder))}"
            )
    return found


def _about_load(loads: Sequence[float | None]) -> list[str]:
    loud = [load for load in loads if load is not None and is_loud(load)]
    if not loud:
        return []
    return [
        f"other programs kept up to {max(loud):.1f} cores busy during {len(loud)} of {len(loads)} "
        "launches: their figures scatter, and a quiet machine would be faster"
    ]
