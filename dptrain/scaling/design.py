"""The design of a study: its points and the order of launches, stored in ``scale.json``."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from dptrain.errors import UserError
from dptrain.files import parse_json, writing
from dptrain.records import Form
from dptrain.scaling.study import WEAK

DESIGN, LAUNCHES, PREPARE, PROFILE, LOG, LAUNCHED = (
    "scale.json",
    "launches",
    "prepare-",
    "profile.json",
    "log.txt",
    "launch.json",
)
FORM = Form(
    noun="design of a scaling study",
    otherwise="choose another --output",
    anew="choose another --output",
)
_PARTIAL = f".{DESIGN}."
_COUNTS = ("launches", "until", "most_launches")
"""Fields that decide how many rounds there are; no launch depends on them."""


@dataclass(frozen=True)
class PlannedPoint:
    """A point to measure.

    Attributes:
        scaling: `WEAK` or `STRONG`; the base belongs to both and is listed with the first one.
        ranks: number of ranks.
        threads: compute threads per rank.
        batch_size: global minibatch size.
    """

    scaling: str
    ranks: int
    threads: int
    batch_size: int

    @property
    def name(self) -> str:
        """The name of the point, such as ``weak-r2-t1``."""
        return f"{self.scaling}-r{self.ranks}-t{self.threads}"


@dataclass(frozen=True)
class Task:
    """A launch to run: a point and its round, counted from 1."""

    point: PlannedPoint
    round: int

    @property
    def folder(self) -> str:
        """The folder of the launch, relative to the folder of the study."""
        return f"{LAUNCHES}/{self.point.name}-{self.round}"


@dataclass(frozen=True)
class Design:
    """The parameters that are varied, and the number of measurements.

    Attributes:
        ranks, threads: numbers of ranks, and of compute threads per rank; every combination is a
            point.
        scalings: `WEAK`, `STRONG` or both.
        launches: launches per point.
        steps: timed steps per launch.
        seed: seed of the order of launches.
        launcher: command line of the program that starts ranks; empty: found by
            `dptrain.scaling.launching`.
        batch_size: global minibatch size of the point with the fewest compute threads.
        known_losses: inject known losses into each launch.
        settings: settings of the job, as returned by `Settings.to_toml_values`.
        until: half-width that the 95% interval of every efficiency shall have; 0 makes exactly
            `launches` launches.
        most_launches: largest number of launches per point with `until`.
    """

    ranks: tuple[int, ...]
    threads: tuple[int, ...]
    scalings: tuple[str, ...]
    launches: int
    steps: int
    seed: int
    launcher: tuple[str, ...]
    batch_size: int
    settings: dict[str, Any]
    until: float = 0.0
    most_launches: int = 0
    known_losses: bool = True

    def trains(self, task: Task) -> bool:
        """Return True if a launch also trains until the accuracy `until_accuracy` of `settings`."""
        return "until_accuracy" in self.settings and task.point.scaling == WEAK

    def points(self) -> tuple[PlannedPoint, ...]:
        """Return each point once, the base first.

        Raises:
            UserError: the minibatch of a point of weak scaling is not an integer.
        """
        combinations = sorted((r * t, t, r) for r in self.ranks for t in self.threads)
        fewest = combinations[0][0]
        found: dict[tuple[int, int, int], PlannedPoint] = {}
        for scaling in self.scalings:
            for total_threads, threads, ranks in combinations:
                batch = self.batch_size
                if scaling == WEAK:
                    batch, rest = divmod(self.batch_size * total_threads, fewest)
                    if rest:
                        multiple = fewest // math.gcd(fewest, total_threads)
                        raise UserError(
                            f"weak scaling from {fewest} to {total_threads} compute threads (ranks "
                            f"× threads) turns the minibatch of {self.batch_size} into "
                            f"{self.batch_size * total_threads / fewest:g}; expected a multiple of "
                            f"{multiple}, try --batch-size {self.batch_size * fewest}"
                        )
                wanted = PlannedPoint(scaling, ranks, threads, batch)
                found.setdefault((ranks, threads, batch), wanted)
        return tuple(found.values())

    def tasks(self) -> list[Task]:
        """Return all launches in rounds: each round contains every point once, in random order.

        A slow change of the machine, such as its temperature or the load by other users, then
        affects all points equally.
        """
        points = self.points()
        found = []
        for number in range(1, self.launches + 1):
            key = np.random.SeedSequence([self.seed, number])
            order = np.random.Generator(np.random.Philox(key)).permutation(len(points))
            found += [Task(points[i], number) for i in order]
        return found

    def write(self, folder: Path) -> None:
        """Write ``scale.json`` unless the folder has another design, or one with more launches.

        Designs that differ only in the number of rounds are not different. Processes that start at
        the same time agree on one design.

        Raises:
            UserError: the file cannot be written.
        """
        path, partial = folder / DESIGN, folder / f"{_PARTIAL}{os.getpid()}"
        with writing(path, "--output"):
            folder.mkdir(parents=True, exist_ok=True)
            try:
                partial.write_text(FORM.text(self) + "\n")
                stored = self._link(partial, path)
                if stored is not None and self._continues(stored):
                    partial.replace(path)
            finally:
                partial.unlink(missing_ok=True)

    def _continues(self, stored: Design) -> bool:
        has_enough = stored.launches <= self.launches
        return has_enough and stored.with_fields_of(self, _COUNTS) == self

    @staticmethod
    def _link(partial: Path, path: Path) -> Design | None:
        """Link a complete file to its name; return the design that has the name already, if any."""
        try:
            os.link(partial, path)
        except FileExistsError:
            return Design.read(path.parent)
        except OSError:  # The file system does not support hard links.
            partial.replace(path)
        return None

    def with_fields_of(self, other: Design, names: Sequence[str]) -> Design:
        """Return a copy with the fields `names` of another design."""
        return replace(self, **{name: getattr(other, name) for name in names})

    @classmethod
    def read(cls, folder: Path) -> Design | None:
        """Return the design of the study in `folder`; None if the folder is empty or missing.

        Raises:
            UserError: `folder` is a file, or contains other files.
        """
        path = folder / DESIGN
        try:
            if not path.exists():
                if folder.exists() and (not folder.is_dir() or _has_other_files(folder)):
                    raise UserError(
                        f"{folder} contains files but no scaling study; choose another --output"
                    )
                return None
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror or error}") from None
        return FORM.read(path, cls)


def _has_other_files(folder: Path) -> bool:
    """Return True unless all files are designs that another process is just writing."""
    return not all(path.name.startswith(_PARTIAL) for path in folder.iterdir())


def unfinished(folder: Path, tasks: Sequence[Task]) -> list[Task]:
    """Return the launches without a profile, in order."""
    return [task for task in tasks if not (folder / task.folder / PROFILE).is_file()]


_FACTS: Mapping[str, tuple[type, ...]] = {
    "command": (list,),
    "began": (str,),
    "wall_s": (int, float),
    "other_cores": (int, float),
}


def launch_facts(folder: Path) -> dict[str, Any]:
    """Return the contents of ``launch.json``: command, start, duration; {} if there is no file."""
    try:
        facts = dict(parse_json((folder / LAUNCHED).read_bytes()))
    except (OSError, ValueError, TypeError):
        return {}
    return {name: value for name, value in facts.items() if isinstance(value, _FACTS.get(name, ()))}


def new_folder(network: str) -> Path:
    """Return a free name ``studies/<network>-<date>-<time>``, with ``-2``, ``-3``, … if needed."""
    name = f"{Path(network).name.removesuffix('.toml')}-{datetime.now():%Y%m%d-%H%M%S}"
    path, number = Path("studies") / name, 1
    while path.exists():
        number += 1
        path = path.with_name(f"{name}-{number}")
    return path


def refuse_difference(folder: Path, stored: Design, requested: Design) -> None:
    """Refuse to continue a study with another design.

    `launches` may increase, and with `until` it may be less than the rounds that were made. `until`
    and `most_launches` may change.

    Raises:
        UserError: the designs differ; the message contains the first difference.
    """
    for name, was, now in _differences(asdict(stored), asdict(requested)):
        if name in _COUNTS and (name != "launches" or now > was or requested.until):
            continue
        flag = f"--{name.replace('_', '-')}"
        raise UserError(
            f"{folder} contains a study with {flag} {_text(was)}, this command has {_text(now)}; "
            f"omit {flag} to continue that study, or choose another --output"
        )


def _differences(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    found = []
    for name in was.keys() | now.keys():
        one, two = was.get(name), now.get(name)
        if isinstance(one, Mapping) and isinstance(two, Mapping):
            found += _differences(one, two)
        elif one != two:
            found.append(({"scalings": "scaling"}.get(name, name), one, two))
    return sorted(found, key=lambda item: item[0])


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ",".join(map(str, value)) or "auto"
    return "(default)" if value is None else str(value)
