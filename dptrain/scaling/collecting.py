"""Read complete launches from folders."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dptrain.errors import UserError
from dptrain.files import dump_json
from dptrain.measure.machine.load import is_busy
from dptrain.measure.profile.profile import Profile
from dptrain.scaling.accuracy import read_training
from dptrain.scaling.design import (
    DESIGN,
    LAUNCHES,
    PREPARE,
    PROFILE,
    Design,
    launch_facts,
    unfinished,
)
from dptrain.scaling.points import Measured


@dataclass(frozen=True)
class Collected:
    """Launches in the order of time.

    Attributes:
        launches: the launches.
        commands: the command of each launch, quoted for a shell, by its folder.
        notes: remarks on copies, on missing launches and on other programs.
    """

    launches: tuple[Measured, ...]
    commands: dict[str, str]
    notes: tuple[str, ...]


def collect(folders: Sequence[Path], relative_to: Path) -> Collected:
    """Read every ``profile.json`` in and below `folders`.

    Args:
        folders: folders of studies or of profiles, or folders that contain such.
        relative_to: folder to which the folders of the launches are relative.

    Raises:
        UserError: there is no profile, or one cannot be read.
    """
    paths = sorted({path.resolve() for folder in folders for path in _profiles(folder)})
    if not paths:
        names = ", ".join(map(str, folders))
        raise UserError(
            f"no profile in {names}; expected a folder that `dptrain scale` or "
            "`dptrain profile --output` has written"
        )
    found = []
    kept, copies = _without_copies({path.parent: Profile.read(path) for path in paths})
    for path, profile in kept.items():
        facts = launch_facts(path)
        began = str(facts.get("began") or profile.environment.get("started", ""))
        found.append((began, path, profile, facts))
    found.sort(key=lambda item: (item[0], str(item[1])))
    launches, commands, loads = [], {}, list[float | None]()
    for order, (_, path, profile, facts) in enumerate(found):
        folder = os.path.relpath(path, relative_to.resolve())
        loads.append(_load(profile, facts))
        launches.append(Measured(folder, order, profile, read_training(path), loads[-1]))
        arguments = facts.get("command") or profile.environment.get("command") or []
        commands[folder] = shlex.join(map(str, arguments))
    notes = [*copies, *_about_missing(folders), *_about_load(loads)]
    return Collected(tuple(launches), commands, tuple(notes))


def _without_copies(
    profiles: Mapping[Path, Profile],
) -> tuple[dict[Path, Profile], list[str]]:
    """Return the profiles of which none is a copy, and a remark if others are.

    Launches that count twice make intervals too small. No two launches have equal step times and
    durations.
    """
    first: dict[str, Path] = {}
    for path, found in profiles.items():
        started = found.environment.get("started")
        key = dump_json([launch_facts(path), started, found.step_times_ms])
        first.setdefault(key, path)
    kept = {path: profiles[path] for path in first.values()}
    if not (copies := [path.name for path in profiles if path not in kept]):
        return kept, []
    number = f"{len(copies)} launch{'es' * (len(copies) > 1)}"
    return kept, [f"copies of launches do not count, of which {number} were found: {copies[0]}"]


def _load(profile: Profile, facts: Mapping[str, Any]) -> float | None:
    """Return the cores of other programs: during the launch, or during its steps if more."""
    known = [each for each in (facts.get("other_cores"), profile.other_cores) if each is not None]
    return max(known, default=None)


def _profiles(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise UserError(f"--collect {folder}: no such folder")
    inside = folder / LAUNCHES
    found = (inside if inside.is_dir() else folder).rglob(PROFILE)
    # A study that was killed may leave profiles of its preparation.
    return [path for path in found if not path.parents[1].name.startswith(PREPARE)]


def _about_missing(folders: Sequence[Path]) -> list[str]:
    """Return a remark for each study that has incomplete launches."""
    found = []
    for folder in folders:
        try:
            design = Design.read(folder) if (folder / DESIGN).exists() else None
        except UserError:  # Complete launches need no design.
            design = None
        if design is None:
            continue
        tasks = design.tasks()
        if missing := len(unfinished(folder, tasks)):
            found.append(
                f"{missing} of {len(tasks)} launches are missing in {folder}; continue with: "
                f"dptrain scale --output {shlex.quote(str(folder))}"
            )
    return found


def _about_load(loads: Sequence[float | None]) -> list[str]:
    busy = [load for load in loads if load is not None and is_busy(load)]
    if not busy:
        return []
    return [
        f"other programs used up to {max(busy):.1f} cores during {len(busy)} of {len(loads)} "
        "launches: the figures of these launches scatter, and an idle machine would be faster"
    ]
