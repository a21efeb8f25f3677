"""What a study launches, and in which order; kept in ``scale.json`` so that it can go on later."""

from __future__ import annotations

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
    "scale.json", "launches", "prepare-", "profile.json", "log.txt", "launch.json",
)  # fmt: skip
FORM = Form(
    noun="design of a study", otherwise="choose another --output", anew="choose another --output"
)
_PARTIAL = f".{DESIGN}."


@dataclass(frozen=True)
class Wanted:
    """A point to measure.

    Attributes:
        scaling: `WEAK` or `STRONG`; the base is a point of both and has the first.
        batch_size: of all ranks.
    """

    scaling: str
    ranks: int
    threads: int
    batch_size: int

    @property
    def name(self) -> str:
        """``weak-r2-t1``."""
        return f"{self.scaling}-r{self.ranks}-t{self.threads}"


@dataclass(frozen=True)
class Task:
    """One launch: a point and its round, from 1."""

    point: Wanted
    round: int

    @property
    def folder(self) -> str:
        """Below the study's folder."""
        return f"{LAUNCHES}/{self.point.name}-{self.round}"


@dataclass(frozen=True)
class Design:
    """What is varied, and how often it is measured.

    Attributes:
        ranks, threads: every combination is a point.
        scalings: `WEAK`, `STRONG` or both.
        launches: of each point.
        steps: timed in each.
        seed: of the order.
        launcher: what starts ranks, in words; empty: found by `dptrain.scaling.launching`.
        batch_size: of all ranks at the smallest number of workers.
        settings: of the job, as `Settings.to_toml_values` has them.
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

    def points(self) -> tuple[Wanted, ...]:
        """Each point once, the base first.

        Raises:
            UserError: a weak minibatch would not be whole.
        """
        places = sorted((r * t, t, r) for r in self.ranks for t in self.threads)
        fewest = places[0][0]
        found: dict[tuple[int, int, int], Wanted] = {}
        for scaling in self.scalings:
            for workers, threads, ranks in places:
                batch = self.batch_size
                if scaling == WEAK:
                    batch, rest = divmod(self.batch_size * workers, fewest)
                    if rest:
                        raise UserError(
                            f"{self.batch_size} samples for {fewest} workers make no whole number "
                            f"for {workers}; try --batch-size {self.batch_size * fewest}"
                        )
                wanted = Wanted(scaling, ranks, threads, batch)
                found.setdefault((ranks, threads, batch), wanted)
        return tuple(found.values())

    def tasks(self) -> list[Task]:
        """All launches: rounds that visit each point once, each in an order of its own.

        What changes slowly on a machine, such as its temperature or its other users, then meets
        all points alike.
        """
        points = self.points()
        found = []
        for number in range(1, self.launches + 1):
            key = np.random.SeedSequence([self.seed, number])
            order = np.random.Generator(np.random.Philox(key)).permutation(len(points))
            found += [Task(points[i], number) for i in order]
        return found

    def keep(self, folder: Path) -> None:
        """Write ``scale.json`` where there is none, or one with fewer launches.

        Several that begin at once agree on one.

        Raises:
            UserError: it cannot be written.
        """
        path, partial = folder / DESIGN, folder / f"{_PARTIAL}{os.getpid()}"
        with writing(path, "--output"):
            folder.mkdir(parents=True, exist_ok=True)
            try:
                partial.write_text(FORM.text(self) + "\n")
                kept = self._link(partial, path)
                if kept is not None and kept.launches < self.launches:
                    partial.replace(path)
            finally:
                partial.unlink(missing_ok=True)

    @staticmethod
    def _link(partial: Path, path: Path) -> Design | None:
        """Call a file by its name; what has that name already, if there is something."""
        try:
            os.link(partial, path)
        except FileExistsError:
            return Design.read(path.parent)
        except OSError:  # A file system without links.
            partial.replace(path)
        return None

    def taking(self, other: Design, names: Sequence[str]) -> Design:
        """This one, with the fields `names` of another."""
        return replace(self, **{name: getattr(other, name) for name in names})

    @classmethod
    def read(cls, folder: Path) -> Design | None:
        """The one of a study that was begun in `folder`; None where none was.

        Raises:
            UserError: `folder` is a file, or holds something that is no study.
        """
        path = folder / DESIGN
        try:
            if not path.exists():
                if folder.exists() and (not folder.is_dir() or _holds_something(folder)):
                    raise UserError(f"{folder} is not empty and no study; choose another --output")
                return None
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror or error}") from None
        return FORM.read(path, cls._from)

    @classmethod
    def _from(cls, values: dict[str, Any]) -> Design:
        lists = ("ranks", "threads", "scalings", "launcher")
        return cls(**{**values, **{name: tuple(values[name]) for name in lists}})


def _holds_something(folder: Path) -> bool:
    """Whether there is more than what another process, which begins just now, is about to name."""
    return not all(path.name.startswith(_PARTIAL) for path in folder.iterdir())


def unfinished(folder: Path, tasks: Sequence[Task]) -> list[Task]:
    """Launches that have no profile yet, in order."""
    return [task for task in tasks if not (folder / task.folder / PROFILE).is_file()]


_FACTS: Mapping[str, tuple[type, ...]] = {
    "command": (list,), "began": (str,), "wall_s": (int, float), "other_cores": (int, float),
}  # fmt: skip


def launch_facts(place: Path) -> dict[str, Any]:
    """What was noted of a launch: command, begin, seconds; nothing if somebody else made it."""
    try:
        facts = dict(parse_json((place / LAUNCHED).read_bytes()))
    except (OSError, ValueError, TypeError):
        return {}
    return {name: value for name, value in facts.items() if isinstance(value, _FACTS.get(name, ()))}


def new_folder(network: str) -> Path:
    """``studies/<network>-<date>-<time>``, and ``-2``, ``-3``, … behind it while that is taken."""
    name = f"{Path(network).name.removesuffix('.toml')}-{datetime.now():%Y%m%d-%H%M%S}"
    path, number = Path("studies") / name, 1
    while path.exists():
        number += 1
        path = path.with_name(f"{name}-{number}")
    return path


def refuse_difference(folder: Path, kept: Design, asked: Design) -> None:
    """Refuse to go on with a study of something else; more launches are welcome.

    Raises:
        UserError: names the first difference.
    """
    for name, was, now in _differences(asdict(kept), asdict(asked)):
        if name == "launches" and now > was:
            continue
        flag = f"--{name.replace('_', '-')}"
        raise UserError(
            f"{folder} holds a study with {flag} {_text(was)}, this one asks for {_text(now)}; "
            "leave it out to go on with that study, or choose another --output"
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
    return "its default" if value is None else str(value)
